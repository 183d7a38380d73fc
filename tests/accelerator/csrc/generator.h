// The device's random numbers: drawn as the CPU draws them, from generators of the device's own.
#pragma once

#include "streams.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator make_generator(c10::DeviceIndex index);

// The CPU generator behind one of the device's.
at::Generator cpu_generator(const at::Generator& generator);

// While it lives, the CPU's default generator has the state of a device's: for kernels that take no generator.
class DefaultDraws {
 public:
  explicit DefaultDraws(c10::DeviceIndex device);
  ~DefaultDraws();
  DefaultDraws(const DefaultDraws&) = delete;
  DefaultDraws& operator=(const DefaultDraws&) = delete;

 private:
  c10::DeviceIndex device_;
  at::Tensor kept_;
};

} // namespace sim
