"""Another process solves a problem as this one would, and its end is noticed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from offmate.solver.plan import plan

from offmate.errors import SolverError
from offmate.planning.solving import Solving

from ...solver.random_problems import random_problem

HOW = {"time_limit_s": 60.0, "gap": 0.01, "backend": None}


def waited(found: Solving) -> Solving:
    end_s = time.monotonic() + 400
    while not found.done:
        assert time.monotonic() < end_s, "the process takes too long"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("seed", range(2))
def test_another_process_finds_the_same_plan(seed):
    problem = random_problem(random.Random(seed))
    found, own = waited(Solving(problem, **HOW)).found(), plan(problem, **HOW)
    assert (found.schedule, found.simulation) == (own.schedule, own.simulation)
    assert found.solution.lower_bound_s == own.solution.lower_bound_s


def test_what_fails_there_is_said_here():
    with pytest.raises(SolverError, match="no such solver"):
        waited(Solving(random_problem(random.Random(0)), **{**HOW, "backend": "no such solver"})).found()


def test_a_process_that_is_killed_is_said_by_its_status():
    found: Any = Solving(random_problem(random.Random(0)), **HOW)
    found._process.kill()
    with pytest.raises(SolverError, match="its process ended with status -9"):
        waited(found).found()


def test_a_process_ends_with_what_waits_for_it():
    found: Any = Solving(random_problem(random.Random(0)), **HOW)
    process, folder = found._process, found.close.peek()[2][1]
    assert Path(folder).is_dir()
    del found
    assert process.wait(timeout=60) == -9
    assert not Path(folder).exists()


def test_nothing_is_left_of_it_once_it_is_done():
    found: Any = waited(Solving(random_problem(random.Random(0)), **HOW))
    assert not Path(found.close.peek()[2][1]).exists()
    assert found._process.returncode == 0


GROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
SHOWS_PRIORITY = """
import os
from pathlib import Path
from offmate.solver.own_process import let_training_go_first
group = Path("/proc/self/autogroup")
before = group.read_text()
let_training_go_first()
print(os.getpriority(os.PRIO_PROCESS, 0), group.read_text() == before, *group.read_text().split()[-1:])
"""


@pytest.mark.skipif(
    not GROUPS.exists() or GROUPS.read_text().strip() != "1", reason="the system does not schedule sessions as groups"
)
def test_training_goes_first_where_sessions_share_the_cores():
    code = [sys.executable, "-c", SHOWS_PRIORITY]
    leads = subprocess.run(code, capture_output=True, text=True, check=True, start_new_session=True).stdout
    assert leads.split() == ["19", "False", "19"]
    one_of_ours = subprocess.run(code, capture_output=True, text=True, check=True).stdout
    assert one_of_ours.split()[:2] == ["19", "True"]


def test_folders_of_modules_may_be_paths(monkeypatch):
    monkeypatch.setattr(sys, "path", [*map(Path, sys.path), Path("/nowhere")])
    assert waited(Solving(random_problem(random.Random(0)), **HOW)).found().schedule is not None


def test_it_rests_as_many_times_as_it_took():
    found = Solving(random_problem(random.Random(0)), **HOW)
    assert found.rested(0.0)()
    assert not waited(found).rested(1e6)()
