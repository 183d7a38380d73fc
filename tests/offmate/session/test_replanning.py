"""A plan is made again while a model trains if storage paths have other rates than it counts with; bits stay."""

from __future__ import annotations

import dataclasses
import errno
import logging
import pickle
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offmate.solver.plan import plan
from offmate.solver.problem import Problem

import offmate
from offmate.planning import planner
from offmate.planning.solving import Solving
from offmate.session import replanning
from offmate.session.maker import Maker

from ...runtime.storage.faulty import Faulty, refused
from . import test_state_storage
from .test_state_storage import KINDS, assert_same, batch, made, one_cache, small_requests, train
from .test_storage_adapts import paths, slowed, use_engine

__all__ = ["one_cache", "paths", "small_requests"]  # the fixtures of those files


def replanning_of(model: Any) -> Any:
    return model._offmate_session.replanning


BUDGETS = {"adamw": (900_000, 1_050_000), "masters": (1_000_000, 1_100_000)}  # of GPU memory, and of RAM
_FOUND: dict[bytes, bytes] = {}  # by problem, so that each is solved once


class Here(Solving):
    """Solves the problem at once, in this process."""

    def __init__(self, problem: Problem, **how: Any) -> None:
        self._began_s = time.monotonic()
        known_as = pickle.dumps(problem)
        if known_as not in _FOUND:
            _FOUND[known_as] = pickle.dumps(plan(problem, **how))
        self._answer = [_FOUND[known_as]]
        self._process: Any = types.SimpleNamespace(poll=lambda: -9)


@pytest.fixture(autouse=True)
def small_and_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models have three layers, and only one test need another process."""
    monkeypatch.setattr(test_state_storage, "LAYERS", 3)
    if "process" not in request.node.name:
        monkeypatch.setattr(replanning, "Solving", Here)


def compiled(paths: Any, kind: str = "adamw", **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    (gpu_budget, cpu_budget), (make, dtype) = BUDGETS[kind], KINDS[kind]
    settings = {"gpu_budget": gpu_budget, "cpu_budget": cpu_budget, **settings}
    return test_state_storage.compiled(paths, make, dtype, **settings)


def waited(model: Any) -> None:
    """Wait for the process that plans again."""
    found, _, _ = replanning_of(model)._solving
    end_s = time.monotonic() + 400
    while not found.done:
        assert time.monotonic() < end_s, "the process takes too long"
        time.sleep(0.01)


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How many times as long each path takes as it was planned; tests change that."""
    factors = {"first": 1.0, "second": 1.0}
    use_engine(monkeypatch, 2)
    slowed(monkeypatch, factors)
    return factors


def until_found(paths: Any, drives: dict[str, float]) -> tuple[Any, Any, offmate.Plan]:
    """Train until the paths are slower and another plan is found; return both sides, and the plan that trains."""
    pair, plain = compiled(paths), made()
    assert train(*pair, range(3)) == train(*plain, range(3))
    before = pair[0].offmate.plan
    drives.update(first=4.0, second=4.0)
    assert train(*pair, range(3, 8)) == train(*plain, range(3, 8))
    return pair, plain, before


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize(("kind", "gated"), [("adamw", False), ("masters", True)])
def test_a_plan_is_made_again_and_taken_between_two_updates(paths, drives, monkeypatch, caplog, kind, gated):
    monkeypatch.setattr(replanning, "_WORTH", -10.0)  # take whatever is found
    caplog.set_level(logging.INFO, "offmate")
    make, dtype = KINDS[kind]
    pair, plain = compiled(paths, kind, **({"max_grad_norm": float("inf")} if gated else {})), made(make, dtype)
    assert train(*pair, range(3), dtype) == train(*plain, range(3), dtype)
    before = pair[0].offmate.plan
    monkeypatch.setattr(planner, "solve_problem", None)  # from now on only the other process searches
    drives.update(first=4.0, second=4.0)
    assert train(*pair, range(3, 8), dtype) == train(*plain, range(3, 8), dtype)
    assert len(said(caplog, "it is planned again, beside training")) == 1
    assert pair[0].offmate.plan is before
    assert train(*pair, range(8, 12), dtype) == train(*plain, range(8, 12), dtype)
    after = pair[0].offmate.plan
    assert after is not before and len(said(caplog, "from this update on, another plan is used")) == 1
    then, now = (one.schedule.rates.paths["storage paths"] for one in (before, after))
    assert then.alike_bytes_per_s / now.alike_bytes_per_s == pytest.approx(4.0)
    assert after.predicted_step_s > 1.1 * before.predicted_step_s
    assert_same(pair, plain)


def test_another_process_plans_while_a_model_trains(paths, drives, monkeypatch):
    monkeypatch.setattr(replanning, "_WORTH", -10.0)
    pair, plain = compiled(paths), made()
    assert train(*pair, range(3)) == train(*plain, range(3))
    before = pair[0].offmate.plan
    drives.update(first=4.0, second=4.0)
    assert train(*pair, range(3, 9)) == train(*plain, range(3, 9))
    waited(pair[0])
    assert train(*pair, range(9, 11)) == train(*plain, range(9, 11))
    assert pair[0].offmate.plan is not before
    assert_same(pair, plain)


