"""Micro-batches of different shapes in one update: each runs its own programs, in the steps of one plan."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from offmate.runtime.replay.executor import Executor
from offmate.runtime.storage.engine import Engine
from offmate.solver.items import ItemKind
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.follow import side_by_side
from offmate.solver.simulate import memory_highs
from torch.nn.functional import cross_entropy

import offmate
from offmate import Config
from offmate.planning import follow
from offmate.session import state_storage
from offmate.session.together import Together

from ...accelerator.loops import on_sim
from ...fuzz.figures import from_hardware_file
from ...runtime.replay.order import watched
from ..loops import CPU_BUDGET
from .test_by_block import MICRO_BATCHES, Batch, Tied, assert_alike, compiled, optimizer_of, tied, trained
from .test_handed import copies, wide

AMPLE = 1 << 24
UPDATES = 3
ROWS = ((12, 5, 9, 12, 7), (3, 12, 12, 8, 2), (6, 6, 2, 6, 5))  # of each micro-batch of three updates


@pytest.fixture(scope="module", autouse=True)
def rates() -> Any:
    """What moves is not left to how busy the machine was."""
    with from_hardware_file():
        yield


def words(rows: Iterable[int], seed: int = 7) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randint(0, 24, (own,), generator=generator) for n in ("x", "y")} for own in rows]


def pairs(rows: Iterable[int], scale: int = 20) -> list[Batch]:
    """Batches for `Wide`."""
    generator = torch.Generator().manual_seed(9)
    sizes = [{"x": (scale * own, 2), "y": (scale * own,)} for own in rows]
    return [{name: torch.randn(size, generator=generator) for name, size in own.items()} for own in sizes]


def flat(rows: Iterable[Iterable[int]]) -> list[int]:
    return [own for group in rows for own in group]


def config(per_pass: int = MICRO_BATCHES, **more: Any) -> Config:
    if per_pass == 1:
        return Config(cache_dir=None, accumulation_order="by batch", **more)
    return Config(cache_dir=None, micro_batches_per_pass=per_pass, accumulation_order="by block", **more)


def executor_of(model: Any) -> Executor:
    return model._offmate_session.training.executor


def together_of(model: Any) -> Together:
    """The last update's micro-batches, which ran block by block."""
    together = model._offmate_session.orders.together
    assert together is not None
    return together


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_pass", [1, 2, 3, MICRO_BATCHES])
@pytest.mark.parametrize("more", [{}, {"dropout": 0.2}, {"norm": True}], ids=["plain", "dropout", "batch norm"])
def test_numbers_are_those_of_the_plain_loop(more: dict[str, Any], per_pass: int) -> None:
    """In one pass and in several, of which the last one is shorter; the last batches are too few for an update."""
    data = words([*flat(ROWS), 4, 11])
    clip = 0.05
    reference = tied(**more)
    theirs = optimizer_of(reference)
    torch.manual_seed(3)
    expected = trained(reference, theirs, data, clip=clip)
    model, optimizer = compiled(tied(**more), config=config(per_pass), max_grad_norm=clip)
    torch.manual_seed(3)
    announced = per_pass > 1  # passes of one micro-batch need not be
    assert trained(model, optimizer, model.offmate.batches(data) if announced else data) == expected
    optimizer.zero_grad()
    assert_alike(model, optimizer, reference, theirs)
    if announced:
        assert len({variant.kind.shapes for variant in together_of(model)._variants}) == 3


@pytest.mark.parametrize("scale", [20, 33])
def test_the_ledger_shows_what_the_mixed_schedule_counts(scale: int) -> None:
    """To the byte, with every micro-batch's own sizes; never more than the plan for the largest one."""
    budget = 102 * least_budget(wide(), pairs([12], scale)[0]) // 100
    data = pairs(ROWS[0], scale)
    expected = wide()
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data * UPDATES)
    model, optimizer = compiled(wide(), budget, config=config(outputs=("loss",)))
    ours = trained(model, optimizer, model.offmate.batches(data))
    executor = executor_of(model)
    executor.device.ledger.reset_peak()
    ours += trained(model, optimizer, model.offmate.batches(data * (UPDATES - 1)))
    assert ours == losses
    assert_alike(model, optimizer, expected, theirs)
    slots = [variant.shape.schedule for variant in together_of(model)._variants]
    counted = max(memory_highs(side_by_side(executor.schedule, slots))) + executor.fixed_bytes
    assert executor.device.ledger.peak_bytes == counted < model.offmate.plan.predicted_peak_bytes


