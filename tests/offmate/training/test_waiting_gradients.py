"""Behind a gate, gradients of what the device updates wait on the host: plain PyTorch's numbers, whatever happens."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.solver.problem import Group, Problem
from offmate.solver.resources import Resource
from offmate.solver.rounding import groups
from offmate.solver.schedule import Kind, Schedule

import offmate
from offmate.optim.updater import Updater
from offmate.profile import store

from ...accelerator.loops import without_allocator
from ...fuzz.figures import from_hardware_file
from ..parity import AMPLE_BYTES, check, least_bytes
from .test_parity_gate import CLIP, assert_same, decoder, gated, nothing, train
from .test_parity_models import Decoder, token_batches, token_case

STEPS = {"turn_around_steps": 8}


@pytest.fixture
def slow_host() -> Iterator[None]:
    """The host is so slow that the device updates nearly all."""
    with from_hardware_file(), mock.patch.object(store, "_kept", {}):  # nothing else is to take these costs for its own
        cost = Updater.cost
        slow = {"cpu_update_s": 1.0, "cpu_add_s": 1.0}
        with mock.patch.object(Updater, "cost", lambda *given: replace(cost(*given), **slow)):
            yield


@pytest.fixture
def all_wait(slow_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient that may leave does so as soon as it is complete, and returns as late as it can."""

    def waits(problem: Problem, group: Group, flow: Any, allowance: Any, plans: list[Any]) -> list[Any]:
        waiting, returning = problem.waiting(group)
        leave = {"grad_out": waiting[0], "grad_back": returning[-1]} if returning else {}
        return [plan if plan.cpu else replace(plan, **leave) for plan in plans]

    monkeypatch.setattr(groups, "_waits", waits)


