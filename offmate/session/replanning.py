"""Plans again while a model trains, where storage paths have become slower or faster than its plan counts with."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from ..errors import SolverError, StorageError
from ..planning.planner import how_to_solve
from ..planning.restated import Restated
from ..planning.solving import Solving
from ..plans.plan import Plan
from ..reports.units import format_seconds
from ..runtime.replay.executor import Executor
from ..solver.resources import Path
from ..solver.schedule import Schedule
from ..solver.simulate import simulate
from .preparer import Preparer
from .state_storage import StateStorage
from .variants import Call, Variant

log = logging.getLogger("offmate")

_OFF = 0.1  # part by which rates, and then a plan's prediction, are off before it is planned again
_STEADY = 0.05  # part by which rates may differ from those of the update before
_UPDATES = 3  # in a row with steady rates
_WORTH = 0.02  # part of a step that another plan must save
_WAITS = 20  # updates of other kinds of batches for which a plan that was found is kept
_REST = 10  # times the seconds that a plan took, until the next one may be looked for


class Replanning:
    """Looks after each update whether its plan's prediction still holds, and has another plan made if not.

    A step is simulated with the rates that the storage paths have now. If it is off by more than a tenth, the problem
    is stated anew at the beginning of the next such update, and another process solves it. If what it finds saves more
    than a fiftieth, it is taken between two updates. No number changes by that: on a device of its own each parameter
    keeps the side of its updates.

    State: `_path`, the paths as they were after the update before, and `_steady`, for how many updates they have been
    alike; `_seen`, by executor, the paths with which its plan was last looked at; `_due`, the variants that are to be
    planned again, each when a call of its kind comes; `_solving`, what is being solved, for which variant, and
    `_unused`, the updates since it is; `_before`, the variant that was replaced, until the one instead of it has made
    an update; `_has_rested`, whether the next one may be looked for. Changed by one thread at a time.

    Parameters
    ----------
    given: whether the user gave a plan, which is then kept.
    """

    def __init__(self, preparer: Preparer, storage: StateStorage, given: bool) -> None:
        self._preparer, self._storage = preparer, storage
        self._possible = not given and bool(sys.executable) and not getattr(sys, "frozen", False)
        self._path: Path | None = None
        self._steady = 0
        self._seen: weakref.WeakKeyDictionary[Executor, Path] = weakref.WeakKeyDictionary()
        self._due: list[weakref.ref[Variant]] = []
        self._before: Variant | None = None
        self._unused = 0
        self._solving: tuple[Solving, Restated, Variant] | None = None
        self._has_rested: Callable[[], bool] = lambda: True

    def update_done(self) -> None:
        """Note that an update has ended."""
        variant, now = self._preparer.training, self._storage.path
        if variant is None or now is None or not self._possible:
            return
        same = self._path is not None and abs(_turn_s(now) / _turn_s(self._path) - 1) <= _STEADY
        self._steady, self._path = self._steady + 1 if same else 0, now
        self._before = None
        self._let_go_if_unused()
        lead = variant.lead
        if self._steady >= _UPDATES and self._solving is None and self._has_rested():
            self._look_at(lead, now)

    def _let_go_if_unused(self) -> None:
        """Give up what was found for a kind of batch that does not come any more."""
        if self._solving is None or not self._solving[0].done:
            self._unused = 0
            return
        self._unused += 1
        if self._unused > _WAITS:
            solving, _, variant = self._solving
            self._solving, self._unused = None, 0
            self._has_rested = solving.rested(_REST)
            self._seen.pop(variant.lead.executor, None)  # it is looked at again if it comes

    def _look_at(self, lead: Variant, now: Path) -> None:
        plan = lead.prepared.plan
        if plan.problem is None or not any(plan.stored_bytes):
            return
        seen = self._seen.get(lead.executor) or plan.schedule.rates.paths[now.tier]
        if abs(_turn_s(now) / _turn_s(seen) - 1) <= _OFF:
            return
        self._seen[lead.executor] = now
        if _is_off(plan, now):
            self._due = [due for due in self._due if due() not in (None, lead)] + [weakref.ref(lead)]

    def begin(self, model: torch.nn.Module, call: Call, make_room: Callable[[], None]) -> None:
        """Go on as an update begins: state the problem that is due, or take the plan that was found.

        Parameters
        ----------
        call: its first one. make_room: removes everything from the device.
        """
        if self._solving is not None:
            solving, again, variant = self._solving
            if solving.done and _of_kind(call, variant) is not None:
                self._finish(solving, again, variant)
            return
        for due in self._due:
            waiting = due()
            own = _of_kind(call, waiting) if waiting is not None else None
            if waiting is not None and own is not None:
                self._due.remove(due)
                self._start(model, own, waiting, make_room)
                return

    def _start(self, model: torch.nn.Module, call: Call, variant: Variant, make_room: Callable[[], None]) -> None:
        plan, now = variant.prepared.plan, self._storage.path
        if now is None or not _is_off(plan, now):  # any more
            return
        log.info(
            "a step is predicted to take %s with the storage paths as they are now, and %s was planned: it is planned "
            "again, beside training",
            format_seconds(simulate(_at(plan.schedule, now)).step_s), format_seconds(plan.predicted_step_s),
        )  # fmt: skip
        make_room()
        how = how_to_solve(self._preparer.request.config)
        try:
            again = self._preparer.maker.restate(model, call, plan)
            self._solving = Solving(again.problem, **how), again, variant
        except Exception as error:  # whatever it is, training can go on as it did
            log.warning("the plan stays, since it cannot be made again: %s", error)

    def _finish(self, solving: Solving, again: Restated, variant: Variant) -> None:
        self._solving = None
        self._has_rested = solving.rested(_REST)
        try:
            found = solving.found()
        except SolverError as error:
            log.warning("planning again has failed, so the plan stays: %s", error)
            return
        now = self._storage.path
        if now is None or found.schedule is None:
            return
        plan = again.planned(found)
        before_s, after_s = (simulate(_at(one.schedule, now)).step_s for one in (variant.prepared.plan, plan))
        if after_s > (1 - _WORTH) * before_s:
            log.info(
                "the plan stays: with the storage paths as they are now, a step is predicted to take %s, and another "
                "plan would make it %s",
                format_seconds(before_s), format_seconds(after_s),
            )  # fmt: skip
        elif words := self._why_not(plan):
            log.info("the plan stays: another one would save %s per step, but %s", _saved(before_s, after_s), words)
        else:
            log.info(
                "from this update on, another plan is used: with the storage paths as they are now, a step is "
                "predicted to take %s instead of %s",
                format_seconds(after_s), format_seconds(before_s),
            )  # fmt: skip
            self._before = variant
            self._preparer.replan(variant, plan)

    def goes_back(self, error: StorageError) -> bool:
        """Have the plan from before used again if the one instead of it cannot begin, and say so.

        Returns: whether there is one.
        """
        if self._before is None:
            return False
        log.warning("the plan stays, since the one instead of it cannot begin: %s", error)
        self._preparer.put_back(self._before)
        self._before = None
        return True

    def _why_not(self, plan: Plan) -> str:
        """Say why a plan cannot be taken instead of the one that trains; empty if it can."""
        now = self._storage.path
        then = plan.schedule.rates.paths.get(now.tier) if now is not None else None
        if now is not None and then is not None and abs(_turn_s(now) / _turn_s(then) - 1) > _OFF:
            return "the storage paths have other rates by now"
        if not self._preparer.request.has_room_for(plan.host_bytes):
            return "it needs more RAM than there is now"
        return self._storage.why_no_room_beside(plan.schedule)


def _of_kind(call: Call, variant: Variant) -> Call | None:
    """Return the call as it would be one of a variant's kind; None if it is of another one."""
    own = replace(call, together=variant.kind.together, early=variant.kind.early)
    return own if own.kind == variant.kind else None


def _is_off(plan: Plan, now: Path) -> bool:
    return abs(simulate(_at(plan.schedule, now)).step_s / plan.predicted_step_s - 1) > _OFF


def _saved(before_s: float, after_s: float) -> str:
    return format_seconds(before_s - after_s)


def _turn_s(path: Path) -> float:
    """Return the seconds in which a byte is read and a byte is written."""
    return max(1 / path.in_bytes_per_s, 1 / path.out_bytes_per_s, 2 / path.alike_bytes_per_s)


def _at(schedule: Schedule, path: Path) -> Schedule:
    """Return a schedule on a machine whose storage paths have these rates."""
    tiers = tuple(replace(tier, path=path) if tier.name == path.tier else tier for tier in schedule.rates.tiers)
    return replace(schedule, rates=replace(schedule.rates, tiers=tiers))
