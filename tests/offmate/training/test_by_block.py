"""Micro-batches that run block by block: the numbers of the plain loop over the same micro-batches, and its rules."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import offmate
from offmate import Config, InfeasibleBudget, OffmateError, ProtocolError

from ..loops import CPU_BUDGET, Tiny, adamw, tiny

MICRO_BATCHES = 5
UPDATES = 4
AMPLE = 1 << 24
BY_BLOCK = Config(cache_dir=None, accumulation_order="by block")

Batch = dict[str, torch.Tensor]


class Tied(torch.nn.Module):
    """An embedding that is also the head, dropout, batch norm, and a layer that is not trained."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(24, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.dropout = torch.nn.Dropout(dropout)
        self.norm = torch.nn.BatchNorm1d(16) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed(x)
        for layer in self.layers:
            h = h + self.dropout(torch.nn.functional.gelu(layer(h)))
        scores = self.norm(h) @ self.embed.weight.T
        return {"loss": cross_entropy(scores, y), "scores": scores}


def tied(**more: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(**more)


def words(number: int, seed: int = 7) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randint(0, 24, (12,), generator=generator) for n in ("x", "y")} for _ in range(number)]


def numbers(number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(8)
    made = (torch.randn(8, 16, generator=generator) for _ in range(number))
    return [{"x": x, "y": torch.randint(0, 4, (8,), generator=generator)} for x in made]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, fused=True)


def compiled(model: Any, budget: int = AMPLE, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = optimizer_of(model)
    settings = {"accumulation_steps": MICRO_BATCHES, "config": BY_BLOCK, "cpu_budget": CPU_BUDGET, **more}
    return offmate.compile(model, budget, optimizer=optimizer, device="emulated", **settings), optimizer


def trained(
    model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], every: int = MICRO_BATCHES,
    clip: float | None = None,
) -> list[float]:  # fmt: skip
    """The loop of a user; `clip` only where the plan does not."""
    losses = []
    for i, batch in enumerate(batches, 1):
        loss = model(**batch)["loss"] / every
        loss.backward()
        losses.append(loss.item())
        if i % every == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_alike(model: Any, optimizer: torch.optim.Optimizer, other: Any, others: torch.optim.Optimizer) -> None:
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    ours, theirs = optimizer.state_dict()["state"], others.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, state in theirs.items():
        assert all(torch.equal(torch.as_tensor(ours[number][key]), torch.as_tensor(v)) for key, v in state.items())


def least_budget(make: Callable[[], Any], example: Batch, **more: Any) -> int:
    model = make()
    plan = offmate.plan(
        model, AMPLE, example_inputs=example, optimizer=optimizer_of(model), device="emulated", cpu_budget=CPU_BUDGET,
        accumulation_steps=MICRO_BATCHES, config=BY_BLOCK, **more,
    )  # fmt: skip
    assert plan.schedule.per_step == MICRO_BATCHES
    return plan.least_budget_bytes


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["ample", "least"])
@pytest.mark.parametrize("clip", [None, 0.05, 1e6], ids=["no clipping", "clips", "never clips"])
@pytest.mark.parametrize("more", [{}, {"dropout": 0.2}, {"norm": True}], ids=["plain", "dropout", "batch norm"])
def test_numbers_are_those_of_the_plain_loop(more: dict[str, Any], clip: float | None, budget: str) -> None:
    data = words(UPDATES * MICRO_BATCHES)
    gate = {"max_grad_norm": clip} if clip is not None else {}
    budget_bytes = AMPLE if budget == "ample" else least_budget(lambda: tied(**more), data[0], **gate)
    reference = tied(**more)
    theirs = optimizer_of(reference)
    torch.manual_seed(3)
    expected = trained(reference, theirs, data, clip=clip)
    model, optimizer = compiled(tied(**more), budget_bytes, **gate)
    torch.manual_seed(3)
    assert trained(model, optimizer, model.offmate.batches(data)) == expected
    assert_alike(model, optimizer, reference, theirs)
    plan = model.offmate.plan
    assert plan.schedule.per_step == MICRO_BATCHES and plan.schedule.gate is (clip is not None)
    assert model.offmate.peak_bytes == plan.predicted_peak_bytes


