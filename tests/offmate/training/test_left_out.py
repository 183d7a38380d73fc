"""Micro-batches that run together and whose backward() never comes: they add nothing, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from offmate.solver.schedule import Kind

import offmate
from offmate import ProtocolError

from ...accelerator.loops import on_sim
from ...fuzz.figures import from_hardware_file
from ...runtime.replay.order import watched
from ..loops import CPU_BUDGET, adamw, batch, plain
from .speculating import own_cores
from .test_by_block import (
    AMPLE,
    MICRO_BATCHES,
    Batch,
    assert_alike,
    compiled,
    numbers,
    optimizer_of,
    tied,
    words,
)
from .test_passes import least_budget, passes, returning

LEFT_OUT = [{0}, {2}, {4}, {0, 1}, {2, 3}, {0, 1, 2, 3}, {1, 2, 3, 4}, {0, 4}]
WAYS = ["first", "within", "last", "a pass", "another pass", "all but the last", "all but the first", "first and last"]


def trained(
    model: Any, optimizer: Any, batches: Iterable[Batch], left_out: Collection[int], clip: float | None = None
) -> list[float]:
    """The loop of a user who skips some losses; in every second update, so that one without follows one with."""
    losses = []
    for i, one in enumerate(batches):
        number = i % MICRO_BATCHES
        loss = model(**one)["loss"] / MICRO_BATCHES
        losses.append(loss.item())
        if number not in left_out or i // MICRO_BATCHES % 2:
            loss.backward()
        if number == MICRO_BATCHES - 1:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.sampled(4)
@pytest.mark.parametrize("left_out", LEFT_OUT, ids=WAYS)
@pytest.mark.parametrize("per_pass", [1, 2, 3, MICRO_BATCHES])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["no clipping", "clips"])
def test_numbers_are_those_of_the_plain_loop(clip: float | None, per_pass: int, left_out: set[int]) -> None:
    """With tied weights, dropout and batch norm; in the least budget, in which gradients and totals move."""
    more: dict[str, Any] = {"dropout": 0.2, "norm": True}
    data, config = words(4 * MICRO_BATCHES), passes(per_pass)
    gate = {"max_grad_norm": clip} if clip is not None else {}
    reference = tied(**more)
    theirs = optimizer_of(reference)
    torch.manual_seed(3)
    expected = trained(reference, theirs, data, left_out, clip)
    budget = least_budget(data[0], tied(**more), config, **gate)
    model, optimizer = compiled(tied(**more), budget, config=config, **gate)
    torch.manual_seed(3)
    assert trained(model, optimizer, model.offmate.batches(data), left_out) == expected
    assert_alike(model, optimizer, reference, theirs)
    plan = model.offmate.plan
    assert plan.schedule.per_step == per_pass
    # A loop that skips losses reads more between the calls; the last update skips none, and is as predicted.
    assert model.offmate.peak_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize("updates", ["host", "device"])
@pytest.mark.parametrize("left_out", [{0, 1}, {4}], ids=["the first pass", "the last pass"])
def test_a_whole_pass_whoever_updates(left_out: set[int], updates: str) -> None:
    data, config = numbers(4 * MICRO_BATCHES), passes(2, updates=updates)
    reference = plain().model
    theirs = optimizer_of(reference)
    expected = trained(reference, theirs, data, left_out)
    budget = least_budget(data[0], plain().model, config)
    model, optimizer = compiled(plain().model, budget, config=config)
    assert trained(model, optimizer, model.offmate.batches(data), left_out) == expected
    assert_alike(model, optimizer, reference, theirs)


@pytest.mark.parametrize("per_pass", [2, MICRO_BATCHES])
def test_none_comes(per_pass: int) -> None:
    """The step has nothing to update, and the next update is as if there had been none."""
    data = words(2 * MICRO_BATCHES)
    model, optimizer = compiled(tied(dropout=0.2, norm=True), config=passes(per_pass))
    reference = tied(dropout=0.2, norm=True)
    theirs = optimizer_of(reference)
    losses = []
    for one, own, batches in ((reference, theirs, iter(data)), (model, optimizer, model.offmate.batches(data))):
        torch.manual_seed(3)
        found = []
        for i, inputs in enumerate(batches):
            loss = one(**inputs)["loss"]
            found.append(loss.item())
            if i >= MICRO_BATCHES:
                loss.backward()
        own.step()
        losses.append(found)
    assert losses[0] == losses[1]
    assert_alike(model, optimizer, reference, theirs)


def test_a_step_after_none_is_refused() -> None:
    model, optimizer = compiled(plain().model)
    data = numbers(MICRO_BATCHES)
    for one in model.offmate.batches(data):
        model(**one)
    with pytest.raises(ProtocolError, match=r"optimizer.step\(\) without a backward\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    reference = plain().model
    theirs = optimizer_of(reference)
    assert trained(model, optimizer, model.offmate.batches(data), ()) == trained(reference, theirs, data, ())
    assert_alike(model, optimizer, reference, theirs)


def test_gradients_are_unscaled_and_a_step_is_skipped() -> None:
    """With losses that are scaled; the last micro-batch of an update is known to be left out at unscale_() only."""
    data = numbers(4 * MICRO_BATCHES)
    ways = []
    for ours in (False, True):
        model, scaler = plain().model, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer: Any = optimizer_of(model)
        if ours:
            model, optimizer = compiled(model, config=passes(2), grad_scaler=scaler)
        for i, one in enumerate(model.offmate.batches(data) if ours else data):
            update, number = divmod(i, MICRO_BATCHES)
            loss = model(**one)["loss"] * (float("inf") if (update, number) == (1, 2) else 1.0)
            if number != update:
                scaler.scale(loss).backward()
            if number == MICRO_BATCHES - 1:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        ways.append((model, optimizer, scaler.get_scale()))
    assert ways[0][2] == ways[1][2]
    assert_alike(*ways[1][:2], *ways[0][:2])


def plain_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


@pytest.mark.parametrize("make_optimizer", [optimizer_of, plain_adamw], ids=["fused", "not fused"])
@pytest.mark.parametrize("clip", [None, float("inf"), 0.05])
def test_totals_that_return_are_unscaled_where_they_are_used(
    make_optimizer: Callable[[Any], Any], clip: float | None
) -> None:
    """All of the last pass is left out: nothing is added to totals that have come back from RAM."""
    data, left_out, ways = words(4 * MICRO_BATCHES), {4}, []
    for ours in (False, True):
        model, scaler = tied(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer: Any = make_optimizer(model)
        if ours:
            settings: dict[str, Any] = {"config": passes(2), "grad_scaler": scaler}
            settings |= {} if clip is None else {"max_grad_norm": clip}
            example, again = tied(), make_optimizer
            budget = offmate.plan(
                example, AMPLE, example_inputs=data[0], optimizer=again(example), device="emulated",
                cpu_budget=CPU_BUDGET, accumulation_steps=MICRO_BATCHES, **settings,
            ).least_budget_bytes  # fmt: skip
            offmate.compile(
                model, budget, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
                accumulation_steps=MICRO_BATCHES, **settings,
            )  # fmt: skip
        for i, one in enumerate(model.offmate.batches(data) if ours else data):  # type: ignore[operator, union-attr]
            loss = model(**one)["loss"]
            if i % MICRO_BATCHES not in left_out:
                scaler.scale(loss).backward()
            if i % MICRO_BATCHES == MICRO_BATCHES - 1:
                if clip is not None and not ours:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        ways.append((model, optimizer))
    assert_alike(*ways[1], *ways[0])


@pytest.mark.parametrize("clip", [float("inf"), 1e-3], ids=["kept", "undone"])
def test_updates_before_the_gate(clip: float) -> None:
    data = numbers(4 * MICRO_BATCHES)
    reference = plain().model
    theirs = optimizer_of(reference)
    expected = trained(reference, theirs, data, {1, 4}, clip)
    with own_cores():
        config = passes(2, speculate=True, updates="host")
        model, optimizer = compiled(plain().model, config=config, max_grad_norm=clip)
        assert trained(model, optimizer, model.offmate.batches(data), {1, 4}) == expected
    assert_alike(model, optimizer, reference, theirs)
    assert any(action.kind is Kind.SPECULATE_CPU for action in model.offmate.plan.schedule.actions)


@pytest.mark.parametrize("percent", [None, 100])
@pytest.mark.parametrize("updates", ["host", "device"])
def test_on_the_simulated_accelerator(sim: ModuleType, updates: str, percent: int | None) -> None:
    """Copies and computes are late there, each in its stream; two passes are left out."""
    left_out = {0, 1, 4}
    config, expected = passes(2, updates=updates), plain()
    data = [batch(number) for number in range(4 * MICRO_BATCHES)]
    settings: dict[str, Any] = {"max_grad_norm": 0.05, "accumulation_steps": MICRO_BATCHES, "config": config}
    with (
        from_hardware_file(workspaces=True),
        watched(sim) as order,
        on_sim(percent, cache_dir=None, inputs=batch(0), **settings) as loop,
    ):
        sim.set_delays(1, 50)
        ours = trained(loop.model, loop.optimizer, loop.model.offmate.batches(data), left_out)
        sim.set_delays(0, 0)
        theirs = trained(expected.model, expected.optimizer, data, left_out, 0.05)
        found = loop.model.state_dict()
        assert loop.model.offmate.plan.schedule.per_step == 2
        for name, value in expected.model.state_dict().items():
            assert torch.equal(found[name].cpu(), value), name
    assert ours == theirs
    assert not order.races


class Wide(torch.nn.Module):
    """Layers whose inputs take so much memory that totals have to leave between passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))
        self.head = torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": torch.nn.functional.cross_entropy(self.head(x), y)}


