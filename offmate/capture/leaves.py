"""Refuses tensors and modules of a model with which a graph would give other numbers than plain PyTorch."""

from __future__ import annotations

from collections import defaultdict

import torch

from ..errors import CaptureError
from ..guards.python_objects import Found
from .chain import Chain
from .effects import updates_stats
from .export import Captured
from .fake import memory_of
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
                "gradient but is not a parameter of the model, so it would get none. Register it (an nn.Parameter as "
                "an attribute, or in an nn.ParameterList), or detach it"
            )


def check_elements(model: torch.nn.Module, captured: Captured) -> None:
    """Raise CaptureError if the forward reads a parameter without elements, which cannot be moved."""
    params = dict(model.named_parameters(remove_duplicate=False))
    for name in captured.params.values():
        if name in params and not params[name].numel():
            raise CaptureError(
                f"the forward reads {name}, a parameter of shape {tuple(params[name].shape)} without elements, which "
                "no plan can hold. Make it a buffer, or leave it out if it has no elements"
            )


def check_outputs(captured: Captured) -> None:
    """Raise CaptureError if the model returns a parameter or a buffer itself, which a replay holds only in copies."""
    held = {node: f"parameter {name}" for node, name in captured.params.items()}
    held |= {node: f"buffer {name}" for node, name in captured.buffers.items()}
    for output, name in zip(captured.outputs, captured.output_names):
        if isinstance(output, str) and output in held:
            own = held[output].split()[1]
            raise CaptureError(
                f"the model's output {name!r} is the {held[output]} itself, which a replay cannot return; return "
                f"{own}.clone() instead, or leave it out and read {own} from the model after the call"
            )


def check_shared_buffers(buffers: dict[str, torch.Tensor], captured: Captured, chain: Chain) -> None:
    """Raise CaptureError if the forward writes a buffer whose memory another buffer or constant shares.

    Parameters
    ----------
    buffers: the model's buffers under all their names.
    """
    owner = {s: n for n in captured.graph.nodes if n.op == "placeholder" for s in chain.facts[n].storages}
    written = {owner[s].name for facts in chain.facts.values() for s in facts.written if s in owner}
    for node in captured.graph.nodes:
        if node.op == "call_function" and updates_stats(node):
            written |= {source.name for source in node.all_input_nodes}
    tensors = {name: buffers[target] for name, target in captured.buffers.items()} | captured.constants
    sharing: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel():
            sharing[memory_of(tensor)].append(name)
    for names in sharing.values():
        if len(names) > 1 and written & {*names}:
            raise CaptureError(
                f"the forward writes into {names[0]}, whose memory {names[1]} shares; a graph would not see the one "
                "change with the other. Give each its own memory, or read both through one buffer"
            )


def check_fast_path(model: torch.nn.Module) -> None:
    """Raise CaptureError if plain PyTorch evaluates the model by a fused path that no graph takes."""
    if not torch.backends.mha.get_fastpath_enabled():
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.MultiheadAttention) and module.batch_first and not module.training:
            raise CaptureError(
                f"without gradients PyTorch evaluates {name or 'the model'}, a {type(module).__name__}, by a fused "
                "path whose last bits differ and which zeroes what is padded; a graph does not take it. Switch it off: "
                "torch.backends.mha.set_fastpath_enabled(False)"
            )
