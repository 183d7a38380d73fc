"""How several processes share the suite."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Files whose tests share nothing, and which one process would still be busy with when the others are done.
SPLIT = ("test_accelerator.py",)


class Stretches(LoadScopeScheduling):
    """Hands out the tests in the order in which they were collected, a stretch of one file's tests at a time.

    Of the files in `SPLIT` a stretch is one test with its cases.

    Tests of a file share what its fixtures make. Where they lie apart (those on the simulated accelerator come last),
    each part is a stretch of its own: a process that has begun the last ones must not be given others.

    State: `_stretch`, the stretch of every test, filled when the tests have been collected.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._stretch: dict[str, str] = {}

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        by_file = groupby(collection, key=_together)
        self._stretch = {test: f"{number} {file}" for number, (file, tests) in enumerate(by_file) for test in tests}
        super().add_node_collection(node, collection)

    def _split_scope(self, nodeid: str) -> str:
        return self._stretch[nodeid]


def _together(test: str) -> str:
    """What the tests of a stretch have in common."""
    file = test.split("::")[0]
    return test.split("[")[0] if file.endswith(SPLIT) else file
