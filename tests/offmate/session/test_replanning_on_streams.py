"""Plans that are made again on a device with streams: plain PyTorch's numbers, whatever is late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ...accelerator.loops import without_allocator
from . import test_state_storage
from .test_replanning import (
    drives,
    one_cache,
    paths,
    small_and_at_once,
    small_requests,
    test_a_plan_is_made_again_and_taken_between_two_updates,
    test_accumulated_updates_change_plans_only_between_updates,
)
from .test_state_storage import ring

__all__ = [  # fixtures, and promises of the emulated device that hold here as well
    "drives", "one_cache", "paths", "ring", "small_and_at_once", "small_requests",
    "test_a_plan_is_made_again_and_taken_between_two_updates",
    "test_accumulated_updates_change_plans_only_between_updates",
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_streams(sim: Any, ring: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels, copies and events come late, and freed memory holds NaN."""
    sim.set_delays(1, 300)
    compiled = test_state_storage.compiled
    monkeypatch.setattr(test_state_storage, "compiled", lambda *given, **more: compiled(*given, **more, device="sim"))
    monkeypatch.setattr(test_state_storage.Deep, "dropout", 0.0)
    with without_allocator():
        yield
