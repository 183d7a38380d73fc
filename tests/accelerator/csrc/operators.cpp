// Operators that make, view and copy the device's tensors.
#include "memory.h"
#include "views.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  const c10::OptionalDeviceGuard there(device);
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "The simulated device has only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, device_memory(), kKeys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  const c10::OptionalDeviceGuard there(device);
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "The simulated device has only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(size, stride, device_memory(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard there(self.device());
  current_stream().synchronize();
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage_(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  const c10::DeviceGuard there(self.device());
  current_stream().synchronize();
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_whole_storage_(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_empty_(at::Tensor& self) {
  const c10::DeviceGuard there(self.device());
  const c10::Storage nothing(
      c10::Storage::use_byte_size_t{}, 0, device_memory()->allocate(0), device_memory(), /*resizable=*/true);
  return at::native::set_storage_cpu_(self, nothing, 0, {0}, {});
}

at::Scalar local_scalar(const at::Tensor& self) {
  const c10::DeviceGuard there(self.device());
  current_stream().synchronize();
  return cpu_view(self).item();
}

// Whether the bytes can be copied as they lie, without a kernel.
bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.dtype() == from.dtype() && to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
      to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

Task copy_task(const at::Tensor& to, const at::Tensor& from) {
  if (is_plain(to, from)) {
    return [target = to.mutable_data_ptr(), source = from.const_data_ptr(), size = to.nbytes()] {
      std::memmove(target, source, size);
    };
  }
  return [target = cpu_view(to), source = cpu_view(from)] {
    at::init_num_threads();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(source);
  };
}

// As on CUDA: within a device always on its current stream; between host and device too if the bytes can be copied
// as they lie, the host's are pinned, and the caller does not want to wait; else the host waits. It also waits for
// copies between devices, on the current streams of both.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) {
    return self;
  }
  check_not_lost();
  const auto from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  const c10::DeviceGuard there(on_device(self) ? self.device() : from.device());
  auto& on = current_stream();
  const bool within = self.device() == from.device();
  const auto& host = on_device(self) ? from : self;
  if (within || (non_blocking && is_plain(self, from) && is_pinned(host.const_data_ptr()))) {
    on.submit_late(copy_task(self, from));
    if (!within) {
      pinned_memory_is_read(host.const_data_ptr(), on);
    }
    return self;
  }
  on.synchronize();
  if (on_device(self) && on_device(from)) {
    stream(current_stream_id(from.device().index())).synchronize();
  }
  copy_task(self, from)();
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  auto target = to;
  target.resize_(self.sizes());
  return copy_(target, self, /*non_blocking=*/false);
}

void record_stream(at::Tensor& self, at::Stream by) {
  device_memory()->recordStream(self.storage().data_ptr(), by);
}

} // namespace
} // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &sim::empty);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("resize_", &sim::resize_);
  m.impl("set_", &sim::set_empty_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &sim::set_whole_storage_);
  m.impl("set_.source_Storage_storage_offset", &sim::set_storage_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_local_scalar_dense", &sim::local_scalar);
  m.impl("copy_", &sim::copy_);
  m.impl("_copy_from", &sim::copy_from);
  m.impl("_copy_from_and_resize", &sim::copy_from_and_resize);
  m.impl("record_stream", &sim::record_stream);
}

// The CPU's choice of attention kernel: the fused one where the CPU would take it.
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &_fused_sdp_choice_cpp)
} // namespace at::native
