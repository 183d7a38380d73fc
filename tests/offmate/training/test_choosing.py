"""Changing between plans with and without updates before the gate: plain PyTorch's bits, whenever it happens."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from offmate.runtime.replay.executor import Executor
from offmate.runtime.replay.speculation import _Log

import offmate
from offmate.plans.break_even import BreakEven

from ..loops import adamw, batch, tiny
from .speculating import CONFIG, early, own_cores
from .test_speculation import INF, Trained, forced, low_batch, low_precision, masters, warm

FIGURES = BreakEven(gated_s=1.0, kept_s=0.8, missed_s=1.2, switch_s=0.0, log_bytes=1000)  # begins after 5, ends after 5
CALM, CLIPPED = 1e-3, 1e4  # of the loss, whose gradients have norms around 1
AUTO = {**CONFIG, "speculate": "auto"}


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps of a tiny model are too short to compare, so they are said to take what `FIGURES` has."""
    monkeypatch.setattr("offmate.session.choice.break_even", lambda gated, early: FIGURES)
    with own_cores():
        yield


def runs_early(model: Any) -> bool:
    """Whether the plan that trained last is the one that may have updates before the gate."""
    return bool(model._offmate_session.training.kind.early)


def steps(trained: Trained, scales: list[float], start: int = 0) -> list[bool]:
    """Make steps with these factors of the loss; return which of them ran with updates before the gate."""
    found = []
    for number, scale in enumerate(scales, start):
        trained.loss_scale = scale
        trained.step(number)
        found.append(runs_early(trained.model))
    return found


THERE_AND_BACK = [CLIPPED] * 3 + [CALM] * 30 + [CLIPPED] * 10 + [CALM] * 40


PAIRS = [
    ("ample", 1, False, "host"), ("least", 2, False, "auto"), ("least", 1, True, "host"), ("ample", 2, True, "auto"),
]  # fmt: skip


@pytest.mark.parametrize(("budget", "micro", "low", "updates"), PAIRS)
def test_there_and_back_and_there_again(
    budget: str, micro: int, low: bool, updates: str, caplog: pytest.LogCaptureFixture
) -> None:
    size = 1 << 30
    if budget == "least":
        size = least_bytes(micro, low, updates)
    trained = Trained(micro, 1.0, low, speculate="auto", budget=size, updates=updates)
    with caplog.at_level(logging.INFO, "offmate"):
        found = steps(trained, THERE_AND_BACK)
    changes = [n for n, (one, other) in enumerate(itertools.pairwise(found), 1) if one != other]
    assert not found[0] and len(changes) == 3, changes
    trained.assert_same()
    said = [record.getMessage() for record in caplog.records if "From the next step on" in record.getMessage()]
    assert len(said) == 3 and (updates == "auto" or early(trained.model.offmate.plan.schedule))
    assert "updates before the gate are faster if fewer than 50 % are" in said[0]
    assert "the CPU updates before it: 800 ms predicted" in said[0] and "updates wait for it again" in said[1]


def least_bytes(micro: int, low: bool, updates: str) -> int:
    optimizer_of, model, given = (masters, low_precision(), low_batch(0)) if low else (adamw, tiny(), batch(0))
    plan = offmate.plan(
        model, 1 << 30, example_inputs=given, optimizer=optimizer_of(model), max_grad_norm=1.0, device="emulated",
        accumulation_steps=micro, cpu_budget=1 << 30,
        config=offmate.Config(**{**AUTO, "cache_dir": None, "updates": updates}),
    )  # fmt: skip
    return plan.least_budget_bytes


def test_micro_batches_that_run_block_by_block_change_too() -> None:
    trained = Trained(3, 1.0, low=False, speculate="auto", accumulation_order="by block")
    found = steps(trained, THERE_AND_BACK[:40])
    assert found[0] is found[-1] is False and any(found)
    assert trained.model.offmate.plan.schedule.per_step == 3
    trained.assert_same()


def test_an_update_runs_as_it_began_whatever_the_shapes_of_its_batches() -> None:
    """The batches of an update take turns between two shapes; each has plans of both kinds."""
    trained = Trained(2, 1.0, low=False, speculate="auto")
    whole = trained.batch
    trained.batch = lambda n: {key: value[: 8 - 2 * (n % 2)] for key, value in whole(n).items()}
    assert any(steps(trained, THERE_AND_BACK[:36]))
    trained.assert_same()


def test_a_scaler_that_skips_counts_as_a_miss() -> None:
    scalers = tuple(torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000) for _ in range(2))
    trained = Trained(1, INF, low=False, speculate="auto", scalers=scalers)
    found = steps(trained, [CALM] * 12)
    assert found[-1]
    whole = trained.batch
    trained.batch = lambda n: {**whole(n), "x": whole(n)["x"] * INF}
    found = steps(trained, [CALM] * 12, start=12)
    assert not found[-1] and trained.model._offmate_session.choice.clipping.steps == (12, 24)
    trained.batch = whole
    steps(trained, [CALM] * 3, start=24)
    trained.assert_same()


def test_what_undoes_updates_for_other_reasons_counts_where_they_wait_too() -> None:
    """A rate that is set between backward() and step() would undo every update, so that they never come early."""
    trained = Trained(1, INF, low=False, speculate="auto")
    for number in range(20):
        trained.step(number, between=warm)
    assert trained.model._offmate_session.choice.clipping.steps == (20, 20)
    assert not runs_early(trained.model)
    trained.assert_same()


