"""What the integer program answers: fractions, its bound and its status."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    """How a solve ended; the value is a sentence with advice."""

    OPTIMAL = "solved to within the requested gap"
    TIME_LIMIT = "the time limit ended the search; the plan is valid, a longer limit may find a faster one"
    INFEASIBLE = "no plan fits the budgets; raise the device or the host budget, or make the batch smaller"
    STREAMED = "no plan was found in time; this safe one streams everything; give the search more time"
    NO_ANSWER = "the time limit ended the search before any plan was found; give it more time"


@dataclass(frozen=True)
class Gap:
    """What happens to a group's compute copy between two successive uses (never the idle gap of a trainable group).

    Parameters
    ----------
    after, before: the steps of the two uses; `before` may be smaller, the gap then wraps round the cycle's end.
    dropped: fraction released at the end of step `after`.
    back: fraction that comes in, by step, from `after` + 1 to `before` - 1 (cyclic).
    shifts: the gap recurs that many steps later, with the same fractions: once per pass, or between every two passes.
    """

    after: int
    before: int
    dropped: float
    back: dict[int, float] = field(default_factory=dict)
    shifts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class GroupFlow:
    """Where one parameter group goes: fractions of the group, by step. Absent steps are 0.

    Parameters
    ----------
    cpu_part: x_w, the fraction updated on the host.
    grad_out: GradOut, CPU part, of the last pass.
    lead_out: the same of the first pass, and of every other but the last.
    cpu_update: Opt, CPU part.
    cpu_back: ParInC, CPU part's new parameters coming in.
    out: ParOut, device part's new parameters going to the host.
    drop: device part released at the end of the step, idle gap.
    back: ParIn, device part coming in, idle gap.
    gaps: all other gaps (for a frozen group every gap), in order.
    state_out, state_in: OutO and InO, the device part's optimizer states.
    state_tiers: which part of what leaves of them goes to which tier; empty if all goes to the host.
    """

    cpu_part: float = 0.0
    grad_out: dict[int, float] = field(default_factory=dict)
    lead_out: dict[int, float] = field(default_factory=dict)
    cpu_update: dict[int, float] = field(default_factory=dict)
    cpu_back: dict[int, float] = field(default_factory=dict)
    out: dict[int, float] = field(default_factory=dict)
    drop: dict[int, float] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    state_out: dict[int, float] = field(default_factory=dict)
    state_in: dict[int, float] = field(default_factory=dict)
    state_tiers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ActivationFlow:
    """How what a block's option offloads leaves after its forward and returns for its backward.

    Parameters
    ----------
    out, back: fractions of it by step of the first pass; empty if the option offloads nothing. What moves in the
        forward's or the backward's own step does so after the one or before the other.
    tiers: which part of it goes to which tier; empty if all goes to the host.
    """

    out: dict[int, float] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)
    tiers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Solution:
    """The program's answer.

    Parameters
    ----------
    options: option index per block.
    activations: per block, how what its option offloads leaves and returns.
    offloaded_values: names of the interface values that leave between their last forward and first backward use.
    value_tiers: by name the tier that they leave to, where that is not the host.
    step_s: predicted seconds per step, each taken once. `objective_s` is their sum, those of the middle pass's steps
        (`Problem.times`) M - 2 times.
    memory_bytes: device bytes per step as the program counts them.
    lower_bound_s: no plan whose copies and host updates keep to the program's steps (see program/groups.py and
        program/blocks.py) is faster.
    gap: (objective - bound) / objective.
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
