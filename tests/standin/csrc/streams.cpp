// Streams and events, each with its time, and errors.
#include "standin.h"

#include <algorithm>
#include <set>

namespace standin {
namespace {

struct Event {
  double time = 0;
};

std::set<Stream*>& streams() {
  static auto* all = new std::set<Stream*>;
  return *all;
}

thread_local cudaError_t last_error = cudaSuccess;

Stream* default_stream(int card) {
  static Stream* all = [] {
    auto* made = new Stream[kMaxCards];
    for (int i = 0; i < kMaxCards; i++) {
      made[i].device = i;
      streams().insert(&made[i]);
    }
    return made;
  }();
  return &all[card];
}

Event* event_of(cudaEvent_t handle) { return (Event*)handle; }

cudaError_t reached(double time) {
  std::lock_guard<std::recursive_mutex> held(lock);
  double present = now();
  settle(present);
  return time <= present ? cudaSuccess : cudaErrorNotReady;
}

void wait_until(double time) {
  sleep_until(time);
  std::lock_guard<std::recursive_mutex> held(lock);
  settle(std::max(time, now()));
}

}  // namespace

Stream* stream_of(cudaStream_t handle) {
  bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? default_stream(current_card()) : (Stream*)handle;
}

void wait_for_all() {
  double end = 0;
  for (Stream* stream : streams()) end = std::max(end, stream->end);
  sleep_until(end);
  settle(std::max(end, now()));
}

}  // namespace standin

using namespace standin;
using Held = std::lock_guard<std::recursive_mutex>;

// -- errors

extern "C" cudaError_t standin_failed(cudaError_t error) { return last_error = error; }

STANDIN_API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

STANDIN_API cudaError_t cudaPeekAtLastError() { return last_error; }

STANDIN_API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an error of the stand-in";
}

STANDIN_API const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stand-in";
}

// -- streams

STANDIN_API cudaError_t cudaStreamCreate(cudaStream_t* into) {
  Held held(lock);
  auto* stream = new Stream{current_card()};
  streams().insert(stream);
  *into = (cudaStream_t)stream;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* into, unsigned, int) { return cudaStreamCreate(into); }

// Work of a stream that is no longer there may still be under way, so the stream itself stays.
STANDIN_API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

STANDIN_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  double end;
  {
    Held held(lock);
    Stream* stream = stream_of(handle);
    count_sync(stream->device);
    end = stream->end;
  }
  wait_until(end);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceSynchronize() {
  Held held(lock);
  count_sync(current_card());
  wait_for_all();
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Held held(lock);
  return reached(stream_of(handle)->end);
}

STANDIN_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  Held held(lock);
  Stream* stream = stream_of(handle);
  counts[stream->device].waits++;
  stream->end = std::max(stream->end, event_of(event)->time);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t work, void* data) {
  Held held(lock);
  put(stream_of(handle), 0, {}, {}, [=] { work(data); });
  return cudaSuccess;
}

// -- no graph is ever captured

STANDIN_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// -- events

STANDIN_API cudaError_t cudaEventCreate(cudaEvent_t* into) {
  *into = (cudaEvent_t) new Event;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* into, unsigned) { return cudaEventCreate(into); }

STANDIN_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Held held(lock);
  delete event_of(event);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  Held held(lock);
  Stream* stream = stream_of(handle);
  counts[stream->device].records++;
  event_of(event)->time = std::max(stream->end, now());
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
  return cudaEventRecord(event, handle);
}

STANDIN_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Held held(lock);
  return reached(event_of(event)->time);
}

STANDIN_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  double time;
  {
    Held held(lock);
    count_sync(current_card());
    time = event_of(event)->time;
  }
  wait_until(time);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Held held(lock);
  *ms = (float)((event_of(end)->time - event_of(start)->time) * 1e3);
  return cudaSuccess;
}
