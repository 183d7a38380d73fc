"""The tier that each frozen tensor comes from: the host as far as it has room, and files for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil

from ..decisions import Decisions, TensorPlan
from ..problem import Group, Problem
from ..resources import HOST
from ..scheduling.emit import host_bytes
from ..solution import GroupFlow
from .knapsack import select
from .walk import NOISE


class Sources:
    """Chooses whole tensors that come from the host: of all groups so far, never more bytes than the fractions.

    State: `_room`, the bytes that the fractions have there beyond those chosen.
    """

    def __init__(self) -> None:
        self._room = 0.0

    def choose(self, group: Group, flow: GroupFlow, plans: list[TensorPlan]) -> list[TensorPlan]:
        """Return the plans of a frozen group with the tier that each tensor comes from."""
        if not flow.sources:
            return plans
        self._room += flow.sources.get(HOST, 0.0) * group.param_bytes
        sizes = _leaving(group, plans)
        total = sum(sizes.values())
        elsewhere = select(sizes, min(total, max(0, ceil(total - self._room - NOISE * total))))
        self._room -= total - sum(sizes[name] for name in elsewhere)
        others = {tier: part for tier, part in flow.sources.items() if tier != HOST}
        return _moved(plans, elsewhere, max(others, key=lambda tier: others[tier]))


def fill_host(problem: Problem, decisions: Decisions) -> Decisions:
    """Return the decisions with as many frozen tensors on the host as it has room for, and no more.

    A copy from the host never takes longer than one from files, which passes the host, too. The program may leave some
    room, as its answer is only within a gap of the best one, and whole tensors may take more of it than fractions do.
    """
    tiers = problem.frozen_tiers
    if not tiers:
        return decisions
    sizes = {t.name: t.param_bytes for group in problem.groups if group.in_files for t in group.tensors}
    leaving = {plan.name: sizes[plan.name] for plan in decisions.tensors if plan.leaves and plan.name in sizes}
    on_host = _from(decisions, leaving, leaving)
    if host_bytes(problem, on_host) <= problem.host_budget_bytes:
        return on_host
    room = problem.host_budget_bytes - host_bytes(problem, decisions)
    hosted = {p.name for p in decisions.tensors if p.name in leaving and p.source == HOST}
    if room < 0 and not problem.host_in_time:
        gone = {name: leaving[name] for name in hosted}
        hosted -= select(gone, min(-room, sum(gone.values())))
    else:
        for name in sorted(leaving.keys() - hosted, key=lambda name: -leaving[name]):
            if leaving[name] <= room:
                room -= leaving[name]
                hosted.add(name)
    return _from(decisions, leaving, hosted, tiers[0].name)


def _from(decisions: Decisions, leaving: Iterable[str], hosted: Iterable[str], elsewhere: str = HOST) -> Decisions:
    """Return the decisions with these of the tensors that leave from the host, and all others from files."""
    on_host, plans = set(hosted), list(decisions.tensors)
    moved = _moved(plans, [name for name in leaving if name not in on_host], elsewhere)
    return replace(decisions, tensors=tuple(replace(p, source=HOST) if p.name in on_host else p for p in moved))


def _leaving(group: Group, plans: Iterable[TensorPlan]) -> Mapping[str, int]:
    sizes = {tensor.name: tensor.param_bytes for tensor in group.tensors}
    return {plan.name: sizes[plan.name] for plan in plans if plan.leaves}


def _moved(plans: list[TensorPlan], names: Iterable[str], tier: str) -> list[TensorPlan]:
    those = set(names)
    return [replace(plan, source=tier) if plan.name in those and plan.source == HOST else plan for plan in plans]
