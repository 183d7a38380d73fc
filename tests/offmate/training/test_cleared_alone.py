"""`param.grad = None` for some parameters drops their sums alone, as in plain PyTorch, or an error says why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from offmate import Config, ProtocolError

from ..loops import tiny
from .test_by_block import BY_BLOCK, MICRO_BATCHES, Batch, assert_alike, compiled, numbers, optimizer_of, trained

ONE_BY_ONE = Config(cache_dir=None, accumulation_order="by batch")
SOME, OTHERS = slice(1, 3), slice(4, 5)

Clear = Callable[[Any, int], None]


def clear(model: Any, which: slice = SOME) -> None:
    for param in list(model.parameters())[which]:
        param.grad = None
        assert param.grad is None


def run(model: Any, optimizer: Any, batches: Iterable[Batch], clears: Clear, clip: float | None = None) -> None:
    """The loop of a user, who clears something after each backward()."""
    for i, batch in enumerate(batches, 1):
        (model(**batch)["loss"] / MICRO_BATCHES).backward()
        clears(model, i)
        if i % MICRO_BATCHES == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def refused(words: str) -> Any:
    return pytest.raises(ProtocolError, match=re.escape(words))


@pytest.mark.parametrize("clip", [None, 0.05], ids=["no clipping", "clips"])
@pytest.mark.parametrize("updates", ["host", "device"])
@pytest.mark.parametrize("after", [(2,), (2, 4), (MICRO_BATCHES,), (3, MICRO_BATCHES)])
def test_only_their_sums_are_dropped(after: tuple[int, ...], updates: Any, clip: float | None) -> None:
    """Between micro-batches, and before a step that then leaves the parameters out; other steps are whole ones."""

    def clears(model: Any, number: int) -> None:
        if number in after:
            clear(model, SOME if number < MICRO_BATCHES else OTHERS)

    data = numbers(3 * MICRO_BATCHES)
    reference = tiny()
    theirs = optimizer_of(reference)
    run(reference, theirs, data, clears, clip)
    gate = {"max_grad_norm": clip} if clip is not None else {}
    config = Config(cache_dir=None, accumulation_order="by batch", updates=updates)
    model, optimizer = compiled(tiny(), config=config, **gate)
    run(model, optimizer, data, clears)
    assert_alike(model, optimizer, reference, theirs)
    assert model.offmate.peak_bytes <= model.offmate.plan.predicted_peak_bytes


def test_after_passes_of_several_before_the_step() -> None:
    def clears(model: Any, number: int) -> None:
        if number == MICRO_BATCHES:
            clear(model)

    data = numbers(2 * MICRO_BATCHES)
    reference = tiny()
    theirs = optimizer_of(reference)
    run(reference, theirs, data, clears)
    model, optimizer = compiled(tiny(), config=Config(cache_dir=None, micro_batches_per_pass=2))
    run(model, optimizer, model.offmate.batches(data), clears)
    assert_alike(model, optimizer, reference, theirs)


def test_one_after_the_other_is_all_of_them() -> None:
    """A loop over the parameters is zero_grad(), in either order of micro-batches."""

    def clears(model: Any, number: int) -> None:
        if number == 2:
            clear(model, slice(None))

    data = numbers(MICRO_BATCHES)
    for config in (ONE_BY_ONE, BY_BLOCK):
        model, optimizer = compiled(tiny(), config=config)
        loop = iter(model.offmate.batches(data))
        for number in (1, 2):
            model(**next(loop))["loss"].backward()
            clears(model, number)
        reference = tiny()
        theirs = optimizer_of(reference)
        expected = trained(reference, theirs, data)
        assert trained(model, optimizer, model.offmate.batches(data)) == expected
        assert_alike(model, optimizer, reference, theirs)


def test_after_the_step_the_others_are_left() -> None:
    model, optimizer = compiled(tiny(), config=ONE_BY_ONE)
    data = numbers(2 * MICRO_BATCHES)
    trained(model, optimizer, data[: MICRO_BATCHES - 1])
    model(**data[MICRO_BATCHES - 1])["loss"].backward()
    optimizer.step()
    clear(model)
    loss = model(**data[MICRO_BATCHES])["loss"]
    with refused("the gradients of the last iteration were not cleared"):
        loss.backward()
    with refused("has taken this gradient"):
        _ = next(model.parameters()).grad


def test_a_term_of_its_own_counts_after_it() -> None:
    """The step then has this gradient alone for the parameter."""
    data = numbers(MICRO_BATCHES)
    found = []
    for ours in (False, True):
        model: Any = tiny()
        optimizer = optimizer_of(model)
        if ours:
            model, optimizer = compiled(model, config=ONE_BY_ONE)
        for batch in data:
            (model(**batch)["loss"] / MICRO_BATCHES).backward()
        clear(model)
        list(model.parameters())[1].square().sum().backward()
        optimizer.step()
        found.append((model, optimizer))
    assert_alike(*found[1], *found[0])


def test_what_has_no_sum_yet_is_refused() -> None:
    """Until everything is cleared, and nothing is updated meanwhile."""
    data = numbers(MICRO_BATCHES)
    model, optimizer = compiled(tiny(), config=BY_BLOCK)
    loop = iter(model.offmate.batches(data))
    model(**next(loop))["loss"].backward()
    clear(model)
    with refused("was set to None between the micro-batches of an update that run together"):
        model(**data[1])
    optimizer.zero_grad()
    model, _ = compiled(tiny(), config=ONE_BY_ONE)
    model(**data[0])["loss"].backward()
    model(**data[1])["loss"]
    with refused("gradients were cleared between a forward and its backward()"):
        clear(model)


def test_a_scaler_has_looked_at_it_in_the_last_backward() -> None:
    """Before that, the sum is dropped."""

    def step(model: Any, optimizer: Any, scaler: Any) -> None:
        for i, batch in enumerate(numbers(MICRO_BATCHES), 1):
            scaler.scale(model(**batch)["loss"]).backward()
            if i == 2:
                clear(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    reference = tiny()
    theirs = optimizer_of(reference)
    step(reference, theirs, torch.amp.GradScaler("cpu", init_scale=4.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = compiled(tiny(), config=ONE_BY_ONE, grad_scaler=scaler)
    step(model, optimizer, scaler)
    assert_alike(model, optimizer, reference, theirs)
    for batch in numbers(MICRO_BATCHES):
        scaler.scale(model(**batch)["loss"]).backward()
    clear(model)
    with refused("was set to None after the last backward() of an update. With grad_scaler="):
        scaler.step(optimizer)
