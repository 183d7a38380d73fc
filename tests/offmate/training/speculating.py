"""Plans that update before the gate, on the emulated device: as if its copies and updates had cores of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from offmate.solver.schedule import Kind, Schedule

from offmate.lowering.problem import Lowering

CONFIG: dict[str, Any] = {"speculate": True, "updates": "host"}


@contextmanager
def own_cores() -> Iterator[None]:
    """Plan as for a device beside the host; where all share the same cores, an update before the gate gains nothing."""
    problem = Lowering.problem

    @functools.wraps(problem)
    def on_a_device(lowering: Lowering, rates: Any, shared_cores: bool, **given: Any) -> Any:
        return problem(lowering, rates, False, **given)

    with mock.patch.object(Lowering, "problem", on_a_device):
        yield


def early(schedule: Schedule) -> list[str]:
    """The parameters that a schedule updates before the gate."""
    return [action.name for action in schedule.actions if action.kind is Kind.SPECULATE_CPU]
