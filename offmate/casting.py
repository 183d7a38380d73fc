"""`offmate.cast_frozen`: frozen parameters that autocast casts wherever they are read, kept in the lower precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from .capture.checks import check_model
from .capture.export import Captured, capture
from .capture.fake import fake_batch, faked, is_without_memory, stand_in
from .capture.kv_caches import without_cache
from .capture.model import only_cast_of
from .errors import CaptureError
from .guards.surroundings import autocast_on_cpu
from .machines.devices import accelerator, device_kind, rng_untouched


def cast_frozen(
    model: torch.nn.Module,
    *,
    example_inputs: dict[str, Any] | tuple[Any, ...],
    device: str | torch.device | None = None,
) -> dict[str, torch.dtype]:
    """Convert frozen float32 parameters, in place, to the precision to which autocast casts them at every use.

    Casting them once gives the same numbers as casting them at every use, bit for bit. It halves their bytes in RAM, on
    the link and on the device. Parameters that are trained, or read in float32 anywhere, stay as they are. Call it
    inside the same `torch.autocast` as training, before `offmate.compile`. What is saved of the converted parameters
    afterwards has the lower precision, and so has a result that adapters are merged into.

    Parameters
    ----------
    model: not compiled yet. example_inputs: one batch, as in `offmate.plan`.
    device: as in `offmate.compile`; what autocast casts depends on it. Without a card, autocast for one counts as
        autocast on the CPU, as it does in plans for other machines.

    Returns: the new precision of every converted parameter, by name; empty if there are none. Raises: OffmateError if
    the model cannot be captured; CaptureError if its forward asks for the precision of a parameter, so that it would
    compute otherwise after the conversion. Nothing is converted then.
    Source: SuperOffload, section 4.5 (where to cast).
    """
    check_model(model)
    args = example_inputs if isinstance(example_inputs, tuple) else ()
    kwargs = without_cache(model, example_inputs if isinstance(example_inputs, dict) else {})
    where = accelerator(device_kind(device))
    around = autocast_on_cpu() if where is None else contextlib.nullcontext()
    with around, _training(model), rng_untouched(where), torch.enable_grad():
        before = _captured(model, args, kwargs, where)
        found = only_cast_of(model, before)
        params = dict(model.named_parameters())
        kept = {name: params[name].data for name in found}
        try:
            for name, dtype in found.items():
                params[name].data = params[name].data.to(dtype)
            _check_same(before, _captured(model, args, kwargs, where) if found else before)
        except BaseException:
            for name, data in kept.items():
                params[name].data = data
            raise
    return found


def _captured(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: torch.device | None
) -> Captured:
    if not is_without_memory(model):
        return capture(model, args, kwargs, device=where)
    real = stand_in((args, kwargs))
    with faked(model) as mode:
        args, kwargs = fake_batch(mode, (args, kwargs))
        return capture(model, args, kwargs, real)


def _check_same(before: Captured, after: Captured) -> None:
    """Raise CaptureError if a model computes otherwise since its parameters were converted."""
    for one, other in zip_longest(before.graph.nodes, after.graph.nodes):
        if one is None or other is None or _line(one) != _line(other):
            raise CaptureError(
                f"the model's forward asks for the precision of a parameter: at {(one or other).name} it would compute "
                "otherwise if parameters that are cast at every use were kept in the lower precision. Nothing was "
                "converted; to halve their bytes, load the model in the lower precision"
            )


def _line(node: fx.Node) -> tuple[Any, ...]:
    return node.op, str(node.target), str(node.args), str(node.kwargs)


@contextlib.contextmanager
def _training(model: torch.nn.Module) -> Iterator[None]:
    """Inside, all modules are in training mode."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