def wide() -> Wide:
    torch.manual_seed(0)
    return Wide()


@pytest.mark.parametrize("left_out", [{4}, {0, 1}], ids=["the last pass", "the first pass"])
@pytest.mark.parametrize("percent", [100, 112])
def test_totals_that_return_to_the_accelerator_are_used_there(
    sim: ModuleType, percent: int, left_out: set[int]
) -> None:
    generator = torch.Generator().manual_seed(5)
    data = [
        {"x": torch.randn(256, 64, generator=generator), "y": torch.randint(0, 4, (256,), generator=generator)}
        for _ in range(2 * MICRO_BATCHES)
    ]
    reference = wide()
    theirs = adamw(reference)
    expected = trained(reference, theirs, data, left_out)
    settings: dict[str, Any] = {"accumulation_steps": MICRO_BATCHES, "config": passes(2, updates="device")}
    with from_hardware_file(), on_sim(percent, cache_dir=None, model=wide(), inputs=data[0], **settings) as loop:
        assert trained(loop.model, loop.optimizer, loop.model.offmate.batches(data), left_out) == expected
        assert returning(loop.model.offmate.plan.schedule) > 0
        found = loop.model.state_dict()
        for name, value in reference.state_dict().items():
            assert torch.equal(found[name].cpu(), value), name


