"""On a device that is not the current one: the numbers stay, and nothing waits, allocates or is timed elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from offmate.runtime.current import entered

import offmate
from offmate.machines.stopwatch import clock_of, launching_s

from ...accelerator.loops import on_sim
from ..loops import batch, plain, tensors
from .test_accelerator import HOST_BYTES, NO_CACHE, adamw, assert_same, budget_of, built, text
from .test_accelerator import plain as plain_on_sim

pytestmark = pytest.mark.timeout(120)
SECOND = "sim:1"
SLOW_S = 0.1
STUCK_S = 10


@contextlib.contextmanager
def first_stands_still(sim: ModuleType) -> Iterator[None]:
    """The first device does nothing within a block. What waits for it fails the test, and does not hang."""
    stuck: list[bool] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(sim.held(torch.accelerator.current_stream("sim:0")))
        timer = threading.Timer(STUCK_S, lambda: (stuck.append(True), stack.close()))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
    assert not stuck, "something waited for the first device"


@pytest.mark.parametrize("percent", [100, None])
def test_the_same_numbers_while_the_first_device_stands_still(sim, cache_dir, percent):
    """A wait on the first device's stream would let the second run ahead of its copies."""
    expected = plain()
    losses = expected.steps(0, 4)
    with on_sim(percent, cache_dir=cache_dir, inputs=batch(0), device=SECOND) as loop:
        found = loop.steps(0, 1)
        sim.set_delays(1, 200)
        with first_stands_still(sim):
            found += loop.steps(1, 4)
        assert found == losses
        sim.set_delays(0, 0)
        own, wanted = tensors(loop), tensors(expected)
        assert all(torch.equal(own[name].cpu(), wanted[name]) for name in wanted)
        assert torch.accelerator.current_device_index() == 0


def test_a_plan_with_an_allocator_is_placed_and_kept_on_the_second_device(sim):
    losses, state = plain_on_sim("llama")
    budget = budget_of("llama", "tight")
    sim.empty_cache()
    sim.reset_peak_memory_stats(0)
    model = built("llama")
    optimizer = adamw(model)
    settings = {"device": SECOND, "cpu_budget": HOST_BYTES, "config": NO_CACHE}
    offmate.compile(model, budget, optimizer=optimizer, **settings)
    sim.set_delays(2, 200)
    assert [on_second(model, optimizer, step) for step in range(len(losses))] == losses
    sim.set_delays(0, 0)
    assert_same(model, state)
    assert torch.accelerator.max_memory_reserved(SECOND) <= model.offmate.plan.predicted_peak_bytes <= budget
    assert torch.accelerator.max_memory_allocated("sim:0") == 0
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()


def on_second(model, optimizer, step):
    loss = model(**text(step))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_work_is_timed_where_it_is_done(sim):
    """The stopwatch waits for the second device, and for no other."""
    tensor = torch.ones(8, device=SECOND)
    sim.set_delays(0, 1)
    stream = torch.accelerator.current_stream(SECOND)
    clock = clock_of(torch.device(SECOND))

    def slow():
        with sim.held(stream):
            tensor.add_(1)
            time.sleep(SLOW_S)

    with first_stands_still(sim):
        assert clock(slow) >= SLOW_S / 2
        assert launching_s(lambda: tensor.add_(1), torch.device(SECOND)) >= 0


def test_recorded_moments_are_those_of_the_second_device(sim, cache_dir):
    with on_sim(100, cache_dir=cache_dir, inputs=batch(0), device=SECOND) as loop:
        loop.steps(0, 1)
        with first_stands_still(sim), loop.model.offmate.record():
            loop.steps(1, 3)
            trace = loop.model.offmate.trace
        assert [one.action for walk in trace.recording.walks for one in walk] == [
            *loop.model.offmate.plan.schedule.actions
        ]


def test_the_device_is_entered_for_a_walk_and_left_after_it(sim, cache_dir):
    """Kernels that launch themselves, such as Triton's, take the current device."""
    seen = set()
    with on_sim(100, cache_dir=cache_dir, inputs=batch(0), device=SECOND) as loop:
        loop.steps(0, 1)
        loop.executor.on_action = lambda action: seen.add(torch.accelerator.current_device_index())
        loop.steps(1, 2)
        assert torch.accelerator.current_device_index() == 0
    assert seen == {1}
    with entered(None), entered(torch.device("cpu")):
        assert torch.accelerator.current_device_index() == 0
