// A caching allocator with the pools, sizes and order of CUDA's (c10/cuda/CUDACachingAllocator.cpp, default settings),
// so that what is reserved here for a sequence of requests is what is reserved there.
#include "memory.h"

#include <array>
#include <cstring>
#include <set>
#include <tuple>
#include <vector>

namespace sim {
namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr size_t kGrainBytes = 512; // every block is a multiple of it
constexpr size_t kSmallBytes = size_t{1} << 20; // largest request served from small segments
constexpr size_t kSmallSegmentBytes = size_t{2} << 20;
constexpr size_t kLargeSegmentBytes = size_t{20} << 20;
constexpr size_t kOwnSegmentBytes = size_t{10} << 20; // from here on a request gets a segment of its own size
constexpr size_t kOwnSegmentGrainBytes = size_t{2} << 20;
constexpr int kPoison = 0xFF; // bytes of a NaN in every floating-point type

size_t round_up(size_t size, size_t grain) {
  return (size + grain - 1) / grain * grain;
}

size_t block_bytes(size_t requested) {
  return std::max(kGrainBytes, round_up(requested, kGrainBytes));
}

size_t segment_bytes(size_t size) {
  if (size <= kSmallBytes) {
    return kSmallSegmentBytes;
  }
  return size < kOwnSegmentBytes ? kLargeSegmentBytes : round_up(size, kOwnSegmentGrainBytes);
}

struct Block {
  c10::StreamId stream;
  bool small;
  size_t size;
  char* data;
  size_t requested = 0;
  bool allocated = false;
  Block* before = nullptr; // neighbours within the segment
  Block* after = nullptr;
  std::set<c10::StreamId> readers; // streams named by record_stream
  std::vector<Event> reads; // what is awaited before it is free

  bool whole() const {
    return !before && !after;
  }
  c10::DeviceIndex device() const {
    return device_of(stream);
  }
};

struct BestFit {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->data) < std::tie(b->stream, b->size, b->data);
  }
};

using Pool = std::set<Block*, BestFit>;

// What a device has, and what it says of it.
struct Card {
  size_t total_bytes = size_t{16} << 30;
  size_t limit_bytes = SIZE_MAX; // of this process
  size_t others_bytes = 0; // held by other processes
  c10::CachingDeviceAllocator::DeviceStats stats;

  size_t reserved() const {
    return stats.reserved_bytes[0].current;
  }
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  void emptyCache(c10::MempoolId_t = {0, 0}) override;

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    current_stream().synchronize();
    std::memcpy(to, from, size);
  }
  bool initialized() override {
    return true;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return cards.at(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override;
  void resetPeakStats(c10::DeviceIndex) override;

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& card = cards.at(device);
    return {card.total_bytes - std::min(card.total_bytes, card.others_bytes + card.reserved()), card.total_bytes};
  }

  void watch(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_ = on;
    changes_.clear();
  }
  std::vector<Change> take_changes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(changes_, {});
  }

  std::array<Card, kDevices> cards;
  bool poisons = true; // without, memory that nobody writes takes none of the host's

 private:
  static void release(void* context);

  Pool& pool(bool small) {
    return small ? small_ : large_;
  }
  void count(StatArray& statistic, bool small, int64_t change);
  void count_free(const Block& block, int64_t sign);
  Block* take_cached(c10::StreamId stream, bool small, size_t size);
  Block* take_new(c10::StreamId stream, bool small, size_t size);
  void split(Block* block, size_t size);
  void put_back(Block* block);
  void merge(Block* block, Block* neighbour);
  void collect_read();
  void release_cached(c10::DeviceIndex device);
  void note(const Block& block, size_t requested);
  void poison(char* data, size_t size) const {
    if (poisons) {
      std::memset(data, kPoison, size);
    }
  }
  [[noreturn]] void refuse(Card& card, size_t requested);

  std::mutex mutex_;
  Pool small_, large_;
  std::vector<Block*> being_read_; // freed, but a stream named by record_stream has not come so far yet
  bool watched_ = false;
  std::vector<Change> changes_;
};

DeviceMemory& the_memory() {
  static auto* const memory = new DeviceMemory(); // outlives every tensor
  return *memory;
}