def test_zero_grad_clears_nothing_where_none_has_come() -> None:
    """As in plain PyTorch: the update goes on, with the random numbers and buffers of its forwards."""
    data, found = words(2 * MICRO_BATCHES), []
    for first in (1, 2):
        for ours in (False, True):
            model: Any = tied(dropout=0.2, norm=True)
            optimizer: Any = optimizer_of(model)
            if ours:
                model, optimizer = compiled(model)
            torch.manual_seed(3)
            losses = []
            for i, one in enumerate(model.offmate.batches(data) if ours else data):
                number = i % MICRO_BATCHES
                loss = model(**one)["loss"]
                losses.append(loss.item())
                if number == 1:
                    optimizer.zero_grad()
                if number >= first:
                    loss.backward()
                if number == MICRO_BATCHES - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append((losses, model, optimizer))
        assert found[-1][0] == found[-2][0]
        assert_alike(*found[-1][1:], *found[-2][1:])


def test_a_loss_that_is_not_a_number() -> None:
    """The loop hands over copies of its batches, as `batch.to(device)` makes them."""
    data = numbers(2 * MICRO_BATCHES)
    data[1]["x"][0, 0] = data[4]["x"][2, 1] = float("nan")
    ways = []
    for ours in (False, True):
        model: Any = plain().model
        optimizer: Any = optimizer_of(model)
        if ours:
            model, optimizer = compiled(model)
        skipped = 0
        for i, one in enumerate(model.offmate.batches(data) if ours else data, 1):
            loss = model(**{name: tensor.clone() for name, tensor in one.items()})["loss"]
            if torch.isfinite(loss):
                loss.backward()
            else:
                skipped += 1
            if i % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
        assert skipped == 2
        ways.append((model, optimizer))
    assert_alike(*ways[1], *ways[0])


def test_a_budget_of_code_outside_is_kept_where_an_update_is_left_out() -> None:
    """What offmate itself brings home then is not counted as the user's."""
    data = numbers(3 * MICRO_BATCHES)
    config = passes(2, gradients_into=("scores",), updates="host")
    budget = int(1.02 * least_budget(data[0], plain().model, config, max_grad_norm=1e6))
    model, optimizer = compiled(plain().model, budget, config=config, max_grad_norm=1e6)
    reference = plain().model
    theirs = optimizer_of(reference)
    for one, own, batches in ((reference, theirs, iter(data)), (model, optimizer, model.offmate.batches(data))):
        for i, inputs in enumerate(batches):
            loss = torch.nn.functional.cross_entropy(one(**inputs)["scores"], inputs["y"])
            if i >= MICRO_BATCHES:
                loss.backward()
            if i % MICRO_BATCHES == MICRO_BATCHES - 1:
                if i >= MICRO_BATCHES:
                    own.step()
                own.zero_grad()
    assert_alike(model, optimizer, reference, theirs)