def test_a_loss_outside_of_the_model() -> None:
    """Its gradients have many numbers, and those of all micro-batches wait for the last backward()."""
    data = numbers(UPDATES * MICRO_BATCHES)

    def losses_of(model: Any, optimizer: Any, batches: Iterable[Batch]) -> list[float]:
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
    config = Config(cache_dir=None, accumulation_order="by block", gradients_into=("scores",))
    model, optimizer = compiled(tiny(), config=config)
    assert losses_of(model, optimizer, model.offmate.batches(data)) == expected
    assert_alike(model, optimizer, reference, theirs)


def test_a_short_last_group_runs_in_the_usual_order() -> None:
    """Whether the loop makes a step with it or adds the next epoch's micro-batches."""
    for step_at_the_end in (True, False):
        data = numbers(2 * MICRO_BATCHES + 2)
        found = []
        for ours in (False, True):
            model: Any = tiny()
            optimizer = adamw(model)
            if ours:
                model, optimizer = compiled(model)
            losses = []
            for _ in range(2):
                losses += trained(model, optimizer, model.offmate.batches(data) if ours else data)
                if step_at_the_end:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append((losses, model, optimizer))
            if not step_at_the_end:
                break
        if step_at_the_end:
            assert found[0][0] == found[1][0]
            assert_alike(found[1][1], found[1][2], found[0][1], found[0][2])


def test_a_measured_norm_delays_nothing() -> None:
    data = numbers(2 * MICRO_BATCHES)
    reference = tiny()
    expected = []
    for i, batch in enumerate(data, 1):
        (reference(**batch)["loss"] / MICRO_BATCHES).backward()
        if i % MICRO_BATCHES == 0:
            expected.append(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]))
            reference.zero_grad()
    config = Config(cache_dir=None, accumulation_order="by block", measure_grad_norm=True)
    model: Any = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    offmate.compile(
        model, AMPLE, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config,
        accumulation_steps=MICRO_BATCHES,
    )  # fmt: skip
    found = []
    for i, batch in enumerate(model.offmate.batches(data), 1):
        (model(**batch)["loss"] / MICRO_BATCHES).backward()
        if i % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
            found.append(model.offmate.grad_norm)
    assert found == expected and not model.offmate.plan.schedule.gate


def test_auto_takes_the_order_that_is_predicted_to_be_faster(caplog: pytest.LogCaptureFixture) -> None:
    data = numbers(MICRO_BATCHES)
    model, optimizer = compiled(tiny(), config=Config(cache_dir=None))
    with caplog.at_level(logging.INFO, logger="offmate"):
        trained(model, optimizer, model.offmate.batches(data))
    by_order = {plan.schedule.per_step: plan.predicted_step_s for plan in model.offmate.plans}
    assert {1, MICRO_BATCHES} <= by_order.keys() and len(by_order) <= 3
    taken = model.offmate.plan.schedule.per_step
    assert by_order[taken] == min(by_order.values())
    assert "less per update than" in model.offmate.plan.explain()
    if taken == 1:
        assert "one after the other, and not block by block: the plans predict" in caplog.text


def test_without_announcing_auto_stays_in_the_usual_order() -> None:
    model, optimizer = compiled(tiny(), config=Config(cache_dir=None))
    trained(model, optimizer, numbers(MICRO_BATCHES))
    assert [plan.schedule.per_step for plan in model.offmate.plans] == [1]


def test_a_plan_is_handed_over() -> None:
    model = tiny()
    data = numbers(MICRO_BATCHES)
    settings = {"device": "emulated", "cpu_budget": CPU_BUDGET, "accumulation_steps": MICRO_BATCHES}
    plan = offmate.plan(
        model, AMPLE, example_inputs=data[0], optimizer=adamw(model), config=BY_BLOCK, **settings
    )  # fmt: skip
    assert f"{MICRO_BATCHES} micro-batches" in plan.explain() and "block by block" in plan.explain()
    model, optimizer = compiled(tiny(), plan=plan)
    trained(model, optimizer, model.offmate.batches(data))
    assert model.offmate.plan.fingerprint == plan.fingerprint
    with pytest.raises(OffmateError, match=r"plan= runs the micro-batches of an update by block, but .*'by batch'"):
        compiled(tiny(), plan=plan, config=Config(cache_dir=None, accumulation_order="by batch"))