def returning(schedule: Schedule) -> list[str]:
    """The tensors whose gradients, or totals, return."""
    return [a.item.name for a in schedule.actions if a.kind is Kind.PREFETCH and a.name.startswith(("g:", "t:"))]


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize(("model", "micro"), [("tied", 1), ("tied", 2), ("llama", 4), ("convolutions", 3)])
def test_all_gradients_wait(model: str, micro: int, tight: bool, all_wait: None) -> None:
    case = replace(gated(model, micro, CLIP), name=f"{model}-{micro}-all-wait", config=STEPS)
    run = check(case, least_bytes(case, None) * 6 // 5 if tight else AMPLE_BYTES, None)
    assert len(returning(run.plan.schedule)) >= 6
    kind = "t:" if micro > 1 else "g:"
    assert all(kind + name in run.plan.schedule.item_bytes for name in returning(run.plan.schedule))


def test_a_plan_sends_gradients_away_by_itself(slow_host: None) -> None:
    """In a budget that all of them together exceed."""
    case = token_case("waiting-clip", lambda: Decoder(tied=True), **CLIP)
    run = check(case, least_bytes(case, None), None)
    assert returning(run.plan.schedule)


def loop(micro: int, budget: int | str = "1GiB") -> tuple[Any, torch.optim.Optimizer]:
    """A compiled decoder whose gradients wait."""
    config = offmate.Config(cache_dir=None, **STEPS)
    model, optimizer = decoder(budget=budget, accumulation_steps=micro, config=config, **CLIP)
    return model, optimizer


def look_around(model: Any, optimizer: Any, step: int, micro: int) -> None:
    """Evaluates and saves before the step, when gradients have left already."""
    if step == 1:
        with torch.no_grad():
            model(**token_batches()[0])
    if step in (1, 2):
        model.state_dict()
        optimizer.state_dict()


@pytest.mark.parametrize("micro", [1, 2])
def test_evaluation_and_saving_between_backward_and_step(micro: int, all_wait: None) -> None:
    expected = train(*decoder(), (micro,) * 4, 0.5, look_around)
    assert_same(expected, train(*loop(micro), (micro,) * 4, 0.5, look_around))


def test_fewer_micro_batches_at_the_end_of_an_epoch(all_wait: None) -> None:
    counts = (3, 1, 3, 2, 3)
    assert_same(train(*decoder(), counts, 0.5, nothing), train(*loop(3), counts, 0.5, nothing))


@pytest.mark.parametrize("micro", [1, 2])
def test_an_iteration_interrupted_at_any_action_of_the_update_phase(micro: int, all_wait: None) -> None:
    """Before the gate nothing was updated; once it is open all updates are made, from gradients scaled once."""
    model, optimizer = loop(micro)
    train(model, optimizer, (micro,), 0.5, nothing)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    after = [train(*decoder(), (micro,) * steps, 0.5, nothing)[1] for steps in (1, 2)]
    actions = model._offmate_session.training.executor.schedule.turn_around
    assert returning(model.offmate.plan.schedule)
    gate = next(i for i, action in enumerate(actions) if action.name == "gate")
    for stop in range(len(actions)):
        model_state, optimizer_state = copy.deepcopy(start)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        for m in range(micro):
            (model(**token_batches()[1 + m]) / micro).backward()
        executor, left = model._offmate_session.training.executor, stop

        def interrupt(action: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

        executor.on_action = interrupt
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
        executor.on_action = None
        optimizer.zero_grad()
        found = model.state_dict()
        done = [all(torch.equal(v, found[k]) for k, v in state.items()) for state in after]
        assert done == [stop <= gate, stop > gate], f"interrupted before {actions[stop]}"


@pytest.mark.parametrize("nth", [0, 3, 10])
@pytest.mark.parametrize("micro", [1, 2])
def test_an_update_that_fails(micro: int, nth: int, all_wait: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host makes what is left, from its own copies of the gradients, of which none is scaled twice."""
    model, optimizer = loop(micro)
    train(model, optimizer, (micro,), 0.5, nothing)
    for m in range(micro):
        (model(**token_batches()[1 + m]) / micro).backward()
    update, seen = Updater.__call__, 0

    def faulty(self: Updater, *given: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == nth + 1:
            raise ArithmeticError("the device broke")
        update(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "__call__", faulty)
        with pytest.raises(offmate.OffmateError, match="the device broke"):
            optimizer.step()
    expected = train(*decoder(), (micro, micro), 0.5, nothing)[1]
    assert [k for k, v in model.state_dict().items() if not torch.equal(v, expected[k])] == []


@pytest.mark.parametrize(("direction", "done"), [("copy_in", 2), ("copy_out", 1)])
def test_a_gradient_whose_copy_fails(
    direction: str, done: int, all_wait: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it. One that does not come back is not lost; one that never arrived holds all updates back."""
    model, optimizer = loop(1)
    train(model, optimizer, (1,), 0.5, nothing)
    start = getattr(EmulatedDevice, direction)
    gradients = model._offmate_session.training.executor.host.grads

    def fails() -> None:
        raise OSError("the link broke")

    def broken(self: EmulatedDevice, target: torch.Tensor, source: torch.Tensor, after: Any, *link: Any) -> Any:
        home = source if direction == "copy_in" else target
        if not any(home is gradient for gradient in gradients.values()):
            return start(self, target, source, after, *link)
        return self._lane(Resource.IN if direction == "copy_in" else Resource.OUT).submit(fails, after)

    with monkeypatch.context() as patch:
        patch.setattr(EmulatedDevice, direction, broken)
        with pytest.raises(offmate.OffmateError, match=r"the copy of the gradient of .*the link broke"):
            model(**token_batches()[1]).backward()
            optimizer.step()
    expected = train(*decoder(), (1,) * done, 0.5, nothing)[1]
    assert [k for k, v in model.state_dict().items() if not torch.equal(v, expected[k])] == []


@pytest.mark.parametrize("micro", [1, 2])
def test_on_an_accelerator(micro: int, sim: Any, all_wait: None) -> None:
    """Copies are late at random, and memory that is let go is poisoned."""
    sim.set_delays(3, 40)
    expected = train(*decoder(), (micro,) * 4, 0.5, nothing)
    with without_allocator():
        config = offmate.Config(cache_dir=None, **STEPS)
        compiled = decoder(budget=1 << 30, device="sim", accumulation_steps=micro, config=config, **CLIP)
        found = train(*compiled, (micro,) * 4, 0.5, nothing)
    assert returning(compiled[0].offmate.plan.schedule)
    assert_same(expected, ([norm.cpu() for norm in found[0]], {k: v.cpu() for k, v in found[1].items()}))
