// Kernels: they are registered and launched, take their seconds, and compute nothing.
#include "standin.h"

#include <cstring>

using namespace standin;
using Held = std::lock_guard<std::recursive_mutex>;

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};

thread_local Configuration configuration;

cudaError_t launch(cudaStream_t handle) {
  Held held(lock);
  Stream* stream = stream_of(handle);
  counts[stream->device].launches++;
  put(stream, settings.kernel_s, {}, {}, [] {});
  return cudaSuccess;
}

}  // namespace

STANDIN_API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
STANDIN_API void __cudaRegisterFatBinaryEnd(void**) {}
STANDIN_API void __cudaUnregisterFatBinary(void**) {}
STANDIN_API char __cudaInitModule(void**) { return 1; }
STANDIN_API void __cudaRegisterFunction(
    void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
STANDIN_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

STANDIN_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

STANDIN_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

STANDIN_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}

STANDIN_API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(stream);
}

STANDIN_API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(stream);
}

STANDIN_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* given, const void*, void**) {
  return launch(given->stream);
}

STANDIN_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  cudaDeviceProp card;
  cudaGetDeviceProperties(&card, current_card());
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = card.maxThreadsPerBlock;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = card.major * 10 + card.minor;
  found->maxDynamicSharedSizeBytes = (int)card.sharedMemPerBlock;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

STANDIN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 8;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 8;
  return cudaSuccess;
}

// Variables on the device, which kernels alone would read.
STANDIN_API cudaError_t cudaGetSymbolAddress(void** into, const void*) {
  static char variables[1 << 16];
  *into = variables;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

STANDIN_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
STANDIN_API cudaError_t cudaProfilerStop() { return cudaSuccess; }
