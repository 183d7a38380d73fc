"""Explanation of what limits a plan, phase by phase, and of what more memory or faster parts would gain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .effects import effect
from .plan import Planned
from .problem import Problem
from .schedule import Direction, Schedule
from .simulate import Simulation
from .solve import solve

GIB = 2**30
_FULL = 0.9  # a resource that is busy for this fraction of a phase limits it
_BUSY = 0.5  # where none does, those busy for this fraction are named
_ALL = 0.995  # fraction of the device budget at which memory counts as full
_WORTH_SAYING = 1e-3  # fraction of a step
HOST_MEMORY = "host memory"  # beside the resources, whose copies and updates it serves
_WORDS = {
    "compute": "GPU compute",
    "copy in": "copies to the GPU",
    "copy out": "copies to RAM",
    "cpu": "CPU updates",
    HOST_MEMORY: "RAM bandwidth",
}


@dataclass(frozen=True)
class Phase:
    """One phase of the simulated iteration.

    Parameters
    ----------
    name: "forward", "backward" or "turn_around"; with several micro-batches "first forward", "middle forward" and so
        on, where a middle one stands for all of them. seconds: its duration, once.
    busy: by resource, the fraction of the phase in which it works. memory: the largest fraction of the device budget in
        use.
    waits: by resource, the seconds for which the device waits for it.
    """

    name: str
    seconds: float
    busy: dict[str, float]
    memory: float
    waits: dict[str, float]

    @property
    def limit(self) -> str:
        """The resource that is busiest; "nothing" if the phase takes no time."""
        return max(self.busy, key=lambda name: self.busy[name]) if self.seconds > 0 else "nothing"


@dataclass(frozen=True)
class Offer:
    """The gain from a change: seconds per iteration as the program predicts them, infinite where it found no plan."""

    change: str
    step_s: float
    saved_s: float


@dataclass(frozen=True)
class Launching:
    """Computes whose operators the CPU launches more slowly than the device runs them.

    Parameters
    ----------
    bound, computes: how many of an iteration's computes are such, and how many there are. seconds: by which they are
        longer than on the device alone.
    """

    bound: int
    computes: int
    seconds: float

    def words(self) -> str:
        """Return what launching costs and what would help, as the end of a line or the beginning of a sentence."""
        return (
            f"for {self.bound} of {self.computes} forwards and backwards of blocks, the CPU launches operators more "
            f"slowly than the GPU runs them, which costs up to {self.seconds:.2g} s per step; a larger batch does more "
            "work per launch"
        )


@dataclass(frozen=True)
class Explanation:
    """An explanation of what limits a plan and of what would help; offers in the order of their savings.

    Parameters
    ----------
    certain: fraction of a step that an offer must save to exceed what the search may have overlooked.
    launching: the computes that take longer to launch than to run.
    """

    step_s: float
    phases: tuple[Phase, ...]
    offers: tuple[Offer, ...]
    certain: float
    launching: Launching | None = None

    @property
    def launching_matters(self) -> bool:
        """Whether a notable part of the step may be due to launching."""
        return self.launching is not None and self.launching.seconds > _WORTH_SAYING * self.step_s

    def worth(self, offer: Offer) -> bool:
        """Return whether an offer certainly saves time."""
        return offer.saved_s > self.certain * self.step_s

    def text(self) -> str:
        """Return the explanation in sentences, one per line."""
        lines = [_sentence(phase) for phase in self.phases if phase.seconds > 0]
        if self.launching_matters:
            assert self.launching is not None
            lines.append(f"F{self.launching.words()[1:]}.")
        for offer in self.offers:
            if self.worth(offer):
                lines.append(f"With {offer.change}, a step would take about {offer.saved_s:.2g} s less.")
            else:
                change = f"{offer.change[0].upper()}{offer.change[1:]}"
                lines.append(f"{change} would save less than {100 * self.certain:.1f} %.")
        return "\n".join(lines)


def explain(
    problem: Problem,
    planned: Planned,
    *,
    offers: bool = True,
    time_limit_s: float = 20.0,
    gap: float = 0.01,
    backend: str | None = None,
) -> Explanation:
    """Explain what limits a plan; for the offers the problem is solved again, once per change.

    Parameters
    ----------
    planned: the result of `plan` for the problem, with a schedule.
    offers: whether to solve again to learn what more memory or faster parts would gain. time_limit_s, gap, backend: as
        in `solve`.

    Raises: ValueError if there is no schedule to explain.
    """
    if planned.schedule is None or planned.simulation is None:
        raise ValueError(f"no plan to explain: {planned.solution.status.value}")
    now_s, proved = planned.solution.objective_s, planned.solution.gap
    found = offered(problem, now_s, time_limit_s=time_limit_s, gap=gap, backend=backend) if offers else ()
    return explanation(problem, planned.schedule, planned.simulation, proved, found)


def explanation(
    problem: Problem, schedule: Schedule, simulation: Simulation, gap: float, offers: tuple[Offer, ...] = ()
) -> Explanation:
    """Explain what limits a schedule.

    Parameters
    ----------
    problem: what the schedule solves. gap: what the search may have overlooked, as a fraction of a step.
    """
    certain = max(_WORTH_SAYING, gap)
    return Explanation(simulation.step_s, _phases(schedule, simulation), offers, certain, _launching(problem, schedule))


def _launching(problem: Problem, schedule: Schedule) -> Launching | None:
    chosen = [block.options[option] for block, option in zip(problem.blocks, schedule.options)]
    pairs = [option.launched for option in chosen if option.launched is not None]
    times = problem.per_update
    bound = sum((x.forward_launch_s > x.forward_device_s) + (x.backward_launch_s > x.backward_device_s) for x in pairs)
    # Those of fat steps are of all their micro-batches.
    seconds = times / problem.per_step * sum(option.launch_bound_s for option in chosen)
    return Launching(times * bound, times * 2 * len(chosen), seconds) if bound else None


def offered(
    problem: Problem, now_s: float, *, time_limit_s: float = 20.0, gap: float = 0.01, backend: str | None = None
) -> tuple[Offer, ...]:
    """Estimate the gain from each change, the largest first; the problem is solved again for each.

    Parameters
    ----------
    now_s: seconds of the problem's solution. time_limit_s, gap, backend: as in `solve`.
    """
    found: list[Offer] = []
    for change, other in _changes(problem).items():
        then_s = solve(other, time_limit_s=time_limit_s, gap=gap, backend=backend).objective_s
        found.append(Offer(change, then_s, max(0.0, now_s - then_s)))
    return tuple(sorted(found, key=lambda offer: -offer.saved_s))


def _changes(problem: Problem) -> dict[str, Problem]:
    changes = {
        "one more GiB of GPU memory": replace(problem, device_budget_bytes=problem.device_budget_bytes + GIB),
        "a link twice as fast": replace(problem, rates=problem.rates.faster(2)),
        "8 more GiB of RAM": replace(problem, host_budget_bytes=problem.host_budget_bytes + 8 * GIB),
    }
    if problem.update == "planned":
        updates = tuple(replace(group, cpu_update_s=group.cpu_update_s / 2) for group in problem.groups)
        changes["CPU updates twice as fast"] = replace(problem, groups=updates)
    if problem.rates.host_memory_shares:
        twice = replace(problem.rates, host_memory_bytes_per_s=2 * problem.rates.host_memory_bytes_per_s)
        changes["RAM twice as fast"] = replace(problem, rates=twice)
    return changes


def _phases(schedule: Schedule, simulation: Simulation) -> tuple[Phase, ...]:
    words = {1: ("",), 2: ("first ", "last ")}.get(len(schedule.parts) // 2, ("first ", "middle ", "last "))
    first, phases = 0, []
    for part in schedule.parts:
        turns = part.direction is Direction.TURN_AROUND
        name = "turn_around" if turns else f"{words[part.of_pass]}{part.direction.value}"
        phases.append(_phase(schedule, simulation, name, first, first + len(part.actions) - 1))
        first += len(part.actions)
    return tuple(phases)


def _phase(schedule: Schedule, simulation: Simulation, name: str, first: int, last: int) -> Phase:
    if last < first:
        return Phase(name, 0.0, {}, 0.0, {})
    begin, end = simulation.taken[first][0], simulation.taken[last][1]
    shares = schedule.rates.host_memory_shares
    busy = {str(resource): 0.0 for resource in schedule.rates.resources} | ({HOST_MEMORY: 0.0} if shares else {})
    for event in simulation.timeline:
        for shift in (0.0, simulation.step_s):  # work that one iteration leaves runs in the next one's forward
            overlap = max(0.0, min(event.end_s - shift, end) - max(event.start_s - shift, begin))
            busy[event.resource] += overlap
            if event.resource in shares and overlap > 0:
                alone_s = effect(event.action, schedule).seconds
                busy[HOST_MEMORY] += shares[event.resource] * alone_s * overlap / (event.end_s - event.start_s)
    seconds = end - begin
    most = max(high for _, high in simulation.memory[first : last + 1])
    parts = {name: min(1.0, spent / seconds) if seconds > 0 else 0.0 for name, spent in busy.items()}
    waits = dict.fromkeys(busy, 0.0)
    for stall in simulation.stalls:
        waits[stall.cause] += max(0.0, min(stall.end_s, end) - max(stall.start_s, begin))
    return Phase(name, seconds, parts, most / max(schedule.device_budget_bytes, 1), waits)


def _sentence(phase: Phase) -> str:
    name = phase.name.replace("_", "-")
    parts = [f"The {name} takes {phase.seconds:.3g} s: {_limits(phase)}"]
    waits_s = sum(phase.waits.values())
    if waits_s > _WORTH_SAYING * phase.seconds:
        longest = max(phase.waits, key=lambda resource: phase.waits[resource])
        mostly = "" if phase.waits[longest] > _ALL * waits_s else "mostly "
        parts.append(f"the GPU waits {waits_s:.2g} s, {mostly}for {_WORDS.get(longest, longest)}")
    parts.append(
        "GPU memory is full" if phase.memory >= _ALL else f"GPU memory is at most {round(100 * phase.memory)} % full"
    )
    return "; ".join(parts) + "."


def _limits(phase: Phase) -> str:
    order = sorted(phase.busy, key=lambda resource: -phase.busy[resource])
    full = [
        f"{_WORDS.get(name, name)} ({round(100 * phase.busy[name])} %)" for name in order if phase.busy[name] >= _FULL
    ]
    if full:
        return f"it is limited by {' and '.join(full)}"
    busy = [
        f"{_WORDS.get(name, name)} {round(100 * phase.busy[name])} %" for name in order if phase.busy[name] >= _BUSY
    ]
    return f"nothing is busy all the time{', ' if busy else ''}{', '.join(busy)}"
