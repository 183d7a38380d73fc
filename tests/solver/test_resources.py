"""Rates, tiers and workers that contradict themselves are named, in problems and in schedules."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest
from offmate.solver.problem import ProblemError
from offmate.solver.resources import Path, Rates, Tier, Worker
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.text import from_dict, to_dict

from .random_problems import random_problem
from .tiny_schedule import tiny_schedule

PEER = Path("peer", 1.0, 1.0, 1.0)
FAULTS = {
    "in_bytes_per_s is 0, must be above 0 and finite": {"in_bytes_per_s": 0},
    "out_bytes_per_s is inf, must be": {"out_bytes_per_s": inf},
    "manage_s is 'x', must be finite": {"manage_s": "x"},
    "host_memory_bytes_per_s is -1.0, must be finite and not negative": {"host_memory_bytes_per_s": -1.0},
    "rates: per_copy_s is -1.0, must be finite and not negative": {"per_copy_s": -1.0},
    "tier peer: per_copy_s is inf, must be": {"tiers": (Tier(replace(PEER, per_copy_s=inf), 1),)},
    "worker_bytes_per_s is nan, must be": {"worker_bytes_per_s": float("nan")},
    "tier peer: both_bytes_per_s is inf": {"tiers": (Tier(replace(PEER, both_bytes_per_s=inf), 1),)},
    "tier peer: capacity_bytes is -1": {"tiers": (Tier(PEER, -1),)},
    "need distinct names, found 'host', 'host'": {"tiers": (Tier(replace(PEER, tier="host"), 1),)},
    "need distinct names, found 'host', 'peer', 'peer'": {"tiers": (Tier(PEER, 1),) * 2},
    "worker 'cpu': needs a name of its own": {"workers": (Worker("cpu", ("update-cpu",)),)},
    "worker 'copy in': needs a name": {"workers": (Worker("copy in", ("update-cpu",)),)},
    "worker '': needs a name": {"workers": (Worker("", ("update-cpu",)),)},
    "does 'updat-cpu'; each of update-cpu, accumulate-cpu": {"workers": (Worker("a", ("updat-cpu",)),)},
    "worker 'b': does 'update-cpu'": {"workers": (Worker("a", ("update-cpu",)), Worker("b", ("update-cpu",)))},
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_contradicts_itself_is_named(message):
    problem, schedule = random_problem(random.Random(0)), tiny_schedule()
    with pytest.raises(ProblemError, match=message):
        replace(problem, rates=replace(problem.rates, **FAULTS[message]))
    with pytest.raises(ScheduleError, match=message):
        validate(replace(schedule, rates=replace(schedule.rates, **FAULTS[message])))


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"tiers": [{"capacity_bytes": 1}]}, r"rates.tiers\[0\]: lacks 'path'"),
        ({"workers": [{"name": "a", "does": "update-cpu"}]}, r"rates.workers\[0\].does: expected a list"),
        ({"workers": [{"name": 3, "does": []}]}, r"rates.workers\[0\].name: expected str"),
        ({"shared_cores": "no"}, "rates.shared_cores: expected bool"),
        ({"in_bytes_per_s": 10**400}, "rates.in_bytes_per_s: .* is too large a number"),
    ],
)
def test_rates_in_a_file_that_cannot_be_read(damage, message):
    data = to_dict(tiny_schedule())
    with pytest.raises(ScheduleError, match=message):
        from_dict(data | {"rates": data["rates"] | damage})


def test_seconds_that_are_none():
    data = to_dict(tiny_schedule())
    data["computes"]["F0"]["seconds"] = ""
    with pytest.raises(ScheduleError, match=r"computes\['F0'\]\.seconds: expected float, found ''"):
        from_dict(data)


def test_rates_say_nothing_of_tiers_where_there_are_none():
    rates = Rates(1.0, 2.0, 3.0)
    assert "tiers" not in rates.to_dict() and "workers" not in rates.to_dict()


def test_a_limit_of_host_memory_is_kept_and_one_that_is_not_there_is_not_written():
    limited = Rates(1.0, 2.0, 3.0, host_memory_bytes_per_s=2.5, worker_bytes_per_s=1.5)
    schedule = replace(tiny_schedule(), rates=limited)
    assert from_dict(to_dict(schedule)).rates == limited
    assert limited.host_memory_shares == {"copy in": 0.4, "copy out": 0.8, "cpu": 0.6}
    assert limited.with_endless_host_memory.host_memory_shares == {}
    assert not any("host_memory" in name or "worker" in name for name in Rates(1.0, 2.0, 3.0).to_dict())


@pytest.mark.parametrize("both", [6.0, 8.0, 10.0, 20.0])
def test_seconds_of_both_links_are_those_of_their_rate_together(both):
    path = Path("peer", 6.0, 4.0, both)
    assert path.seconds(1 / 6, 1 / 4) == pytest.approx(2 / path.alike_bytes_per_s)
    assert path.seconds(3.0, 0.0) == path.seconds(0.0, 3.0) == 3.0