def test_a_trace_shows_every_micro_batch_with_its_own_bytes() -> None:
    """At every action of the iteration, those that the mixed schedule counts."""
    data = pairs(ROWS[0])
    model, optimizer = wide_pair(tight_budget())
    with model.offmate.record():
        trained(model, optimizer, model.offmate.batches(data * 2))
    recording = model.offmate.trace.recording
    taken = [one for walk in recording.walks for one in walk]
    assert recording.schedule != executor_of(model).schedule
    assert [one.high_bytes - recording.fixed_bytes for one in taken] == memory_highs(recording.schedule)


def least_budget(model: Any, example: Batch, **more: Any) -> int:
    settings = {"accumulation_steps": MICRO_BATCHES, "config": config(outputs=("loss",)), "cpu_budget": CPU_BUDGET}
    found = offmate.plan(
        model, 1 << 26, example_inputs=example, optimizer=optimizer_of(model), device="emulated", **(settings | more)
    )
    return found.least_budget_bytes


@functools.cache
def tight_budget() -> int:
    return 103 * least_budget(wide(), pairs([12])[0]) // 100


def wide_pair(budget: int, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
    return compiled(wide(), budget, **({"config": config(outputs=("loss",))} | more))


def test_values_leave_in_their_own_sizes() -> None:
    """Groups follow each other in which a slot's batch grows and shrinks, so that memory in RAM serves both."""
    data = pairs(flat(ROWS + ROWS[::-1]))
    expected = wide()
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data)
    model, optimizer = wide_pair(tight_budget())
    assert trained(model, optimizer, model.offmate.batches(data)) == losses
    assert_alike(model, optimizer, expected, theirs)
    assert copies(executor_of(model).schedule, ItemKind.VALUE, Kind.OFFLOAD)
    assert executor_of(model).device.ledger.peak_bytes <= model.offmate.plan.predicted_peak_bytes


def hungry(monkeypatch: pytest.MonkeyPatch, workspace_bytes: int) -> None:
    """Kernels hold more for batches that follow another one's plan, as those of libraries do for odd sizes."""
    measure = follow.measure

    def more(*given: Any) -> Any:
        rates, costs = measure(*given)
        return rates, {
            key: {n: replace(one, workspace_bytes=one.workspace_bytes + workspace_bytes) for n, one in own.items()}
            for key, own in costs.items()
        }

    monkeypatch.setattr(follow, "measure", more)


