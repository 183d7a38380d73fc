"""The tier that each tensor comes from: the host as far as it has room, and files for the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ..decisions import Decisions, TensorGap, TensorPlan, cycle
from ..problem import Group, Problem
from ..resources import HOST
from ..scheduling.emit import build_schedule, host_bytes
from ..simulate import memory_highs
from ..solution import GroupFlow
from .walk import NOISE


class Sources:
    """Chooses whole tensors that come from the host: of all groups so far, never more bytes than the fractions.

    State: the room of frozen groups and that of trained ones.
    """

    def __init__(self) -> None:
        self._frozen, self._trained = _Room(), _Room()

    def choose(self, group: Group, flow: GroupFlow, plans: list[TensorPlan]) -> list[TensorPlan]:
        """Return the plans of a group with the tier that each tensor comes from; what the host updates stays there."""
        if not flow.sources:
            return plans
        room = self._trained if group.trainable else self._frozen
        return room.choose(group, flow, plans)


class _Room:
    """The bytes that the fractions of some groups have on the host beyond those of whole tensors, in `_room`."""

    def __init__(self) -> None:
        self._room = 0.0

    def choose(self, group: Group, flow: GroupFlow, plans: list[TensorPlan]) -> list[TensorPlan]:
        """Return the plans of a group of these with the tier that each tensor comes from."""
        self._room += (flow.sources.get(HOST, 0.0) + NOISE) * group.param_bytes
        sizes = {tensor.name: tensor.param_bytes for tensor in group.tensors}
        hosted = {plan.name for plan in plans if plan.cpu}
        for plan in _most_wanted([plan for plan in plans if not plan.cpu], sizes):
            if sizes[plan.name] <= self._room:
                self._room -= sizes[plan.name]
                hosted.add(plan.name)
        others = {tier: part for tier, part in flow.sources.items() if tier != HOST}
        elsewhere = max(others, key=lambda tier: others[tier])
        return [replace(p, source=elsewhere) if p.has_copy and p.name not in hosted else p for p in plans]


def read_least(problem: Problem, decisions: Decisions) -> Decisions:
    """Return the decisions with as little read from files as the memory that whole tensors leave free allows.

    Rounding keeps to the fractions of each group. Over all groups, tensors that come from files can stay on the device
    where it has room, and the host can hold those that would be read most often.
    """
    sizes = {t.name: t.param_bytes for group in problem.groups if group.in_files for t in group.tensors}
    if not problem.frozen_tiers or not sizes:
        return decisions
    hosted = _fill_host(problem, decisions, sizes)
    staying = _stay_on_device(problem, hosted, sizes)
    return hosted if staying is hosted else _fill_host(problem, staying, sizes)


def _fill_host(problem: Problem, decisions: Decisions, sizes: Mapping[str, int]) -> Decisions:
    """Return the decisions with as many frozen tensors on the host as it has room for, those that return most first.

    Of tensors that return equally often, those that the fractions have on the host come first.
    """
    on_host = _with_hosted(decisions, sizes, sizes.keys(), HOST)
    if host_bytes(problem, on_host) <= problem.host_budget_bytes:
        return on_host
    (tier, *_) = problem.frozen_tiers
    room = problem.host_budget_bytes - host_bytes(problem, _with_hosted(decisions, sizes, (), tier.name))
    hosted = set()
    for plan in _most_wanted(decisions.tensors, sizes):
        if sizes[plan.name] <= room:
            room -= sizes[plan.name]
            hosted.add(plan.name)
    return _with_hosted(decisions, sizes, hosted, tier.name)


def _stay_on_device(problem: Problem, decisions: Decisions, sizes: Mapping[str, int]) -> Decisions:
    """Return the decisions without the absences of tensors in files for which the device has room, largest first."""
    free = _free_bytes(problem, decisions)
    away = [
        (sizes[plan.name], plan.name, gap)
        for plan in decisions.tensors
        if plan.name in sizes and plan.source != HOST
        for gap in plan.gaps
        if gap.back is not None
    ]
    staying: set[tuple[str, TensorGap]] = set()
    for size, name, gap in sorted(away, key=lambda one: (-one[0], one[1], one[2].after)):
        steps = cycle((gap.after + 1) % problem.n_steps, ((gap.back or 0) - 1) % problem.n_steps, problem.n_steps)
        if min((free[step] for step in steps), default=0) >= size:
            staying.add((name, gap))
            for step in steps:
                free[step] -= size
    if not staying:
        return decisions

    def kept(plan: TensorPlan) -> TensorPlan:
        gaps = (replace(gap, back=None) if (plan.name, gap) in staying else gap for gap in plan.gaps)
        return replace(plan, gaps=tuple(gaps))

    return replace(decisions, tensors=tuple(map(kept, decisions.tensors)))


def _free_bytes(problem: Problem, decisions: Decisions) -> list[int]:
    """Return the device's free bytes in each step."""
    schedule = build_schedule(problem, decisions)
    free = [problem.device_budget_bytes] * problem.n_steps
    for action, high in zip(schedule.actions, memory_highs(schedule)):
        free[action.step] = min(free[action.step], problem.device_budget_bytes - high)
    return free


def _most_wanted(plans: Iterable[TensorPlan], sizes: Mapping[str, int]) -> list[TensorPlan]:
    """Return the plans of those tensors that leave, first those that return most often, of these the host's."""

    def rank(plan: TensorPlan) -> tuple[int, bool, int]:
        returns = sum(gap.back is not None for gap in plan.gaps) + (plan.back is not None)
        return -returns, plan.source != HOST, -sizes[plan.name]

    return sorted((plan for plan in plans if plan.has_copy and plan.name in sizes), key=rank)


def _with_hosted(decisions: Decisions, in_files: Collection[str], hosted: Collection[str], elsewhere: str) -> Decisions:
    """Return the decisions with these of the tensors in files from the host, and the others from `elsewhere`."""

    def placed(plan: TensorPlan) -> TensorPlan:
        if plan.name not in in_files or not plan.leaves:
            return plan
        return replace(plan, source=HOST if plan.name in hosted else elsewhere)

    return replace(decisions, tensors=tuple(map(placed, decisions.tensors)))
