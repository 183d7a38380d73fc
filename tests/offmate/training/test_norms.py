"""Norms of gradients are taken where these become complete, with plain PyTorch's bits, and the plan counts them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.runtime.replay.gate import Gate
from offmate.runtime.replay.norms import Norms

import offmate

from ...accelerator.loops import without_allocator
from ...fuzz.figures import from_hardware_file
from ..parity import AMPLE_BYTES, HOST_BYTES, check
from .test_parity_gate import CLIP, assert_same, decoder, gated, least_of, nothing, train
from .test_parity_models import token_batches


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """How often each norm was taken before the gate, or by a worker; and by the training thread that opens it."""
    found: dict[str, Counter[str]] = {"before": Counter(), "gate": Counter()}
    opens, takes, opening = Gate.open, Norms.take, set[int]()

    def opened(self: Gate) -> None:
        opening.add(threading.get_ident())
        opens(self)
        opening.clear()

    def noted(self: Norms, gradients: dict[str, torch.Tensor]) -> None:
        found["gate" if threading.get_ident() in opening else "before"].update(gradients.keys())
        takes(self, gradients)

    monkeypatch.setattr(Gate, "open", opened)
    monkeypatch.setattr(Norms, "take", noted)
    return found


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_every_norm_is_taken_once_and_before_the_gate(micro: int, tight: bool, taken: Any) -> None:
    """That of tied weights when their last part is added; those of totals with the last micro-batch."""
    gate = {"accumulation_steps": micro, **CLIP}
    compiled = decoder(budget=least_of(**gate) if tight else "1GiB", **gate)
    assert_same(train(*decoder(), (micro,) * 3, 0.5, nothing), train(*compiled, (micro,) * 3, 0.5, nothing))
    names = {name for name, _ in compiled[0].named_parameters()}
    assert taken == {"before": dict.fromkeys(names, 3), "gate": Counter()}


def test_totals_that_an_early_end_leaves_incomplete_are_measured_at_the_gate(taken: Any) -> None:
    compiled = decoder(budget="1GiB", accumulation_steps=3, **CLIP)
    assert_same(train(*decoder(), (3, 2, 3), 0.5, nothing), train(*compiled, (3, 2, 3), 0.5, nothing))
    names = {name for name, _ in compiled[0].named_parameters()}
    assert taken == {"before": dict.fromkeys(names, 2), "gate": dict.fromkeys(names, 1)}


def test_the_last_norm_stays_while_the_next_forward_takes_another_plan() -> None:
    found: list[Any] = []
    norms: list[torch.Tensor] = []
    model, optimizer = decoder(budget="1GiB", **CLIP)
    plain, plain_optimizer = decoder()
    for step in range(3):
        batch = {name: value[:, : (None, 4)[step % 2]] for name, value in token_batches()[step].items()}
        for one in (model, plain):
            loss = one(**batch)
            if one is model:
                found.append(model.offmate.grad_norm)
            loss.backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
        assert torch.equal(model.offmate.grad_norm, expected)
        norms.append(expected)
    assert found[0] is None
    assert list(map(torch.equal, found[1:], norms)) == [True, True]


def test_a_gradient_from_outside_the_plan_counts(taken: Any) -> None:
    """A loss term on a parameter comes after the norms of the model's own gradients were taken."""

    def decay(model: Any, optimizer: Any, step: int, micro: int) -> None:
        if step == 1:
            (0.1 * next(model.parameters()).square().sum()).backward()

    compiled = decoder(budget="1GiB", **CLIP)
    assert_same(train(*decoder(), (1,) * 3, 0.5, decay), train(*compiled, (1,) * 3, 0.5, decay))
    assert taken["gate"]


@pytest.mark.parametrize("micro", [1, 3])
def test_with_two_threads(micro: int, two_threads: None) -> None:
    """The host's worker has one, and sums up as the training thread would."""
    check(replace(gated("llama", micro, CLIP), name=f"two-threads-{micro}"), AMPLE_BYTES, None)


def test_norms_whose_bits_depend_on_threads_are_left_to_the_training_thread(two_threads: None) -> None:
    """Kernels share float16 tensors among threads, and add up their parts."""
    generator = torch.Generator().manual_seed(1)
    total = torch.randn(1 << 20, generator=generator).to(torch.float16)
    model, _ = decoder(budget="1GiB", accumulation_steps=2, **CLIP)
    model(**token_batches()[0]).backward()
    norms = model._offmate_session.training.executor._norms
    half, single = [name for name, _ in model.named_parameters()][:2]
    norms.begin(last=True)
    torch.set_num_threads(1)  # as a worker has it
    norms.on_worker(half, total)
    norms.on_worker(single, total.float())
    assert norms._found.keys() == {single}
    norms.begin(last=True)  # now the training thread has no more
    norms.on_worker(half, total)
    assert norms._found.keys() == {half}


@pytest.mark.parametrize("micro", [1, 2])
def test_on_an_accelerator_norms_are_the_accelerators(micro: int, sim: Any, taken: Any) -> None:
    sim.set_delays(3, 40)
    gate = {"accumulation_steps": micro, **CLIP}
    with without_allocator():
        compiled = decoder(budget=1 << 30, device="sim", **gate)
        found = train(*compiled, (micro,) * 4, 0.5, nothing)
    expected = train(*decoder(), (micro,) * 4, 0.5, nothing)
    assert_same(expected, ([norm.cpu() for norm in found[0]], {k: v.cpu() for k, v in found[1].items()}))
    assert not taken["gate"]


def test_the_plan_counts_them_where_they_are_taken() -> None:
    with from_hardware_file():
        found = {}
        for clip, micro in ((None, 1), (0.5, 1), (None, 3), (0.5, 3)):
            model, optimizer = decoder()
            found[clip, micro] = offmate.plan(
                model, "1GiB", example_inputs=token_batches()[0], optimizer=optimizer, device="emulated",
                cpu_budget=HOST_BYTES, max_grad_norm=clip, accumulation_steps=micro,
                config=offmate.Config(cache_dir=None),
            ).problem  # fmt: skip
    norms_s = sum(group.device_update_s for group in found[0.5, 1].groups) / 7
    assert [sum(group.norm_s for group in problem.groups) for problem in found.values()] == [
        0.0, pytest.approx(norms_s), 0.0, 0.0,
    ]  # fmt: skip
    for side, update in (("cpu_add_s", "cpu_update_s"), ("device_add_s", "device_update_s")):
        added_s = [sum(getattr(group, side) for group in found[clip, 3].groups) for clip in (0.5, None)]
        additions = 3 if side == "cpu_add_s" else 2  # the device's first gradient becomes the total without one
        whole_s = sum(getattr(group, update) for group in found[0.5, 3].groups) / 7
        assert additions * (added_s[0] - added_s[1]) == pytest.approx(whole_s)
    assert 0 < found[0.5, 1].gate_s < 0.1 * norms_s
    assert found[None, 3].gate_s == 0