@pytest.mark.parametrize("order", ["by block", "auto"])
@pytest.mark.parametrize("room", [120, 100])
def test_kernels_that_hold_more_for_smaller_batches(
    room: int, order: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan leaves that free; where none can, updates of several shapes run in the usual order, others as before."""
    data = pairs([*flat(ROWS), *ROWS[0], *[12] * MICRO_BATCHES])
    expected = wide()
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data)
    budget = room * least_budget(wide(), pairs([12])[0]) // 100
    hungry(monkeypatch, budget * 8 // 100)
    model, optimizer = wide_pair(budget, config=replace(config(outputs=("loss",)), accumulation_order=order))
    with caplog.at_level(logging.INFO, logger="offmate"):
        assert trained(model, optimizer, model.offmate.batches(data)) == losses
    assert_alike(model, optimizer, expected, theirs)
    if order == "by block":
        assert model.offmate.plan.schedule.per_step == MICRO_BATCHES
        assert "so the plan for the largest one is made again" in caplog.text
        assert ("no plan leaves" in caplog.text) is (room == 100)
    assert executor_of(model).device.ledger.peak_bytes <= budget


def test_values_leave_to_ram_that_is_shared() -> None:
    data = pairs(flat(ROWS))
    expected = wide()
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data)
    budget = 115 * tight_budget() // 100
    roomy, their = wide_pair(budget)
    trained(roomy, their, roomy.offmate.batches(data[:MICRO_BATCHES]))
    model, optimizer = wide_pair(budget, cpu_budget=roomy.offmate.plan.host_bytes * 98 // 100)
    assert trained(model, optimizer, model.offmate.batches(data)) == losses
    assert_alike(model, optimizer, expected, theirs)
    assert executor_of(model).schedule.host_layout.places


def test_values_leave_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = functools.partial(Engine, n_threads=2, request_bytes=1 << 12)
    monkeypatch.setattr(state_storage, "Engine", engine)
    data = pairs(flat(ROWS + ROWS[::-1]))
    expected = wide()
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data)
    path = offmate.StoragePath(tmp_path, read="1GB/s", write="1GB/s")
    model, optimizer = wide_pair(tight_budget(), cpu_budget=420_000, storage=path)
    assert trained(model, optimizer, model.offmate.batches(data)) == losses
    assert_alike(model, optimizer, expected, theirs)
    assert executor_of(model).schedule.values_in_files


def test_micro_batches_that_are_left_out() -> None:
    data, left = pairs(flat(ROWS)), {1, 4}
    expected = wide()
    theirs = optimizer_of(expected)
    model, optimizer = wide_pair(tight_budget())

    def losses(model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> list[float]:
        found = []
        for i, batch in enumerate(batches, 1):
            loss = model(**batch)["loss"]
            found.append(loss.item())
            if i % MICRO_BATCHES not in left:
                loss.backward()
            if i % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert losses(model, optimizer, model.offmate.batches(data)) == losses(expected, theirs, data)
    assert_alike(model, optimizer, expected, theirs)


class Pair(torch.nn.Module):
    """Two inputs whose lengths have nothing to do with each other, as those of encoders and decoders."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
        self.head = torch.nn.Linear(16, 6)

    def forward(self, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        seen, asks = torch.tanh(self.encoder(x)), torch.tanh(self.decoder(z))
        read = torch.softmax(asks @ seen.transpose(1, 2), -1) @ seen
        return {"loss": cross_entropy(self.head(read + asks).flatten(0, 1), y.flatten())}


def asking(lengths: Iterable[tuple[int, int]]) -> list[Batch]:
    """Batches for `Pair`, with the lengths of their two inputs."""
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "x": torch.randn(2, own, 8, generator=generator),
            "z": torch.randn(2, other, 8, generator=generator),
            "y": torch.randint(0, 6, (2, other), generator=generator),
        }
        for own, other in lengths
    ]


def test_no_batch_of_a_group_need_be_the_largest_in_everything(caplog: pytest.LogCaptureFixture) -> None:
    """A plan is made for one that would be; it never runs."""
    data = asking([(9, 3), (4, 8), (9, 8), (2, 7), (6, 6), (5, 3), (10, 2), (3, 9), (1, 1), (8, 8)])
    torch.manual_seed(0)
    expected = Pair()
    torch.manual_seed(0)
    model, optimizer = compiled(Pair(), config=config())
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data)
    with caplog.at_level(logging.INFO, logger="offmate"):
        assert trained(model, optimizer, model.offmate.batches(data)) == losses
    assert_alike(model, optimizer, expected, theirs)
    assert "one after the other" not in caplog.text
    assert executor_of(model).device.ledger.peak_bytes <= model.offmate.plan.predicted_peak_bytes