# -- the rules of the loop --------------------------------------------------------------------------------------------


def batches(model: Any, number: int = 2 * MICRO_BATCHES) -> Iterator[Batch]:
    return iter(model.offmate.batches(numbers(number)))


def test_batches_must_be_announced() -> None:
    model, optimizer = compiled(tiny())
    with pytest.raises(ProtocolError, match=r"has to know all 5 batches.*model.offmate.batches\(loader\)"):
        trained(model, optimizer, numbers(MICRO_BATCHES))
    with pytest.raises(TypeError, match="such as a DataLoader, not int"):
        model.offmate.batches(3)


def test_a_call_that_was_not_foreseen() -> None:
    model, _ = compiled(tiny())
    loop = batches(model)
    model(**next(loop))["loss"].backward()
    later = next(loop)
    with pytest.raises(ProtocolError, match=r"micro-batch 2 differs from what its batch announced: its argument x"):
        model(**{**later, "x": later["x"] + 1})


def test_a_batch_that_is_changed_in_place() -> None:
    model, _ = compiled(tiny())
    loop = batches(model)
    model(**next(loop))["loss"].backward()
    later = next(loop)
    later["y"].zero_()
    with pytest.raises(ProtocolError, match="its argument y"):
        model(**later)


def test_a_step_before_all_backwards() -> None:
    model, optimizer = compiled(tiny())
    loop = batches(model)
    for _ in range(2):
        model(**next(loop))["loss"].backward()
    with pytest.raises(ProtocolError, match=r"optimizer.step\(\) after 2 of the 5 micro-batches"):
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    # Training goes on with the next group.
    for _ in range(3):
        next(loop)
    data = numbers(2 * MICRO_BATCHES)[MICRO_BATCHES:]
    reference = tiny()
    theirs = adamw(reference)
    expected = trained(reference, theirs, data)
    assert trained(model, optimizer, loop) == expected
    assert_alike(model, optimizer, reference, theirs)


def test_a_forward_before_the_backward_and_one_without_gradients() -> None:
    model, _ = compiled(tiny())
    loop = batches(model)
    model(**next(loop))["loss"].backward()
    loss = model(**next(loop))["loss"]
    later = next(loop)
    with pytest.raises(ProtocolError, match=r"a forward without backward\(\) of micro-batch 2, and not with the batch"):
        model(**numbers(1)[0])
    loss.backward()
    with pytest.raises(ProtocolError, match="between the micro-batches of one update"), torch.no_grad():
        model(**later)
    model(**later)["loss"].backward()


def test_numbers_drawn_between_the_calls() -> None:
    model, _ = compiled(tied(dropout=0.2))
    loop = iter(model.offmate.batches(words(MICRO_BATCHES)))
    model(**next(loop))["loss"].backward()
    torch.rand(1)
    with pytest.raises(ProtocolError, match="random numbers were drawn between the calls for micro-batches 1 and 2"):
        model(**next(loop))


def test_a_loader_that_draws_beside_dropout() -> None:
    def drawing() -> Iterator[Batch]:
        for batch in words(MICRO_BATCHES):
            yield {"x": torch.randint(0, 24, (12,)), "y": batch["y"]}

    model, optimizer = compiled(tied(dropout=0.2))
    with pytest.raises(ProtocolError, match="the loader draws random numbers"):
        trained(model, optimizer, model.offmate.batches(drawing()))
    still, others = compiled(tied())
    trained(still, others, still.offmate.batches(drawing()))