void DeviceMemory::count(StatArray& statistic, bool small, int64_t change) {
  for (const auto type : {StatType::AGGREGATE, small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    auto& stat = statistic[static_cast<size_t>(type)];
    change > 0 ? stat.increase(change) : stat.decrease(-change);
  }
}

// A part of a segment that is cached cannot be given back: it counts as inactive.
void DeviceMemory::count_free(const Block& block, int64_t sign) {
  if (!block.whole()) {
    auto& stats = cards[block.device()].stats;
    count(stats.inactive_split, block.small, sign);
    count(stats.inactive_split_bytes, block.small, sign * static_cast<int64_t>(block.size));
  }
}

c10::DataPtr DeviceMemory::allocate(size_t requested) {
  const c10::Device device = device_at(current_device());
  if (requested == 0) {
    return {nullptr, nullptr, &release, device};
  }
  check_not_lost();
  std::lock_guard<std::mutex> lock(mutex_);
  collect_read();
  const size_t size = block_bytes(requested);
  const bool small = size <= kSmallBytes;
  const auto stream = current_stream_id();
  auto& card = cards[device.index()];
  Block* block = take_cached(stream, small, size);
  if (!block) {
    block = take_new(stream, small, size);
  }
  if (!block) {
    ++card.stats.num_alloc_retries;
    release_cached(device.index());
    block = take_new(stream, small, size);
  }
  if (!block) {
    refuse(card, requested);
  }
  const size_t rest = block->size - size;
  if (small ? rest >= kGrainBytes : rest > kSmallBytes) {
    split(block, size);
  }
  block->allocated = true;
  block->requested = requested;
  count(card.stats.allocation, small, 1);
  count(card.stats.active, small, 1);
  count(card.stats.allocated_bytes, small, block->size);
  count(card.stats.active_bytes, small, block->size);
  count(card.stats.requested_bytes, small, requested);
  note(*block, requested);
  return {block->data, block, &release, device};
}

Block* DeviceMemory::take_cached(c10::StreamId stream, bool small, size_t size) {
  Block key{stream, small, size, nullptr};
  const auto found = pool(small).lower_bound(&key);
  if (found == pool(small).end() || (*found)->stream != stream) {
    return nullptr;
  }
  Block* block = *found;
  pool(small).erase(found);
  count_free(*block, -1);
  return block;
}

Block* DeviceMemory::take_new(c10::StreamId stream, bool small, size_t size) {
  const size_t bytes = segment_bytes(size);
  auto& card = cards[device_of(stream)];
  const size_t after = card.reserved() + bytes;
  if (after > card.limit_bytes || card.others_bytes + after > card.total_bytes) {
    return nullptr;
  }
  char* data = map_segment(bytes);
  poison(data, bytes);
  ++card.stats.num_device_alloc;
  count(card.stats.segment, small, 1);
  count(card.stats.reserved_bytes, small, bytes);
  return new Block{stream, small, bytes, data};
}

void DeviceMemory::split(Block* block, size_t size) {
  auto* rest = new Block{block->stream, block->small, block->size - size, block->data + size};
  block->size = size;
  rest->before = block;
  rest->after = block->after;
  if (rest->after) {
    rest->after->before = rest;
  }
  block->after = rest;
  pool(rest->small).insert(rest);
  count_free(*rest, 1);
}

void DeviceMemory::release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) {
    return;
  }
  auto& memory = the_memory();
  std::lock_guard<std::mutex> lock(memory.mutex_);
  memory.note(*block, 0);
  block->allocated = false;
  auto& stats = memory.cards[block->device()].stats;
  memory.count(stats.allocation, block->small, -1);
  memory.count(stats.allocated_bytes, block->small, -static_cast<int64_t>(block->size));
  memory.count(stats.requested_bytes, block->small, -static_cast<int64_t>(block->requested));
  if (block->readers.empty()) {
    memory.put_back(block);
    return;
  }
  for (const auto reader : block->readers) {
    block->reads.emplace_back().record(stream(reader));
  }
  block->readers.clear();
  memory.being_read_.push_back(block);
}

// Poisoned in the order of the stream that it was allocated on: what this stream reads before is whole, what another
// one reads without having been waited for is not.
void DeviceMemory::put_back(Block* block) {
  if (poisons) {
    stream(block->stream).submit([this, data = block->data, size = block->size] { poison(data, size); });
  }
  auto& stats = cards[block->device()].stats;
  count(stats.active, block->small, -1);
  count(stats.active_bytes, block->small, -static_cast<int64_t>(block->size));
  block->reads.clear();
  merge(block, block->before);
  merge(block, block->after);
  pool(block->small).insert(block);
  count_free(*block, 1);
}

