"""Runs the user's optimizer on one tensor at a time, with its own torch implementation."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..capture.spec import LowPrecision
from ..errors import ArgumentTypeError, OffmateError, ProtocolError
from ..machines.devices import EMULATED
from ..machines.stopwatch import clock_of, launching_s
from ..runtime.devices.cores import as_a_worker
from ..runtime.replay.contents import is_bulk
from ..runtime.replay.low_copies import WHOLE
from ..runtime.torch_names.modules import bare_step
from ..runtime.torch_names.scalers import can_unscale, check_and_unscale
from .lone import lone
from .low import step_low, updated_in
from .masters import MASTER, WithMasters, first_state
from .rows import depends_on_threads, works_by_element

log = logging.getLogger("offmate")

_TIMED_ELEMENTS = 2**22
_REPEATS = 3
_CPU = torch.device("cpu")
PLAIN = "_offmate_plain"  # the attribute of a planned optimizer's class that names the plain one
_SHOWN_ELEMENTS = 2**18  # size of the stand-in on which both forms of an update are timed


@dataclass(frozen=True)
class UpdateCost:
    """The cost of updating a parameter: bytes of state that can move, bytes of scalar state, seconds on each side.

    Parameters
    ----------
    cpu_add_s, device_add_s: seconds to add a gradient to the sum of earlier ones.
    cpu_norm_s, device_norm_s: seconds to take its norm. cpu_unscale_s, device_unscale_s: to unscale and check it.
    cpu_log_s: seconds to copy the parameter and its state on the CPU.
    """

    state_bytes: int
    scalar_bytes: int
    cpu_update_s: float
    device_update_s: float
    cpu_add_s: float
    device_add_s: float
    cpu_norm_s: float
    device_norm_s: float
    cpu_unscale_s: float
    device_unscale_s: float
    cpu_log_s: float


class Updater:
    """Runs the optimizer's step on single tensors, with the hyperparameters of the last snapshot.

    On the emulated device an optimizer that was given neither `fused` nor `foreach` runs what plain PyTorch runs on a
    CPU; on an accelerator it runs fused, where it can.

    State: `groups`, the hyperparameters per parameter, and `threads`, how many compute, as of the last `snapshot`;
    `grad_scales`, by kind of device, the scale by which a kernel that unscales divides gradients, {} if they are
    unscaled, None if no loss is scaled.

    Parameters
    ----------
    optimizer: the instance that the user built.
    names: canonical name of every parameter that it holds. device: kind of the device that updates are planned for.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], device: str = EMULATED
    ) -> None:
        self.optimizer = optimizer
        self.names = names
        self.base: Any = plain_class(optimizer)
        self.emulated = device == EMULATED
        self.grad_scales: dict[str, torch.Tensor] | None = None
        self.fuse = not self.emulated and self._may_fuse()
        self.groups: dict[str, dict[str, Any]] = {}
        self.threads = 1
        self.snapshot()

    def _may_fuse(self) -> bool:
        """Return whether the user left the form of an update open, and the fused one exists for these tensors."""
        groups = self.optimizer.param_groups
        if any("fused" not in g or g["fused"] is not None or g.get("foreach") is not None for g in groups):
            return False
        if any(g.get("differentiable") for g in groups):
            return False
        try:
            probe = torch.zeros(2, dtype=groups[0]["params"][0].dtype)
            self.step_one({**_hyper(groups[0]), "fused": True}, probe, torch.zeros_like(probe), {})
        except Exception:
            return False
        return True

    def say_form(self) -> None:
        """Log which form an update has, if the user left that open, and what the other form would save."""
        if not log.isEnabledFor(logging.INFO) or not (self.fuse or self._may_fuse()):
            return
        kind = self.base.__name__
        if self.fuse:
            log.info("%s runs with fused=True, since neither fused nor foreach was given", kind)
            return
        group = self.optimizer.param_groups[0]
        like = torch.empty(_SHOWN_ELEMENTS, dtype=group["params"][0].dtype, device="meta")
        plain_s, fused_s = (
            self._times(like, {**_hyper(group), **form}, _CPU, None).update_s for form in ({}, {"fused": True})
        )
        if fused_s >= plain_s:
            return
        log.info(
            "%s updates as plain PyTorch does on a CPU, since neither fused nor foreach was given. With %s(..., "
            "fused=True), an update took %.2g s instead of %.2g s here (a tensor of %d elements), with the numbers of "
            "plain PyTorch with fused=True",
            *(kind, kind, fused_s, plain_s, _SHOWN_ELEMENTS),
        )

    @property
    def by_element(self) -> bool:
        """Return whether an update treats every element of a tensor independently."""
        return works_by_element(self.base)

    def by_rows(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether the device can update rows of a parameter separately, with the bits of one whole update."""
        return (self.by_element and not self.emulated) or self.by_rows_on_host(name, dtype)

    def by_rows_on_host(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether the CPU can update rows of a parameter separately, with the bits of one whole update."""
        return not depends_on_threads(self.base, self.groups[name], dtype)

    def snapshot(self) -> None:
        """Copy the current hyperparameters, and the training thread's number of threads."""
        self.groups = {}
        self.threads = torch.get_num_threads()
        for group in self.optimizer.param_groups:
            # A learning rate that is a tensor is changed in place by schedulers.
            hyper = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in _hyper(group).items()}
            if self.fuse:
                hyper["fused"] = True
            for param in group["params"]:
                self.groups[self.names[param]] = hyper

    def check_unchanged(self) -> None:
        """Raise ProtocolError if hyperparameters have changed since the snapshot."""
        for key, then, now in self._changes():
            raise ProtocolError(
                f"{key} changed from {then} to {now} between backward() and optimizer.step(); updates began with the "
                "old value, during the backward. Change it after optimizer.step(), as schedulers do"
            )

    def has_changed(self) -> bool:
        """Return whether hyperparameters, or the number of threads, have changed since the snapshot."""
        return torch.get_num_threads() != self.threads or any(True for _ in self._changes())

    def _changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the hyperparameters that have changed since the snapshot, with their values then and now."""
        for group in self.optimizer.param_groups:
            now = _hyper(group)
            for param in group["params"][:1]:
                then = self.groups[self.names[param]]
                for key in now:
                    if key != "fused" and not _alike(now[key], then.get(key)):
                        yield key, then.get(key), now[key]

    def __call__(
        self,
        name: str,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
        factor: torch.Tensor | None = None,
        casts: bool = True,
    ) -> None:
        """Update `param` in place; see `Update`."""
        # A worker has one thread; for these updates it needs as many as plain PyTorch takes. The default for new
        # threads does not change.
        dtype = state.get(WHOLE, param).dtype
        if torch.get_num_threads() != self.threads and depends_on_threads(self.base, self.groups[name], dtype):
            torch.set_num_threads(self.threads)
        self.step_one(self.groups[name], param, grad, state, factor=factor, casts=casts)

    def begin_state(self, name: str, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Fill the empty state of a parameter as a fused optimizer does whose first update a scaler has it skip."""
        if issubclass(self.base, torch.optim.SGD):
            return  # torch leaves the memory of momenta as it is; here the first update makes them
        self.step_one(self.groups[name], param, torch.zeros_like(param), state, skips=True)

    def step_one(
        self,
        hyper: dict[str, Any],
        param: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
        skips: bool = False,
        factor: torch.Tensor | None = None,
        casts: bool = True,
    ) -> None:
        """Update one tensor in place with given hyperparameters; `state` is filled at the first update.

        Parameters
        ----------
        param: or its copy in a lower precision, where `state` has the parameter itself under `WHOLE`.
        grad: in the parameter's precision or in a lower one, to which autocast casts it.
        skips: a fused kernel then changes nothing. factor: by which the gradient is multiplied first, None for 1.
        casts: whether the parameter takes the new value of its float32 copy, if it has one.
        """
        if WHOLE in state or grad.dtype != param.dtype:
            _place_scalars(state, param.device if hyper.get("fused") or hyper.get("capturable") else _CPU)
            step_low(self.base, self.optimizer.__dict__, hyper, param, grad, state, factor)
            return
        leaf = torch.nn.Parameter(param.data)
        leaf.grad = grad
        if not state.keys() - {MASTER}:
            state.update(first_state(self.base, hyper, leaf))
        _place_scalars(state, leaf.device if hyper.get("fused") or hyper.get("capturable") else _CPU)
        single = lone(self.base, self.optimizer.__dict__, [{**hyper, "params": [leaf]}], {leaf: state})
        if issubclass(self.base, WithMasters):
            single.follows, single.factor, single.casts = False, factor, casts
        elif factor is not None:
            grad.mul_(factor)
        if self.grad_scales is not None:
            # The optimizer itself has them only during the scaler's step, and a worker may come later.
            single.grad_scale = self.grad_scales.get(leaf.device.type)
            single.found_inf = torch.ones((), device=leaf.device) if skips else None
        bare_step(self.base)(single)
        # Some optimizers replace the dictionary instead of filling it.
        if single.state[leaf] is not state:
            state.update(single.state[leaf])

    def cost(
        self,
        like: torch.Tensor,
        hyper: dict[str, Any],
        device: torch.device = _CPU,
        low: LowPrecision | None = None,
    ) -> UpdateCost:
        """Measure bytes of state and seconds for a tensor, by updating a stand-in of its shape.

        Parameters
        ----------
        like: shape and dtype; no data are read. hyper: the group's hyperparameters. device: where operators run; on the
            CPU a worker has one thread and the training thread has all, unless bits depend on their number.
        low: the precision in which it moves; its own if None. The tensor is a part of its state if a copy moves.
        """
        on_device = self._times(like, hyper, device, low)
        on_cpu = on_device
        if device != _CPU:
            with as_a_worker():
                on_cpu = self._times(like, hyper, _CPU, low)
        share = torch.get_num_threads() if device == _CPU else 1
        update_share = 1 if depends_on_threads(self.base, hyper, like.dtype) else share
        tensors = [v for v in on_device.state.values() if isinstance(v, torch.Tensor)]
        return UpdateCost(
            state_bytes=sum(t.untyped_storage().nbytes() for t in tensors if is_bulk(t)),
            scalar_bytes=sum(t.untyped_storage().nbytes() for t in tensors if not is_bulk(t)),
            cpu_update_s=update_share * on_cpu.update_s,
            device_update_s=on_device.update_s,
            cpu_add_s=share * on_cpu.add_s,
            device_add_s=on_device.add_s,
            cpu_norm_s=share * on_cpu.norm_s,
            device_norm_s=on_device.norm_s,
            cpu_unscale_s=share * on_cpu.unscale_s,
            device_unscale_s=on_device.unscale_s,
            cpu_log_s=share * on_cpu.log_s,
        )

    def _times(
        self, like: torch.Tensor, hyper: dict[str, Any], device: torch.device, low: LowPrecision | None
    ) -> _Times:
        param, grad, state = updated_in(low, torch.zeros(like.shape, dtype=like.dtype, device=device))
        found, half = torch.zeros((), device=device), torch.full((), 0.5, device=device)
        repeats = _REPEATS if like.numel() <= _TIMED_ELEMENTS else 2
        unscales = low is None and can_unscale(like.dtype, device)
        return _Times(
            state,
            _seconds(lambda: self.step_one(hyper, param, grad, state), repeats, device),
            _seconds(lambda: param.add_(grad), repeats, device),
            _seconds(lambda: torch.linalg.vector_norm(grad, dtype=like.dtype), repeats, device),
            _seconds(lambda: check_and_unscale([grad], found, half), repeats, device) if unscales else 0.0,
            _log_s(param, state, repeats, device),
        )


