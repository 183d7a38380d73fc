// Host memory that copies can run beside compute from and to: sizes rounded up to powers of two and cached, as CUDA's.
#include "memory.h"

#include <cstdlib>
#include <map>

namespace sim {
namespace {

constexpr size_t kPageBytes = 4096;

struct Block {
  void* data;
  size_t size;
  size_t readers = 0; // copies under way
  bool freed = false;
};

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override;
  bool record_event(void* data, void*, c10::Stream by) override {
    return is_read(data, stream(by.id()));
  }
  void empty_cache() override;
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void reset_accumulated_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for_each_statistic([](auto& stat) { stat.reset_accumulated(); });
  }
  void reset_peak_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for_each_statistic([](auto& stat) { stat.reset_peak(); });
  }

  bool is_pinned(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(data) != nullptr;
  }
  bool is_read(const void* data, Stream& by);

  size_t limit_bytes = SIZE_MAX;

 private:
  static void release(void* context);

  template <typename Call>
  void for_each_statistic(Call call) {
    for (auto* stat :
         {&stats_.allocations, &stats_.allocated_bytes, &stats_.active_requests, &stats_.active_bytes}) {
      call(*stat);
    }
  }
  Block* find(const void* data);
  void put_back(Block* block);

  std::mutex mutex_;
  std::map<const char*, Block*> blocks_; // all there are, by address
  std::multimap<size_t, Block*> free_; // those to be handed out again, by size
  at::HostStats stats_;
};

PinnedMemory& the_memory() {
  static auto* const memory = new PinnedMemory(); // outlives every tensor
  return *memory;
}

c10::DataPtr PinnedMemory::allocate(size_t requested) {
  if (requested == 0) {
    return {nullptr, nullptr, &release, c10::kCPU};
  }
  size_t size = 1;
  while (size < requested) {
    size *= 2;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Block* block = nullptr;
  if (const auto found = free_.find(size); found != free_.end()) {
    block = found->second;
    free_.erase(found);
    block->freed = false;
  } else {
    TORCH_CHECK(
        static_cast<size_t>(stats_.allocated_bytes.current) + size <= limit_bytes,
        "The simulated device cannot pin ", size, " bytes of host memory: ", stats_.allocated_bytes.current,
        " are pinned already, and the limit is ", limit_bytes);
    const size_t bytes = (size + kPageBytes - 1) / kPageBytes * kPageBytes;
    void* data = std::aligned_alloc(kPageBytes, bytes);
    TORCH_CHECK(data, "The host has no memory left for ", bytes, " pinned bytes");
    block = new Block{data, size};
    blocks_[static_cast<const char*>(data)] = block;
    stats_.allocations.increase(1);
    stats_.allocated_bytes.increase(size);
  }
  stats_.active_requests.increase(1);
  stats_.active_bytes.increase(size);
  return {block->data, block, &release, c10::kCPU};
}

void PinnedMemory::release(void* context) {
  if (auto* block = static_cast<Block*>(context)) {
    auto& memory = the_memory();
    std::lock_guard<std::mutex> lock(memory.mutex_);
    block->freed = true;
    memory.put_back(block);
  }
}

void PinnedMemory::put_back(Block* block) {
  if (block->freed && block->readers == 0) {
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(block->size);
    free_.emplace(block->size, block);
  }
}

Block* PinnedMemory::find(const void* data) {
  const auto* address = static_cast<const char*>(data);
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) {
    return nullptr;
  }
  const auto& [start, block] = *std::prev(after);
  return address < start + block->size ? block : nullptr;
}

bool PinnedMemory::is_read(const void* data, Stream& by) {
  std::lock_guard<std::mutex> lock(mutex_);
  Block* block = find(data);
  if (!block) {
    return false;
  }
  ++block->readers;
  by.submit([this, block] {
    std::lock_guard<std::mutex> done(mutex_);
    --block->readers;
    put_back(block);
  });
  return true;
}

void PinnedMemory::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [size, block] : free_) {
    blocks_.erase(static_cast<const char*>(block->data));
    stats_.allocations.decrease(1);
    stats_.allocated_bytes.decrease(size);
    std::free(block->data);
    delete block;
  }
  free_.clear();
}

} // namespace

at::HostAllocator* pinned_memory() {
  return &the_memory();
}

void set_pinned_limit_bytes(size_t limit_bytes) {
  the_memory().limit_bytes = limit_bytes;
}

bool is_pinned(const void* data) {
  return the_memory().is_pinned(data);
}

void pinned_memory_is_read(const void* data, Stream& by) {
  the_memory().is_read(data, by);
}

} // namespace sim