void DeviceMemory::merge(Block* block, Block* neighbour) {
  if (!neighbour || neighbour->allocated || !neighbour->reads.empty()) {
    return;
  }
  pool(neighbour->small).erase(neighbour);
  count_free(*neighbour, -1);
  if (neighbour == block->before) {
    block->data = neighbour->data;
    block->before = neighbour->before;
    if (block->before) {
      block->before->after = block;
    }
  } else {
    block->after = neighbour->after;
    if (block->after) {
      block->after->before = block;
    }
  }
  block->size += neighbour->size;
  delete neighbour;
}

void DeviceMemory::recordStream(const c10::DataPtr& data, c10::Stream by) {
  if (data.get_deleter() != &release || !data.get()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto* block = static_cast<Block*>(data.get_context());
  if (block->stream != by.id()) {
    block->readers.insert(by.id());
  }
}

void DeviceMemory::collect_read() {
  std::vector<Block*> waiting;
  for (Block* block : std::exchange(being_read_, {})) {
    const bool done =
        std::all_of(block->reads.begin(), block->reads.end(), [](const Event& read) { return read.happened(); });
    done ? put_back(block) : waiting.push_back(block);
  }
  being_read_ = std::move(waiting);
}

void DeviceMemory::release_cached(c10::DeviceIndex device) {
  auto& stats = cards[device].stats;
  settle_devices(); // a stream of another one may read what is given back
  collect_read();
  settle_devices(); // what has just been collected is being poisoned
  for (const bool small : {true, false}) {
    for (auto it = pool(small).begin(); it != pool(small).end();) {
      Block* block = *it;
      if (!block->whole() || block->device() != device) {
        ++it;
        continue;
      }
      it = pool(small).erase(it);
      unmap_segment(block->data);
      ++stats.num_device_free;
      count(stats.segment, small, -1);
      count(stats.reserved_bytes, small, -static_cast<int64_t>(block->size));
      delete block;
    }
  }
}

void DeviceMemory::note(const Block& block, size_t requested) {
  if (watched_) {
    changes_.emplace_back(reinterpret_cast<uintptr_t>(block.data), requested);
  }
}

void DeviceMemory::emptyCache(c10::MempoolId_t) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    release_cached(device);
  }
}

void DeviceMemory::refuse(Card& card, size_t requested) {
  using c10::CachingAllocator::format_size;
  ++card.stats.num_ooms;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "Simulated device out of memory. Tried to allocate ", format_size(requested),
      ". The device has ", format_size(card.total_bytes), ", of which others hold ", format_size(card.others_bytes),
      " and this process may reserve ", format_size(std::min(card.limit_bytes, card.total_bytes)), "; ",
      format_size(card.reserved()), " are reserved and ", format_size(card.stats.allocated_bytes[0].current),
      " allocated.");
}

template <typename Call>
void for_each_statistic(c10::CachingDeviceAllocator::DeviceStats& stats, Call call) {
  for (auto* statistic :
       {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
        &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (auto& stat : *statistic) {
      call(stat);
    }
  }
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& stats = cards.at(device).stats;
  for_each_statistic(stats, [](auto& stat) { stat.reset_accumulated(); });
  stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_each_statistic(cards.at(device).stats, [](auto& stat) { stat.reset_peak(); });
}

} // namespace

c10::DeviceAllocator* device_memory() {
  return &the_memory();
}

void set_poisons(bool poisons) {
  the_memory().poisons = poisons;
}

void watch_allocations(bool on) {
  the_memory().watch(on);
}

std::vector<Change> take_changes() {
  return the_memory().take_changes();
}

void set_total_bytes(c10::DeviceIndex device, size_t total_bytes) {
  the_memory().cards.at(device).total_bytes = total_bytes;
}

void set_others_bytes(c10::DeviceIndex device, size_t others_bytes) {
  the_memory().cards.at(device).others_bytes = others_bytes;
}

void set_limit_bytes(c10::DeviceIndex device, size_t limit_bytes) {
  the_memory().cards.at(device).limit_bytes = limit_bytes;
}

} // namespace sim
