"""What an executor keeps alive, and what it does not."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import MagicMock, Mock

from offmate.runtime.replay.executor import Executor
from offmate.runtime.replay.world import World

from ...solver.tiny_schedule import tiny_schedule


def test_an_executor_that_nobody_needs_is_gone_at_once() -> None:
    """Its programs and constants would otherwise lie in memory that the ledger does not count."""
    world = World(tiny_schedule(), MagicMock(), Mock(), MagicMock())
    executor = Executor(world)
    gone = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert gone() is None
    finally:
        gc.enable()
