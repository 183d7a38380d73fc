"""The walk of Algorithm 1, and the bytes that it may use: the fractions' own and those that other groups spare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil, floor

from ..decisions import TensorPlan, tensor_bytes
from ..problem import Group, Problem
from ..solution import GroupFlow
from .knapsack import select

_STEPS_TO_LEAVE = 4  # steps within which a tensor updated on the device may leave while computes hide the copy
NOISE = 1e-6  # fractions this close count as equal: solvers are accurate to about 1e-7


def at_least(fraction: float, size_bytes: int) -> int:
    """Return the bytes of a fraction, rounded up except for noise."""
    return max(0, ceil((fraction - NOISE) * size_bytes))


class Curve:
    """A flow by step as a running sum over positions, counted in cyclic order from its first step."""

    def __init__(self, problem: Problem, first: int, flow: Mapping[int, float]) -> None:
        n = problem.n_steps
        self._sums = list(accumulate(flow.get((first + k) % n, 0.0) for k in range(n)))

    def up_to(self, position: int) -> float:
        """Return the flow's sum over positions 0..position; 0 below 0, the total beyond the end."""
        return self._sums[min(position, len(self._sums) - 1)] if position >= 0 else 0.0


class Allowance:
    """The device bytes that one group may use in each step: its fractions', and `spare` from the groups before it.

    The three methods `use_*` add to `spare` the fractions' bytes minus those of whole tensors; nothing else changes it.
    `choose_host_part` sets aside the bytes that later groups need in order to update more on the device.

    Parameters
    ----------
    spare: by step, the bytes that earlier groups' fractions use more than their whole tensors.
    for_states: whether states alone may use them, and parameters may not.
    """

    def __init__(
        self, problem: Problem, group: Group, flow: GroupFlow, spare: Sequence[float], *, for_states: bool = False
    ) -> None:
        self.spare = list(spare)
        self._for_states = for_states
        self._group = group
        self._last = problem.last_gradient(group) if group.trainable else 0
        self._updated = problem.device_update(group) if group.trainable else 0
        self._gate = problem.gate
        self._idle = [(self._last + k) % problem.n_steps for k in range(1, _idle_steps(problem, group))]
        self._excess = self._reserve = 0.0
        self._params = [float(group.param_bytes)] * problem.n_steps
        self._states = [0.0] * problem.n_steps
        self._grads = [0.0] * problem.n_steps
        self._problem = problem
        n = problem.n_steps
        for gap in flow.gaps:
            back = Curve(problem, gap.after, gap.back)
            for k in range(1, (gap.before - gap.after) % n or n):
                for shift in gap.shifts:
                    self._params[(gap.after + shift + k) % n] *= 1 - gap.dropped + back.up_to(k)
        if group.trainable:
            for step in range(problem.last_read(group) + 1, self._last + 1):
                self._params[step] -= flow.cpu_part * group.param_bytes
            self._add_idle_gap(problem, group, flow)
            self._add_totals(problem, group, flow)

    def _add_idle_gap(self, problem: Problem, group: Group, flow: GroupFlow) -> None:
        n, last, x = problem.n_steps, self._last, flow.cpu_part
        flows = (flow.cpu_back, flow.drop, flow.back, flow.grad_out)
        came, drop, back, grad_out = (Curve(problem, last, f) for f in flows)
        out, into = (Curve(problem, self._updated, f) for f in (flow.state_out, flow.state_in))
        for k in range(n):
            self._states[(self._updated + k) % n] = group.state_bytes * (1 - x - out.up_to(k - 1) + into.up_to(k))
            step = (last + k) % n
            if step in self._idle:
                self._params[step] *= 1 - x + came.up_to(k) - drop.up_to(k - 1) + back.up_to(k)
                self._grads[step] = group.grad_bytes * (x - grad_out.up_to(k - 1))

    def _add_totals(self, problem: Problem, group: Group, flow: GroupFlow) -> None:
        """Add the device part's gradients until its update, and the CPU part's of all passes but the last."""
        first, n, rest = group.grad_steps[-1], problem.n_steps, 1 - flow.cpu_part
        if problem.sums_on_device:
            self._add_passed_on(problem, group, flow)
            first = self._last
        out, into = (Curve(problem, self._last, f) for f in (flow.wait_out, flow.wait_in))
        for k in range(1, (self._updated - first) % n + 1):
            step = (first + k) % n
            waited = (step - self._last) % n  # positions of passes before the last one lie behind all of the flows
            away = out.up_to(waited - 1) - into.up_to(waited)
            self._grads[step] += group.grad_bytes * (rest - away)
        if problem.sums_on_device:
            return
        gone = Curve(problem, first, flow.lead_out)
        for again in problem.each(first)[:-1]:
            for k in range(1, lead_window(problem, group)):
                self._grads[again + k] += group.grad_bytes * (flow.cpu_part - gone.up_to(k - 1))

    def _add_passed_on(self, problem: Problem, group: Group, flow: GroupFlow) -> None:
        """Add the totals between passes, and before the additions to a tied group's, whose gradient is there, too."""
        ends = problem.each(group.grad_steps[-1])
        gone, back = (Curve(problem, ends[0], f) for f in (flow.lead_out, flow.lead_back))
        for again in ends[:-1]:
            for k in range(1, problem.pass_steps + group.is_tied):
                self._grads[again + k] += group.grad_bytes * (1 - gone.up_to(k - 1) + back.up_to(k))

    def room(self) -> float:
        """Return the additional fraction of the group that fits on the device, by the spare bytes around its update."""
        if self._gate:  # the gradients of such a fraction would wait for the update, too
            return 0.0
        size = self._group.param_bytes + self._group.state_bytes
        # The states must be on the device right before the update, too: they come back in the step before it.
        around = (self.spare[(self._last + k) % len(self.spare)] for k in range(-1, _STEPS_TO_LEAVE))
        return max(0.0, min(around) / max(size, 1))

    def choose_host_part(self, excess: float, total: float) -> None:
        """Set aside the device bytes that other groups need to make up for the excess on the host.

        Parameters
        ----------
        excess: fraction of this group updated on the host beyond its fractions, negative if less is.
        total: the excess of all groups so far, in groups of this size.
        """
        self._excess = excess
        self._reserve = max(0.0, total) * (self._group.param_bytes + self._group.state_bytes)

    def absent_params(self, step: int) -> int:
        """Return the bytes of parameters that must be absent in a step."""
        whole = self._group.param_bytes
        own = whole if step in self._idle else 0
        usable = self._usable(step, own)
        need = ceil(whole * (1 - NOISE) - self._params[step] - (min(0.0, usable) if self._for_states else usable))
        return min(max(0, need), whole)

    def states(self, step: int) -> int:
        """Return the bytes of states that may be present in a step."""
        whole = self._group.state_bytes
        return max(0, floor(self._states[step] + whole * NOISE + self._usable(step, whole)))

    def grads(self, step: int) -> int:
        """Return the bytes of gradients that may be pending in a step."""
        return floor(self._grads[step] + self._group.grad_bytes * NOISE + self.spare[step])

    def _usable(self, step: int, whole: int) -> float:
        # The group leaves the reserve to others, but may use the bytes that its own deficit on the host needs.
        return min(self.spare[step], max(-self._excess * whole, self.spare[step] - self._reserve))

    def use_params(self, plans: Sequence[TensorPlan]) -> None:
        """Account for the parameters of whole tensors."""
        self._use(self._params, plans, "param_bytes")

    def use_states(self, plans: Sequence[TensorPlan]) -> None:
        """Account for the states of whole tensors."""
        self._use(self._states, plans, "state_bytes")

    def use_grads(self, plans: Sequence[TensorPlan]) -> None:
        """Account for the pending gradients of whole tensors."""
        self._use(self._grads, plans, "grad_bytes")

    def _use(self, fractional: list[float], plans: Sequence[TensorPlan], kind: str) -> None:
        for tensor, plan in zip(self._group.tensors, plans):
            alone = replace(
                tensor,
                param_bytes=tensor.param_bytes * (kind == "param_bytes"),
                grad_bytes=tensor.grad_bytes * (kind == "grad_bytes"),
                state_bytes=tensor.state_bytes * (kind == "state_bytes"),
            )
            rows = tensor_bytes(self._problem, self._group, alone, plan)
            self.spare = [spare - used for spare, used in zip(self.spare, rows)]
        self.spare = [spare + allowed for spare, allowed in zip(self.spare, fractional)]


