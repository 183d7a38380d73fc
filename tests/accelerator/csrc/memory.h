// The device's memory, cached in pools as CUDA's, and pinned host memory.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <utility>
#include <vector>

namespace sim {

// Memory of the host that plays the device's; not safe for threads.
char* map_segment(size_t bytes);
void unmap_segment(char* segment);

c10::DeviceAllocator* device_memory();
at::HostAllocator* pinned_memory();

// Whether memory is overwritten when it is made and when it is let go.
void set_poisons(bool poisons);

// What was allocated (address and bytes asked for) and let go (address and 0) since it was last asked for, in order.
using Change = std::pair<uintptr_t, size_t>;
void watch_allocations(bool on);
std::vector<Change> take_changes();

// `total_bytes` is the memory of the whole card, `others_bytes` what other processes hold of it, `limit_bytes` what
// this one may reserve.
void set_total_bytes(c10::DeviceIndex device, size_t total_bytes);
void set_others_bytes(c10::DeviceIndex device, size_t others_bytes);
void set_limit_bytes(c10::DeviceIndex device, size_t limit_bytes);

// What the first matrix product of a thread on a stream takes from the device's memory and keeps.
void set_workspace_bytes(size_t bytes);
void keep_workspace();

// How much host memory may be pinned.
void set_pinned_limit_bytes(size_t limit_bytes);

bool is_pinned(const void* data);

// Pinned memory that is freed is not handed out again before the stream has come to here.
void pinned_memory_is_read(const void* data, Stream& by);

} // namespace sim