class Placed(Pair):
    """Adds places to its two inputs, of which it has 12 together."""

    def __init__(self) -> None:
        super().__init__()
        self.places = torch.nn.Parameter(torch.zeros(12, 8))

    def forward(self, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        both = torch.cat([x, z], 1) + self.places[: x.shape[1] + z.shape[1]]
        return super().forward(both[:, : x.shape[1]], both[:, x.shape[1] :], y)


def test_a_made_up_batch_that_does_not_suit_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """The user's batches do, and train; nothing is printed about one that nobody has made."""
    data = asking((own, 12 - own) for own in (9, 3, 6, 7, 2))
    torch.manual_seed(0)
    expected = Placed()
    torch.manual_seed(0)
    model, optimizer = compiled(Placed(), config=config())
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data)
    with caplog.at_level(logging.INFO):
        assert trained(model, optimizer, model.offmate.batches(data)) == losses
    assert_alike(model, optimizer, expected, theirs)
    assert "so it is made for the largest one" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_batch_much_larger_than_all_is_not_made_up() -> None:
    """As where a loader keeps the number of tokens: the update runs in the usual order, and nothing large is timed."""
    generator = torch.Generator().manual_seed(4)
    sizes = [(1, 128), (128, 1), (16, 8), (8, 16), (4, 32)]
    data = [{n: torch.randint(0, 24, own, generator=generator).flatten() for n in ("x", "y")} for own in sizes]
    square = [{n: t.view(own) for n, t in one.items()} for one, own in zip(data, sizes)]

    class Rows(Tied):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(x.flatten(), y.flatten())

    torch.manual_seed(0)
    expected = Rows()
    torch.manual_seed(0)
    model, optimizer = compiled(Rows(), config=config())
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, square)
    assert trained(model, optimizer, model.offmate.batches(square)) == losses
    assert_alike(model, optimizer, expected, theirs)
    known = [variant.kind.shapes for variant in model._offmate_session.preparer._variants.of_training()]
    assert known and not any((128, 128) in shapes for shapes in known)


# -- one executor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [True, False], ids=["by block", "in the usual order"])
def test_nothing_is_reloaded_for_smaller_batches(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that take a larger one's decisions also use its executor, whatever their shapes and their order."""
    data, unloads = words(flat(ROWS)), []
    order = {"config": config(per_pass=MICRO_BATCHES if announced else 1)}
    model, optimizer = compiled(tied(), **order)
    expected = tied()
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data * 2)
    ours = trained(model, optimizer, model.offmate.batches(data) if announced else data)
    unload = Executor.unload
    monkeypatch.setattr(Executor, "unload", lambda self: (unloads.append(self), unload(self)))
    ours += trained(model, optimizer, model.offmate.batches(data) if announced else data)
    assert ours == losses and not unloads
    assert_alike(model, optimizer, expected, theirs)


class Longest(torch.nn.Module):
    """Goes as far as the longest text of a batch, which it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(24, 16), torch.nn.Linear(16, 24)

    def forward(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        most = int(lengths.max())
        return {"loss": cross_entropy(self.head(self.embed(x[:, :most])).flatten(0, 1), y[:, :most].flatten())}


@pytest.mark.parametrize("order", ["by block", "by batch", "auto"])
def test_batches_alike_about_whose_values_the_model_decides_differently(order: Any) -> None:
    """Each has a trace of its own, though their shapes are the same."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(12, (12, 3)), (9, (9, 1)), (9, (5, 2)), (12, (7, 7)), (9, (9, 2))]
    data = [
        {name: torch.randint(0, 24, (2, own), generator=generator) for name in ("x", "y")}
        | {"lengths": torch.tensor(these)}
        for own, these in lengths
    ] * 2
    torch.manual_seed(0)
    expected = Longest()
    torch.manual_seed(0)
    model, optimizer = compiled(Longest(), config=Config(cache_dir=None, accumulation_order=order))
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data)
    assert trained(model, optimizer, model.offmate.batches(data)) == losses
    assert_alike(model, optimizer, expected, theirs)