def test_a_budget_for_one_micro_batch_only() -> None:
    """By block it is refused with its own least budget; auto takes the usual order."""
    data = numbers(MICRO_BATCHES)
    model = tiny()
    usual = offmate.plan(
        model, AMPLE, example_inputs=data[0], optimizer=adamw(model), device="emulated", cpu_budget=CPU_BUDGET,
        accumulation_steps=MICRO_BATCHES, config=Config(cache_dir=None),
    )  # fmt: skip
    budget = usual.least_budget_bytes
    assert budget < least_budget(tiny, data[0])
    model, optimizer = compiled(tiny(), budget)
    with pytest.raises(InfeasibleBudget, match="the least that works"):
        trained(model, optimizer, model.offmate.batches(data))
    model, optimizer = compiled(tiny(), budget, config=Config(cache_dir=None))
    trained(model, optimizer, model.offmate.batches(data))
    assert model.offmate.plan.schedule.per_step == 1


@pytest.mark.parametrize("where", [0, 3])
def test_an_interrupted_forward_or_backward(where: int) -> None:
    """Nothing is updated in a forward; the same batches can be announced again."""
    model, optimizer = compiled(tiny(), max_grad_norm=1e6)
    data = numbers(2 * MICRO_BATCHES)
    trained(model, optimizer, model.offmate.batches(data[:MICRO_BATCHES]))
    executor = model._offmate_session.training.executor
    seen = []

    def stop(action: Any) -> None:
        seen.append(action)
        if len(seen) == 20 + where:
            raise KeyboardInterrupt

    executor.on_action = stop
    with pytest.raises(KeyboardInterrupt):
        trained(model, optimizer, model.offmate.batches(data[MICRO_BATCHES:]))
    executor.on_action = None
    reference = tiny()
    theirs = adamw(reference)
    trained(reference, theirs, data[:MICRO_BATCHES])
    assert_alike(model, optimizer, reference, theirs)
    expected = trained(reference, theirs, data[MICRO_BATCHES:])
    optimizer.zero_grad()
    assert trained(model, optimizer, model.offmate.batches(data[MICRO_BATCHES:])) == expected
    assert_alike(model, optimizer, reference, theirs)


def test_one_micro_batch_needs_nothing() -> None:
    assert isinstance(tiny(), Tiny)
    model: Any = tiny()
    optimizer = adamw(model)
    offmate.compile(model, AMPLE, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=BY_BLOCK)
    reference = tiny()
    theirs = adamw(reference)
    data = numbers(3)
    assert trained(model, optimizer, model.offmate.batches(data), every=1) == trained(reference, theirs, data, every=1)


