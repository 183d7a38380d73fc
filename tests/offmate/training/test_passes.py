"""Micro-batches in passes of several: the numbers of the plain loop, totals between passes, and the rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from offmate.solver.items import ItemKind
from offmate.solver.schedule import Kind, Schedule
from torch.nn.functional import cross_entropy

import offmate
from offmate import Config, ProtocolError
from offmate.errors import ArgumentValueError

from ..loops import CPU_BUDGET, adamw, tiny
from .speculating import own_cores
from .test_by_block import (
    AMPLE,
    MICRO_BATCHES,
    UPDATES,
    Batch,
    assert_alike,
    compiled,
    numbers,
    optimizer_of,
    tied,
    trained,
    words,
)
from .test_speculation import INF, Trained


def passes(per_pass: int, **more: Any) -> Config:
    return Config(cache_dir=None, micro_batches_per_pass=per_pass, **more)


def least_budget(example: Batch, model: Any, config: Config, **more: Any) -> int:
    return offmate.plan(
        model, AMPLE, example_inputs=example, optimizer=optimizer_of(model), device="emulated",
        cpu_budget=CPU_BUDGET, accumulation_steps=MICRO_BATCHES, config=config, **more,
    ).least_budget_bytes  # fmt: skip


def returning(schedule: Schedule) -> int:
    """How many totals come back between passes."""
    actions = (action for one in schedule.passes for action in (*one.forward, *one.backward))
    return sum(a.kind is Kind.PREFETCH and a.item.kind is ItemKind.TOTAL for a in actions)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("per_pass", [1, 2, 3, MICRO_BATCHES])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["no clipping", "clips"])
@pytest.mark.parametrize("more", [{"dropout": 0.2}, {"norm": True}], ids=["dropout", "batch norm"])
def test_numbers_are_those_of_the_plain_loop(more: dict[str, Any], clip: float | None, per_pass: int) -> None:
    """With an ample budget and with the least one; the last pass is a short one."""
    data, config = words(UPDATES * MICRO_BATCHES), passes(per_pass)
    gate = {"max_grad_norm": clip} if clip is not None else {}
    reference = tied(**more)
    theirs = optimizer_of(reference)
    torch.manual_seed(3)
    expected = trained(reference, theirs, data, clip=clip)
    for budget in (AMPLE, least_budget(data[0], tied(**more), config, **gate)):
        model, optimizer = compiled(tied(**more), budget, config=config, **gate)
        torch.manual_seed(3)
        assert trained(model, optimizer, model.offmate.batches(data)) == expected
        assert_alike(model, optimizer, reference, theirs)
        plan = model.offmate.plan
        assert plan.micro_batches_per_pass == plan.schedule.per_step == per_pass
        assert plan.accumulation_steps == MICRO_BATCHES
        assert model.offmate.peak_bytes == plan.predicted_peak_bytes
    assert returning(plan.schedule) > 0 or per_pass in (1, MICRO_BATCHES)


@pytest.mark.parametrize(("updates", "make"), [("auto", tiny), ("host", tiny), ("device", tied)])
def test_totals_leave_and_return_whoever_updates(updates: str, make: Any) -> None:
    """Also for a model whose blocks share no weight, and for passes of which none is short."""
    data, config = (numbers if make is tiny else words)(4 * 6), passes(3, updates=updates)
    reference = make()
    theirs = optimizer_of(reference)
    expected = trained(reference, theirs, data, every=6)
    settings: dict[str, Any] = {"accumulation_steps": 6, "config": config}
    example = make()
    plan = offmate.plan(
        example, AMPLE, example_inputs=data[0], optimizer=optimizer_of(example), device="emulated",
        cpu_budget=CPU_BUDGET, **settings,
    )  # fmt: skip
    model, optimizer = compiled(make(), plan.least_budget_bytes, **settings)
    assert trained(model, optimizer, model.offmate.batches(data), every=6) == expected
    assert_alike(model, optimizer, reference, theirs)
    schedule = model.offmate.plan.schedule
    assert returning(schedule) > 0 and not schedule.last_per_step and not schedule.add_cpu_s
    assert model.offmate.peak_bytes == model.offmate.plan.predicted_peak_bytes


def test_a_loss_outside_of_the_model() -> None:
    data = numbers(UPDATES * MICRO_BATCHES)

    def losses_of(model: Any, optimizer: Any, batches: Any) -> list[float]:
        losses = []
        for i, batch in enumerate(batches, 1):
            loss = cross_entropy(model(**batch)["scores"], batch["y"], label_smoothing=0.1)
            loss.backward()
            losses.append(loss.item())
            if i % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    reference = tiny()
    theirs = adamw(reference)
    expected = losses_of(reference, theirs, data)
    model, optimizer = compiled(tiny(), config=passes(2, gradients_into=("scores",)))
    assert losses_of(model, optimizer, model.offmate.batches(data)) == expected
    assert_alike(model, optimizer, reference, theirs)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("clip", [INF, 1.2, 1e-3])
def test_updates_before_the_gate(clip: float, low: bool) -> None:
    """In the last pass, from totals; with float32 copies, too."""
    with own_cores():
        model = Trained(5, clip, low, accumulation_order="by block", micro_batches_per_pass=2)
        for number in range(5):
            model.step(number)
        model.assert_same()
    assert any(action.kind is Kind.SPECULATE_CPU for action in model.model.offmate.plan.schedule.actions)


def test_losses_that_are_scaled_and_a_step_that_is_skipped() -> None:
    scalers = tuple(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2))
    model = Trained(5, INF, False, scalers=scalers, accumulation_order="by block", micro_batches_per_pass=2)
    for number, scale in enumerate((1.0, float("inf"), 1.0, 1.0)):
        model.loss_scale = scale
        model.step(number)
    model.assert_same()


# -- the rules of the loop --------------------------------------------------------------------------------------------


def steps(model: Any, batches: Iterator[Batch], count: int) -> None:
    for _ in range(count):
        (model(**next(batches))["loss"] / MICRO_BATCHES).backward()


def test_between_passes_the_loop_may_draw_and_edit_buffers() -> None:
    """As in plain PyTorch, later forwards see it; within a pass it is refused."""

    def train(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
        torch.manual_seed(3)
        for count in (2, 2, 1):
            steps(model, batches, count)
            torch.rand(3)
            with torch.no_grad():
                model.norm.running_mean.mul_(0.5)
        optimizer.step()

    data = words(MICRO_BATCHES)
    reference = tied(dropout=0.2, norm=True)
    theirs = optimizer_of(reference)
    train(reference, theirs, iter(data))
    model, optimizer = compiled(tied(dropout=0.2, norm=True), config=passes(2))
    train(model, optimizer, iter(model.offmate.batches(data)))
    assert_alike(model, optimizer, reference, theirs)
    optimizer.zero_grad()
    batches = iter(model.offmate.batches(data))
    steps(model, batches, 3)
    torch.rand(1)
    with pytest.raises(ProtocolError, match="random numbers were drawn between the calls for micro-batches 3 and 4"):
        steps(model, batches, 1)


def replace_it(model: Any) -> None:
    model.norm.running_mean = model.norm.running_mean * 0.5


def put_another(model: Any) -> None:
    model.norm._buffers["running_mean"] = torch.full_like(model.norm.running_mean, 0.5)


def give_it_memory(model: Any) -> None:
    model.norm.running_mean.data = model.norm.running_mean.data * 0.5


@pytest.mark.parametrize("change", [replace_it, put_another, give_it_memory])
def test_a_buffer_that_is_replaced_counts_from_the_next_pass_on(change: Callable[[Any], None]) -> None:
    """Within a pass, whose forwards have read the old one, it is refused."""

    def train(model: Any, optimizer: Any, batches: Iterator[Batch]) -> None:
        for count in (2, 2, 1):
            steps(model, batches, count)
            change(model)
        optimizer.step()

    data = words(MICRO_BATCHES)
    reference = tied(norm=True).eval()
    theirs = optimizer_of(reference)
    train(reference, theirs, iter(data))
    model, optimizer = compiled(tied(norm=True).eval(), config=passes(2))
    train(model, optimizer, iter(model.offmate.batches(data)))
    assert_alike(model, optimizer, reference, theirs)
    optimizer.zero_grad()
    batches = iter(model.offmate.batches(data))
    steps(model, batches, 3)
    change(model)
    with pytest.raises(ProtocolError, match="running_mean was edited before the call for micro-batch 4"):
        steps(model, batches, 1)


def test_an_edit_of_a_parameter_between_passes_is_refused() -> None:
    model, optimizer = compiled(tiny(), config=passes(2))
    batches = iter(model.offmate.batches(numbers(MICRO_BATCHES)))
    steps(model, batches, 2)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(ProtocolError, match="was edited between two passes of one update"):
        steps(model, batches, 1)
    optimizer.zero_grad()
    data, reference = numbers(MICRO_BATCHES), tiny()
    theirs = optimizer_of(reference)
    with torch.no_grad():
        next(reference.parameters()).mul_(2)
    for one, own, given in ((model, optimizer, iter(model.offmate.batches(data))), (reference, theirs, iter(data))):
        steps(one, given, MICRO_BATCHES)
        own.step()
    assert_alike(model, optimizer, reference, theirs)


def test_an_edit_before_the_step_counts() -> None:
    """The rest of the update is then made on the host, from totals wherever they are."""
    data = numbers(MICRO_BATCHES)
    reference = tiny()
    theirs = adamw(reference)
    budget = least_budget(data[0], tiny(), passes(2))
    for size in (AMPLE, budget):
        model, optimizer = compiled(tiny(), size, config=passes(2))
        reference = tiny()
        theirs = optimizer_of(reference)
        for one, own, batches in (
            (reference, theirs, iter(data)),
            (model, optimizer, iter(model.offmate.batches(data))),
        ):
            steps(one, batches, MICRO_BATCHES)
            with torch.no_grad():
                next(one.parameters()).mul_(0.5)
            own.step()
        assert_alike(model, optimizer, reference, theirs)


def test_reading_between_passes_changes_nothing() -> None:
    data = numbers(2 * MICRO_BATCHES)
    reference = tiny()
    theirs = optimizer_of(reference)
    trained(reference, theirs, data)
    model, optimizer = compiled(tiny(), least_budget(data[0], tiny(), passes(2)), config=passes(2))
    for i, batch in enumerate(model.offmate.batches(data), 1):
        (model(**batch)["loss"] / MICRO_BATCHES).backward()
        assert model.state_dict() and optimizer.state_dict()
        if i % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(model, optimizer, reference, theirs)


def test_a_step_after_some_passes_and_an_update_that_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    data = numbers(2 * MICRO_BATCHES)
    model, optimizer = compiled(tiny(), config=passes(2))
    batches = iter(model.offmate.batches(data))
    steps(model, batches, 2)
    with pytest.raises(ProtocolError, match=r"optimizer.step\(\) after 2 of the 5 micro-batches"):
        optimizer.step()
    with caplog.at_level(logging.INFO, logger="offmate"):
        optimizer.zero_grad()
    assert "the gradients of 2 backward() are dropped" in caplog.text
    reference = tiny()
    theirs = optimizer_of(reference)
    expected = trained(reference, theirs, data)
    assert trained(model, optimizer, model.offmate.batches(data)) == expected
    assert_alike(model, optimizer, reference, theirs)


@pytest.mark.parametrize(("count", "ahead"), [(1, True), (2, False), (3, True), (4, False)])
@pytest.mark.parametrize("more", [{"dropout": 0.2}, {"norm": True}], ids=["dropout", "batch norm"])
def test_a_dropped_update_leaves_the_generator_as_the_plain_loop_and_warns_of_buffers(
    more: dict[str, Any], count: int, ahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Between passes, buffers are those of the plain loop, too."""
    warns = ahead and "norm" in more
    data, reference = words(MICRO_BATCHES), tied(**more)
    torch.manual_seed(3)
    steps(reference, iter(data), count)
    expected = torch.get_rng_state()
    model, optimizer = compiled(tied(**more), config=passes(2))
    torch.manual_seed(3)
    steps(model, iter(model.offmate.batches(data)), count)
    optimizer.zero_grad()
    assert ("so that buffers are ahead of plain PyTorch's" in caplog.text) is warns
    buffers = dict(model.named_buffers())
    same = all(torch.equal(buffer, buffers[name]) for name, buffer in reference.named_buffers())
    assert same is not warns
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("order", [passes(2), Config(cache_dir=None, accumulation_order="by block")])
def test_after_zero_grad_within_an_update_dropout_goes_on_as_in_the_plain_loop(order: Config) -> None:
    """The micro-batches that are left draw what they draw there."""
    found = []
    for compiles in (False, True):
        model, optimizer = tied(dropout=0.2), None
        if compiles:
            model, optimizer = compiled(model, config=order)
        batches = model.offmate.batches(words(MICRO_BATCHES)) if compiles else words(MICRO_BATCHES)
        theirs = optimizer or optimizer_of(model)
        torch.manual_seed(3)
        losses = []
        for number, batch in enumerate(batches):
            loss = model(**batch)["loss"] / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
            if number == 0:
                theirs.zero_grad()
        found.append((losses, torch.get_rng_state()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("where", [5, 40, 75])
def test_an_interrupt_in_any_pass_makes_no_update(where: int) -> None:
    data = numbers(2 * MICRO_BATCHES)
    model, optimizer = compiled(tiny(), config=passes(2))
    trained(model, optimizer, model.offmate.batches(data[:MICRO_BATCHES]))
    executor, seen = model._offmate_session.training.executor, []

    def stop(action: Any) -> None:
        seen.append(action)
        if len(seen) == where:
            raise KeyboardInterrupt

    executor.on_action = stop
    with pytest.raises(KeyboardInterrupt):
        trained(model, optimizer, model.offmate.batches(data[MICRO_BATCHES:]))
    executor.on_action = None
    reference = tiny()
    theirs = optimizer_of(reference)
    trained(reference, theirs, data[:MICRO_BATCHES])
    assert_alike(model, optimizer, reference, theirs)
    expected = trained(reference, theirs, data[MICRO_BATCHES:])
    optimizer.zero_grad()
    assert trained(model, optimizer, model.offmate.batches(data[MICRO_BATCHES:])) == expected
    assert_alike(model, optimizer, reference, theirs)


# -- the choice -------------------------------------------------------------------------------------------------------


def test_the_fastest_of_three_plans_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offmate.planning.orders.passes_between", lambda plans: 2)
    data = numbers(MICRO_BATCHES)
    model, optimizer = compiled(tiny(), config=Config(cache_dir=None))
    trained(model, optimizer, model.offmate.batches(data))
    seconds = {plan.micro_batches_per_pass: plan.predicted_step_s for plan in model.offmate.plans}
    assert seconds.keys() == {1, 2, MICRO_BATCHES}
    assert seconds[model.offmate.plan.micro_batches_per_pass] == min(seconds.values())


def test_a_number_that_contradicts_the_order_or_the_plan_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match=r"is 2; it must be 1 or None with .*'by batch'"):
        passes(2, accumulation_order="by batch")
    with pytest.raises(ArgumentValueError, match="micro_batches_per_pass is 1; it must be at least 2 or None"):
        passes(1, accumulation_order="by block")
    with pytest.raises(ArgumentValueError, match="micro_batches_per_pass is 2, but an update has one micro-batch"):
        compiled(tiny(), config=passes(2), accumulation_steps=1)
    with pytest.raises(ArgumentValueError, match="micro_batches_per_pass is 0"):
        passes(0)
    data, model = numbers(MICRO_BATCHES), tiny()
    plan = offmate.plan(
        model, AMPLE, example_inputs=data[0], optimizer=adamw(model), device="emulated", cpu_budget=CPU_BUDGET,
        accumulation_steps=MICRO_BATCHES, config=passes(2),
    )  # fmt: skip
    assert "5 micro-batches" in plan.explain() and "block by block, 2 at a time" in plan.explain()
    model, optimizer = compiled(tiny(), plan=plan, config=Config(cache_dir=None))
    trained(model, optimizer, model.offmate.batches(data))
    assert model.offmate.plan.fingerprint == plan.fingerprint
    with pytest.raises(ArgumentValueError, match=r"plan= runs 2 micro-batches per pass, .*micro_batches_per_pass=3"):
        compiled(tiny(), plan=plan, config=passes(3))


def test_batches_must_be_announced() -> None:
    model, optimizer = compiled(tiny(), config=passes(2))
    with pytest.raises(ProtocolError, match="block by block, 2 at a time, so the plan has to know all 5 batches"):
        trained(model, optimizer, numbers(MICRO_BATCHES))


@pytest.mark.parametrize("order", ["auto", "by block"])
def test_what_an_error_advises_can_be_done(order: Any) -> None:
    """The advice leaves out what would contradict it, and asks for a new plan if one was given."""
    data, config = numbers(MICRO_BATCHES), passes(2, accumulation_order=order)
    model, _ = compiled(tiny(), config=config)
    steps(model, iter(model.offmate.batches(data)), 1)
    advice = r'with config=offmate.Config\(accumulation_order="by batch"\) without micro_batches_per_pass=2$'
    with pytest.raises(ProtocolError, match="or compile " + advice), torch.no_grad():
        model(**data[1])
    usual, _ = compiled(tiny(), config=Config(cache_dir=None, accumulation_order="by batch"))
    steps(usual, iter(usual.offmate.batches(data)), 1)
    with torch.no_grad():
        usual(**data[1])
    model, _ = compiled(tiny(), config=config, plan=model.offmate.plan)
    steps(model, iter(model.offmate.batches(data)), 1)
    with pytest.raises(ProtocolError, match="or plan again " + advice), torch.no_grad():
        model(**data[1])
