"""What comes late or goes wrong on an accelerator: training ends with words, and what the host holds can be read."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from offmate.runtime.devices.streams import StreamDevice

import offmate

from ...accelerator.loops import on_sim
from ..loops import adamw, assert_same, batch, plain, tensors, tiny
from ..session.test_failures import check_goes_on, check_told, check_whole, fails, reference

pytestmark = pytest.mark.timeout(120)
GIB = 1 << 30
N_STEPS = 200
PLACES = 6


@pytest.fixture
def loop(sim, cache_dir):
    """A loop in the least budget, after two steps."""
    with on_sim(100, cache_dir=cache_dir, inputs=batch(0)) as loop:
        loop.steps(0, 2)
        yield loop


def test_200_steps_in_which_copies_and_workers_are_late(sim, loop, monkeypatch):
    """Nothing is blocked and nothing is changed by what is late, at random."""
    chance, update = random.Random(0), StreamDevice.update_on_host

    def late_update(device, work, *given):
        pause_s = chance.random() * 1e-3
        return update(device, lambda: (time.sleep(pause_s), work())[1], *given)

    monkeypatch.setattr(StreamDevice, "update_on_host", late_update)
    sim.set_delays(3, 40)
    reference = plain(2)
    assert loop.steps(2, N_STEPS) == reference.steps(2, N_STEPS)
    sim.set_delays(0, 0)
    assert_same(loop, reference)


# -- in the middle of a step ------------------------------------------------------------------------------------------


def trouble_at(loop, place: int, trouble) -> None:
    """Have something happen before the action at a place of the next iteration."""
    left = iter(range(place))

    def happens(action):
        if next(left, None) is None:
            loop.executor.on_action = None
            trouble()

    loop.executor.on_action = happens


def places(loop) -> list[int]:
    """Actions all over an iteration."""
    count = len(loop.model.offmate.plan.schedule.actions)
    return [count * k // PLACES for k in range(PLACES)]


def test_a_device_that_is_lost_at_any_action(sim, loop):
    """What was updated on the host is whole; what only the device had is named; training asks for a checkpoint."""
    done = 2
    for place in places(loop):
        sim.set_delays(place, 20)
        trouble_at(loop, place, sim.lose)
        error, done = fails(loop, done)
        assert isinstance(error, offmate.DeviceError) and "device lost" in str(error)
        truth, on_host = loop.session.truth, loop.model.offmate.plan.schedule.update_cpu_s.keys()
        assert not truth.lost or not on_host & set(truth.torn)
        found = check_readable(loop)
        for name in on_host:
            assert any(torch.equal(found[name], reference(count)[name]) for count in range(done - 1, done + 2)), name
        if truth.torn:
            with pytest.raises(offmate.OffmateError, match="Load a checkpoint"):
                loop.forward(9)
        sim.lose(False)
        check_goes_on(loop, {done, done + 1})
        done += 3


def check_readable(loop) -> dict[str, torch.Tensor]:
    """All that the host holds, finite; states are whole or none."""
    found = tensors(loop)
    assert all(torch.isfinite(value).all() for value in found.values())
    states = loop.optimizer.state_dict()["state"]
    assert all(state.keys() in ({"step", "exp_avg", "exp_avg_sq"}, set()) for state in states.values())
    return found


@pytest.mark.parametrize("n_steps", [0, 1])
def test_a_lost_device_that_had_updated_everything(sim, n_steps):
    """The host has what it had when the device began, at first or when everything was brought home last."""
    config = offmate.Config(cache_dir=None, updates="device")
    with on_sim(None, cache_dir=None, inputs=batch(0), config=config) as loop:
        loop.steps(0, n_steps)
        expected = check_readable(loop)
        loop.steps(n_steps, n_steps + 2)
        trouble_at(loop, len(loop.model.offmate.plan.schedule.actions) // 2, sim.lose)
        error, _ = fails(loop, n_steps + 2)
        assert isinstance(error, offmate.DeviceError) and "lost with the device" in str(error)
        found = check_readable(loop)
        assert set(loop.session.truth.torn) == {name for name, _ in loop.model.named_parameters()}
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        with pytest.raises(offmate.OffmateError, match=r"lost with the device.*Load a checkpoint"):
            loop.forward(9)
        sim.lose(False)


def test_out_of_memory_at_any_action(sim, loop, caplog):
    """The error shows what was planned beside what the device says; the state can be read, and training goes on."""

    def full():
        torch.empty(1 << 60, dtype=torch.uint8, device="sim")

    done = 2
    for place in places(loop):
        trouble_at(loop, place, full)
        error, _ = fails(loop, done)
        assert isinstance(error, offmate.BudgetExceeded)
        for words in ("ran out of memory: budget", "planned", "in fact, at most", "reserved", "free on the device"):
            assert words in str(error)
        counts = check_whole(loop, range(done - 1, done + 3))
        check_told(loop, error, counts, caplog)
        check_goes_on(loop, counts)
        done = max(counts) + 2


def test_a_state_that_is_loaded_stays_on_the_host(sim, loop):
    reference = plain(3)
    loop.model.load_state_dict(reference.model.state_dict())
    loop.optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
    assert torch.accelerator.memory_allocated() == 0
    for state in loop.optimizer.state.values():
        assert {value.device.type for value in state.values()} == {"cpu"}
    assert loop.steps(3, 5) == reference.steps(3, 5)
    assert_same(loop, reference)


# -- before the first -------------------------------------------------------------------------------------------------


def compile_tiny(budget: int | str) -> torch.nn.Module:
    model = tiny()
    config = offmate.Config(cache_dir=None)
    return offmate.compile(model, budget, optimizer=adamw(model), device="sim", cpu_budget=GIB, config=config)


def test_no_accelerator(monkeypatch, caplog):
    """Asked for by name it is an error that says what is there; else the CPU plays it, and the log says so."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(offmate.DeviceError, match=r"'cuda': torch \S+ sees no accelerator here; use device='emulated'"):
        offmate.compile(tiny(), "1GiB", device="cuda")
    with caplog.at_level("INFO", "offmate"):
        offmate.compile(tiny(), "1GiB")
    assert "the CPU emulates the device" in caplog.text


def test_another_process_fills_the_card(sim):
    sim.set_total_bytes(2 * GIB)
    with pytest.raises(offmate.DeviceError, match=r"gpu_budget is 3 GiB, but simulated accelerator has 2 GiB"):
        compile_tiny("3GiB")
    sim.set_others_bytes(3 * GIB // 2)
    with pytest.raises(offmate.DeviceError, match=r"only 512 MiB .* are free: other processes hold 1\.5 GiB"):
        compile_tiny("1GiB")
    assert compile_tiny("auto")._offmate_session.request.budget_bytes == GIB // 4
    sim.set_others_bytes(2 * GIB)
    with pytest.raises(
        offmate.OffmateError, match=r"no memory of simulated accelerator is left .* other processes hold"
    ):
        compile_tiny("auto")


def test_another_process_fills_the_card_before_the_first_batch(sim):
    sim.set_total_bytes(2 * GIB)
    model = compile_tiny("1GiB")
    sim.set_others_bytes(2 * GIB - (1 << 20))
    with pytest.raises(offmate.DeviceError, match=r"only \S+ MiB .* are free: other processes hold"):
        model(**batch(0))
    sim.set_others_bytes(0)
    model(**batch(0))["loss"].backward()
    model._offmate_session.device.close()
