"""Names of torch, transformers and trl that are not public there: where each is used, what for, and who has it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

# By the file that alone may use them: names as their libraries spell them, and what would be lost with each. What only
# objects have goes by the name of their class.
NAMES: dict[str, dict[str, str]] = {
    "runtime/torch_names/trees.py": {
        "torch.utils._pytree.tree_flatten": "the tensors in a batch",
        "torch.utils._pytree.tree_flatten_with_path": "the names of outputs",
        "torch.utils._pytree.tree_leaves": "the tensors in containers",
        "torch.utils._pytree.tree_map": "batches with other tensors",
        "torch.utils._pytree.tree_unflatten": "outputs in the containers that the model returns",
    },
    "runtime/torch_names/tensors.py": {
        "torch.Tensor._version": "noticing that the user has written into a tensor",
        "torch.UntypedStorage._cdata": "telling which tensors share memory that has no address",
        "torch.multiprocessing.reductions.StorageWeakRef": "knowing what lies in an accelerator's segment",
        "torch.UntypedStorage._expired": "knowing what is gone from an accelerator's segment",
        "torch.UntypedStorage._new_with_weak_ptr": "moving tensors aside in an accelerator's segment",
        "torch.Tensor._backward_hooks": "calling or refusing hooks on gradients",
        "torch.Tensor._post_accumulate_grad_hooks": "refusing hooks on gradients that the plan takes",
        "torch.Tensor._make_subclass": "making parameters of parameters",
        "torch.nn.Parameter._is_param": "making plain parameters of compiled models' parameters",
    },
    "runtime/torch_names/allocators.py": {
        "torch.cuda.memory._snapshot": "refusing settings of a card's allocator that break plans",
    },
    "runtime/torch_names/autograd.py": {
        "torch._C.DisableTorchFunctionSubclass": "looking at compiled models' parameters without waiting",
        "torch._C.DisableTorchFunction": "looking at custom functions aside of the export",
        "torch._C._DisableAutocast": "replaying operators as captured",
        "torch._C._will_engine_execute_node": "backward(inputs=...) and several forwards under one backward()",
        "torch._C._current_graph_task_id": "refusing sums of gradients in another order",
        "torch.autograd._profiler_enabled": "saying that a profiler is in the way",
        "torch.autograd.function._SingleLevelFunction": "keeping custom autograd functions in the graph",
        "torch.autograd.Variable._execution_engine.queue_callback": "gradients from elsewhere in the same backward()",
        "torch._C._autograd._top_saved_tensors_default_hooks": "refusing saved_tensors_hooks around a call",
        "torch.autocast_increment_nesting": "knowing whether a disabled autocast is open",
        "torch.autocast_decrement_nesting": "knowing whether a disabled autocast is open",
    },
    "runtime/torch_names/modules.py": {
        "torch.nn.Module._parameters": "seeing and replacing parameters",
        "torch.nn.Module._buffers": "seeing and replacing buffers",
        "torch.nn.Module._modules": "seeing that modules came, went or changed places",
        "torch.nn.Module._forward_pre_hooks": "capturing hooks inside a model",
        "torch.nn.Module._forward_hooks": "capturing hooks inside a model",
        "torch.nn.Module._backward_pre_hooks": "refusing backward hooks inside a model",
        "torch.nn.Module._backward_hooks": "refusing backward hooks inside a model",
        "torch.nn.Module._call_impl": "capturing a model without its own hooks",
        "torch.nn.modules.transformer._detect_is_causal_mask": "saying what to do about a mask that is looked at",
        "torch.nn.modules.transformer._generate_square_subsequent_mask": "planning masks that the forward makes",
        "torch.nn.modules.module._global_forward_pre_hooks": "refusing hooks on all modules",
        "torch.nn.modules.module._global_forward_hooks": "refusing hooks on all modules",
        "torch.nn.modules.module._global_backward_pre_hooks": "refusing hooks on all modules",
        "torch.nn.modules.module._global_backward_hooks": "refusing hooks on all modules",
        "torch.nn.LSTM._flat_weights": "knowing that a recurrent layer is what it was",
        "torch.nn.LSTM._flat_weight_refs": "knowing that a recurrent layer is what it was",
        "torch._dynamo.eval_frame.OptimizedModule": "refusing models that torch.compile has made",
        "torch._C._nn._parse_to": "model.to(dtype)",
        "torch.optim.Optimizer._optimizer_step_pre_hooks": "updating one parameter without the user's hooks",
        "torch.optim.Optimizer._optimizer_step_post_hooks": "updating one parameter without the user's hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks": "hooks on the steps of all optimizers",
        "torch.optim.optimizer._global_optimizer_post_hooks": "hooks on the steps of all optimizers",
        "torch.optim.Optimizer._opt_called": "schedulers that do not warn of a missing step",
        "torch.optim.Optimizer.step._wrapped_by_lr_sched": "schedulers made before compiling",
    },
    "runtime/torch_names/operators.py": {
        "torch._ops.OpOverload": "knowing operators in a graph",
        "torch._ops.HigherOrderOperator": "refusing operators that hold graphs",
        "torch.ops.aten.add.Tensor._schema": "knowing what an operator writes into",
        "torch.ops.aten._local_scalar_dense.default": "knowing which numbers a forward takes out of its batch",
        "torch.ops.aten.add.Tensor._can_decompose": "dropping operators that return their argument",
        "torch._foreach_norm": "clipping by the global norm",
        "torch.utils._foreach_utils._group_tensors_by_device_and_dtype": "clipping by the global norm, bit for bit",
        "torch._C._get_sdp_priority_order": "seeing that other attention kernels are preferred",
        "torch.utils.flop_counter.sdpa_flop_count": "seconds of attention on a card that is not here",
        "torch.utils.flop_counter.sdpa_backward_flop_count": "seconds of attention on a card that is not here",
        "torch.utils.flop_counter.flop_registry": "seconds of operators on a card that is not here",
        "torch.ops.aten._to_copy.default": "seeing what autocast casts",
        "torch.ops.aten._log_softmax.default": "losses in tiles, bit for bit",
        "torch.ops.aten._log_softmax_backward_data.default": "losses in tiles, bit for bit",
        "torch.ops.aten._unsafe_view.default": "losses in tiles of logits that are views",
        "torch.ops.aten._linalg_svd.default": "singular values of what needs no gradient, bit for bit",
        "torch.ops.aten._linalg_eigh.default": "eigenvalues of what needs no gradient, bit for bit",
        "torch.ops.aten._linalg_check_errors.default": "errors of matrices that are singular",
        "torch.ops.aten._trilinear": "refusing autocast around bilinear",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default": "knowing attention in a graph",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default": "knowing attention in a graph",
    },
    "runtime/torch_names/scalers.py": {
        "torch._amp_foreach_non_finite_check_and_unscale_": "unscaling gradients where they lie",
        "torch.amp.GradScaler._get_scale_async": "unscaling without waiting for the device",
        "torch.amp.GradScaler._unscale_grads_": "scalers that step planned optimizers",
        "torch.optim.AdamW._step_supports_amp_scaling": "fused optimizers whose kernels unscale",
    },
    "runtime/torch_names/tracing.py": {
        "torch._subclasses.fake_tensor.FakeTensor": "models without memory",
        "torch._subclasses.fake_tensor.FakeTensorMode": "models without memory",
        "torch._subclasses.fake_tensor.DataDependentOutputException": "refusing numbers made from values by name",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException": "refusing sizes made from values by name",
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode": "refusing numbers made from values",
        "torch._subclasses.functional_tensor.FunctionalTensor.to_functional": "blocks that write in place",
        "torch._subclasses.functional_tensor.FunctionalTensorMode": "blocks that write in place",
        "torch._functorch._aot_autograd.functional_utils.has_data_mutation": "buffers that a forward writes",
        "torch._mirror_autograd_meta_to": "blocks that write in place",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator": "checkpoints inside checkpoints",
        "torch._sync": "blocks that write in place",
        "torch._from_functional_tensor": "blocks that write in place",
        "torch._functionalize_replace": "strides of what is written in place",
        "torch.fx.experimental.proxy_tensor.make_fx": "graphs of blocks, forward and backward",
        "torch.utils._python_dispatch.TorchDispatchMode": "watching operators while they run",
        "torch.utils._python_dispatch._disable_current_modes": "looking at custom functions aside of the export",
        "torch._C._set_grad_enabled": "grad modes inside a forward",
        "torch.amp.autocast_mode._enter_autocast": "autocast regions inside a forward",
        "torch.amp.autocast_mode._exit_autocast": "autocast regions inside a forward",
        "torch.export._trace": "refusals without torch's own printed graphs",
        "torch._export.passes.replace_autocast_with_hop_pass.replace_autocast_with_hop_pass": "one mode in another",
        "torch._export.passes.replace_set_grad_with_hop_pass.replace_set_grad_with_hop_pass": "one mode in another",
    },
    "runtime/torch_names/inductor.py": {
        "torch._guards.TracingContext.fw_metadata": "inputs that a compiled block may write into",
        "torch._guards.tracing": "inputs that a compiled block may write into",
        "torch._inductor.compile_fx.compile_fx_inner": "compiled blocks",
        "torch._inductor.decomposition.select_decomp_table": "compiled blocks",
        "torch._inductor.config.patch": "compiled blocks as the plan needs them",
        "torch._inductor.config.compile_threads": "compiling without processes that stay",
        "torch._inductor.config.fallback_random": "compiled blocks that draw as plain PyTorch does",
        "torch._inductor.config.comprehensive_padding": "compiled blocks with the bytes that were planned",
        "torch._inductor.config.triton.cudagraphs": "compiled blocks without memory of their own",
        "torch._inductor.cpp_builder.get_cpp_compiler": "saying that a C++ compiler is missing",
        "torch._inductor.exc.InvalidCxxCompiler": "saying that a C++ compiler is missing",
        "torch._inductor.codegen.common.init_backend_registration": "saying that Inductor does not know a device",
        "torch._inductor.codegen.common.get_scheduling_for_device": "saying that Inductor does not know a device",
        "torch.utils._triton.has_triton": "saying that Triton is missing",
    },
    "offmate/transformers_names.py": {
        "transformers.masking_utils.find_packed_sequence_indices": "packed batches as in eager",
        "transformers.masking_utils._ignore_causal_mask_sdpa": "batches without padding as in eager",
        "transformers.masking_utils._ignore_bidirectional_mask_sdpa": "batches without padding as in eager",
        "transformers.masking_utils.is_torchdynamo_exporting": "batches without padding as in eager",
        "transformers.models.qwen3_next.modeling_qwen3_next.is_torchdynamo_exporting": "linear attention as in eager",
        "transformers.integrations.moe.is_torchdynamo_compiling": "experts in float32",
        "transformers.PreTrainedConfig._attn_implementation": "attention by its plain formula, with a cache",
        "transformers.utils.output_capturing": "models that collect attentions or hidden states",
        "transformers.PreTrainedModel._output_capturing_hooks_installed": "models that collect attentions",
        "transformers.core_model_loading.set_param_for_module": "a base in another dtype in a file of its own",
        "transformers.PreTrainedModel._keep_in_fp32_modules": "loading weights without losing digits",
        "transformers.PreTrainedModel._keep_in_fp32_modules_strict": "loading weights without losing digits",
        "transformers.TrainingArguments._n_gpu": "a Trainer where several GPUs are visible",
        "transformers.Trainer._load_optimizer_and_scheduler": "a Trainer that goes on with its plans",
        "transformers.Trainer._clip_grad_norm": "a Trainer whose plan clips",
        "transformers.Trainer._get_grad_norm": "a Trainer whose plan clips",
        "transformers.Trainer._maybe_log_save_evaluate": "the gradient norm in a Trainer's log",
    },
    "offmate/integrations/trl.py": {
        "trl.trainer.utils._ChunkedLogProbFunction": "the head of TRL's trainers as an operator of a plan",
        "trl.trainer.utils.add_fused_lm_head": "finding the head of TRL's trainers",
        "trl.trainer.utils._use_triton": "the head of TRL's trainers on a GPU",
    },
}


def missing(file: str) -> list[str]:
    """Sentences for the names that a file uses and that its library, where it is installed, has not."""
    sentences = []
    for name, purpose in NAMES[file].items():
        library = name.partition(".")[0]
        if importlib.util.find_spec(library) is not None and not has(name):
            version = importlib.import_module(library).__version__
            sentences.append(f"{library} {version} has no {name}, by which {file} provides for {purpose}.")
    return sentences


def has(name: str) -> bool:
    """Whether a name can be had as it is spelt, of an object where only objects have it."""
    path, *rest = name.split(".")
    found: Any = importlib.import_module(path)
    for part in rest:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
        if path in _OBJECTS:
            found = _OBJECTS[path]()
    return True


def private(segment: str) -> bool:
    """Whether a name is spelt as a private one."""
    return segment.startswith("_") and not segment.startswith("__") and len(segment) > 1


def private_segments(file: str) -> frozenset[str]:
    """What is private in the names that are listed for a file."""
    return frozenset(segment for name in NAMES[file] for segment in name.split(".") if private(segment))


# -- objects of classes whose names above are attributes of objects alone ---------------------------------------------


@cache
def _parameter() -> Any:
    import torch

    return torch.nn.Parameter(torch.zeros(1).as_subclass(type("Own", (torch.Tensor,), {})))


@cache
def _module() -> Any:
    import torch

    return torch.nn.Module()


@cache
def _recurrent() -> Any:
    import torch

    return torch.nn.LSTM(1, 1)


@cache
def _scheduled() -> Any:
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1)])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step()
    return optimizer


@cache
def _fused() -> Any:
    import torch

    return torch.optim.AdamW([torch.zeros(1)], fused=True)


@cache
def _context() -> Any:
    import torch

    return torch._guards.TracingContext(None)


@cache
def _collecting() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=2, hidden_size=2, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaModel(config)
    model(torch.zeros(1, 1, dtype=torch.long), output_hidden_states=True)
    return model


@cache
def _arguments() -> Any:
    from transformers import TrainingArguments

    arguments = TrainingArguments(use_cpu=True)
    assert arguments.n_gpu == 0
    return arguments


_OBJECTS: dict[str, Callable[[], Any]] = {
    "torch.nn.Parameter": _parameter,
    "torch.nn.Module": _module,
    "torch.nn.LSTM": _recurrent,
    "torch.optim.Optimizer": _scheduled,
    "torch.optim.AdamW": _fused,
    "torch._guards.TracingContext": _context,
    "transformers.PreTrainedModel": _collecting,
    "transformers.TrainingArguments": _arguments,
}
