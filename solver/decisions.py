"""Decisions for every whole tensor, and the device bytes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from . import items
from .handed import Hand
from .items import Item
from .problem import Group, Problem, Rows, TensorSize
from .resources import HOST


@dataclass(frozen=True)
class TensorGap:
    """An absence between two uses: the tensor is released at the end of step `after` and is copied back in step `back`.

    Parameters
    ----------
    after, before: the steps of the two uses. If `before` is the smaller one, the absence wraps round the end of the
        cycle.
    back: the step in which it is copied back, None if it stays on the device.
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
    """The steps of the first pass in which a block's offloaded values leave to a tier (`out`) and return (`back`)."""

    out: int
    back: int
    tier: str = HOST


@dataclass(frozen=True)
class TensorPlan:
    """The moves of one parameter tensor, by step; None for moves that do not happen.

    Parameters
    ----------
    name, group: the tensor and its parameter group.
    cpu: whether it is updated on the host. Its compute copy is then released at the end of the step of its last
        gradient.
    grad_out: its gradient of the last pass is copied to the host (CPU part); or its whole gradient is, and waits there
        for the update (device part).
    grad_back: its whole gradient returns from there (device part).
    lead_out: its gradient of the first pass is copied to the host (CPU part); those of the other passes but the last
        follow at the same step of their pass. If the device adds all gradients up, its total leaves then, between two
        passes (either part).
    lead_back: this total returns before the next pass adds to it.
    cpu_update: its update starts on the host (CPU part; None if the user's own code updates).
    device_update: it is updated on the device (device part of a trainable group).
    back: it is copied to the device before its first use (CPU part, or device part that was dropped).
    out: its new values are copied to the host (device part).
    drop: it is released at the end of this step (device part).
    gaps: all other gaps between its uses; a gap that recurs in several passes is listed once per pass.
    states: the pieces of its optimizer state that leave and return, first rows first (device part).
    states_from: the tier that has its optimizer state, which the host updates piece by piece (CPU part); None for the
        host's own memory.
    source: the tier that it comes from after it was released, which gets its new values, too, or that has them when
        somebody reads them, if it is always on the device; or that of float32 copies which the host's updates leave in
        RAM (CPU part).
    """

    name: str
    group: str
    cpu: bool = False
    grad_out: int | None = None
    grad_back: int | None = None
    lead_out: int | None = None
    lead_back: int | None = None
    cpu_update: int | None = None
    device_update: int | None = None
    back: int | None = None
    out: int | None = None
    drop: int | None = None
    gaps: tuple[TensorGap, ...] = ()
    states: tuple[StateStay, ...] = ()
    source: str = HOST
    states_from: str | None = None

    @property
    def leaves(self) -> bool:
        """Return whether the tensor is away between some of its uses."""
        return any(gap.back is not None for gap in self.gaps)

    @property
    def may_be_cast(self) -> bool:
        """Return whether the host updates it and has its state and its values in RAM."""
        return self.cpu and self.states_from is None and self.source == HOST

    @property
    def has_copy(self) -> bool:
        """Return whether a tier beside the device needs a copy of the values that it has on the device."""
        return self.out is not None or self.leaves

    def updated_from(self, tier: str, *, with_values: bool) -> TensorPlan:
        """Return the plan with its state, which the host updates, on a tier; with or without the parameter's values."""
        return replace(self, states_from=tier, source=tier if with_values else HOST)


