"""Weights that `offmate.cast_weights` converted, and whether autocast still casts for what reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from ..errors import CaptureError
from ..guards.surroundings import AUTOCAST_KINDS
from .export import Captured

_NOTE = "_offmate_converted"  # an attribute of the model that was converted, which copies and pickles keep


def note_converted(model: torch.nn.Module, precisions: Mapping[str, torch.dtype]) -> None:
    """Note on a model the precisions of its converted parameters, by name."""
    if precisions:
        vars(model)[_NOTE] = {**vars(model).get(_NOTE, {}), **precisions}


def check_converted(model: torch.nn.Module, captured: Captured, device: torch.device | None) -> None:
    """Raise CaptureError if a forward reads a converted parameter where autocast does not cast to its precision.

    Parameters
    ----------
    device: the one that the model is captured for; None for the CPU.
    """
    converted = dict(_converted(model))
    if not converted:
        return
    kinds = {*AUTOCAST_KINDS, *([device.type] if device is not None else [])}
    around = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    for node in captured.graph.nodes:
        if node.op == "placeholder" and captured.params.get(node.name) in converted:
            name = captured.params[node.name]
            for reader in node.users:
                precisions = _precisions(reader, around)
                if converted[name] not in precisions:
                    found = ", ".join(str(one) for one in sorted(precisions, key=str))
                    raise CaptureError(
                        f"{name} was converted to {converted[name]} by offmate.cast_weights, but {reader.target} reads "
                        f"it {f'under torch.autocast to {found}' if found else 'outside torch.autocast'}, where the "
                        "float32 weight would give other numbers. Call the model inside the same torch.autocast as "
                        "cast_weights, also in evaluation. Or load its float32 weights into a new model"
                    )


def _converted(model: torch.nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """Yield the parameters, by canonical name, that were converted and still have that precision."""
    canonical = {param: name for name, param in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, dtype in vars(module).get(_NOTE, {}).items():
            param = every.get(f"{path}.{name}" if path else name)
            if param is not None and param.dtype == dtype:
                yield canonical[param], dtype


def _precisions(reader: fx.Node, around: Mapping[str, torch.dtype]) -> set[torch.dtype]:
    """Return the precisions to which autocast casts for a node."""
    found, region = dict(around), reader.meta["region"] if reader.op == "call_function" else None
    if region is not None and region.autocast is not None:
        kind, dtype, enabled, _ = region.autocast
        found.pop(kind, None)
        if enabled:
            found[kind] = dtype or torch.get_autocast_dtype(kind)
    return set(found.values())
