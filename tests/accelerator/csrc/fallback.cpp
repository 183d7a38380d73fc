// Every operator without a kernel of its own: the CPU's kernel on the device's memory, so that the bits are the CPU's.
#include "generator.h"
#include "memory.h"
#include "views.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
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
          !tensor.defined() || tensor.device() == device_at(current_device()) ||
              (!on_device(tensor) && !written && (indices || number)),
          op.operator_name(), ": expected all tensors to be on the same device, but argument `", declared[i].name(),
          "` of shape ", tensor.sizes(), " is on ", tensor.device(), " and another one is on sim:", static_cast<int>(current_device()));
    });
  }
}

// The device of the first tensor that is on one, or that a tensor is to be made on; else the current one.
c10::Device device_for(c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> found;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!found && on_device(tensor)) {
        found = tensor.device();
      }
    });
    if (!found && argument.isDevice() && argument.toDevice().type() == kDevice && argument.toDevice().has_index()) {
      found = argument.toDevice();
    }
  }
  return found.value_or(device_at(current_device()));
}

bool is_matrix_product(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string_view> names = {
      "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation"};
  return names.count(op.schema().name()) > 0;
}

// One call of an operator: its arguments for the CPU, and its results for the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments)
      : op_(op), originals_(arguments.vec()), device_(current_device()) {
    for (const auto& argument : arguments) {
      inputs_.push_back(on_cpu(argument));
    }
  }

  void run() {
    // Kernels that draw and have been given no generator draw from the device's.
    std::optional<DefaultDraws> draws;
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      draws.emplace(device_);
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    results_ = inputs_;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results_);
  }

  // Pushes the results; tensors that are new get device memory, whose filling is left to `fill`.
  std::vector<void*> allocate_results(torch::jit::Stack* stack) {
    views_.resize_originals();
    std::vector<void*> targets;
    for (size_t i = 0; i < results_.size(); ++i) {
      if (const auto* original = written(op_.schema().returns()[i])) {
        stack->push_back(*original);
        results_[i] = IValue();
        continue;
      }
      stack->push_back(map_tensors(results_[i], [&](const at::Tensor& host) {
        const auto [tensor, is_new] = views_.to_device(host);
        targets.push_back(is_new ? tensor.mutable_data_ptr() : nullptr);
        return tensor;
      }));
    }
    return targets;
  }

  void fill(const std::vector<void*>& targets) const {
    size_t next = 0;
    for (const auto& result : results_) {
      for_each_tensor(result, [&](const at::Tensor& host) {
        if (void* target = targets[next++]) {
          std::memcpy(target, host.const_data_ptr(), extent_bytes(host));
        }
      });
    }
  }

  // Whether all that it returns is what it was given to write to, of the right size already.
  bool only_writes() const {
    const auto& returns = op_.schema().returns();
    bool sized = true;
    for (size_t i = 0; i < originals_.size(); ++i) {
      if (is_written(op_.schema().arguments()[i])) {
        for_each_tensor(originals_[i], [&](const at::Tensor& tensor) { sized &= tensor.numel() > 0; });
      }
    }
    return sized && !op_.hasTag(at::Tag::nondeterministic_seeded) &&
        std::all_of(returns.begin(), returns.end(), [this](const auto& one) { return written(one) != nullptr; });
  }

  // Whether running it again changes nothing. Batch norms write to their statistics without saying so.
  bool repeatable() const {
    const auto& arguments = op_.schema().arguments();
    return !op_.hasTag(at::Tag::nondeterministic_seeded) &&
        op_.schema().name().find("batch_norm") == std::string::npos &&
        std::none_of(arguments.begin(), arguments.end(), is_written);
  }

  void push_originals(torch::jit::Stack* stack) const {
    for (const auto& one : op_.schema().returns()) {
      stack->push_back(*written(one));
    }
  }

  // Where the arguments lie: a kernel that resizes one moves it.
  std::vector<std::pair<const void*, int64_t>> memory() const {
    std::vector<std::pair<const void*, int64_t>> places;
    for (const auto& input : inputs_) {
      for_each_tensor(input, [&](const at::Tensor& host) {
        if (host.defined()) {
          places.emplace_back(host.const_data_ptr(), host.numel());
        }
      });
    }
    return places;
  }

  const std::string& name() const {
    return op_.schema().name();
  }

  // Before it goes to a stream's thread: what waits there keeps no device memory alive.
  void detach() {
    originals_.clear();
    views_ = {};
  }

 private:
  static bool is_written(const c10::Argument& declared) {
    return declared.alias_info() && declared.alias_info()->isWrite();
  }

  IValue on_cpu(const IValue& argument) {
    if (argument.isDevice() && argument.toDevice().type() == kDevice) {
      return c10::Device(c10::kCPU);
    }
    if (argument.isGenerator() && argument.toGenerator().defined()) {
      return cpu_generator(argument.toGenerator());
    }
    return map_tensors(argument, [this](const at::Tensor& tensor) {
      return on_device(tensor) || !tensor.defined() || !delays_are_on() ? views_.of(tensor) : as_it_is_now(tensor);
    });
  }

  static at::Tensor as_it_is_now(const at::Tensor& host) {
    auto kept = host.clone();
    if (host.unsafeGetTensorImpl()->is_wrapped_number()) {
      kept.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return kept;
  }

  // The argument that is returned as this result, if it is one that was given to be written to.
  const IValue* written(const c10::Argument& result) const {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; is_written(result) && i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) {
        return &originals_[i];
      }
    }
    return nullptr;
  }

  c10::OperatorHandle op_;
  std::vector<IValue> originals_;
  c10::DeviceIndex device_;
  Views views_;
  torch::jit::Stack inputs_;
  torch::jit::Stack results_;
};

// Kernels on a stream's thread compute with as many threads as the caller's would: bits depend on the number.
Task with_threads_of_caller(Task task) {
  return [n_threads = at::get_num_threads(), task = std::move(task)] {
    if (at::get_num_threads() != n_threads) {
      at::set_num_threads(n_threads);
    }
    task();
  };
}

void run_now(Call& call, torch::jit::Stack* stack) {
  current_stream().synchronize();
  call.run();
  call.fill(call.allocate_results(stack));
}

// Where delays are on, a kernel runs when its stream comes to it, as on a real device, so that whoever reads its
// results too early, or overwrites its arguments too early, is found out. New results have to be computed at once to
// know their shapes: they are computed a second time on the stream, or where this is not possible only delivered there.
void run_late(std::shared_ptr<Call> call, torch::jit::Stack* stack) {
  auto& on = current_stream();
  if (call->only_writes()) {
    call->push_originals(stack);
    call->detach();
    on.submit_late(with_threads_of_caller([call, memory = call->memory()] {
      call->run();
      TORCH_CHECK(memory == call->memory(), call->name(), ": `out` of another shape than the result, with delays on");
    }));
    return;
  }
  on.synchronize();
  call->run();
  const auto targets = call->allocate_results(stack);
  const bool again = call->repeatable();
  call->detach();
  on.submit_late(with_threads_of_caller([call, targets, again] {
    if (again) {
      call->run();
    }
    call->fill(targets);
  }));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t n_arguments = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, n_arguments);
  const c10::DeviceGuard there(device_for(arguments));
  check_not_lost();
  check_devices(op, arguments);
  if (is_matrix_product(op)) {
    keep_workspace();
  }
  auto call = std::make_shared<Call>(op, arguments);
  torch::jit::drop(*stack, n_arguments);
  if (delays_are_on()) {
    run_late(std::move(call), stack);
  } else {
    run_now(*call, stack);
  }
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
