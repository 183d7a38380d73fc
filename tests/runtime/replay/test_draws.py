"""Where forwards of a fat step draw from, on a generator that counts as a card's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offmate.runtime.devices.generator import Generator, moved, position_of
from offmate.runtime.ledger import Ledger
from offmate.runtime.replay.draws import Draws

from offmate import OffmateError

SLOTS = 3
ADVANCES = ({0: 4, 2: 256}, {0: 8, 2: 512}, {0: 4, 2: 256})  # of three micro-batches, the second one of another shape


class Card:
    """A generator that counts."""

    counts = True

    def __init__(self) -> None:
        self.now = torch.zeros(16, dtype=torch.uint8)

    def state(self) -> torch.Tensor:
        return self.now.clone()

    def place(self, state: torch.Tensor) -> None:
        self.now = state.clone()

    def draws(self, by: int) -> int:
        """Return where a kernel draws from."""
        begin = position_of(self.now)
        self.now = moved(self.now, by)
        return begin


def draws(card: Card, *, several: bool = True) -> Draws:
    bindings = [SimpleNamespace(advances=own, drawing={}) for own in ADVANCES]
    shapes: Any = SimpleNamespace(own=SimpleNamespace(binding=bindings[0]), binding=bindings.__getitem__)
    generator: Any = card
    return Draws(shapes, Ledger(1), generator, several=several)


def test_every_block_draws_from_where_it_would_in_turn() -> None:
    card, plain = Card(), Card()
    card.draws(100), plain.draws(100)
    expected = {(slot, block): plain.draws(by) for slot in range(SLOTS) for block, by in ADVANCES[slot].items()}
    own, found = draws(card), {}
    own.foresee(SLOTS)
    for block in range(3):
        for slot in range(SLOTS):
            own.before(block, slot)
            if block in ADVANCES[slot]:
                found[slot, block] = card.draws(ADVANCES[slot][block])
            own.after(block, slot)
    own.after_all()
    assert found == expected
    assert torch.equal(card.state(), plain.state())
    assert [position_of(state) for state in own.begins] == [100, 360, 880]


def test_a_block_that_draws_otherwise_is_told() -> None:
    card = Card()
    own = draws(card)
    own.foresee(SLOTS)
    own.before(0, 1)
    card.draws(4)
    with pytest.raises(OffmateError, match=r"block 0 has drawn other random numbers .* at 264 instead of 268"):
        own.after(0, 1)


def test_one_micro_batch_at_a_time_needs_no_place() -> None:
    card = Card()
    own = draws(card, several=False)
    own.foresee(1)
    own.before(0, 0)
    assert card.draws(4) == 0
    own.after(0, 0)
    own.after_all()
    assert position_of(card.state()) == 4 and own.begins == ()


def test_the_cpus_generator_does_not_count() -> None:
    generator = Generator(torch.device("cpu"))
    assert not generator.counts
    torch.manual_seed(3)
    state = generator.state()
    first = torch.rand(3)
    generator.place(state)
    assert torch.equal(torch.rand(3), first)