class Branches(Tied):
    """Long batches go through one more layer."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed(x)
        for layer in self.layers if len(x) > 6 else self.layers[1:]:
            h = h + torch.relu(layer(h))
        scores = h @ self.embed.weight.T
        return {"loss": cross_entropy(scores, y), "scores": scores}


def test_what_cannot_take_the_same_steps_runs_in_the_usual_order(caplog: pytest.LogCaptureFixture) -> None:
    data = words(flat(ROWS))
    torch.manual_seed(0)
    expected = Branches()
    torch.manual_seed(0)
    model, optimizer = compiled(Branches(), config=config())
    theirs = optimizer_of(expected)
    losses = trained(expected, theirs, data)
    with caplog.at_level(logging.INFO, logger="offmate"):
        assert trained(model, optimizer, model.offmate.batches(data)) == losses
    assert_alike(model, optimizer, expected, theirs)
    assert "those with [5], [5] do not fit into the steps of the plan for [12], [12]" in caplog.text


def test_an_argument_that_the_loop_computes(caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be foreseen for batches of other lengths. They run in the usual order, with the same numbers."""

    def losses(model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> list[float]:
        found = []
        for batch in batches:
            loss = model(x=batch["x"], y=batch["y"].flip(0))["loss"]
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        return found

    data, expected = words(ROWS[0]), tied()
    theirs = optimizer_of(expected)
    model, optimizer = compiled(tied(), config=config())
    with caplog.at_level(logging.INFO, logger="offmate"):
        assert losses(model, optimizer, model.offmate.batches(data)) == losses(expected, theirs, data)
    assert_alike(model, optimizer, expected, theirs)
    assert "cannot be foreseen: Tied does not export" in caplog.text
    assert "compute it in the data loader or its collate_fn" in caplog.text


def test_a_batch_that_the_loop_cuts() -> None:
    """The argument is named that is not as announced, whatever its shape."""
    model, _ = compiled(tied(), config=config())
    with pytest.raises(offmate.ProtocolError, match=r"the call for micro-batch 2 differs .* its argument x"):
        for batch in model.offmate.batches(words(ROWS[0])):
            model(**{name: value[:4] for name, value in batch.items()})["loss"].backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", [0.2, 0.5, 0.9])
def test_an_interrupt_makes_no_update(where: float) -> None:
    data = pairs(flat(ROWS))
    first, second = data[:MICRO_BATCHES], data[MICRO_BATCHES : 2 * MICRO_BATCHES]
    expected = wide()
    theirs = optimizer_of(expected)
    model, optimizer = wide_pair(tight_budget(), max_grad_norm=1e6)
    assert trained(model, optimizer, model.offmate.batches(first)) == trained(expected, theirs, first)
    executor = executor_of(model)
    left = [int(where * len(executor.schedule.forward + executor.schedule.backward))]

    def stop(action: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    executor.on_action = stop
    with pytest.raises(KeyboardInterrupt):
        trained(model, optimizer, model.offmate.batches(second))
    executor.on_action = None
    assert_alike(model, optimizer, expected, theirs)
    losses = trained(expected, theirs, second)
    optimizer.zero_grad()
    assert trained(model, optimizer, model.offmate.batches(second)) == losses
    assert_alike(model, optimizer, expected, theirs)


def test_on_the_simulated_accelerator(sim: ModuleType) -> None:
    data, model, expected = pairs(flat(ROWS)), wide(), wide()
    theirs = optimizer_of(expected)
    more = {"accumulation_steps": MICRO_BATCHES, "config": config(outputs=("loss",))}
    with (
        from_hardware_file(workspaces=True),
        watched(sim) as order,
        on_sim(103, cache_dir=None, model=model, inputs=pairs([12])[0], **more) as loop,
    ):
        sim.set_delays(1, 50)
        ours = trained(loop.model, loop.optimizer, loop.model.offmate.batches(data))
        sim.set_delays(0, 0)
        losses = trained(expected, theirs, data)
        found = loop.model.state_dict()
        assert copies(executor_of(loop.model).schedule, ItemKind.VALUE, Kind.OFFLOAD)
        for name, value in expected.state_dict().items():
            assert torch.equal(found[name].cpu(), value), name
    assert ours == losses
    assert not order.races