class Across(torch.nn.Module):
    """A buffer that the last block writes and the first one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.nn.functional.gelu(self.first(x) + self.mean)
        h = h + torch.tanh(h)
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return {"loss": cross_entropy(self.last(h), y)}


def test_a_buffer_of_several_blocks_runs_in_the_usual_order() -> None:
    data = numbers(2 * MICRO_BATCHES)
    torch.manual_seed(0)
    reference = Across()
    theirs = optimizer_of(reference)
    expected = trained(reference, theirs, data)
    torch.manual_seed(0)
    model, optimizer = compiled(Across(), config=Config(cache_dir=None))
    assert trained(model, optimizer, model.offmate.batches(data)) == expected
    assert_alike(model, optimizer, reference, theirs)


@pytest.mark.parametrize("change", ["mode", "attribute", "autocast"])
def test_a_change_of_the_model_between_the_calls(change: str) -> None:
    model, _ = compiled(tied())
    loop = iter(model.offmate.batches(words(MICRO_BATCHES)))
    model(**next(loop))["loss"].backward()
    later = next(loop)
    around: Any = torch.autocast("cpu") if change == "autocast" else contextlib.nullcontext()
    if change == "mode":
        model.eval()
    elif change == "attribute":
        model.dropout.p = 0.5
    with (
        around,
        pytest.raises(ProtocolError, match="have changed before the call for micro-batch 2"),
    ):
        model(**later)


def test_a_loader_that_uses_its_memory_again() -> None:
    """Reading ahead would leave only the last batch."""

    def reusing() -> Iterator[Batch]:
        x, y = torch.empty(8, 16), torch.empty(8, dtype=torch.long)
        for batch in numbers(MICRO_BATCHES):
            yield {"x": x.copy_(batch["x"]), "y": y.copy_(batch["y"])}

    model, optimizer = compiled(tiny())
    with pytest.raises(ProtocolError, match="batches of one update in the same memory"):
        trained(model, optimizer, model.offmate.batches(reusing()))
    usual, others = compiled(tiny(), config=Config(cache_dir=None, accumulation_order="by batch"))
    reference = tiny()
    theirs = adamw(reference)
    expected = trained(reference, theirs, numbers(MICRO_BATCHES))
    assert trained(usual, others, usual.offmate.batches(reusing())) == expected, "by batch nothing is read ahead"


def test_a_batch_that_is_edited_and_passed_as_a_view() -> None:
    model, _ = compiled(tiny())
    loop = batches(model)
    model(**next(loop))["loss"].backward()
    later = next(loop)
    later["x"].add_(1)
    with pytest.raises(ProtocolError, match="its argument x"):
        model(x=later["x"].view(8, 16), y=later["y"])


def test_a_gradient_whose_memory_is_used_again() -> None:
    def losses_of(model: Any, optimizer: Any, batches: Iterable[Batch]) -> None:
        gradient = torch.empty(8, 4)
        for i, batch in enumerate(batches, 1):
            scores = model(**batch)["scores"]
            scores.backward(gradient.copy_(batch["x"][:, :4]))
            gradient.zero_()
            if i % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()

    data = numbers(2 * MICRO_BATCHES)
    reference = tiny()
    theirs = adamw(reference)
    losses_of(reference, theirs, data)
    config = Config(cache_dir=None, accumulation_order="by block", gradients_into=("scores",))
    model, optimizer = compiled(tiny(), config=config)
    losses_of(model, optimizer, model.offmate.batches(data))
    assert_alike(model, optimizer, reference, theirs)


def test_a_forward_whose_loss_is_lost() -> None:
    """The first one is dropped as usual; a later one only with the whole update."""
    data = numbers(2 * MICRO_BATCHES)
    for calls in (1, 3):
        model, optimizer = compiled(tiny())
        loop = iter(model.offmate.batches(data))
        for number in range(calls):
            loss = model(**next(loop))["loss"] / MICRO_BATCHES
            if number + 1 < calls:
                loss.backward()
        del loss
        optimizer.zero_grad()
        kept = list(loop)[MICRO_BATCHES - calls :]
        reference = tiny()
        theirs = adamw(reference)
        expected = trained(reference, theirs, kept)
        assert trained(model, optimizer, model.offmate.batches(kept)) == expected
        assert_alike(model, optimizer, reference, theirs)


def test_a_state_loaded_in_the_middle() -> None:
    model, optimizer = compiled(tiny())
    known = tiny().state_dict()
    loop = batches(model)
    for _ in range(2):
        model(**next(loop))["loss"].backward()
    with pytest.raises(ProtocolError, match="a state is loaded after 2 of 5 micro-batches"):
        model.load_state_dict(known)
    optimizer.zero_grad()
    model.load_state_dict(known)


def test_frozen_parts_and_adapters(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks without any backward, as in front of the first trained layer."""
    found = []
    for ours in (False, True):
        model: Any = tiny()
        for layer in (model.first, *model.layers[:3]):
            layer.requires_grad_(False)
        optimizer = optimizer_of(model)
        data = numbers(2 * MICRO_BATCHES)
        if ours:
            model, optimizer = compiled(model)
        found.append((trained(model, optimizer, model.offmate.batches(data) if ours else data), model, optimizer))
    assert found[0][0] == found[1][0]
    assert_alike(found[1][1], found[1][2], found[0][1], found[0][2])
    assert found[1][1].offmate.plan.schedule.per_step == MICRO_BATCHES


def test_a_batch_that_is_skipped() -> None:
    """The error says so, and not that its arguments were computed in the loop."""
    model, _ = compiled(tiny())
    skipped = r"not called with the batch of micro-batch 3, but with a later one.*leave out its backward"
    with pytest.raises(ProtocolError, match=skipped):
        for number, batch in enumerate(model.offmate.batches(numbers(MICRO_BATCHES))):
            if number != 2:
                model(**batch)["loss"].backward()
