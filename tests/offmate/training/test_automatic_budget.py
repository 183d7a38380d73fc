"""gpu_budget="auto" on a card: it counts what kernels load, and shrinks if memory is taken before the first batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offmate
from offmate.machines import devices, warm_up

from .test_accelerator import HOST_BYTES, NO_CACHE, adamw, assert_same, built, plain, steps, text

pytestmark = pytest.mark.timeout(120)
GIB = 1 << 30


@pytest.fixture
def cold(monkeypatch):
    """A process that has run no kernel yet."""
    monkeypatch.setattr(warm_up, "_warm", set())


def test_kernels_are_loaded_before_free_memory_is_read(sim, cold, monkeypatch):
    """They take memory outside the allocator."""
    seen = []

    def loading(device, dtype, own=warm_up._step):
        own(device, dtype)
        seen.append((str(device), dtype))
        sim.set_others_bytes(GIB)

    monkeypatch.setattr(warm_up, "_step", loading)
    margin = max(sim.TOTAL_BYTES // 50, 1 << 28)
    assert devices.default_budget_bytes("sim:0") == sim.TOTAL_BYTES - GIB - margin
    assert devices.default_budget_bytes("sim:0") == sim.TOTAL_BYTES - GIB - margin
    assert seen == [("sim:0", torch.float32), ("sim:0", torch.bfloat16)]  # once
    assert sim.memory_allocated() == 0


def test_what_a_step_needs_is_among_them(sim, cold):
    class Names(TorchDispatchMode):
        seen: set[str] = set()  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    state, mode = torch.get_rng_state(), torch.is_grad_enabled()
    with Names() as names:
        warm_up.warm_up(torch.device("sim:0"))
    assert {"mm", "_fused_adamw_"} <= names.seen
    assert any("attention" in name and "backward" in name for name in names.seen)
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled() is mode


def test_a_kernel_that_a_device_lacks_is_left_to_the_model(sim, cold, monkeypatch):
    def lacks(*given, **more):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lacks)
    assert devices.default_budget_bytes("sim:0") > 0


def test_the_margin_is_larger_under_wsl(sim, monkeypatch):
    sim.set_total_bytes(8 * GIB)
    usual = devices.default_budget_bytes("sim:0")
    monkeypatch.setattr(devices, "is_wsl", lambda: True)
    assert devices.default_budget_bytes("sim:0") == 7 * GIB < usual


def automatic():
    model = built("llama")
    optimizer = adamw(model)
    offmate.compile(model, device="sim", cpu_budget=HOST_BYTES, config=NO_CACHE, optimizer=optimizer)
    return model, optimizer


def test_memory_that_others_take_before_the_first_batch_makes_the_budget_smaller(sim, caplog):
    losses, state = plain("llama")
    sim.set_total_bytes(GIB)
    model, optimizer = automatic()
    sim.set_others_bytes(GIB // 2)
    assert steps("llama", model, optimizer) == losses
    assert_same(model, state)
    assert model.offmate.plan.budget_bytes == GIB // 4
    assert sim.max_memory_reserved() <= GIB // 4
    assert 'gpu_budget "auto" now stands for 256 MiB instead of 768 MiB' in caplog.text
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()


def test_a_budget_in_bytes_is_refused_then(sim):
    sim.set_total_bytes(GIB)
    model = built("llama")
    offmate.compile(model, "768MiB", device="sim", cpu_budget=HOST_BYTES, config=NO_CACHE)
    sim.set_others_bytes(GIB // 2)
    with pytest.raises(offmate.DeviceError, match=r"768 MiB, but only 512 MiB"):
        steps("llama", model, adamw(model))


def test_nothing_left_is_an_error_in_words(sim):
    sim.set_total_bytes(GIB)
    model, _ = automatic()
    sim.set_others_bytes(GIB - (100 << 20))  # what is left is less than the margin
    with pytest.raises(offmate.DeviceError, match=r"no memory of .* is left for a plan"):
        model(**text(0))