class _Times(NamedTuple):
    state: dict[str, Any]
    update_s: float
    add_s: float
    norm_s: float
    unscale_s: float
    log_s: float


def _log_s(param: torch.Tensor, state: dict[str, Any], repeats: int, device: torch.device) -> float:
    """Return the seconds to copy a parameter and its state; only those of the CPU are asked for."""
    if device != _CPU:
        return 0.0
    values = [param, *(value for value in state.values() if is_bulk(value))]
    log = [torch.zeros_like(value) for value in values]

    def keep() -> None:
        for old, value in zip(log, values):
            old.copy_(value)

    return _seconds(keep, repeats, device)


def _seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median time in seconds after a first run: of the device or of launching, whichever is longer."""
    clock = clock_of(device)
    device_s = statistics.median([clock(work) for _ in range(repeats)][1:])
    return max(device_s, statistics.median([launching_s(work, device) for _ in range(repeats)][1:]))


def _place_scalars(state: dict[str, Any], device: torch.device) -> None:
    """Move a state's scalars to the device where torch's optimizers keep them."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != device:
            state[key] = value.to(device)


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    return bool(a == b)


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return the canonical name of every parameter of an optimizer.

    Raises: OffmateError if `optimizer` is not a torch.optim.Optimizer, or holds a tensor that is not a parameter of the
        model.
    """
    if isinstance(optimizer, type):
        raise ArgumentTypeError(
            f"optimizer= is the class {optimizer.__name__}; make an instance of it, such as "
            f"{optimizer.__name__}(model.parameters()), and pass that"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OffmateError(
            f"optimizer= is of class {type(optimizer).__name__}, not a torch.optim.Optimizer; pass the one inside the "
            "wrapper"
        )
    names = {param: name for name, param in model.named_parameters()}
    found: dict[torch.Tensor, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in names:
                raise OffmateError(
                    f"parameter group {index} of the optimizer holds a tensor of shape {tuple(param.shape)} that is "
                    "not a parameter of the model; build the optimizer from model.parameters() after all changes to "
                    "the model, and compile that same model"
                )
            found[param] = names[param]
    return found


def plain_class(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer's own class, even if a planned one has taken its place."""
    return getattr(type(optimizer), PLAIN, type(optimizer))