def test_a_plan_that_is_as_fast_stays(paths, drives, caplog):
    caplog.set_level(logging.INFO, "offmate")
    pair, plain, before = until_found(paths, drives)
    waited(pair[0])
    session = replanning_of(pair[0])
    restated = session._solving[1]
    same = dataclasses.replace(restated.plan, fingerprint="same")
    session._solving = session._solving[0], _Finds(same), session._solving[2]
    assert train(*pair, range(8, 12)) == train(*plain, range(8, 12))
    assert pair[0].offmate.plan is before
    assert len(said(caplog, "the plan stays: with the storage paths as they are now")) == 1
    assert session._solving is None
    assert train(*pair, range(12, 14)) == train(*plain, range(12, 14))
    assert session._solving is None  # the rates are known
    assert_same(pair, plain)


class _Finds:
    """Stands for a problem for which a known plan is found."""

    def __init__(self, plan: offmate.Plan) -> None:
        self._plan = plan

    def planned(self, found: object) -> offmate.Plan:
        return self._plan


@pytest.mark.parametrize("why", ["fails", "no RAM", "no space", "other rates"])
def test_what_cannot_be_taken_is_said_and_training_goes_on(paths, drives, monkeypatch, caplog, why):
    monkeypatch.setattr(replanning, "_WORTH", -10.0)
    caplog.set_level(logging.INFO, "offmate")
    pair, plain, before = until_found(paths, drives)
    waited(pair[0])
    session, words = pair[0]._offmate_session, ""
    if why == "fails":
        session.replanning._solving[0]._answer[0] = b""
        words = "planning again has failed, so the plan stays: its process ended with status"
    elif why == "no RAM":
        maker = session.preparer.maker
        maker.request = dataclasses.replace(maker.request, host_budget_bytes=1000, automatic_host=True)
        words = "but it needs more RAM than there is now"
    elif why == "no space":
        monkeypatch.setattr(replanning.StateStorage, "why_no_room_beside", lambda self, schedule: "its files need")
        words = "but its files need"
    else:
        drives.update(first=2.0, second=2.0)
        words = "but the storage paths have other rates by now"
    assert train(*pair, range(8, 10)) == train(*plain, range(8, 10))
    assert pair[0].offmate.plan is before and len(said(caplog, words)) == 1
    assert_same(pair, plain)


@pytest.mark.parametrize("error", [OSError("no processes left"), offmate.InfeasibleBudget("too small", budget_bytes=1)])
def test_what_cannot_be_stated_or_started_is_said_and_training_goes_on(paths, drives, monkeypatch, caplog, error):
    def refuses(problem: Problem, **how: Any) -> None:
        raise error

    monkeypatch.setattr(replanning, "Solving", refuses)
    pair, plain = compiled(paths), made()
    assert train(*pair, range(3)) == train(*plain, range(3))
    drives.update(first=4.0, second=4.0)
    assert train(*pair, range(3, 12)) == train(*plain, range(3, 12))
    assert len(said(caplog, f"the plan stays, since it cannot be made again: {error}")) == 1
    assert_same(pair, plain)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_plan_that_finds_no_space_gives_way_to_the_one_before(paths, drives, monkeypatch, caplog, code):
    monkeypatch.setattr(replanning, "_WORTH", -10.0)
    faulty = Faulty()
    use_engine(monkeypatch, 2, faulty)
    pair, plain, before = until_found(paths, drives)
    faulty.faults["fallocate"] = refused(code)
    assert train(*pair, range(8, 12)) == train(*plain, range(8, 12))
    assert pair[0].offmate.plan is before
    assert len(said(caplog, "the plan stays, since the one instead of it cannot begin")) == 1
    assert_same(pair, plain)


def test_only_a_call_of_its_kind_lets_a_plan_be_made_again(paths, drives, monkeypatch, caplog):
    """Batches that follow the decisions for a larger one wait for such a one."""
    monkeypatch.setattr(replanning, "_WORTH", -10.0)
    caplog.set_level(logging.INFO, "offmate")
    pair, plain = compiled(paths, config=offmate.Config(shape_buckets=(16,))), made()

    def same(step: int, rows: int) -> None:
        losses = []
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            loss = model(batch(step, rows=rows))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]

    for step in range(3):
        same(step, 16)
    same(3, 12)
    lead = pair[0]._offmate_session.training.lead
    assert lead.kind.shapes == ((16, 192),)
    drives.update(first=4.0, second=4.0)
    for step in range(4, 11):
        same(step, 12)
    assert not said(caplog, "planned again, beside") and replanning_of(pair[0])._solving is None
    monkeypatch.setattr(planner, "solve_problem", None)  # from now on only the other process searches
    same(11, 16)
    assert len(said(caplog, "planned again, beside")) == 1
    same(12, 12)
    assert pair[0]._offmate_session.training.lead is lead
    same(13, 16)
    assert pair[0]._offmate_session.training.lead is not lead
    same(14, 12)
    assert pair[0]._offmate_session.training.followed is not None
    assert_same(pair, plain)


