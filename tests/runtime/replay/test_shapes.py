"""Which batches may run on the executor of other ones."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from offmate.runtime.replay.shapes import Shape
from offmate.solver.plan import plan
from offmate.solver.schedule import Schedule

from ...solver.random_problems import random_problem


def schedule() -> Schedule:
    found = plan(random_problem(random.Random(0))).schedule
    assert found is not None
    return found


def binding(*blocks: tuple[dict[int, tuple[int, ...]], dict[int, int]]) -> Any:
    """By block, the storages that leave with their registers, and the bytes of storages."""
    return SimpleNamespace(
        blocks=[SimpleNamespace(offloaded=offloaded, made_bytes=made_bytes) for offloaded, made_bytes in blocks]
    )


def test_what_leaves_must_have_its_place() -> None:
    own = schedule()
    lead = Shape(own, binding(({3: (1,), 4: (2,)}, {3: 100, 4: 10})))
    assert lead.excess_bytes(Shape(own, binding(({3: (1,), 4: (2,)}, {3: 60, 4: 10})))) == 0
    assert lead.excess_bytes(Shape(own, binding(({3: (1,), 4: (2,)}, {3: 60, 4: 11})))) is None


def test_a_graph_of_other_storages_does_not_follow() -> None:
    """Its schedule is another one, too, as a rule."""
    own = schedule()
    lead = Shape(own, binding(({3: (1,)}, {3: 100})))
    other = binding(({7: (1,)}, {7: 50}))
    assert lead.excess_bytes(Shape(own, other)) is None
    assert lead.excess_bytes(Shape(replace(own, forward=own.forward[1:]), other)) is None
