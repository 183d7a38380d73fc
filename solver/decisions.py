"""What is decided for every whole tensor, and the bytes on the device that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import items
from .items import Item
from .problem import Group, Problem, Rows, TensorSize
from .resources import HOST


@dataclass(frozen=True)
class TensorGap:
    """A stay away between two uses: the tensor is released at the end of step `after` and comes in in step `back`.

    Parameters
    ----------
    after, before: the steps of the two uses; `before` may be the smaller one, the stay then wraps round.
    back: the step in which it comes in, None if it stays on the device.
    """

    after: int
    before: int
    back: int | None


@dataclass(frozen=True)
class StateStay:
    """A piece of an optimizer state that leaves to a tier in step `out`, after its update, and returns in `back`."""

    rows: Rows
    out: int
    back: int
    tier: str = HOST


@dataclass(frozen=True)
class ActivationStay:
    """What a block offloads leaves to a tier in step `out` and returns in step `back`, steps of the first pass."""

    out: int
    back: int
    tier: str = HOST


@dataclass(frozen=True)
class TensorPlan:
    """Where one parameter tensor goes, by step; None where it does not move.

    Parameters
    ----------
    name, group: the tensor and its parameter group.
    cpu: updated on the host. Its compute copy is then released at the end of the step of its last gradient.
    grad_out: its gradient goes out (CPU part), in the last pass.
    lead_out: it goes out in the first pass (CPU part), and so many steps later in every other but the last.
    cpu_update: its update starts on the host (CPU part; None if the user's own code updates).
    device_update: it is updated on the device (device part of a trainable group).
    back: it comes in before its first use (CPU part, or device part that was dropped).
    out: its new values go to the host (device part).
    drop: it is released at the end of the step (device part).
    gaps: all other gaps between its uses; what recurs in several passes is listed for each.
    states: the pieces of its optimizer state that leave and return, first rows first (device part).
    """

    name: str
    group: str
    cpu: bool = False
    grad_out: int | None = None
    lead_out: int | None = None
    cpu_update: int | None = None
    device_update: int | None = None
    back: int | None = None
    out: int | None = None
    drop: int | None = None
    gaps: tuple[TensorGap, ...] = ()
    states: tuple[StateStay, ...] = ()

    @property
    def hosted(self) -> bool:
        """Whether the host holds a copy of its values."""
        return self.cpu or self.out is not None or any(gap.back is not None for gap in self.gaps)


@dataclass(frozen=True)
class Decisions:
    """A solution in whole tensors.

    Parameters
    ----------
    tensors: one plan per tensor, groups and tensors in the problem's order.
    options, activations: option index per block, and when what it offloads leaves and returns.
    offloaded_values: interface values that leave between their last forward and first backward use.
    value_tiers: the tiers that they leave to, where that is not the host.
    """

    tensors: tuple[TensorPlan, ...]
    options: tuple[int, ...]
    activations: tuple[ActivationStay | None, ...]
    offloaded_values: frozenset[str]
    value_tiers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StatePart:
    """An item of an optimizer state on the device, and how it moves; what never does is as few items as possible."""

    item: Item
    bytes: int
    stay: StateStay | None


def state_parts(tensor: TensorSize, plan: TensorPlan) -> tuple[StatePart, ...]:
    """The items of the state of a tensor that is updated on the device, first rows first."""
    parts: list[StatePart] = []
    row = 0
    for stay in (*plan.states, None):
        first, end = stay.rows if stay else (tensor.rows, tensor.rows)
        for rows, moves in (((row, first), None), ((first, end), stay)):
            if rows[0] < rows[1]:
                cut = rows if rows != (0, tensor.rows) else None
                parts.append(StatePart(items.state(tensor.name, cut), tensor.piece_bytes(rows), moves))
        row = end
    return tuple(parts)


def cycle(first: int, last: int, n_steps: int) -> list[int]:
    """The steps from `first` to `last` in cyclic order, both included; empty if `last` comes right before."""
    return [(first + k) % n_steps for k in range((last - first + 1) % n_steps)]


def tensor_bytes(problem: Problem, group: Group, tensor: TensorSize, plan: TensorPlan) -> list[int]:
    """Bytes of one tensor's compute copy, state and pending gradient in each step, as the program counts them.

    A gradient is counted from the step after the last one that adds to it; before that it is held in any case. With
    several micro-batches the total on the device is counted from the step after the first pass's gradient.
    """
    n_steps = problem.n_steps
    away: set[int] = set()
    for gap in plan.gaps:
        if gap.back is not None:
            away.update(cycle((gap.after + 1) % n_steps, (gap.back - 1) % n_steps, n_steps))
    states = [0 if plan.cpu else tensor.state_bytes] * n_steps
    pending: set[int] = set()
    if group.trainable:
        last = problem.last_gradient(group)
        left = last if plan.cpu else plan.drop
        if left is not None and plan.back is not None:
            away.update(cycle((left + 1) % n_steps, (plan.back - 1) % n_steps, n_steps))
        for stay in plan.states:
            for step in cycle((stay.out + 1) % n_steps, (stay.back - 1) % n_steps, n_steps):
                states[step] -= tensor.piece_bytes(stay.rows)
        pending.update(_pending(problem, group, plan))
    return [
        tensor.param_bytes * (t not in away) + states[t] + tensor.grad_bytes * (t in pending) for t in range(n_steps)
    ]


def _pending(problem: Problem, group: Group, plan: TensorPlan) -> list[int]:
    """The steps in which a complete gradient, or a total, is on the device, but those that complete it."""
    first, last = group.grad_steps[-1], problem.last_gradient(group)
    waits = [(last, plan.grad_out)] if plan.cpu else [(first, plan.device_update)]
    if plan.cpu and plan.lead_out is not None:
        waits += list(zip(problem.each(first)[:-1], problem.each(plan.lead_out)[:-1]))
    n = problem.n_steps
    return [step for made, until in waits if until not in (None, made) for step in cycle((made + 1) % n, until or 0, n)]
