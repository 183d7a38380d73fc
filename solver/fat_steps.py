"""Fat steps: every step runs its block for several micro-batches, one after the other: for all of an update, or a part.

Parameters then come to the device once per pass and not once per micro-batch, and gradients add up on the device. The
price is memory: what a forward leaves for its backward, and what blocks hand on, is there for all micro-batches of the
pass at once. GreedySnake (section 4) calls this order vertical.

The program sees such a pass as one micro-batch, whose sizes and seconds are those of all of them. Only the schedule
knows the micro-batches of a step apart, as slots. In one pass of all, the first one's gradient becomes the sum. With
several passes, a total goes on from pass to pass, and each gradient is added to it as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from .problem import Option, Problem
from .rows import Block
from .steps import passes_and_slots


@dataclass(frozen=True)
class _More:
    """What a step holds beyond the peak of one compute: bytes per further micro-batch, and once if there are any."""

    per_slot_bytes: int
    once_bytes: int = 0

    def of(self, slots: int) -> int:
        return (slots - 1) * self.per_slot_bytes + (self.once_bytes if slots > 1 else 0)


class InTurn(NamedTuple):
    """Bytes of a block's values of all micro-batches of a step but one: each comes, or goes, with its own compute.

    Parameters
    ----------
    made: by the forward, and not saved. gradients_made, gradients_taken: of values and outputs, by the backward.
    """

    made: int
    gradients_made: int
    gradients_taken: int


def in_turn(problem: Problem, block: int) -> InTurn:
    """Return what a step does not hold for all of its micro-batches at once; `problem` is that of all of them."""
    step = problem.runs[block][0][1]
    return InTurn(
        all_but_one(problem, _made(problem, block)),
        all_but_one(problem, _gradients_made(problem, step)),
        all_but_one(problem, _gradients_taken(problem, block)),
    )


def all_but_one(problem: Problem, amount_bytes: int) -> int:
    """Return the bytes of all micro-batches of a step but one, of those of all."""
    return amount_bytes - amount_bytes // problem.per_step


def in_passes(problem: Problem, micro_batches: int, per_step: int) -> Problem:
    """Return the problem of an update of several micro-batches, of which each pass takes some.

    Parameters
    ----------
    problem: of one micro-batch per update; with a gate, unless one pass takes all. micro_batches: of the update.
    per_step: k, micro-batches of a pass; the last pass has what is left. 1 runs them one after the other.

    Source: GreedySnake, section 4.2, with a group size.
    """
    passes, slots, last = passes_and_slots(micro_batches, per_step)
    return for_all(problem, slots, passes, last=last)


def for_all(problem: Problem, slots: int, passes: int = 1, *, last: int = 0) -> Problem:
    """Return the problem whose steps run each block for several micro-batches in turn.

    Parameters
    ----------
    problem: of one micro-batch per update. slots: k, the number of micro-batches of a pass. passes: of an update.
    last: micro-batches of the last pass; 0 if it has k.

    Source: GreedySnake, section 4.2.
    """
    if slots == 1:
        return problem if passes == 1 else replace(problem, micro_batches=passes)
    values = tuple(replace(v, bytes=slots * v.bytes, grad_bytes=slots * v.grad_bytes) for v in problem.values)
    outputs = tuple(replace(o, bytes=slots * o.bytes, grad_bytes=slots * o.grad_bytes) for o in problem.outputs)
    shared = tuple(replace(s, bytes=slots * s.bytes) for s in problem.shared)
    groups = problem.groups
    if passes == 1:
        groups = tuple(replace(g, norm_s=g.norm_s + (slots - 1) * g.device_add_s) for g in groups)
    return replace(
        problem,
        blocks=_blocks(problem, slots, _fat),
        groups=groups,
        values=values,
        outputs=outputs,
        shared=shared,
        user_bytes=problem.user_bytes + (slots - 1) * _handed_in(problem),
        start_s=slots * problem.start_s,
        start_peak_bytes=problem.start_peak_bytes + (slots - 1) * _shared_bytes(problem),
        micro_batches=passes,
        per_step=slots,
        last_per_step=last % slots,
    )


def for_one(problem: Problem) -> Problem:
    """Return the problem of one micro-batch of a step, in as many passes; the inverse of `for_all`."""
    slots = problem.per_step
    if slots == 1:
        return problem
    values = tuple(replace(v, bytes=v.bytes // slots, grad_bytes=v.grad_bytes // slots) for v in problem.values)
    outputs = tuple(replace(o, bytes=o.bytes // slots, grad_bytes=o.grad_bytes // slots) for o in problem.outputs)
    shared = tuple(replace(s, bytes=s.bytes // slots) for s in problem.shared)
    groups = problem.groups
    if not problem.adds_up:
        groups = tuple(replace(g, norm_s=max(0.0, g.norm_s - (slots - 1) * g.device_add_s)) for g in groups)
    one = replace(problem, values=values, outputs=outputs, shared=shared, groups=groups, per_step=1, last_per_step=0)
    return replace(
        one,
        blocks=_blocks(one, slots, _lean),
        user_bytes=problem.user_bytes - (slots - 1) * _handed_in(one),
        start_s=problem.start_s / slots,
        start_peak_bytes=problem.start_peak_bytes - (slots - 1) * _shared_bytes(one),
    )


def _handed_in(problem: Problem) -> int:
    return sum(output.grad_bytes for output in problem.outputs)


def _shared_bytes(problem: Problem) -> int:
    return sum(shared.bytes for shared in problem.shared)


def _blocks(problem: Problem, slots: int, made: Callable[[Option, int, _More, _More], Option]) -> tuple[Block, ...]:
    """Make every option anew; all other rows of the problem are those of one micro-batch."""
    mores = [(_forward_more(problem, i), _backward_more(problem, i)) for i in range(problem.n_blocks)]
    return tuple(
        replace(block, options=tuple(made(option, slots, *more) for option in block.options))
        for block, more in zip(problem.blocks, mores)
    )


def _fat(option: Option, slots: int, forward: _More, backward: _More) -> Option:
    more = (slots - 1) * (option.saved_bytes + option.offloaded_bytes)
    return replace(
        _scaled(option, Fraction(slots)),
        forward_peak_bytes=option.forward_peak_bytes + more + forward.of(slots),
        backward_peak_bytes=option.backward_peak_bytes + more + backward.of(slots),
    )


def _lean(option: Option, slots: int, forward: _More, backward: _More) -> Option:
    one = _scaled(option, Fraction(1, slots))
    more = (slots - 1) * (one.saved_bytes + one.offloaded_bytes)
    return replace(
        one,
        forward_peak_bytes=option.forward_peak_bytes - more - forward.of(slots),
        backward_peak_bytes=option.backward_peak_bytes - more - backward.of(slots),
    )


def _scaled(option: Option, times: Fraction) -> Option:
    launched = option.launched
    if launched is not None:
        launched = replace(launched, **{name: float(times) * seconds for name, seconds in vars(launched).items()})
    return replace(
        option,
        saved_bytes=int(times * option.saved_bytes),
        offloaded_bytes=int(times * option.offloaded_bytes),
        forward_s=float(times) * option.forward_s,
        backward_s=float(times) * option.backward_s,
        launched=launched,
    )


def _forward_more(problem: Problem, block: int) -> _More:
    """What a block's forward makes for every micro-batch and that is not saved."""
    return _More(_made(problem, block))


def _backward_more(problem: Problem, block: int) -> _More:
    """What a block's backward takes and makes for every micro-batch, and the gradients that it adds up."""
    step = problem.runs[block][0][1]
    partial = sum(g.grad_bytes for g in problem.groups if len(g.grad_steps) > 1 and g.grad_steps[0] == step)
    # One micro-batch's gradient is there beside the sum of those before it.
    fresh = sum(g.grad_bytes for g in problem.groups if g.grad_steps == (step,))
    return _More(_gradients_taken(problem, block) + _gradients_made(problem, step) + partial, fresh)


def _made(problem: Problem, block: int) -> int:
    made = sum(v.bytes for v in problem.values if v.made == block)
    return made + sum(o.bytes for o in problem.outputs if o.made == block)


def _gradients_made(problem: Problem, step: int) -> int:
    return sum(v.grad_bytes for v in problem.values if v.grad_steps[:1] == (step,))


def _gradients_taken(problem: Problem, block: int) -> int:
    taken = sum(v.grad_bytes for v in problem.values if v.made == block)
    return taken + sum(o.grad_bytes for o in problem.outputs if o.made == block)
