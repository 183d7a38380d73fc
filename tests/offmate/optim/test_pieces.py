"""Optimizer states that leave and return in pieces: plain PyTorch's numbers, whatever moves and whatever fails."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.solver.schedule import Kind

import offmate
from offmate.optim.masters import with_master_weights
from offmate.optim.updater import Updater

from ...accelerator.loops import without_allocator
from ..loops import Loop, assert_same, tensors

optim = torch.optim
STEPS = 4
AMPLE = 1 << 30
SETTINGS = {"cpu_budget": 1 << 30, "config": offmate.Config(cache_dir=None, updates="device")}
EMBEDDING = "embedding.weight"
WIDTH, WORDS = 36, 301  # the last piece is no multiple of what a processor takes at once


class Tied(torch.nn.Module):
    """A language model whose embedding is most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embedding(x)
        for layer in self.layers:
            h = h + torch.nn.functional.gelu(layer(h))
        scores = torch.nn.functional.linear(h, self.embedding.weight)
        return {"loss": torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), y.flatten())}


def words(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, WORDS, (4, 24), generator=generator) for name in "xy"}


class Words(Loop):
    def forward(self, step: int) -> torch.Tensor:
        return self.model(**words(step))["loss"]


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda params: optim.AdamW(params, lr=1e-2, fused=True),
    "amsgrad": lambda params: optim.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1, foreach=True),
    "momentum": lambda params: optim.SGD(params, lr=1e-1, momentum=0.9, nesterov=True, fused=True),
    "nadam": lambda params: optim.NAdam(params, lr=1e-2),
    "radam": lambda params: optim.RAdam(params, lr=1e-2, foreach=False),
    "adamax": lambda params: optim.Adamax(params, lr=1e-2),
    "adadelta": lambda params: optim.Adadelta(params, lr=1.0),
    "rmsprop": lambda params: optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.5),
    "rprop": lambda params: optim.Rprop(params, lr=1e-3),
    "masters": lambda params: with_master_weights(optim.AdamW)(params, lr=1e-2, fused=True),
}


def words_loop(name: str = "adamw") -> Words:
    torch.manual_seed(0)
    model = Tied().to(torch.bfloat16 if name == "masters" else torch.float32)
    return Words(model, OPTIMIZERS[name](model.parameters()))


@pytest.fixture
def in_pieces(monkeypatch):
    """Even small states are cut, and the host is so slow that the device updates nearly all."""
    cost = Updater.cost
    monkeypatch.setattr("offmate.solver.options.pieces._LEAST_BYTES", 1 << 11)
    monkeypatch.setattr("offmate.profile.store._kept", {})
    monkeypatch.setattr(Updater, "cost", lambda *given: replace(cost(*given), cpu_update_s=1.0))


@functools.cache
def budget(name: str, device: str, **gate: Any) -> int:
    """One in which pieces of the embedding's state have to move, whatever seconds were measured."""
    loop = words_loop(name)
    ample = offmate.plan(
        loop.model, AMPLE, example_inputs=words(0), optimizer=loop.optimizer, device=device, **SETTINGS, **gate
    )
    return ample.least_budget_bytes * 11 // 10


def compiled(name: str = "adamw", steps: int = 0, device: str = "emulated", **gate: Any) -> Words:
    loop = words_loop(name)
    bytes_ = budget(name, device, **gate)
    offmate.compile(loop.model, bytes_, optimizer=loop.optimizer, device=device, **SETTINGS, **gate)
    loop.steps(0, steps)
    return loop


def plain(name: str = "adamw", steps: int = 0) -> Words:
    loop = words_loop(name)
    loop.steps(0, steps)
    return loop


def moving(loop: Words) -> set[str]:
    """Pieces of the embedding's state that come in."""
    actions = loop.model.offmate.plan.schedule.actions
    return {a.name for a in actions if a.kind is Kind.PREFETCH and a.name.startswith(f"s:{EMBEDDING}[")}


def check(loop: Words, reference: Words) -> None:
    """Pieces have moved, within what was predicted, and nothing differs."""
    assert moving(loop)
    assert loop.model.offmate.peak_bytes == loop.model.offmate.plan.predicted_peak_bytes
    assert_same(loop, reference)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_works_by_element(name, in_pieces):
    loop, reference = compiled(name), plain(name)
    assert loop.steps(0, STEPS) == reference.steps(0, STEPS)
    check(loop, reference)


def micro_steps(loop: Words, micro: int, max_norm: float | None = None) -> list[float]:
    losses = []
    for step in range(STEPS):
        for m in range(micro):
            loss = loop.forward(step * micro + m) / micro
            loss.backward()
            losses.append(loss.item())
        if max_norm is not None and not hasattr(loop.model, "offmate"):
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), max_norm)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("micro", "max_norm"), [(1, 0.1), (2, None), (3, 0.1)])
def test_behind_a_gate_and_in_several_micro_batches(micro, max_norm, in_pieces):
    loop, reference = compiled(max_grad_norm=max_norm, accumulation_steps=micro), plain()
    assert micro_steps(loop, micro) == micro_steps(reference, micro, max_norm)
    check(loop, reference)


