"""Clipping by the global norm and accumulation with a planned optimizer: plain PyTorch's numbers, inside the budget."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import pytest
import torch

import offmate

from ...pairs import covering
from ..parity import AMPLE, BUDGETS, HOST_BYTES, LEAST, Case, adamw, check
from .test_parity_language import language_model, text_batches, text_case
from .test_parity_models import (
    Decoder,
    convolutions,
    decaying,
    frozen_but_last,
    momentum,
    pictures,
    token_batches,
    token_case,
    two_groups,
    vector_case,
)

# The first norms of every case lie above this, some of the later ones below.
CLIP = {"max_grad_norm": 0.5}


def gated(model: str, micro: int, clip: dict[str, float]) -> Case:
    """One of three kinds of models, with a gate before its updates."""
    variant = f"-{micro}-{'clip' if clip else 'sums'}"
    if model == "llama":
        return text_case("llama", "padding", variant, micro=micro, **clip)
    if model == "tied":
        return token_case(f"tied{variant}", lambda: Decoder(tied=True), micro=micro, **clip)
    return vector_case(f"convolutions{variant}", convolutions, batches=pictures, micro=micro, **clip)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "micro", "clips", "budget"),
    covering(
        ["llama", "tied", "convolutions"], [1, 2, 3, 4], [True, False], BUDGETS,
        allowed=lambda model, micro, clips, budget: micro > 1 or clips,
    ),
)  # fmt: skip
def test_clipping_and_accumulation(model: str, micro: int, clips: bool, budget: str, cache_dir: str) -> None:
    check(gated(model, micro, CLIP if clips else {}), budget, cache_dir)


@pytest.mark.parametrize(
    "case",
    [
        token_case("dropout-clip", lambda: Decoder(dropout=0.2), **CLIP),
        token_case("frozen-clip", frozen_but_last(Decoder), **CLIP),
        token_case("momentum-clip", Decoder, optimizer=momentum, **CLIP),
        token_case("two_groups-clip", Decoder, optimizer=two_groups, scheduler=decaying, **CLIP),
        token_case("measured", Decoder, max_grad_norm=float("inf")),
    ],
    ids=lambda case: case.name,
)
def test_clipping_in_other_loops(case: Case, cache_dir: str) -> None:
    check(case, LEAST, cache_dir)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        token_case("dropout-two-micro-batches", lambda: Decoder(dropout=0.2), micro=2),
        token_case("frozen-5-clip", frozen_but_last(Decoder), micro=5, **CLIP),
        token_case("momentum-2", Decoder, optimizer=momentum, micro=2),
        token_case("two_groups-3", Decoder, optimizer=two_groups, scheduler=decaying, micro=3),
    ],
    ids=lambda case: case.name,
)
def test_accumulation_in_other_loops(case: Case, cache_dir: str) -> None:
    check(case, LEAST, cache_dir)


def decoder(**compiled: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer, compiled if there is anything to compile with."""
    torch.manual_seed(0)
    model = Decoder(tied=True)
    optimizer = adamw(model)
    if compiled:
        config = offmate.Config(cache_dir=None)
        settings = {"device": "emulated", "cpu_budget": HOST_BYTES, "config": config} | compiled
        offmate.compile(model, settings.pop("budget"), optimizer=optimizer, **settings)
    return model, optimizer


def least_of(**gate: Any) -> int:
    model, optimizer = decoder()
    settings = {"device": "emulated", "cpu_budget": HOST_BYTES, "config": offmate.Config(cache_dir=None)}
    example = token_batches()[0]
    return offmate.plan(
        model, "1GiB", example_inputs=example, optimizer=optimizer, **settings, **gate
    ).least_budget_bytes


def train(
    model: Any, optimizer: torch.optim.Optimizer, counts: tuple[int, ...], clip: float | None, between: Any
) -> Any:
    """One step per count of micro-batches; `between` is called after each backward."""
    planned, norms, batches = hasattr(model, "offmate"), [], token_batches()
    for step, count in enumerate(counts):
        for micro in range(count):
            (model(**batches[(step + micro) % len(batches)]) / count).backward()
            between(model, optimizer, step, micro)
        if clip is not None and not planned:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        if clip is not None and planned:
            norms.append(model.offmate.grad_norm.clone())
        optimizer.zero_grad()
    return norms, {k: v.clone() for k, v in model.state_dict().items()}


def nothing(model: Any, optimizer: Any, step: int, micro: int) -> None:
    """Between micro-batches the loop does nothing else."""


def assert_same(expected: Any, found: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(expected[0], found[0], strict=True))
    assert [k for k, v in expected[1].items() if not torch.equal(v, found[1][k])] == []


@pytest.mark.parametrize("clip", [None, 0.5])
def test_fewer_micro_batches_at_the_end_of_an_epoch(clip):
    counts = (4, 1, 4, 3, 2, 4)
    gate = {"accumulation_steps": 4, "max_grad_norm": clip}
    compiled = decoder(budget=least_of(**gate), **gate)
    assert_same(train(*decoder(), counts, clip, nothing), train(*compiled, counts, clip, nothing))
    assert compiled[0].offmate.peak_bytes == compiled[0].offmate.plan.predicted_peak_bytes


