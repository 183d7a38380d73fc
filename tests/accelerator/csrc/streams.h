// Streams are threads that do their tasks in order; events say how far a stream has come.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace sim {

using Task = std::function<void()>;

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::StreamId kStreamsOfDevice = 33; // the default stream and a pool that is handed out in turn, as CUDA's
constexpr c10::StreamId kStreams = kDevices * kStreamsOfDevice; // numbered through, so that a number names the device

inline c10::Device device_at(c10::DeviceIndex index) {
  return c10::Device(kDevice, index);
}
inline c10::DeviceIndex device_of(c10::StreamId id) {
  return static_cast<c10::DeviceIndex>(id / kStreamsOfDevice);
}
inline c10::StreamId default_stream(c10::DeviceIndex device) {
  return device * kStreamsOfDevice;
}

// The device that the calling thread has chosen.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_current_device(c10::DeviceIndex index);

class Stream {
 public:
  Stream();

  // What a task throws is kept, and raised by whoever waits next.
  void submit(Task task);

  // The same, after a random delay where delays are on.
  void submit_late(Task task);

  // Returns when everything submitted before the call is done; raises what a task has thrown, on any stream.
  void synchronize();

  // The same without raising, for those who give memory back.
  void settle();

  bool idle();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t submitted_ = 0;
  uint64_t done_ = 0;
};

Stream& stream(c10::StreamId id);
c10::StreamId next_stream(c10::DeviceIndex device);
// Each device has a current stream; without one named, that of the current device.
c10::StreamId current_stream_id(c10::DeviceIndex device);
c10::StreamId current_stream_id();
c10::StreamId exchange_current_stream(c10::StreamId id);
Stream& current_stream();

// Devices that are lost refuse everything until they are found again.
void set_lost(bool lost);
void check_not_lost();

void synchronize_device(c10::DeviceIndex device);
void settle_device(c10::DeviceIndex device);
void settle_devices();

// Every copy, event and kernel is preceded by a delay between 0 and `max_us`, drawn when it is submitted; 0 turns
// delays off.
void set_delays(uint64_t seed, int64_t max_us);
bool delays_are_on();

// Stops a stream at what has been submitted until now; the function returned lets it go on.
std::function<void()> hold(c10::StreamId id);

// The completion of what was on a stream when it was last recorded. Copies share the state.
class Event {
 public:
  void record(Stream& on);
  void block(Stream& waiting) const;
  bool happened() const;
  void synchronize() const;
  double ms_until(const Event& later) const;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0;
    uint64_t happened = 0;
    std::chrono::steady_clock::time_point when;

    void wait_for(uint64_t version);
    std::chrono::steady_clock::time_point time();
  };

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

} // namespace sim
