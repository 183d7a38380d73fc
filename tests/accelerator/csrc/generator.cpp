#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

namespace sim {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(at::Generator cpu)
      : c10::GeneratorImpl(c10::Device(kDevice, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
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
    return new DeviceGenerator(cpu.clone());
  }
};

} // namespace

at::Generator make_generator(c10::DeviceIndex) {
  return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
}

const at::Generator& default_generator() {
  static const auto* const generator = new at::Generator(make_generator(0));
  return *generator;
}

at::Generator cpu_generator(const at::Generator& generator) {
  return generator.device().type() == kDevice ? generator.get<DeviceGenerator>()->cpu : generator;
}

DefaultDraws::DefaultDraws() {
  auto cpu = at::detail::getDefaultCPUGenerator();
  kept_ = cpu.get_state();
  cpu.set_state(default_generator().get_state());
}

DefaultDraws::~DefaultDraws() {
  auto cpu = at::detail::getDefaultCPUGenerator();
  auto own = default_generator();
  own.set_state(cpu.get_state());
  cpu.set_state(kept_);
}

} // namespace sim
