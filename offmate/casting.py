"""`offmate.cast_weights`: parameters that autocast casts wherever they are read, kept in the lower precision."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch

from .capture.captured import Captured
from .capture.checks import as_batch, check_model
from .capture.converted import note_converted
from .capture.export import capture
from .capture.fake import fake_batch, faked, has_address, is_without_memory, stand_in
from .capture.kv_caches import without_cache
from .capture.model import only_cast_of
from .errors import CaptureError, OffmateError
from .guards.surroundings import AUTOCAST_KINDS, autocast_on_cpu
from .machines.devices import accelerator, device_kind, rng_untouched
from .optim.masters import MASTER, WithMasters, note_copy

log = logging.getLogger("offmate")


def cast_weights(
    model: torch.nn.Module,
    *,
    example_inputs: dict[str, Any] | tuple[Any, ...],
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device | None = None,
) -> dict[str, torch.dtype]:
    """Convert float32 parameters, in place, to the precision to which autocast casts them at every use.

    Casting them once gives the same numbers as casting them at every use, bit for bit. It halves their bytes on the
    link and on the device. Parameters that training or evaluation reads in float32 anywhere stay as they are. Call it
    inside the same `torch.autocast` as training, before `offmate.compile`. Evaluate inside it, too. Converted
    parameters are saved in the lower precision, and so are weights with merged adapters.

    Frozen parameters are converted, which also halves their RAM. Parameters of `optimizer` are converted only if it is
    given: it keeps and updates their float32 values in its state, under "master". Their gradients are in bfloat16, as
    autocast makes them, so a norm for clipping and a sum over micro-batches are rounded to bfloat16. A frozen parameter
    of the optimizer may be trained later. A "master" that was loaded before stays if it rounds to the weight.

    Only the forward of this batch is checked, with gradients on, in training and in evaluation. What a forward reads
    only under `torch.no_grad()`, or only with an argument that this batch lacks, is not checked.

    Parameters
    ----------
    model: not compiled yet. example_inputs: one batch, as in `offmate.plan`.
    optimizer: of a class from `offmate.with_master_weights`. None leaves trained parameters as they are.
    device: as in `offmate.compile`; what autocast casts depends on it. Without a GPU, autocast for a GPU counts as
        autocast on the CPU, as in plans for other machines.

    Returns: the new precision of every converted parameter, by name; empty if there are none. Raises: OffmateError if
    the model cannot be captured or the optimizer has no float32 copies; CaptureError if the forward asks for the
    precision of a parameter and would compute something else after the conversion. Nothing is converted then.
    Source: SuperOffload, section 4.5 (where to cast).
    """
    check_model(model)
    if optimizer is not None and not isinstance(optimizer, WithMasters):
        raise OffmateError(
            f"optimizer= is of class {type(optimizer).__name__}, which would update the converted parameters in the "
            f"lower precision; build it with offmate.with_master_weights(torch.optim.AdamW)(model.parameters(), ...)"
        )
    where = accelerator(device_kind(device))
    around = autocast_on_cpu() if where is None else contextlib.nullcontext()
    params = dict(model.named_parameters())
    with around, _modes_kept(model), rng_untouched(where), torch.enable_grad():
        before = {training: _captured(model, training, example_inputs, where) for training in (True, False)}
        trains = _trained_by(optimizer)
        ways = [only_cast_of(model, captured, trains) for captured in before.values()]
        whole = {name for found, captured in zip(ways, before.values()) for name in captured.reads - found.keys()}
        either = {name: {one[name] for one in ways if name in one} for one in ways for name in one}
        found = {
            name: next(iter(dtypes))
            for name, dtypes in either.items()
            if name not in whole and len(dtypes) == 1
            and (dtypes == {torch.bfloat16} if params[name] in trains else not params[name].requires_grad)
        }  # fmt: skip
        with _as_if_cast(params, found):
            for training, captured in before.items() if found else ():
                _check_same(captured, _captured(model, training, example_inputs, where))
    for name, dtype in found.items():  # one by one: only one copy is held besides what there is
        whole_values = params[name].data
        params[name].data = whole_values.to(dtype)
        if optimizer is not None and params[name] in trains:
            _keep_whole(optimizer.state[params[name]], params[name], whole_values)
    note_converted(model, found)
    if not found and not any(map(torch.is_autocast_enabled, AUTOCAST_KINDS)):
        log.warning(
            "cast_weights converted nothing, since no torch.autocast is active; call it inside the same torch.autocast "
            "as training"
        )
    return found


def _keep_whole(state: dict[str, Any], param: torch.Tensor, whole: torch.Tensor) -> None:
    """Keep the float32 values of a converted parameter, unless it was loaded as the rounding of ones that are kept."""
    kept = state.get(MASTER)
    if kept is None or not torch.equal(kept.to(param.dtype).to(whole), whole):
        state[MASTER] = whole
    note_copy(state[MASTER])


def _trained_by(optimizer: torch.optim.Optimizer | None) -> set[torch.Tensor]:
    return {param for group in optimizer.param_groups for param in group["params"]} if optimizer is not None else set()


def _captured(
    model: torch.nn.Module, training: bool, inputs: dict[str, Any] | tuple[Any, ...], where: torch.device | None
) -> Captured:
    """Capture a model in training or in evaluation."""
    for module in model.modules():  # not by `train()`, where some models change their weights
        module.training = training
    args, given = as_batch(inputs)
    kwargs = without_cache(model, given)
    if not is_without_memory(model):
        return capture(model, args, kwargs, device=where)
    real = stand_in((args, kwargs))
    with faked(model) as mode:
        args, kwargs = fake_batch(mode, (args, kwargs))
        return capture(model, args, kwargs, real)


@contextlib.contextmanager
def _as_if_cast(params: Mapping[str, torch.nn.Parameter], precisions: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Inside, parameters have these precisions and no values; the system gives no memory to what nothing touches."""
    kept = {name: params[name].data for name in precisions}
    try:
        for name, dtype in precisions.items():
            params[name].data = torch.empty_like(params[name].data, dtype=dtype)
        yield
    finally:
        for name, data in kept.items():
            params[name].data = data


def _check_same(before: Captured, after: Captured) -> None:
    """Raise CaptureError if a model computes otherwise since its parameters were converted."""
    for one, other in zip_longest(_lines(before), _lines(after)):
        if one is None or other is None or one != other:
            raise CaptureError(
                f"the model's forward asks for the precision of a parameter: at {(one or other)[0]} it would compute "
                "something else after the conversion. Nothing was converted. To halve the bytes of its parameters, "
                "load the model in the lower precision"
            )


def _lines(captured: Captured) -> Iterator[tuple[str, ...]]:
    """Yield everything that a forward computes and leaves, each with a name; values of constants by their bytes."""
    for node in captured.graph.nodes:
        region = str(node.meta.get("region"))
        yield node.name, node.op, str(node.target), str(node.args), str(node.kwargs), region
    members = {**captured.params, **captured.buffers}
    yield from members.items()
    for name, constant in captured.constants.items():
        yield f"the constant {name}", str(constant.dtype), str(tuple(constant.shape)), _values(constant)
    for name, output in zip(captured.output_names, captured.outputs):
        yield f"the output {name}", str(output)
    for _, attribute, value in captured.changed:
        yield f"the attribute {attribute}", str(value)


def _values(constant: torch.Tensor) -> str:
    if not has_address(constant) or constant.layout is not torch.strided:
        return ""
    return hashlib.sha256(constant.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@contextlib.contextmanager
def _modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restore the modes of all modules after the body."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
