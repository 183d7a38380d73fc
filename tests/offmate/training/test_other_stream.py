"""The user's own streams: a plan belongs to the stream on which it was made."""

from __future__ import annotations

import pytest
import torch

import offmate

from ...accelerator.loops import on_sim
from ..loops import batch, compiled, plain, tensors

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def loop(sim, cache_dir):
    with on_sim(100, cache_dir=cache_dir, inputs=batch(0)) as loop:
        sim.set_delays(3, 100)
        loop.steps(0, 1)
        yield loop
        sim.set_delays(0, 0)


def test_a_call_on_another_stream_is_refused_and_training_goes_on(sim, loop):
    other = torch.Stream(device="sim")
    with (
        other,
        pytest.raises(offmate.ProtocolError, match=rf"planned on stream 0 of sim:0, .* stream {other.stream_id}"),
    ):
        loop.forward(1)
    losses = loop.steps(1, 3)
    assert losses == plain().steps(0, 3)[1:]


def test_a_step_on_another_stream_is_refused(sim, loop):
    loop.forward(1).backward()
    with torch.Stream(device="sim"), pytest.raises(offmate.ProtocolError, match=r"optimizer\.step"):
        loop.optimizer.step()
    loop.optimizer.step()
    expected = plain(2)
    wanted = tensors(expected)
    assert all(torch.equal(value.cpu(), wanted[name]) for name, value in tensors(loop).items())


def test_values_are_read_whole_on_any_stream(sim, loop):
    loop.steps(1, 3)
    with torch.Stream(device="sim"):
        found = tensors(loop)
    wanted = tensors(plain(3))
    assert all(torch.equal(found[name].cpu(), wanted[name]) for name in wanted)


def test_all_of_a_loop_may_run_on_a_stream_of_the_users(sim, cache_dir):
    with torch.Stream(device="sim"), on_sim(100, cache_dir=cache_dir, inputs=batch(0)) as loop:
        sim.set_delays(4, 100)
        assert loop.steps(0, 3) == plain().steps(0, 3)
        sim.set_delays(0, 0)


def test_the_emulated_device_has_no_streams():
    loop = compiled("least", 1)
    assert loop.steps(1, 2) == plain().steps(0, 2)[1:]
