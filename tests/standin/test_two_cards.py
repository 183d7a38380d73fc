"""On the second card, while the first one is current: nothing is asked of the first one."""

from __future__ import annotations

import pytest
import torch

from .card import counts
from .cases import CASES
from .loops import training

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("name", ["llama", "llama without optimizer"])
def test_nothing_is_asked_of_the_first_card(name, cache_dir):
    """A wait in a stream of the first card would let weights be read before their copy into the second has arrived."""
    before = counts(0)
    with training(CASES[name], cache_dir, device="cuda:1") as loop:
        steps = [loop.step() for _ in range(4)]
        first = counts(0).since(before)
        assert loop.model.offmate.plan.predicted_peak_bytes >= torch.cuda.max_memory_reserved(1)
    assert torch.cuda.current_device() == 0, "the second card has become the current one"
    assert steps[-1].waits > 0, "the second card waits for no copy, so that this test shows nothing"
    asked = {field: getattr(first, field) for field in ("launches", "products", "waits", "records", "allocations")}
    assert not any(asked.values()), f"work for the second card was put on the first one: {asked}"
