// What PyTorch asks of a device, and what Python sees of it beyond that.
#include "generator.h"
#include "memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace sim {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchange_current_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchange_current_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_memory();
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return device_at(current_device());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device() : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return make_generator(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard of_storage(storage.device());
    current_stream().synchronize();
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device_at(to.has_index() ? exchange_current_device(to.index()) : current_device());
  }
  c10::Device getDevice() const override {
    return device_at(current_device());
  }
  void setDevice(c10::Device to) const override {
    exchangeDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    exchangeDevice(to);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  c10::Stream getStream(c10::Device device) const override {
    return of_torch(current_stream_id(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return of_torch(default_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return of_torch(next_stream(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return of_torch(next_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return of_torch(exchange_current_stream(to.id()));
  }
  bool queryStream(const c10::Stream& on) const override {
    return stream(on.id()).idle();
  }
  void synchronizeStream(const c10::Stream& on) const override {
    stream(on.id()).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& by) const override {
    device_memory()->recordStream(data, by);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    check_not_lost();
    if (!*event) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->record(stream(on.id()));
  }
  void block(void* event, const c10::Stream& waiting) const override {
    check_not_lost();
    if (event) {
      static_cast<Event*>(event)->block(stream(waiting.id()));
    }
  }
  bool queryEvent(void* event) const override {
    return !event || static_cast<Event*>(event)->happened();
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      static_cast<Event*>(event)->synchronize();
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return static_cast<Event*>(from)->ms_until(*static_cast<Event*>(to));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  static c10::Stream of_torch(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(device_of(id)), id);
  }
};

// Autograd makes its threads for the devices that it finds at the first backward of the process, so the guard is there
// from the moment the library is; the rest, which makes the device the accelerator of the process, when it is wanted.
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void register_device() {
  c10::SetAllocator(kDevice, device_memory());
  at::setHostAllocator(kDevice, pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

} // namespace
} // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  const auto without_gil = pybind11::call_guard<pybind11::gil_scoped_release>();
  module.attr("n_devices") = sim::kDevices;
  module.def("register_device", &sim::register_device);
  module.def("set_delays", &sim::set_delays, without_gil);
  module.def("settle", &sim::settle_devices, without_gil);
  module.def("set_lost", &sim::set_lost);
  module.def("hold", &sim::hold);
  module.def("set_total_bytes", &sim::set_total_bytes);
  module.def("set_others_bytes", &sim::set_others_bytes);
  module.def("set_workspace_bytes", &sim::set_workspace_bytes);
  module.def("set_limit_bytes", &sim::set_limit_bytes);
  module.def("set_poisons", &sim::set_poisons, without_gil);
  module.def("watch_allocations", &sim::watch_allocations);
  module.def("take_changes", &sim::take_changes);
  module.def("set_pinned_limit_bytes", &sim::set_pinned_limit_bytes);
  module.def("pinned_bytes", [] { return sim::pinned_memory()->get_stats().allocated_bytes.current; });
  module.def("empty_host_cache", [] { sim::pinned_memory()->empty_cache(); });
  module.def("default_generator", &sim::default_generator);
}
