"""Problems that are not solved again: many tests ask for the same plan, and to find it takes most of their time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from offmate.solver.plan import Planned, plan
from offmate.solver.problem import Problem
from offmate.solver.refine import Gain, Refinement
from offmate.solver.refinements import LADDER as ALL_PASSES
from offmate.solver.refinements import InTime, OtherSteps, Trials, Whole
from offmate.solver.rounding import least_host

from offmate.planning import planner, refusal, subject
from offmate.plans import sweep

# The others take most of the time, and the schedules that they find consist of the same actions.
QUICK = tuple(one for one in ALL_PASSES if not isinstance(one, Whole | OtherSteps | Trials | InTime))
TIMED = tuple(one for one in ALL_PASSES if not isinstance(one, Whole | OtherSteps | Trials))

_REMEMBERED = 64  # problems whose plans a process keeps
_GAP = 0.1  # to the fewest bytes on the host; what is nearer takes three times as long


@functools.lru_cache(maxsize=_REMEMBERED)
def _known(problem: Problem, how: tuple[tuple[str, Any], ...]) -> tuple[Planned, list[Gain]]:
    gains: list[Gain] = []
    return plan(problem, report=gains.append, **dict(how)), gains


def _remembered(problem: Problem, report: Callable[[Gain], None], **how: Any) -> Planned:
    found, gains = _known(problem, tuple(sorted(how.items())))
    for gain in gains:
        report(gain)
    return found


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Inside, the planner asks for no plan that this process has made already; plans are those that users get."""
    with mock.patch.object(planner, "solve_problem", _remembered):
        yield


def _once(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its answers kept in the folder of the run, if there is one; see tests/conftest.py.

    The keys are what is given in words: floats and bytes of a problem are in them to the last digit.
    """

    def asked(problem: Problem, **how: Any) -> Any:
        if "OFFMATE_TESTS_SOLVED" not in os.environ:
            return function(problem, **how)
        question = repr((name, problem, sorted(how.items())))
        answer = Path(os.environ["OFFMATE_TESTS_SOLVED"], hashlib.sha256(question.encode()).hexdigest())
        if not answer.exists():
            writing = answer.with_name(f"{answer.name}.{os.getpid()}")
            writing.write_bytes(pickle.dumps(function(problem, **how)))
            writing.replace(answer)
        return pickle.loads(answer.read_bytes())

    return asked


# What is replaced, as users have it.
_PLACES = ((planner, "solve_problem"), (sweep, "solve_problem"), (least_host, "_GAP"), (subject, "least_budget"),
           (refusal, "least_budget"), (refusal, "planned_host"))  # fmt: skip
_AS_USERS = [(module, name, getattr(module, name)) for module, name in _PLACES]


def _reporting(name: str, ladder: tuple[Refinement, ...]) -> Callable[..., Planned]:
    plan_once = _once(name, functools.partial(plan, ladder=ladder))

    def reported(problem: Problem, report: Callable[[Gain], None] = lambda gain: None, **how: Any) -> Planned:
        found: Planned = plan_once(problem, **how)
        for gain in found.gains:
            report(gain)
        return found

    return reported


def _with(solve: Callable[..., Planned]) -> list[Any]:
    return [solve, solve, _GAP, _once("least", subject.least_budget), _once("least", refusal.least_budget),
            _once("host", refusal.planned_host)]  # fmt: skip


_QUICKLY, _TIMED = _with(_reporting("plan", QUICK)), _with(_reporting("timed plan", TIMED))


@contextlib.contextmanager
def _instead(found: list[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for (module, name), own in zip(_PLACES, found, strict=True):
            stack.enter_context(mock.patch.object(module, name, own))
        yield


def solved_once(timed_moves: bool = False) -> contextlib.AbstractContextManager[None]:
    """Inside, the planner leaves out the passes that take longest, and no process of a run asks what another has.

    Parameters
    ----------
    timed_moves: whether list scheduling is not left out.
    """
    return _instead(_TIMED if timed_moves else _QUICKLY)


def solved_as_for_users() -> contextlib.AbstractContextManager[None]:
    """Inside, the planner makes all passes again, whatever is replaced around it."""
    return _instead([own for *_, own in _AS_USERS])
