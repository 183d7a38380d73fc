// CPU tensors that lie on the device's memory: the same bytes, sizes, strides and offset, and no part in their life.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace sim {

bool on_device(const at::Tensor& tensor);

at::Tensor cpu_view(const at::Tensor& tensor);

// From a tensor's first element to its last.
size_t extent_bytes(const at::Tensor& tensor);

// CPU tensors for the arguments of one call: tensors that share storage there share it here.
class Views {
 public:
  // A tensor of the host, or an undefined one, is its own view.
  at::Tensor of(const at::Tensor& tensor);

  // What a kernel returned, as a tensor of the device: a view of an argument's storage, or new memory (true) that has
  // to be filled yet.
  std::pair<at::Tensor, bool> to_device(const at::Tensor& result) const;

  // Arguments that a kernel has resized (`out=` of another shape) follow.
  void resize_originals() const;

 private:
  struct Shared {
    c10::Storage device;
    c10::Storage host;
  };
  struct Pair {
    at::Tensor device;
    at::Tensor host;
  };

  const c10::Storage& host_storage(const c10::Storage& storage);

  std::vector<Shared> shared_;
  std::vector<Pair> pairs_;
};

} // namespace sim