def test_more_micro_batches_than_planned():
    model, optimizer = decoder(budget="1GiB", accumulation_steps=2)
    with pytest.raises(
        offmate.ProtocolError, match=r"one update of this plan takes 2 backward\(\) calls.*accumulation_steps="
    ):
        train(model, optimizer, (3,), None, nothing)


def look_around(model: Any, optimizer: Any, step: int, micro: int) -> None:
    """Evaluates and saves in the middle of an accumulation."""
    if (step, micro) == (1, 0):
        with torch.no_grad():
            model(**token_batches()[0])
    if (step, micro) in ((1, 1), (2, 0)):
        model.state_dict()
        optimizer.state_dict()


def test_evaluation_and_saving_between_micro_batches():
    gate = {"accumulation_steps": 3, "max_grad_norm": 0.5}
    compiled = decoder(budget=least_of(**gate), **gate)
    assert_same(train(*decoder(), (3,) * 4, 0.5, look_around), train(*compiled, (3,) * 4, 0.5, look_around))


def drop_second(model: Any, optimizer: Any, step: int, micro: int) -> None:
    if (step, micro) == (1, 0):
        optimizer.zero_grad()


def test_gradients_dropped_before_the_step(caplog):
    """As loops do that skip a batch: what was added up so far does not count."""
    gate = {"accumulation_steps": 3, "max_grad_norm": 0.5}
    compiled = decoder(budget=least_of(**gate), **gate)
    with caplog.at_level(logging.INFO, "offmate"):
        found = train(*compiled, (3,) * 4, 0.5, drop_second)
    assert_same(train(*decoder(), (3,) * 4, 0.5, drop_second), found)
    assert "dropped" in caplog.text


def test_masks_alternate_between_micro_batches(cache_dir):
    """Each outcome of the model's question about its mask has a plan; sums go over from one to the other."""

    def batches() -> list[Any]:
        padded, plain = text_batches("padding"), text_batches("ones")
        return [padded[0], plain[0], plain[1], padded[1]]

    case = Case("llama-alternating-4-clip", lambda: language_model("llama"), batches, micro=4, max_grad_norm=0.5)
    check(case, AMPLE, cache_dir)


def test_hyperparameters_count_at_the_step():
    """With a gate no update has begun before it, so a learning rate set after backward() is used."""

    def warm(model: Any, optimizer: Any, step: int, micro: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)

    compiled = decoder(budget="1GiB", max_grad_norm=0.5)
    assert_same(train(*decoder(), (1,) * 3, 0.5, warm), train(*compiled, (1,) * 3, 0.5, warm))


def test_gradients_cannot_be_read_or_clipped_by_hand():
    model, optimizer = decoder(budget="1GiB", max_grad_norm=0.5)
    model(**token_batches()[0]).backward()
    with pytest.raises(offmate.ProtocolError, match="max_grad_norm="):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_the_plan_counts_all_micro_batches():
    gate = {"accumulation_steps": 6, "max_grad_norm": 0.5}
    model, optimizer = decoder()
    settings = {"device": "emulated", "cpu_budget": HOST_BYTES, "config": offmate.Config(cache_dir=None)}
    plan = offmate.plan(
        model, least_of(**gate), example_inputs=token_batches()[0], optimizer=optimizer, **settings, **gate
    )
    gradients = sum(size for item, size in plan.schedule.item_bytes.items() if item.startswith("g:"))
    assert plan.moved_bytes[1] >= 6 * gradients
    assert plan.predicted_step_s >= 6 * sum(s.seconds for n, s in plan.schedule.computes.items() if n[0] in "FB")


@pytest.fixture(scope="module")
def gated_loop() -> Any:
    """A model with clipping and two micro-batches in the tightest budget, and plain PyTorch's state after each step."""
    gate = {"accumulation_steps": 2, "max_grad_norm": 0.5}
    model, optimizer = decoder(budget=least_of(**gate), **gate)
    train(model, optimizer, (2,), 0.5, nothing)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    after = [train(*decoder(), (2,) * steps, 0.5, nothing)[1] for steps in (1, 2)]
    return model, optimizer, start, after


@pytest.mark.parametrize("share", [0.02, 0.2, 0.45, 0.6, 0.8, 0.9, 0.95, 0.98, 0.999])
def test_an_interrupted_iteration_is_whole(gated_loop: Any, share: float) -> None:
    """Before the gate nothing was updated; once it is open all updates are made, whatever happens."""
    model, optimizer, start, after = gated_loop
    model_state, optimizer_state = copy.deepcopy(start)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    executor = model._offmate_session.training.executor
    schedule = executor.schedule
    left = int(share * len(schedule.actions))

    def interrupt(action: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            executor.on_action = None
            raise KeyboardInterrupt

    executor.on_action = interrupt
    batches = token_batches()
    with contextlib.suppress(KeyboardInterrupt):
        for micro in range(2):
            (model(**batches[1 + micro]) / 2).backward()
        optimizer.step()
    executor.on_action = None
    assert not model._offmate_session.truth.torn
    found = model.state_dict()
    done = [all(torch.equal(v, found[k]) for k, v in state.items()) for state in after]
    assert sum(done) == 1, done
    assert done[1] == (share * len(schedule.actions) > len(schedule.actions) - len(schedule.turn_around) + 1)
