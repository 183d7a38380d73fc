// cuDNN: attention and convolutions through its graphs, whose plans take a workspace and compute nothing.
//
// Declared here as its public documentation has it, since its headers come with a library of several 100 MB.
#include "standin.h"

#include <library_types.h>

#include <cstdio>
#include <cstring>

using namespace standin;

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
};

struct Descriptor {
  int type;
};

// cudnnBackendAttributeName_t and cudnnBackendAttributeType_t, as far as they are told apart here.
enum Attribute { kKnobChoices = 302, kWorkspace = 402, kNumericalNote = 1303, kBehaviorNote = 1305 };
enum Type { kInt64 = 3, kInt32 = 23 };

constexpr int64_t kWorkspaceBytes = 1 << 20;  // of every plan

}  // namespace

STANDIN_API int cudnnCreate(Handle** into) {
  *into = new Handle;
  return 0;
}
STANDIN_API int cudnnDestroy(Handle* handle) {
  delete handle;
  return 0;
}
STANDIN_API int cudnnSetStream(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}
STANDIN_API int cudnnGetStream(Handle* handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return 0;
}

// The version that torch 2.11 comes with: which attention is chosen depends on it.
STANDIN_API size_t cudnnGetVersion() { return 91900; }
STANDIN_API int cudnnGetProperty(libraryPropertyType which, int* value) {
  *value = which == MAJOR_VERSION ? 9 : which == MINOR_VERSION ? 19 : 0;
  return 0;
}
STANDIN_API size_t cudnnGetCudartVersion() { return 13000; }
STANDIN_API const char* cudnnGetErrorString(int) { return "an error of the stand-in"; }
STANDIN_API void cudnnGetLastErrorString(char* into, size_t bytes) { snprintf(into, bytes, "an error of the stand-in"); }

STANDIN_API int cudnnBackendCreateDescriptor(int type, Descriptor** into) {
  *into = new Descriptor{type};
  return 0;
}
STANDIN_API int cudnnBackendDestroyDescriptor(Descriptor* made) {
  delete made;
  return 0;
}
STANDIN_API int cudnnBackendSetAttribute(Descriptor*, int, int, int64_t, const void*) { return 0; }
STANDIN_API int cudnnBackendFinalize(Descriptor*) { return 0; }

STANDIN_API int cudnnBackendGetAttribute(Descriptor*, int name, int type, int64_t, int64_t* count, void* into) {
  bool none = name == kKnobChoices || name == kNumericalNote || name == kBehaviorNote;
  if (count != nullptr) *count = none ? 0 : 1;
  if (into != nullptr && type == kInt64) *(int64_t*)into = name == kWorkspace ? kWorkspaceBytes : 0;
  if (into != nullptr && type == kInt32) *(int32_t*)into = 0;
  return 0;
}

STANDIN_API int cudnnBackendExecute(Handle* handle, Descriptor*, Descriptor*) {
  std::lock_guard<std::recursive_mutex> held(lock);
  Stream* stream = stream_of(handle->stream);
  counts[stream->device].launches++;
  put(stream, settings.kernel_s, {}, {}, [] {});
  return 0;
}