def test_what_was_found_for_batches_that_no_longer_come_is_given_up(paths, drives, monkeypatch, caplog):
    monkeypatch.setattr(replanning, "_WORTH", -10.0)
    monkeypatch.setattr(replanning, "_REST", 0)
    pair, plain, _ = until_found(paths, drives)
    first = replanning_of(pair[0])._solving
    for model in (pair[0], plain[0]):
        model.drop.p = 0.2
    assert train(*pair, range(8, 12)) == train(*plain, range(8, 12))
    second = pair[0]._offmate_session.training
    assert second is not first[2] and replanning_of(pair[0])._solving is first
    drives.update(first=1.0, second=1.0)
    assert train(*pair, range(12, 32)) == train(*plain, range(12, 32))
    assert pair[0]._offmate_session.training is not second  # it has had its turn
    assert_same(pair, plain)


def test_a_write_that_fails_on_the_way_to_a_plan_gives_way_to_the_one_before(paths, drives, monkeypatch, caplog):
    monkeypatch.setattr(replanning, "_WORTH", -10.0)
    pair, plain, before = until_found(paths, drives)
    make, left = Maker.make, [1]

    def fails_once(self: Maker, *given: Any) -> Any:
        if left:
            left.pop()
            raise offmate.StorageError("pwritev failed")
        return make(self, *given)

    monkeypatch.setattr(Maker, "make", fails_once)
    assert train(*pair, range(8, 11)) == train(*plain, range(8, 11))
    assert not left and pair[0].offmate.plan is before
    assert len(said(caplog, "the plan stays, since the one instead of it cannot begin: pwritev failed")) == 1
    assert_same(pair, plain)


def test_files_beside_those_of_the_plan_are_compared_with_what_is_free(paths, drives, monkeypatch):
    pair = compiled(paths)
    train(*pair, range(2))
    storage, schedule = pair[0]._offmate_session.storage, pair[0].offmate.plan.schedule
    assert storage.why_no_room_beside(schedule) == ""
    monkeypatch.setattr(replanning.StateStorage.why_no_room_beside.__globals__["SystemFiles"], "free_bytes", _no_space)
    assert storage.why_no_room_beside(schedule).endswith("beside those of this one, and 1.96 KiB are free")


def _no_space(self: object, folder: object) -> int:
    return 1024


@pytest.mark.parametrize("change", ["a little", "a moment", "not bound", "given"])
def test_nothing_is_planned_again_without_need(paths, drives, monkeypatch, caplog, change):
    caplog.set_level(logging.INFO, "offmate")
    given: dict[str, Any] = {}
    if change == "given":
        first = compiled(paths)
        train(*first, range(1))
        given = {"plan": first[0].offmate.plan}
        first[0]._offmate_session.storage.close()
    pair, plain = compiled(paths, **given), made()
    assert train(*pair, range(3)) == train(*plain, range(3))
    if change == "a little":
        drives.update(first=1.08, second=1.08)
    if change == "not bound":  # computes take nearly all of the step
        plan = pair[0].offmate.plan
        assert plan.predicted_step_s > 0
        drives.update(first=1.15, second=1.15)
        monkeypatch.setattr(replanning, "_OFF", 0.1)
        monkeypatch.setattr(replanning, "simulate", lambda schedule: plan.simulation)
    if change == "given":
        drives.update(first=4.0, second=4.0)
    for step in range(3, 12):
        if change == "a moment":
            drives.update(first=4.0 if step % 3 else 1.0, second=4.0 if step % 3 else 1.0)
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
    assert replanning_of(pair[0])._solving is None and not said(caplog, "planned again, beside")


def test_accumulated_updates_change_plans_only_between_updates(paths, drives, monkeypatch, caplog):
    monkeypatch.setattr(replanning, "_WORTH", -10.0)
    caplog.set_level(logging.INFO, "offmate")
    pair, plain = compiled(paths, accumulation_steps=3, gpu_budget=1_100_000, cpu_budget=1_400_000), made()

    def update(step: int, between: Callable[[], None] = lambda: None) -> list[list[float]]:
        losses = []
        for model, optimizer in (pair, plain):
            losses.append([])
            for part in range(3):
                torch.manual_seed(10 * step + part)
                loss = model(batch(10 * step + part))["loss"] / 3
                loss.backward()
                losses[-1].append(loss.item())
                if model is pair[0] and part == 0:
                    between()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def same(step: int, between: Callable[[], None] = lambda: None) -> None:
        own, theirs = update(step, between)
        assert own == theirs

    for step in range(3):
        same(step)
    before = pair[0].offmate.plan
    drives.update(first=4.0, second=4.0)
    for step in range(3, 7):
        same(step)
    assert replanning_of(pair[0])._due
    same(7, between=lambda: waited(pair[0]))
    assert pair[0].offmate.plan is before
    same(8)
    assert pair[0].offmate.plan is not before
    same(9)
    assert_same(pair, plain)
