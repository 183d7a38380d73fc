"""Micro-batches that run block by block, whose values and gradients leave between neighbouring computes."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from offmate.runtime.storage.engine import Engine
from offmate.solver.items import ItemKind
from offmate.solver.schedule import Kind, Schedule

import offmate
from offmate import Config
from offmate.session import state_storage

from ...accelerator.loops import on_sim
from ...fuzz.figures import from_hardware_file
from ...runtime.replay.order import watched
from ..loops import CPU_BUDGET
from .test_by_block import Batch, assert_alike, optimizer_of

MICRO_BATCHES = 10
UPDATES = 3
ROOM = 1.03  # of the least budget


@pytest.fixture(scope="module", autouse=True)
def rates() -> Any:
    """What moves is not left to how busy the machine was."""
    with from_hardware_file():
        yield


class Wide(torch.nn.Module):
    """Layers with few parameters and large values: what they hand on is most of what the device holds."""

    def __init__(self, dropout: float = 0.0, layers: int = 8) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(layers))
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        for layer in self.layers:
            h = self.dropout(torch.tanh(layer(h)))
        return {"loss": (h.mean(1) - y).square().mean()}


def wide(**more: Any) -> Wide:
    torch.manual_seed(0)
    return Wide(**more)


def data(number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(9)
    sizes = {"x": (256, 2), "y": (256,)}
    return [{name: torch.randn(size, generator=generator) for name, size in sizes.items()} for _ in range(number)]


def config(per_pass: int) -> Config:
    return Config(cache_dir=None, micro_batches_per_pass=per_pass, outputs=("loss",))


def settings(per_pass: int, **more: Any) -> dict[str, Any]:
    return {
        "device": "emulated", "cpu_budget": CPU_BUDGET, "accumulation_steps": MICRO_BATCHES,
        "config": config(per_pass), **more,
    }  # fmt: skip


def least_budget(model: Any, per_pass: int, **more: Any) -> int:
    optimizer = optimizer_of(model)
    found = offmate.plan(model, 1 << 26, example_inputs=data(1)[0], optimizer=optimizer, **settings(per_pass, **more))
    return found.least_budget_bytes


@functools.cache
def tight_budget(per_pass: int = MICRO_BATCHES, dropout: float = 0.0, clip: float | None = None) -> int:
    """A little more than the least: whole copies fit in a little more than fractions of them."""
    return int(ROOM * least_budget(wide(dropout=dropout), per_pass, max_grad_norm=clip))


def copies(schedule: Schedule, kind: ItemKind, moves: Kind) -> int:
    """How many copies of a kind are made in the first pass; a value that returns twice has left once."""
    first = schedule.passes[0]
    return sum(a.kind is moves and a.item.kind is kind for a in (*first.forward, *first.backward))


def trained(
    pair: tuple[Any, torch.optim.Optimizer], batches: list[Batch], left_out: Collection[int] = ()
) -> list[float]:
    """The loop of a user, who skips some losses; for a compiled model with announced micro-batches."""
    model, optimizer = pair
    losses = []
    announced = hasattr(model, "offmate")
    for i, one in enumerate(model.offmate.batches(batches) if announced else batches, 1):
        loss = model(**one)["loss"] / MICRO_BATCHES
        losses.append(loss.item())
        if i % MICRO_BATCHES not in left_out:
            loss.backward()
        if i % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def plain(**more: Any) -> tuple[Wide, torch.optim.Optimizer]:
    model = wide(**more)
    return model, optimizer_of(model)


def compiled(budget: int, per_pass: int, dropout: float = 0.0, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = plain(dropout=dropout)
    return offmate.compile(model, budget, optimizer=optimizer, **settings(per_pass, **more)), optimizer


def check(pair: tuple[Any, torch.optim.Optimizer], expected: tuple[Any, torch.optim.Optimizer]) -> None:
    """The parameters and states are plain PyTorch's, and the peak is the one that was predicted."""
    assert_alike(*pair, *expected)
    plan = pair[0].offmate.plan
    assert copies(plan.schedule, ItemKind.VALUE_GRADIENT, Kind.PREFETCH)
    assert pair[0].offmate.peak_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize("per_pass", [8, MICRO_BATCHES])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_numbers_are_those_of_the_plain_loop(per_pass: int, dropout: float) -> None:
    """With passes of 8, a last one of two follows."""
    batches, expected = data(UPDATES * MICRO_BATCHES), plain(dropout=dropout)
    torch.manual_seed(3)
    losses = trained(expected, batches)
    pair = compiled(tight_budget(per_pass, dropout), per_pass, dropout)
    torch.manual_seed(3)
    assert trained(pair, batches) == losses
    check(pair, expected)
    if per_pass == MICRO_BATCHES:
        schedule = pair[0].offmate.plan.schedule
        assert copies(schedule, ItemKind.VALUE, Kind.PREFETCH) > copies(schedule, ItemKind.VALUE, Kind.OFFLOAD)