@dataclass(frozen=True)
class Decisions:
    """A solution in whole tensors.

    Parameters
    ----------
    tensors: one plan per tensor, groups and tensors in the problem's order.
    options, activations: per block, the option index, and when the values that the option offloads leave and return.
    offloaded_values: interface values that leave between their last forward and first backward use.
    value_tiers: by name, the tier that a value leaves to, if that is not the host.
    handed: by what neighbouring steps hand on, and tier, of how many micro-batches it is away there.
    """

    tensors: tuple[TensorPlan, ...]
    options: tuple[int, ...]
    activations: tuple[ActivationStay | None, ...]
    offloaded_values: frozenset[str]
    value_tiers: dict[str, str] = field(default_factory=dict)
    handed: dict[Hand, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class StatePart:
    """An item of an optimizer state on the device, and its move; rows that never move form as few items as possible."""

    item: Item
    bytes: int
    stay: StateStay | None


def state_parts(tensor: TensorSize, plan: TensorPlan) -> tuple[StatePart, ...]:
    """List the items of the state of a tensor that is updated on the device, first rows first."""
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


def stored_parts(tensor: TensorSize) -> dict[Item, int]:
    """Return the items, with their bytes, of a state in files that the host updates, first rows first."""
    cuts = tensor.pieces if len(tensor.pieces) > 1 else (None,)
    return {items.state(tensor.name, rows): tensor.piece_bytes(rows or (0, tensor.rows)) for rows in cuts}


def cycle(first: int, last: int, n_steps: int) -> list[int]:
    """List the steps from `first` to `last` in cyclic order, both included; empty if `last` comes right before."""
    return [(first + k) % n_steps for k in range((last - first + 1) % n_steps)]


def tensor_bytes(problem: Problem, group: Group, tensor: TensorSize, plan: TensorPlan) -> list[int]:
    """Count the bytes of one tensor's compute copy, state and pending gradient in each step, as the program does.

    A gradient is counted from the step after the last one that adds to it; before that it is held anyway. With several
    micro-batches the total on the device is counted from the step after the first pass's gradient.
    """
    n_steps = problem.n_steps
    away: set[int] = set()
    for gap in plan.gaps:
        if gap.back is not None:
            away.update(cycle((gap.after + 1) % n_steps, (gap.back - 1) % n_steps, n_steps))
    states = [0 if plan.cpu else tensor.state_bytes] * n_steps
    pending: set[int] = set()
    if group.trainable:
        left = problem.last_read(group) if plan.cpu else plan.drop
        if left is not None and plan.back is not None:
            away.update(cycle((left + 1) % n_steps, (plan.back - 1) % n_steps, n_steps))
        for stay in plan.states:
            for step in cycle((stay.out + 1) % n_steps, (stay.back - 1) % n_steps, n_steps):
                states[step] -= tensor.piece_bytes(stay.rows)
        pending.update(pending_steps(problem, group, plan))
    return [
        tensor.param_bytes * (t not in away) + states[t] + tensor.grad_bytes * (t in pending) for t in range(n_steps)
    ]


def pending_steps(problem: Problem, group: Group, plan: TensorPlan) -> list[int]:
    """List the steps in which a complete gradient, or a total, is on the device, except the steps that complete it."""
    first, last = group.grad_steps[-1], problem.last_gradient(group)
    n = problem.n_steps
    if problem.sums_on_device:
        return _pending_totals(problem, group, plan)
    if plan.cpu:
        waits = [(last, plan.grad_out)]
    elif plan.grad_back is None:
        waits = [(first, plan.device_update)]
    else:
        waits = [(first, plan.grad_out), ((plan.grad_back - 1) % n, plan.device_update)]
    if plan.cpu and plan.lead_out is not None:
        waits += list(zip(problem.each(first)[:-1], problem.each(plan.lead_out)[:-1]))
    return [step for made, until in waits if until not in (None, made) for step in cycle((made + 1) % n, until or 0, n)]


def _pending_totals(problem: Problem, group: Group, plan: TensorPlan) -> list[int]:
    """List the same steps where the device adds all gradients up, and totals may be away between passes."""
    ends, n = problem.each(group.grad_steps[-1]), problem.n_steps
    # The peak of a step that adds up has room for total and gradient, but a tied gradient is there before it.
    shortly = 0 if group.is_tied else 1
    steps: list[int] = []
    for made, then in pairwise(ends):
        there = [(made + 1, then - shortly)]
        if plan.lead_out is not None and plan.lead_back is not None:
            shift = made - ends[0]
            there = [(made + 1, plan.lead_out + shift), (plan.lead_back + shift, then - shortly)]
        steps += [step for first, end in there for step in range(first, end + 1)]
    waits = [(ends[-1] + 1, plan.device_update)]
    if plan.grad_out is not None:
        waits = [(ends[-1] + 1, plan.grad_out)]
        waits += [(plan.grad_back, plan.device_update)] if plan.grad_back is not None else []
    return steps + [step for first, end in waits if end is not None for step in cycle(first % n, end, n)]
