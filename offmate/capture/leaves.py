"""Refuses tensors and modules of a model with which a graph would give other numbers than plain PyTorch."""

from __future__ import annotations

import torch

from ..errors import CaptureError
from ..guards.python_objects import Found
from .captured import Captured
from .chain import Chain
from .effects import updates_stats
from .fake import has_address, memory_of
from .observe import entry_of


def check_leaves(model: torch.nn.Module, captured: Captured) -> None:
    """Raise CaptureError if a tensor that is not a parameter of the model would get a gradient in plain PyTorch."""
    own = {id(param) for param in model.parameters()}
    found = Found(model)
    held = {path: entry_of(holder, name) for path, (holder, name) in found.places.items()}
    leaves = {path: t for path, t in held.items() if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad}
    read = {path: t for path, t in leaves.items() if any(path.startswith(attribute) for attribute in captured.read)}
    for name, tensor in {**captured.constants, **dict(model.named_buffers()), **read}.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and id(tensor) not in own:
            raise CaptureError(
                f"the forward reads {name.lstrip('.')}, a tensor of shape {tuple(tensor.shape)} that requires a "
                "gradient but is not a parameter of the model, so it would get none. Register it (as an nn.Parameter "
                "attribute, or in an nn.ParameterList), or detach it"
            )


def check_elements(model: torch.nn.Module, captured: Captured) -> None:
    """Raise CaptureError if the forward reads a parameter without elements, which cannot be moved."""
    params = dict(model.named_parameters(remove_duplicate=False))
    read = {node.name for node in captured.graph.nodes if node.users}
    for placeholder, name in captured.params.items():
        if placeholder in read and name in params and not params[name].numel():
            raise CaptureError(
                f"the forward reads {name}, a parameter of shape {tuple(params[name].shape)} without elements, which a "
                "plan cannot hold. Make it a buffer, or leave it out while it has no elements"
            )


def check_outputs(captured: Captured) -> None:
    """Raise CaptureError if the model returns a buffer itself, which a replay holds only in copies."""
    for output, name in zip(captured.outputs, captured.output_names):
        if isinstance(output, str) and output in captured.buffers:
            own = captured.buffers[output]
            raise CaptureError(
                f"the model's output {name!r} is the buffer {own} itself, which a plan cannot return. Return "
                f"{own}.clone() instead, or leave it out and read {own} from the model after the call"
            )


def check_shared_buffers(model: torch.nn.Module, captured: Captured, chain: Chain, trains: bool) -> None:
    """Raise CaptureError if memory that changes is read under two names.

    Such memory is that of a buffer that the forward writes, shared with another buffer, a constant or a parameter; or
    that of a parameter that is trained, shared with a buffer or constant: a backward may read it after the update.
    """
    called = {node: f"buffer {name}" for node, name in captured.buffers.items()}
    called |= {node: f"constant {node.removeprefix('c_')}" for node in captured.constants}
    owner = {s: n for n in captured.graph.nodes if n.op == "placeholder" for s in chain.facts[n].storages}
    written = {owner[s].name for facts in chain.facts.values() for s in facts.written if s in owner}
    for node in captured.graph.nodes:
        if node.op == "call_function" and updates_stats(node):
            written |= {source.name for source in node.all_input_nodes}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors: dict[str, torch.Tensor] = {name: buffers[target] for name, target in captured.buffers.items()}
    tensors |= captured.constants
    # A parameter is in danger even where the forward does not read it.
    params = {f"parameter {name}": param for name, param in model.named_parameters()}
    trained = {name for name, param in params.items() if trains and param.requires_grad}
    for names in _sharing(tensors | params):
        own = sorted(written & {*names})
        if not own and trained & {*names} and tensors.keys() & {*names}:
            read, param = min(tensors.keys() & {*names}), min(trained & {*names})
            raise CaptureError(
                f"the forward reads {called.get(read, read)}, which shares memory with {param}. That parameter is "
                "trained, and its updates would change both. Read the parameter itself, or give each its own memory"
            )
        if own:
            other = next(name for name in names if name != own[0])
            raise CaptureError(
                f"the forward writes into {called.get(own[0], own[0])}, which shares memory with "
                f"{called.get(other, other)}, and a graph would not see that both change. Give each its own memory, or "
                "read both through one buffer"
            )


def _sharing(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of tensors that share bytes, each group once."""
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    groups: list[list[str]] = []
    reach = -1
    for start, end, name in spans:
        if start >= reach:
            groups.append([])
        groups[-1].append(name)
        reach = max(reach, end)
    return [group for group in groups if len(group) > 1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's first address and the one after its last, or a number of its storage if it has none."""
    if not has_address(tensor):
        return memory_of(tensor), memory_of(tensor) + 1
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


def check_fast_path(model: torch.nn.Module) -> None:
    """Raise CaptureError if plain PyTorch evaluates the model by a fused path that no graph takes."""
    if not torch.backends.mha.get_fastpath_enabled():
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.MultiheadAttention) and module.batch_first and not module.training:
            raise CaptureError(
                f"without gradients, PyTorch runs {name or 'the model'}, a {type(module).__name__}, on a fused path. "
                "Its last bits differ, it sets padded positions to zero, and a graph does not take it. Switch it off: "
                "torch.backends.mha.set_fastpath_enabled(False)"
            )
