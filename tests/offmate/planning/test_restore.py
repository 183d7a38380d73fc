"""Which earlier plans serve a request again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offmate.planning.restore import fitting


@pytest.mark.parametrize(("capacity_bytes", "serves"), [(150, True), (149, False)])
def test_a_plan_that_drives_have_no_room_for_is_made_again(capacity_bytes: int, serves: bool) -> None:
    """Second places of states that are updated before the gate count, too."""
    schedule = SimpleNamespace(most_bytes_in_files=150)
    plan: Any = SimpleNamespace(schedule=schedule, host_bytes=0, stored_bytes=(0, 0))
    storage = SimpleNamespace(capacity_bytes=capacity_bytes)
    request: Any = SimpleNamespace(storage=storage, has_room_for=lambda n_bytes: True)
    assert (fitting(plan, request) is plan) == serves
