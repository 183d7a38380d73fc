// Every operator without a kernel of its own: the CPU's kernel on the device's memory, so that the bits are the CPU's.
#include "generator.h"
#include "views.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <unordered_set>

namespace sim {
namespace {

using c10::IValue;

template <typename Call>
void for_each_tensor(const IValue& value, Call call) {
  if (value.isTensor()) {
    call(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      call(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value()) {
        call(*tensor);
      }
    }
  }
}

template <typename Call>
IValue map_tensors(const IValue& value, Call call) {
  if (value.isTensor()) {
    return call(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      mapped.push_back(call(tensor));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor.has_value() ? std::optional<at::Tensor>(call(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

// CUDA moves indices of the host itself.
bool takes_host_indices(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string_view> names = {
      "aten::index", "aten::_unsafe_index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
  return names.count(op.schema().name()) > 0;
}

// Where CUDA takes a single number that lies on the host: element by element, never where a list must be on one device.
bool takes_host_numbers(const c10::OperatorHandle& op, const IValue& argument) {
  static const std::unordered_set<std::string_view> names = {
      "aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::index_fill_", "aten::lerp", "aten::where"};
  const std::string_view name = op.schema().name();
  if (!argument.isTensor()) {
    return name.rfind("aten::_foreach_", 0) == 0;
  }
  return op.hasTag(at::Tag::pointwise) || names.count(name) > 0 || takes_host_indices(op);
}

void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  const auto& declared = op.schema().arguments();
  bool any_on_device = false;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) { any_on_device |= on_device(tensor); });
  }
  for (size_t i = 0; any_on_device && i < arguments.size(); ++i) {
    const auto* alias = declared[i].alias_info();
    const bool written = alias && alias->isWrite();
    const bool indices = takes_host_indices(op) && arguments[i].isOptionalTensorList();
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      const bool number = tensor.defined() && tensor.dim() == 0 && takes_host_numbers(op, arguments[i]);
      TORCH_CHECK(
          !tensor.defined() || on_device(tensor) || (!written && (indices || number)),
          op.operator_name(), ": expected all tensors to be on the same device, but argument `", declared[i].name(),
          "` of shape ", tensor.sizes(), " is on ", tensor.device(), " and another one is on sim:0");
    });
  }
}

// One call of an operator: its arguments for the CPU, and its results for the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) : op_(op), originals_(arguments.vec()) {
    for (const auto& argument : arguments) {
      stack_.push_back(on_cpu(argument));
    }
  }

  void run() {
    // Kernels that draw and have been given no generator draw from the device's.
    std::optional<DefaultDraws> draws;
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      draws.emplace();
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }

  void return_to(torch::jit::Stack* stack) {
    views_.resize_originals();
    const auto& returns = op_.schema().returns();
    for (size_t i = 0; i < returns.size(); ++i) {
      stack->push_back(returned(returns[i], stack_[i]));
    }
  }

 private:
  IValue on_cpu(const IValue& argument) {
    if (argument.isDevice() && argument.toDevice().type() == kDevice) {
      return c10::Device(c10::kCPU);
    }
    if (argument.isGenerator() && argument.toGenerator().defined()) {
      return cpu_generator(argument.toGenerator());
    }
    return map_tensors(argument, [this](const at::Tensor& tensor) { return views_.of(tensor); });
  }

  // What a kernel writes to and returns is the very argument that it was given.
  IValue returned(const c10::Argument& declared, const IValue& result) const {
    if (const auto* alias = declared.alias_info(); alias && alias->isWrite()) {
      const auto& arguments = op_.schema().arguments();
      for (size_t i = 0; i < arguments.size(); ++i) {
        const auto* of = arguments[i].alias_info();
        if (of && of->beforeSets() == alias->beforeSets()) {
          return originals_[i];
        }
      }
    }
    return map_tensors(result, [this](const at::Tensor& tensor) { return views_.to_device(tensor); });
  }

  const c10::OperatorHandle& op_;
  std::vector<IValue> originals_;
  Views views_;
  torch::jit::Stack stack_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t n_arguments = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, n_arguments);
  check_devices(op, arguments);
  Call call(op, arguments);
  torch::jit::drop(*stack, n_arguments);
  current_stream().synchronize();
  call.run();
  call.return_to(stack);
}

} // namespace
} // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}

// Some operators have a formula for devices without a kernel, which would be taken before the fallback and gives other
// bits than the CPU's kernel; and a convolution asks what device it is on.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  std::vector<std::string> names = {"aten::convolution", "aten::convolution_backward"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))) {
      names.push_back(toString(name));
    }
  }
  for (const auto& name : names) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
  }
}
