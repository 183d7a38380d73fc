// The cards: the first is of architecture 8.6 with 12 GiB, the second of 9.0 with 80 GiB.
#include "standin.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace standin {
namespace {

struct Card {
  const char* name;
  int major, minor;
  size_t bytes;
  int multiprocessors, l2_bytes, threads, blocks, shared_bytes, shared_optin_bytes, bus_bits;
};

const Card kCards[] = {
    {"stand-in sm_86", 8, 6, 12ull << 30, 28, 2359296, 1536, 16, 102400, 101376, 192},
    {"stand-in sm_90", 9, 0, 80ull << 30, 132, 50 << 20, 2048, 32, 233472, 232448, 5120},
};

// Those that a process may see, as CUDA_VISIBLE_DEVICES lists them ("1", "1,0").
const std::vector<Card>& cards() {
  static const std::vector<Card> seen = [] {
    std::vector<Card> found;
    const char* listed = getenv("CUDA_VISIBLE_DEVICES");
    for (const char* at = listed ? listed : "0,1"; *at; at++) {
      if (*at == '0' || *at == '1') found.push_back(kCards[*at - '0']);
    }
    return found;
  }();
  return seen;
}

thread_local int current = 0;

}  // namespace

int n_cards() { return (int)cards().size(); }
int current_card() { return current; }
size_t total_bytes(int card) { return cards()[card].bytes; }

}  // namespace standin

using namespace standin;

STANDIN_API cudaError_t cudaGetDeviceCount(int* n) {
  *n = n_cards();
  return *n ? cudaSuccess : cudaErrorNoDevice;
}

STANDIN_API cudaError_t cudaGetDevice(int* card) {
  *card = current;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaSetDevice(int card) {
  if (card < 0 || card >= n_cards()) return cudaErrorInvalidDevice;
  current = card;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int which) {
  if (which < 0 || which >= n_cards()) return cudaErrorInvalidDevice;
  const Card& card = cards()[which];
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "%s", card.name);
  found->major = card.major;
  found->minor = card.minor;
  found->totalGlobalMem = card.bytes;
  found->multiProcessorCount = card.multiprocessors;
  found->l2CacheSize = card.l2_bytes;
  found->maxThreadsPerMultiProcessor = card.threads;
  found->maxBlocksPerMultiProcessor = card.blocks;
  found->sharedMemPerMultiprocessor = card.shared_bytes;
  found->sharedMemPerBlockOptin = card.shared_optin_bytes;
  found->memoryBusWidth = card.bus_bits;
  found->pciBusID = which + 1;
  found->sharedMemPerBlock = 49152;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->warpSize = 32;
  found->memPitch = 2147483647;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->totalConstMem = 65536;
  found->textureAlignment = 512;
  found->asyncEngineCount = 2;
  found->canMapHostMemory = found->concurrentKernels = found->unifiedAddressing = found->managedMemory = 1;
  found->streamPrioritiesSupported = found->cooperativeLaunch = found->hostRegisterSupported = 1;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int which) {
  cudaDeviceProp card;
  if (cudaGetDeviceProperties(&card, which) != cudaSuccess) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = card.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = card.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)card.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)card.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)card.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = card.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = card.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxGridDimX: *value = card.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = card.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = card.maxGridSize[2]; break;
    case cudaDevAttrWarpSize: *value = card.warpSize; break;
    case cudaDevAttrAsyncEngineCount: *value = card.asyncEngineCount; break;
    case cudaDevAttrL2CacheSize: *value = card.l2CacheSize; break;
    default: missing(("device attribute " + std::to_string(attribute)).c_str());
  }
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceGetPCIBusId(char* into, int length, int card) {
  snprintf(into, length, "0000:%02d:00.0", card + 1);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