def test_a_state_read_and_loaded_in_the_middle(in_pieces):
    loop, reference = compiled(steps=2), plain(steps=2)
    assert_same(loop, reference)  # reads
    assert loop.steps(2, 4) == reference.steps(2, 4)
    model, optimizer = copy.deepcopy((plain(steps=1).model.state_dict(), plain(steps=1).optimizer.state_dict()))
    for one in (loop, reference):
        one.model.load_state_dict(model)
        one.optimizer.load_state_dict(copy.deepcopy(optimizer))
    assert loop.steps(1, 4) == reference.steps(1, 4)
    check(loop, reference)


def updates(loop: Words) -> dict[str, int]:
    """How many updates every parameter has had; it and all of its state equal plain PyTorch's after so many."""
    found, counts = tensors(loop), {}
    for index, (name, _) in enumerate(loop.model.named_parameters()):
        counts[name] = int(found.get(f"{index}/step", 0))
        expected = tensors(plain(steps=counts[name]))
        for key, value in found.items():
            if key == name or key.startswith(f"{index}/"):
                assert torch.equal(value, expected[key]), f"{key} is not of update {counts[name]}"
    return counts


def check_goes_on(loop: Words, done: int) -> None:
    """From a checkpoint, since others may not have had their update."""
    model, optimizer = plain(steps=done).model.state_dict(), plain(steps=done).optimizer.state_dict()
    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(optimizer)
    loop.optimizer.zero_grad()
    reference = plain(steps=done)
    assert loop.steps(done, done + 2) == reference.steps(done, done + 2)
    check(loop, reference)


@pytest.mark.parametrize(("which", "steps"), [("first", 2), ("second", 0), ("last", 2)])
def test_an_update_that_fails_between_two_pieces(which, steps, in_pieces, monkeypatch):
    """What the device has not come to is updated on the host: every tensor is of one update."""
    loop = compiled()
    update, seen = Updater.__call__, []

    def noted(self, name, *rest):
        seen.append(name)
        update(self, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "__call__", noted)
        loop.steps(0, steps)
    nth = {"first": 1, "second": 2, "last": seen.count(EMBEDDING) // max(steps, 1)}[which]
    seen.clear()

    def faulty(self, name, *rest):
        seen.append(name)
        if name == EMBEDDING and seen.count(name) == nth:
            raise ArithmeticError("the device broke")
        update(self, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "__call__", faulty)
        with pytest.raises(offmate.OffmateError, match="the device broke"):
            loop.step(steps)
    assert updates(loop)[EMBEDDING] == steps + (nth > 1)
    check_goes_on(loop, steps + 1)


@pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
def test_a_piece_whose_copy_fails(direction, in_pieces, monkeypatch):
    loop, start = compiled(steps=2), getattr(EmulatedDevice, direction)
    rows = {item.rows[1] - item.rows[0] for item in moving(loop) if item.rows}

    def fails() -> None:
        raise OSError("the link broke")

    with monkeypatch.context() as patch:

        def broken(self, target, source, after, link):
            piece = target.shape[0] in rows and target.shape[0] < WIDTH
            return self._lane(link).submit(fails, after) if piece else start(self, target, source, after, link)

        patch.setattr(EmulatedDevice, direction, broken)
        with pytest.raises(offmate.OffmateError, match=r"the copy of optimizer state of .*the link broke"):
            loop.steps(2, 4)
    assert set(updates(loop).values()) <= {1, 2, 3, 4}
    check_goes_on(loop, 3)


def test_on_an_accelerator(sim, in_pieces):
    """Copies are late at random, and memory that is let go is poisoned."""
    sim.set_delays(3, 40)
    with without_allocator():
        loop, reference = compiled(device="sim"), plain()
        losses = loop.steps(0, STEPS)
        sim.set_delays(0, 0)
        assert losses == reference.steps(0, STEPS)
        check(loop, reference)
        loop.session.residence.bring_home()
        loop.session.device.close()


@pytest.mark.parametrize("steps", [0, 2])
def test_an_accelerator_that_is_lost(steps, sim, in_pieces):
    """States are whole or none, and what was lost is named."""
    with without_allocator():
        loop = compiled(steps=steps, device="sim")
        known = tensors(loop)
        loop.steps(steps, steps + 1)
        loop.executor.on_action = lambda action: sim.lose() if action.kind is Kind.UPDATE_DEVICE else None
        with pytest.raises(offmate.DeviceError, match="lost with the device"):
            loop.step(steps + 1)
        loop.executor.on_action = None
        assert EMBEDDING in loop.session.truth.torn
        found = tensors(loop)
        assert found.keys() == known.keys() and all(torch.isfinite(value).all() for value in found.values())
        sim.lose(False)
        loop.session.device.close()
