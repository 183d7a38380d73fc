// Memory of the cards and pinned memory, both of it the host's, and copies between them.
#include "standin.h"

#include <sys/mman.h>

#include <cstring>
#include <iterator>
#include <map>

namespace standin {
namespace {

constexpr size_t kPage = 2 << 20;  // what a card's memory is given out in

struct Block {
  size_t bytes;
  int card;
};

std::map<const char*, Block>& blocks() {
  static auto* all = new std::map<const char*, Block>;
  return *all;
}

std::map<const char*, size_t>& pinned() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

std::map<const char*, size_t>& registered() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

size_t used_bytes[kMaxCards];
size_t pinned_bytes = 0;

char* map_pages(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : (char*)at;
}

size_t length(const Block& block) { return block.bytes; }
size_t length(size_t bytes) { return bytes; }

template <class Map>
auto around(Map& map, const void* at) {
  auto next = map.upper_bound((const char*)at);
  if (next == map.begin()) return map.end();
  auto found = std::prev(next);
  return (const char*)at < found->first + length(found->second) ? found : map.end();
}

}  // namespace

bool is_pinned(const void* at) {
  return around(pinned(), at) != pinned().end() || around(registered(), at) != registered().end();
}

}  // namespace standin

using namespace standin;
using Held = std::lock_guard<std::recursive_mutex>;

extern "C" cudaError_t standin_failed(cudaError_t error);

// -- a card's memory

STANDIN_API cudaError_t cudaMalloc(void** into, size_t asked) {
  Held held(lock);
  int card = current_card();
  counts[card].allocations++;
  size_t bytes = (asked + kPage - 1) / kPage * kPage;
  *into = nullptr;
  if (used_bytes[card] + bytes > total_bytes(card)) return standin_failed(cudaErrorMemoryAllocation);
  char* pages = map_pages(bytes + kPage);
  if (pages == nullptr) return standin_failed(cudaErrorMemoryAllocation);
  char* at = (char*)(((uintptr_t)pages + kPage - 1) / kPage * kPage);
  if (at > pages) munmap(pages, at - pages);
  if (pages + kPage > at) munmap(at + bytes, pages + kPage - at);
  used_bytes[card] += bytes;
  blocks()[at] = {bytes, card};
  *into = at;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaFree(void* at) {
  Held held(lock);
  if (at == nullptr) return cudaSuccess;
  auto found = blocks().find((const char*)at);
  if (found == blocks().end()) return standin_failed(cudaErrorInvalidValue);
  wait_for_all();
  Block block = found->second;
  counts[block.card].frees++;
  used_bytes[block.card] -= block.bytes;
  munmap(at, block.bytes);
  blocks().erase(found);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Held held(lock);
  *total = total_bytes(current_card());
  *free = *total - used_bytes[current_card()];
  return cudaSuccess;
}

// -- pinned memory

STANDIN_API cudaError_t cudaHostAlloc(void** into, size_t bytes, unsigned) {
  Held held(lock);
  counts[current_card()].host_allocations++;
  *into = nullptr;
  if (pinned_bytes + bytes > settings.pin_limit_bytes) return standin_failed(cudaErrorMemoryAllocation);
  char* at = map_pages(bytes);
  if (at == nullptr) return standin_failed(cudaErrorMemoryAllocation);
  pinned()[at] = bytes;
  pinned_bytes += bytes;
  *into = at;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaFreeHost(void* at) {
  Held held(lock);
  auto found = pinned().find((const char*)at);
  if (found == pinned().end()) return at == nullptr ? cudaSuccess : standin_failed(cudaErrorInvalidValue);
  wait_for_all();
  pinned_bytes -= found->second;
  munmap(at, found->second);
  pinned().erase(found);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  Held held(lock);
  if (pinned_bytes + bytes > settings.pin_limit_bytes) return standin_failed(cudaErrorMemoryAllocation);
  registered()[(const char*)at] = bytes;
  pinned_bytes += bytes;
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaHostUnregister(void* at) {
  Held held(lock);
  auto found = registered().find((const char*)at);
  if (found == registered().end()) return standin_failed(cudaErrorHostMemoryNotRegistered);
  wait_for_all();
  pinned_bytes -= found->second;
  registered().erase(found);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* at) {
  Held held(lock);
  memset(found, 0, sizeof *found);
  auto block = around(blocks(), at);
  if (block != blocks().end()) {
    found->type = cudaMemoryTypeDevice;
    found->device = block->second.card;
    found->devicePointer = (void*)at;
  } else if (is_pinned(at)) {
    found->type = cudaMemoryTypeHost;
    found->device = current_card();
    found->hostPointer = found->devicePointer = (void*)at;
  } else {
    found->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}

// -- copies

namespace {

// Whether the caller gets control back only when the copy is done, as it does for memory that is not pinned.
bool count(Counts& card, const void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  bool in = kind == cudaMemcpyHostToDevice, out = kind == cudaMemcpyDeviceToHost;
  if (!in && !out) {
    card.copies_on_device++;
    return false;
  }
  (in ? card.copies_in : card.copies_out)++;
  (in ? card.bytes_in : card.bytes_out) += bytes;
  bool pageable = !is_pinned(in ? source : target);
  card.pageable_copies += pageable;
  return pageable;
}

void copy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle, bool blocks) {
  double end;
  {
    Held held(lock);
    Stream* stream = stream_of(handle);
    blocks = count(counts[stream->device], target, source, bytes, kind) || blocks;
    bool over_link = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToHost;
    put(stream, over_link ? bytes / settings.link_bytes_per_s : 0, {{(char*)source, bytes}}, {{(char*)target, bytes}},
        [=] { memmove(target, source, bytes); });
    end = stream->end;
    if (blocks && kind == cudaMemcpyDeviceToHost) count_sync(stream->device);
  }
  if (!blocks) return;
  sleep_until(end);
  Held held(lock);
  settle(end);
}

}  // namespace

STANDIN_API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
  copy(target, source, bytes, kind, s, false);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  copy(target, source, bytes, kind, nullptr, true);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t s) {
  copy(target, source, bytes, cudaMemcpyDeviceToDevice, s, false);
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t handle) {
  Held held(lock);
  Stream* stream = stream_of(handle);
  counts[stream->device].fills++;
  put(stream, settings.kernel_s, {}, {{(char*)target, bytes}}, [=] { memset(target, value, bytes); });
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  return cudaMemsetAsync(target, value, bytes, nullptr);
}
