#include "views.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace sim {
namespace {

// Memory that somebody else owns. Resizable, so that a kernel may resize what it is given as `out`: then the storage
// gets memory of its own, and the original follows.
c10::Storage host_storage_at(void* data, size_t size) {
  return c10::Storage(
      c10::Storage::use_byte_size_t{}, size, c10::DataPtr(data, c10::kCPU), c10::GetCPUAllocator(), /*resizable=*/true);
}

at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

} // namespace

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

at::Tensor cpu_view(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  return tensor_on(host_storage_at(storage.mutable_data(), storage.nbytes()), c10::DispatchKey::CPU, tensor);
}

size_t extent_bytes(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize());
}

const c10::Storage& Views::host_storage(const c10::Storage& storage) {
  for (const auto& one : shared_) {
    if (one.device.is_alias_of(storage)) {
      return one.host;
    }
  }
  shared_.push_back({storage, host_storage_at(storage.mutable_data(), storage.nbytes())});
  return shared_.back().host;
}

at::Tensor Views::of(const at::Tensor& tensor) {
  if (!on_device(tensor)) {
    return tensor;
  }
  auto host = tensor_on(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
  pairs_.push_back({tensor, host});
  return host;
}

std::pair<at::Tensor, bool> Views::to_device(const at::Tensor& result) const {
  if (!result.defined()) {
    return {result, false};
  }
  for (const auto& one : shared_) {
    if (one.host.is_alias_of(result.storage())) {
      return {tensor_on(one.device, c10::DispatchKey::PrivateUse1, result), false};
    }
  }
  return {at::empty_strided(result.sizes(), result.strides(), result.options().device(kDevice)), true};
}

void Views::resize_originals() const {
  for (const auto& [device, host] : pairs_) {
    if (device.sizes() == host.sizes() && device.strides() == host.strides()) {
      continue;
    }
    auto* impl = device.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(host.sizes(), host.strides());
    at::native::maybe_resize_storage_cpu(impl, host.storage().nbytes());
    if (host.numel() > 0 && impl->mutable_data() != host.const_data_ptr()) {
      std::memcpy(impl->mutable_data(), host.const_data_ptr(), host.nbytes());
    }
  }
}

} // namespace sim
