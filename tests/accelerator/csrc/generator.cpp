#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>

namespace sim {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(c10::DeviceIndex device, at::Generator cpu)
      : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}

  static c10::DeviceType device_type() {
    return kDevice;
  }
  void set_current_seed(uint64_t seed) override {
    cpu.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    cpu.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return cpu.get_offset();
  }
  uint64_t current_seed() const override {
    return cpu.current_seed();
  }
  uint64_t seed() override {
    return cpu.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator cpu;

 private:
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), cpu.clone());
  }
};

} // namespace

at::Generator make_generator(c10::DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* const generators = new std::array<at::Generator, kDevices>{make_generator(0), make_generator(1)};
  return generators->at(device);
}

at::Generator cpu_generator(const at::Generator& generator) {
  return generator.device().type() == kDevice ? generator.get<DeviceGenerator>()->cpu : generator;
}

DefaultDraws::DefaultDraws(c10::DeviceIndex device) : device_(device) {
  auto cpu = at::detail::getDefaultCPUGenerator();
  kept_ = cpu.get_state();
  cpu.set_state(default_generator(device_).get_state());
}

DefaultDraws::~DefaultDraws() {
  auto cpu = at::detail::getDefaultCPUGenerator();
  auto own = default_generator(device_);
  own.set_state(cpu.get_state());
  cpu.set_state(kept_);
}

} // namespace sim