def _idle_steps(problem: Problem, group: Group) -> int:
    return (group.uses[0] - problem.last_gradient(group)) % problem.n_steps if group.trainable else 0


def lead_window(problem: Problem, group: Group) -> int:
    """Return the number of steps from a pass's last gradient, included, to the first gradient step of the next pass."""
    return problem.each(group.grad_steps[0])[1] - group.grad_steps[-1]


def envelope(need: Sequence[int]) -> list[int]:
    """Return the least curve not below `need` that first never falls and then never rises.

    A whole tensor leaves once and returns once; it stays away while the fractions dip in between.
    """
    rise = list(accumulate(need, max))
    fall = list(accumulate(reversed(need), max))[::-1]
    return [min(pair) for pair in zip(rise, fall)]


def walk(
    sizes: Mapping[str, int],
    need: Sequence[int],
    absent: Iterable[str],
    may_drop: Callable[[int], Iterable[str]],
    may_return: Callable[[int, Collection[str]], Iterable[str]],
) -> tuple[dict[str, int], dict[str, int]]:
    """Let whole tensors leave and return so that at least `need` bytes are absent in every position.

    Parameters
    ----------
    sizes: bytes per tensor.
    need: bytes absent in positions 1, 2, ... (an envelope); after the last position everything is present.
    absent: tensors that left at the end of position 0 in any case.
    may_drop: the tensors that can be released at the end of the position before k.
    may_return: the tensors that can come in at position k, given those that have; at the last one all must.

    Returns: the position at whose end each tensor was dropped (except those of `absent`), and the position of each
    return.
    Source: OffMate, appendix B, Algorithm 1.
    """
    away, peak = set(absent), need.index(max(need)) + 1 if need else 0
    dropped: dict[str, int] = {}
    back: dict[str, int] = {}
    for k, least in enumerate(need, 1):
        short = least - sum(sizes[name] for name in away)
        if short > 0:
            rest = {name: sizes[name] for name in may_drop(k) if name not in away and name not in back}
            leaving = select(rest, min(short, sum(rest.values())))
            dropped.update(dict.fromkeys(leaving, k - 1))
            away |= leaving
        if k < peak or not away:
            continue
        returning = set(away)
        if k < len(need):
            spare = max(0, sum(sizes[name] for name in away) - least)
            coming = {name: sizes[name] for name in may_return(k, back) if name in away}
            returning = coming.keys() - select(coming, sum(coming.values()) - spare)
        back.update(dict.fromkeys(sorted(returning), k))
        away = away - returning
    return dropped, back
