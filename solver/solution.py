"""The integer program's answer: fractions, its bound and its status."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .handed import Hand


class Status(Enum):
    """The end of a solve; the value is a sentence with advice."""

    OPTIMAL = "solved to within the requested gap"
    TIME_LIMIT = "the time limit ended the search; the plan is valid, but a longer limit may find a faster one"
    INFEASIBLE = "no plan fits the budgets; raise either budget, or make the batch smaller"
    STREAMED = "no plan was found in time, so this safe one streams everything; give the search more time"
    NO_ANSWER = "the time limit ended the search before any plan was found; give it more time"


@dataclass(frozen=True)
class Gap:
    """The absences of a group's compute copy between two successive uses (never the idle gap of a trainable group).

    Parameters
    ----------
    after, before: the steps of the two uses. If `before` is the smaller one, the gap wraps round the end of the cycle.
    dropped: fraction released at the end of step `after`.
    back: fraction that comes in, by step, from `after` + 1 to `before` - 1 (cyclic).
    shifts: numbers of steps after which the gap recurs, with the same fractions: once per pass, or between every two
        passes.
    """

    after: int
    before: int
    dropped: float
    back: dict[int, float] = field(default_factory=dict)
    shifts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class GroupFlow:
    """The moves of one parameter group: fractions of the group, by step. Absent steps are 0.

    Parameters
    ----------
    cpu_part: x_w, the fraction updated on the host.
    grad_out: GradOut, the CPU part's gradients of the last pass going to the host.
    lead_out: the same for the first pass, and for every other but the last. If the device adds all gradients up: the
        total that leaves between two passes, of either part; lead_back: and that returns.
    cpu_update: Opt, CPU part.
    cpu_back: ParInC, CPU part's new parameters coming in.
    out: ParOut, device part's new parameters going to the host.
    drop: device part released at the end of the step, idle gap.
    back: ParIn, device part coming in, idle gap.
    wait_out, wait_in: GradOutD and GradInD, the device part's whole gradients, which leave behind a gate and return for
        their update.
    gaps: all other gaps (for a frozen group every gap), in order.
    state_out, state_in: OutO and InO, the device part's optimizer states.
    state_tiers: by tier, the fraction of the states that leave which goes there; empty if all goes to the host.
    sources: by tier, the part of a frozen group that comes from there after it was dropped; empty if all of it comes
        from the host.
    from_files: of the CPU part, the fraction of the group whose states lie in files.
    cast: of the CPU part, the fraction of the group of which RAM has float32 copies alone.
    """

    cpu_part: float = 0.0
    grad_out: dict[int, float] = field(default_factory=dict)
    lead_out: dict[int, float] = field(default_factory=dict)
    lead_back: dict[int, float] = field(default_factory=dict)
    cpu_update: dict[int, float] = field(default_factory=dict)
    cpu_back: dict[int, float] = field(default_factory=dict)
    out: dict[int, float] = field(default_factory=dict)
    drop: dict[int, float] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)
    wait_out: dict[int, float] = field(default_factory=dict)
    wait_in: dict[int, float] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    state_out: dict[int, float] = field(default_factory=dict)
    state_in: dict[int, float] = field(default_factory=dict)
    state_tiers: dict[str, float] = field(default_factory=dict)
    sources: dict[str, float] = field(default_factory=dict)
    from_files: float = 0.0
    cast: float = 0.0


@dataclass(frozen=True)
class ActivationFlow:
    """The moves of the values that a block's option offloads after its forward and needs back for its backward.

    Parameters
    ----------
    out, back: fractions of their bytes, by step of the first pass; empty if the option offloads nothing. In the
        forward's own step they move after it, in the backward's own step before it.
    tiers: by tier, the fraction that goes there; empty if all goes to the host.
    """

    out: dict[int, float] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)
    tiers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class HandFlow:
    """What neighbouring steps hand on: by tier, the part of the most copies that can be away in between."""

    hand: Hand
    tiers: dict[str, float]


@dataclass(frozen=True)
class Solution:
    """The program's answer.

    Parameters
    ----------
    options: option index per block.
    activations: per block, the moves of the values that its option offloads.
    offloaded_values: names of the interface values that leave between their last forward and first backward use.
    value_tiers: by name, the tier that a value leaves to, if that is not the host.
    handed: what neighbouring steps hand on and is away in between.
    step_s: predicted seconds per step, each counted once. `objective_s` is their sum, with the middle pass's steps
        counted M - 2 times (`Problem.times`).
    memory_bytes: device bytes per step as the program counts them.
    lower_bound_s: no plan whose copies and host updates keep to the program's steps (see program/spans.py and
        program/blocks.py) is faster.
    gap: (objective - bound) / objective.
    busy_s: by resource, the seconds that an iteration's work on it takes if nothing else is under way.
    """

    status: Status
    objective_s: float
    lower_bound_s: float
    gap: float
    solve_s: float
    options: tuple[int, ...] = ()
    activations: tuple[ActivationFlow, ...] = ()
    offloaded_values: frozenset[str] = frozenset()
    groups: dict[str, GroupFlow] = field(default_factory=dict)
    step_s: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    host_bytes: int = 0
    value_tiers: dict[str, str] = field(default_factory=dict)
    handed: tuple[HandFlow, ...] = ()
    busy_s: dict[str, float] = field(default_factory=dict)
