// Segments lie in one range of addresses, each at the lowest that is free, so that the allocator's choice between blocks
// of one size is the same in every run.
#include "memory.h"

#include <sys/mman.h>

#include <map>

namespace sim {
namespace {

constexpr size_t kRangeBytes = size_t{1} << 40; // of addresses, not of memory

char* start_of_range() {
  static char* const start = [] {
    void* range = mmap(nullptr, kRangeBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(range != MAP_FAILED, "No range of addresses for the simulated device's memory");
    return static_cast<char*>(range);
  }();
  return start;
}

std::map<char*, size_t>& segments() {
  static auto* const made = new std::map<char*, size_t>(); // outlives every tensor
  return *made;
}

} // namespace

char* map_segment(size_t bytes) {
  char* place = start_of_range();
  for (const auto& [start, size] : segments()) {
    if (static_cast<size_t>(start - place) >= bytes) {
      break;
    }
    place = start + size;
  }
  TORCH_CHECK(
      place + bytes <= start_of_range() + kRangeBytes && mprotect(place, bytes, PROT_READ | PROT_WRITE) == 0,
      "The host has no memory left for a segment of ", bytes, " bytes");
  segments()[place] = bytes;
  return place;
}

void unmap_segment(char* segment) {
  const auto found = segments().find(segment);
  madvise(segment, found->second, MADV_DONTNEED);
  mprotect(segment, found->second, PROT_NONE);
  segments().erase(found);
}

} // namespace sim
