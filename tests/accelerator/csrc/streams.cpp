#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <future>
#include <random>
#include <thread>

namespace sim {
namespace {

// What a task threw and nobody has been told of yet.
std::mutex failure_mutex;
std::exception_ptr failure;

void keep_failure(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(failure_mutex);
  if (!failure) {
    failure = std::move(error);
  }
}

void raise_failure() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(failure_mutex);
    std::swap(error, failure);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

std::mutex delay_mutex;
std::mt19937_64 delay_generator;
std::atomic<int64_t> max_delay_us{0};

std::chrono::microseconds draw_delay() {
  const int64_t limit = max_delay_us;
  if (limit <= 0) {
    return std::chrono::microseconds(0);
  }
  std::lock_guard<std::mutex> lock(delay_mutex);
  return std::chrono::microseconds(delay_generator() % static_cast<uint64_t>(limit + 1));
}

constexpr int32_t kLostCode = 719; // CUDA's for a failed launch
std::atomic<bool> device_is_lost{false};

std::mutex streams_mutex;
std::array<std::atomic<Stream*>, kStreams> streams{};
std::array<std::atomic<c10::StreamId>, kDevices> handed_out{};
thread_local c10::DeviceIndex chosen = 0;
thread_local std::array<c10::StreamId, kDevices> current{}; // counted from each device's default stream

} // namespace

// Streams live as long as the process: their threads wait on them to the very end.
Stream::Stream() {
  std::thread([this] { run(); }).detach();
}

void Stream::submit(Task task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    ++submitted_;
  }
  changed_.notify_all();
}

void Stream::submit_late(Task task) {
  const auto delay = draw_delay();
  if (delay.count() == 0) {
    submit(std::move(task));
    return;
  }
  submit([delay, task = std::move(task)] {
    std::this_thread::sleep_for(delay);
    task();
  });
}

void Stream::run() {
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    try {
      task();
    } catch (...) {
      keep_failure(std::current_exception());
    }
    task = nullptr; // what it holds goes before it counts as done
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
    }
    changed_.notify_all();
  }
}

void Stream::settle() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t until = submitted_;
  changed_.wait(lock, [&] { return done_ >= until; });
}

void Stream::synchronize() {
  check_not_lost();
  settle();
  raise_failure();
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == submitted_;
}

Stream& stream(c10::StreamId id) {
  TORCH_CHECK(id >= 0 && id < kStreams, "The simulated device has no stream ", id);
  auto& slot = streams[id];
  if (Stream* made = slot.load()) {
    return *made;
  }
  std::lock_guard<std::mutex> lock(streams_mutex);
  if (!slot.load()) {
    slot = new Stream();
  }
  return *slot.load();
}

c10::DeviceIndex current_device() {
  return chosen;
}

c10::DeviceIndex exchange_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "There is no simulated device ", static_cast<int>(index));
  return std::exchange(chosen, index);
}

c10::StreamId next_stream(c10::DeviceIndex device) {
  return default_stream(device) + 1 + handed_out[device]++ % (kStreamsOfDevice - 1);
}

c10::StreamId current_stream_id(c10::DeviceIndex device) {
  return default_stream(device) + current[device];
}

c10::StreamId current_stream_id() {
  return current_stream_id(chosen);
}

c10::StreamId exchange_current_stream(c10::StreamId id) {
  const auto device = device_of(id);
  return default_stream(device) + std::exchange(current[device], id - default_stream(device));
}

Stream& current_stream() {
  return stream(current_stream_id());
}

void set_lost(bool lost) {
  device_is_lost = lost;
}

void check_not_lost() {
  if (device_is_lost) {
    throw c10::AcceleratorError(
        {__func__, __FILE__, __LINE__}, kLostCode, "Simulated device error: unspecified launch failure, device lost");
  }
}

void settle_device(c10::DeviceIndex device) {
  for (auto id = default_stream(device); id < default_stream(device + 1); ++id) {
    if (Stream* made = streams[id].load()) {
      made->settle();
    }
  }
}

void settle_devices() {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    settle_device(device);
  }
}

void synchronize_device(c10::DeviceIndex device) {
  check_not_lost();
  settle_device(device);
  raise_failure();
}

void set_delays(uint64_t seed, int64_t max_us) {
  check_not_lost();
  settle_devices();
  raise_failure();
  std::lock_guard<std::mutex> lock(delay_mutex);
  delay_generator.seed(seed);
  max_delay_us = max_us;
}

bool delays_are_on() {
  return max_delay_us > 0;
}

std::function<void()> hold(c10::StreamId id) {
  const auto gate = std::make_shared<std::promise<void>>();
  stream(id).submit([opened = gate->get_future().share()] { opened.wait(); });
  return [gate] { gate->set_value(); };
}

void Event::State::wait_for(uint64_t version) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return happened >= version; });
}

std::chrono::steady_clock::time_point Event::State::time() {
  std::lock_guard<std::mutex> lock(mutex);
  return when;
}

void Event::record(Stream& on) {
  uint64_t version = 0;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    version = ++state_->recorded;
  }
  on.submit_late([state = state_, version] {
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->happened = std::max(state->happened, version);
      state->when = std::chrono::steady_clock::now();
    }
    state->changed.notify_all();
  });
}

void Event::block(Stream& waiting) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->happened < state_->recorded) {
    waiting.submit([state = state_, version = state_->recorded] { state->wait_for(version); });
  }
}

bool Event::happened() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->happened >= state_->recorded;
}

void Event::synchronize() const {
  check_not_lost();
  uint64_t version = 0;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    version = state_->recorded;
  }
  state_->wait_for(version);
  raise_failure();
}

double Event::ms_until(const Event& later) const {
  return std::chrono::duration<double, std::milli>(later.state_->time() - state_->time()).count();
}

} // namespace sim
