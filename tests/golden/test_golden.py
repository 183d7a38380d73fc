"""Linear models, schedules and plan files are what they were: a change that moves none of them shows it here.

The suite compares a part; `python -m tests.golden` compares all, and `--write` makes what is found what is expected.
"""

from __future__ import annotations

import pytest

from . import files
from .problems import PROBLEMS, hashes_of

pytest.importorskip("transformers")
pytest.importorskip("peft")

from .models import CASES, plan_file

pytestmark = pytest.mark.skipif(
    files.versions() != files.written_with(), reason=f"the golden files are of {files.written_with()}"
)
EXPECTED = files.problems()


def test_there_are_as_many_problems_as_promised() -> None:
    assert len(EXPECTED) == PROBLEMS


@pytest.mark.parametrize("seed", list(EXPECTED)[::8])
def test_problems(seed: int) -> None:
    assert not files.changed(EXPECTED[seed], hashes_of(seed))


@pytest.mark.parametrize("name", CASES)
def test_plan_files(name: str) -> None:
    assert not files.differences(name, plan_file(name))
