"""Clipping by the global norm and accumulation with a planned optimizer: plain PyTorch's numbers, inside the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offmate

from .parity import BUDGETS, HOST_BYTES, LEAST, Case, adamw, check
from .test_parity_language import text_case
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


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "case",
    [
        text_case("llama", "padding", "-clip", **CLIP),
        token_case("tied-clip", lambda: Decoder(tied=True), **CLIP),
        vector_case("convolutions-clip", convolutions, batches=pictures, **CLIP),
    ],
    ids=lambda case: case.name,
)
def test_clipping(case: Case, budget: str, cache_dir: str) -> None:
    check(case, budget, cache_dir)


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
