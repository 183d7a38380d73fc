// A stand-in for the CUDA runtime, so that PyTorch's CUDA build runs where there is no card.
//
// Memory is the host's, kernels compute nothing, and each stream has a clock: work put into a stream takes its seconds
// after what is already there and after the events that the stream waits for. Copies really copy.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

namespace standin {

constexpr int kMaxCards = 8;

// What a test may set while the process runs; `settings.cpp` has the names.
struct Settings {
  double link_bytes_per_s = 25e9;
  double kernel_s = 0;              // of a kernel, and of a matrix product
  double pin_limit_bytes = 1e18;    // of pinned memory, after which no more can be had
  double deferred = 0;              // whether copies and products happen at their time in their stream, not at once
};

// What a card was asked for, in the order in which `settings.cpp` names it.
struct Counts {
  int64_t launches, products, copies_in, copies_out, copies_on_device, fills, waits, records, syncs, allocations, frees,
      host_allocations, bytes_in, bytes_out, pageable_copies, poisoned_reads;
};

struct Stream {
  int device;
  double end = 0;  // when all work of the stream is done
};

struct Span {
  char* at;
  size_t bytes;
};

extern std::recursive_mutex lock;  // over all state of the stand-in
extern Settings settings;
extern Counts counts[kMaxCards];

double now();
void sleep_until(double time);

// -- devices.cpp
int n_cards();
int current_card();
size_t total_bytes(int card);

// -- memory.cpp
bool is_pinned(const void* at);

// -- settings.cpp
void count_sync(int card);  // the calling thread waits for a card
[[noreturn]] void missing(const char* what);

// -- streams.cpp
Stream* stream_of(cudaStream_t handle);
void wait_for_all();  // as the runtime does before it takes memory away

// -- timeline.cpp
// Puts work into a stream. It reads and writes memory from its start to its end, and `does` is what is left at its end.
// Where work is deferred, what it writes is poison until then, and reading poison is counted.
void put(Stream* stream, double seconds, std::vector<Span> reads, std::vector<Span> writes, std::function<void()> does);
void settle(double until);  // does all that is due by then

}  // namespace standin
