"""Where the system pins little memory, what cannot be pinned is staged through pinned buffers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from offmate.runtime.devices import staging

import offmate

from .card import behaving
from .cases import WIDE
from .loops import training

pytestmark = pytest.mark.timeout(240)
N_STEPS = 4
# The model and its states take 162 MiB of the host, the buffers of both directions 32 MiB.
LIMITS_MIB = (36, 64, 96, 128)


@pytest.fixture
def nothing_pinned() -> Iterator[None]:
    """Nothing of earlier tests is pinned, buffers and torch's reserve included; later tests take buffers anew."""
    unpin()
    yield
    unpin()


def unpin() -> None:
    for direction in (staging.INTO, staging.OUT_OF):
        direction._blocks.clear()
        direction._used.clear()
    gc.collect()
    torch._C._host_emptyCache()


def unchanged_by(n_steps: int, cache_dir: str) -> tuple[list[int], bool]:
    """Train with updates on the card, where kernels do nothing; pageable copies by step, and whether values stay."""
    expected = WIDE.model().state_dict()
    with training(WIDE, cache_dir, config=offmate.Config(cache_dir=cache_dir, updates="device")) as loop:
        steps = [loop.step() for _ in range(n_steps)]
        state = loop.model.state_dict()
        kept = all(torch.equal(state[name].cpu(), value) for name, value in expected.items())
        assert steps[-1].bytes_out > 1 << 24, "nearly nothing leaves the card, so that this test shows nothing"
    return [step.pageable_copies for step in steps], kept


@pytest.mark.parametrize("limit_mib", LIMITS_MIB)
def test_what_cannot_be_pinned_is_staged(limit_mib, nothing_pinned, cache_dir):
    """No copy goes to or from memory that is not pinned, and parameters come back as they left."""
    with behaving(pin_limit_bytes=limit_mib << 20):
        pageable, kept = unchanged_by(N_STEPS, cache_dir)
    # The batch, which is small, is the only one.
    assert pageable[-1] <= 1, f"with {limit_mib} MiB of pinned memory, copies of a step are not staged"
    assert kept, f"with {limit_mib} MiB of pinned memory, parameters do not come back as they left"


def test_without_any_pinned_memory(nothing_pinned, cache_dir):
    """Copies then block, and parameters come back as they left all the same."""
    with behaving(pin_limit_bytes=0):
        pageable, kept = unchanged_by(N_STEPS, cache_dir)
    assert pageable[-1] > 0
    assert kept, "without pinned memory, parameters do not come back as they left"
