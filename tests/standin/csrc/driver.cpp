// What torch's loader of kernels that are compiled later asks of the driver, and what torch asks of it otherwise.
#include "standin.h"

using namespace standin;

STANDIN_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** into, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
  *into = nullptr;
  if (found != nullptr) *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

STANDIN_API int cuCtxGetCurrent(void** into) {
  static int context;
  *into = &context;
  return 0;
}

STANDIN_API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