def test_an_evaluation_after_an_update_that_is_left_out() -> None:
    """There is nothing to step, and nothing under way."""
    data = numbers(2 * MICRO_BATCHES)
    model, optimizer = compiled(plain().model)
    reference = plain().model
    theirs = optimizer_of(reference)
    for one, own, batches in ((reference, theirs, iter(data)), (model, optimizer, model.offmate.batches(data))):
        for i, inputs in enumerate(batches):
            loss = one(**inputs)["loss"]
            if i == MICRO_BATCHES - 1:
                with torch.no_grad():
                    assert one(**data[0])["loss"].isfinite()
            if i >= MICRO_BATCHES:
                loss.backward()
        own.step()
    assert_alike(model, optimizer, reference, theirs)


# -- the rules --------------------------------------------------------------------------------------------------------


def forwards(model: Any, batches: Any, count: int) -> list[torch.Tensor]:
    return [model(**next(batches))["loss"] for _ in range(count)]


def test_a_later_backward_through_it_is_refused() -> None:
    model, optimizer = compiled(plain().model)
    batches = iter(model.offmate.batches(numbers(2 * MICRO_BATCHES)))
    first, second = forwards(model, batches, 2)
    with pytest.raises(ProtocolError, match="a forward that was discarded"):
        first.backward()
    second.backward()
    forwards(model, batches, 2)
    *_, last = forwards(model, batches, 1)
    optimizer.step()
    with pytest.raises(ProtocolError, match="a forward that was discarded"):
        last.backward()


def test_a_loop_that_goes_on_without_a_step_is_refused() -> None:
    """One that counts its backward() calls would add the next group's to this one's."""
    model, optimizer = compiled(plain().model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = iter(model.offmate.batches(numbers(2 * MICRO_BATCHES)))
    for loss in (forwards(model, batches, 1)[0] for _ in range(MICRO_BATCHES - 1)):
        loss.backward()
    forwards(model, batches, 1)
    with pytest.raises(ProtocolError, match=r"without backward\(\) of micro-batch 5.*Call optimizer.step\(\) after"):
        forwards(model, batches, 1)
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def edit_a_parameter(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(2)


def edit_a_buffer(model: Any) -> None:
    model.norm.running_mean.mul_(0.5)


@pytest.mark.parametrize("edit", [edit_a_parameter, edit_a_buffer])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_edit_in_between_is_refused(edit: Callable[[Any], None], at_the_end: bool) -> None:
    """The backwards of the others are still to run, and later forwards have run."""
    model, optimizer = compiled(tied(norm=True))
    batches = iter(model.offmate.batches(words(2 * MICRO_BATCHES)))
    before = MICRO_BATCHES - 1 if at_the_end else 1
    for _ in range(before):
        forwards(model, batches, 1)[0].backward()
    forwards(model, batches, 1)
    edit(model)
    with pytest.raises(ProtocolError, match=r"was edited .*between the forward and backward\(\)"):
        if at_the_end:
            optimizer.step()
        else:
            forwards(model, batches, 1)


def test_its_outputs_may_be_changed() -> None:
    """No gradient comes through them."""
    data = numbers(2 * MICRO_BATCHES)
    found = []
    for ours in (False, True):
        model: Any = plain().model
        optimizer: Any = optimizer_of(model)
        if ours:
            model, optimizer = compiled(model, AMPLE)
        for i, one in enumerate(model.offmate.batches(data) if ours else data):
            out = model(**one)
            if i % MICRO_BATCHES == 2:
                with torch.no_grad():
                    out["loss"].zero_()
            else:
                out["loss"].backward()
            if i % MICRO_BATCHES == MICRO_BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
        found.append((model, optimizer))
    assert_alike(*found[1], *found[0])


def test_the_usual_order_leaves_them_out_too() -> None:
    """As before: the next forward discards it."""
    data = numbers(2 * MICRO_BATCHES)
    reference = plain().model
    theirs = optimizer_of(reference)
    expected = trained(reference, theirs, data, {1, 4})
    config = offmate.Config(cache_dir=None, accumulation_order="by batch")
    model, optimizer = compiled(plain().model, config=config)
    assert trained(model, optimizer, model.offmate.batches(data), {1, 4}) == expected
    assert_alike(model, optimizer, reference, theirs)