@pytest.mark.parametrize("left", [0, 3, 12])
@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_change_that_is_interrupted_leaves_everything_whole(
    direction: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while one plan's tensors leave the device, or in the first forward of the other; the loop then goes on."""
    trained = Trained(1, 1.0, low=False, speculate="auto")
    model, scales, number = trained.model, [CALM] * 40 if direction == "there" else [CALM] * 12 + [CLIPPED] * 40, 0
    for trained.loss_scale in scales:
        was, clipping = runs_early(model) if number else False, model._offmate_session.choice.clipping
        trained.step(number)
        number += 1
        if clipping.early != was and clipping.early is (direction == "there"):
            break
    before = {name: value.clone() for name, value in trained.plain.state_dict().items()}
    stop_in(monkeypatch, left)
    with pytest.raises(KeyboardInterrupt):
        model(**batch(number))
    monkeypatch.undo()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with own_cores(), monkeypatch.context() as again:
        again.setattr("offmate.session.choice.break_even", lambda gated, early: FIGURES)
        steps(trained, [trained.loss_scale] * 3, start=number)
    assert runs_early(model) is (direction == "there")
    trained.assert_same()


def stop_in(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Interrupt as tensors leave (0), or after so many actions of the next forward."""
    if not left:
        sync = Executor.sync

        def interrupted(self: Any) -> None:
            sync(self)
            raise KeyboardInterrupt

        monkeypatch.setattr(Executor, "sync", interrupted)
        return
    take, taken = Executor._take, 0

    def counted(self: Any, action: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == left:
            raise KeyboardInterrupt
        take(self, action)

    monkeypatch.setattr(Executor, "_take", counted)


@pytest.mark.parametrize("inside", ["a look", "a miss"])
def test_a_signal_inside_an_undo_waits_for_its_end(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the old values are back when it comes."""
    trained = forced(monkeypatch, clip=INF if inside == "a look" else 1e-3)
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    put_back, sent = _Log.put_back, 0

    def interrupted(self: Any, host: Any, name: str) -> None:
        nonlocal sent
        host.params[name].copy_(self.memory[""])
        if not sent:
            os.kill(os.getpid(), signal.SIGINT)
        sent += 1
        put_back(self, host, name)

    monkeypatch.setattr(_Log, "put_back", interrupted)
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    trained.model(**batch(1))["loss"].backward()
    with pytest.raises(KeyboardInterrupt):
        if inside == "a look":
            trained.model.state_dict()
        else:
            trained.optimizers[1].step()
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:  # one that a worker has sent arrives at any moment
            trained.model.state_dict()
    assert sent
    trained.plain(**batch(1))["loss"].backward()
    torch.nn.utils.clip_grad_norm_(trained.plain.parameters(), trained.clip)
    trained.optimizers[0].step()
    found = trained.model.state_dict()
    after = trained.plain.state_dict()
    whole = [all(torch.equal(value, found[name]) for name, value in state.items()) for state in (before, after)]
    assert sum(whole) == 1, whole


def test_a_given_plan_waits_and_the_other_is_made_beside_it() -> None:
    model, config = tiny(), offmate.Config(**{**AUTO, "cache_dir": None})
    given: dict[str, Any] = {"max_grad_norm": 1.0, "device": "emulated", "cpu_budget": 1 << 30, "config": config}
    optimizer = adamw(model)
    plan = offmate.plan(model, 1 << 30, example_inputs=batch(0), optimizer=optimizer, **given)
    assert not early(plan.schedule)
    offmate.compile(model, 1 << 30, optimizer=optimizer, plan=plan, **given)
    model(**batch(0))["loss"].backward()
    optimizer.step()
    plans = model._offmate_session.preparer.plans
    assert [bool(early(one.schedule)) for one in plans] == [True, False]
    assert plans[1].schedule == plan.schedule


def test_a_new_shape_with_nothing_to_gain_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(1, 1.0, low=False, speculate="auto")
    assert steps(trained, [CALM] * 12)[-1]
    monkeypatch.setattr("offmate.session.choice.break_even", lambda gated, early: BreakEven(1.0, 1.0, 1.2, 0.0, 0))
    whole = trained.batch
    trained.batch = lambda n: {key: value[:4] for key, value in whole(n).items()}
    assert steps(trained, [CALM] * 2, start=12) == [False, False]
    trained.batch = whole
    assert steps(trained, [CALM] * 2, start=14) == [True, True]
    trained.assert_same()


def test_a_plan_that_was_dropped_and_made_again_is_chosen_by_the_same_figures() -> None:
    """Three shapes in room for two: the plan that updates early is dropped while its shape waits."""
    trained, number = Trained(1, 1.0, False, speculate="auto", max_plans=2), itertools.count()
    whole = trained.batch

    def step(size: int, scale: float) -> None:
        trained.batch = lambda k: {name: value[:size] for name, value in whole(k).items()}
        trained.loss_scale = scale
        trained.step(next(number))

    for size in (8, 6, 8, 6, 5, 8, 6):
        step(size, CLIPPED)
    for scale, early_then in ((CALM, True), (CLIPPED, False)):
        for _ in range(30):
            step(8, scale)
        assert runs_early(trained.model) is early_then
    trained.assert_same()