def test_more_micro_batches_need_hardly_more_memory() -> None:
    """Beyond those whose copies are under way, each adds its inputs, its loss, and nothing else."""
    least = [least_budget(wide(), number, accumulation_steps=number) for number in (10, 14, 18)]
    inputs = sum(tensor.nbytes for tensor in data(1)[0].values())
    assert least[2] - least[0] < 8 * 2 * inputs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left_out", [{1}, {0}, {3, 4, 5}, {1, 2, 3, 4, 5, 6, 7, 8, 9}])
def test_micro_batches_that_are_left_out(left_out: set[int]) -> None:
    """They have no gradients that could leave; `0` is the last one."""
    batches, expected = data(UPDATES * MICRO_BATCHES), plain()
    losses = trained(expected, batches, left_out)
    pair = compiled(tight_budget(), MICRO_BATCHES)
    assert trained(pair, batches, left_out) == losses
    assert_alike(*pair, *expected)
    executor = pair[0]._offmate_session.training.executor
    assert executor.device.ledger.peak_bytes <= pair[0].offmate.plan.predicted_peak_bytes


def test_ram_is_shared_with_what_is_there_at_other_times() -> None:
    """A copy that returns twice keeps its place until it has returned for the last time."""
    batches, expected = data(UPDATES * MICRO_BATCHES), plain()
    losses = trained(expected, batches)
    budget = int(1.1 * tight_budget())
    roomy = compiled(budget, MICRO_BATCHES)
    trained(roomy, batches[:MICRO_BATCHES])
    ram = roomy[0].offmate.plan.host_bytes * 94 // 100
    pair = compiled(budget, MICRO_BATCHES, cpu_budget=ram)
    assert trained(pair, batches) == losses
    check(pair, expected)
    plan = pair[0].offmate.plan
    assert {item.kind for item in plan.schedule.host_layout.places} >= {ItemKind.VALUE, ItemKind.VALUE_GRADIENT}
    assert plan.host_bytes <= ram


def test_copies_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where RAM has no room either."""
    engine = functools.partial(Engine, n_threads=2, request_bytes=1 << 14)
    monkeypatch.setattr(state_storage, "Engine", engine)
    budget = tight_budget()
    batches, expected = data(UPDATES * MICRO_BATCHES), plain()
    losses = trained(expected, batches)
    path = offmate.StoragePath(tmp_path, read="1GB/s", write="1GB/s")
    pair = compiled(budget, MICRO_BATCHES, cpu_budget=600_000, storage=path)
    assert trained(pair, batches) == losses
    check(pair, expected)
    assert {item.kind for item in pair[0].offmate.plan.schedule.values_in_files} >= {ItemKind.VALUE_GRADIENT}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", [0.1, 0.3, 0.6, 0.8, 1.0])
def test_an_interrupt_makes_no_update(where: float) -> None:
    """Wherever in the forwards and backwards it comes; the same batches can be announced again."""
    gate = {"max_grad_norm": 1e6}
    budget = tight_budget(clip=1e6)
    pair, expected = compiled(budget, MICRO_BATCHES, **gate), plain()
    batches = data(2 * MICRO_BATCHES)
    first, second = batches[:MICRO_BATCHES], batches[MICRO_BATCHES:]
    assert trained(pair, first) == trained(expected, first)
    executor, schedule = pair[0]._offmate_session.training.executor, pair[0].offmate.plan.schedule
    left = [int(where * len(schedule.forward + schedule.backward))]

    def stop(action: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    executor.on_action = stop
    with pytest.raises(KeyboardInterrupt):
        trained(pair, second)
    executor.on_action = None
    assert_alike(*pair, *expected)
    losses = trained(expected, second)
    pair[1].zero_grad()
    assert trained(pair, second) == losses
    assert_alike(*pair, *expected)


def test_on_the_simulated_accelerator(sim: ModuleType) -> None:
    """Copies and computes are late there, each in its stream."""
    batches, expected = data(UPDATES * MICRO_BATCHES), plain()
    model, more = wide(), settings(MICRO_BATCHES)
    del more["device"], more["cpu_budget"]
    with (
        from_hardware_file(workspaces=True),
        watched(sim) as order,
        on_sim(103, cache_dir=None, model=model, inputs=batches[0], **more) as loop,
    ):
        sim.set_delays(1, 50)
        ours = trained((loop.model, loop.optimizer), batches)
        sim.set_delays(0, 0)
        losses = trained(expected, batches)
        found = loop.model.state_dict()
        assert copies(loop.model.offmate.plan.schedule, ItemKind.VALUE_GRADIENT, Kind.PREFETCH)
        for name, value in expected[0].state_dict().items():
            assert torch.equal(found[name].cpu(), value), name
    assert ours == losses
    assert not order.races
