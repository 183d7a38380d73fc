"""Problems and solutions survive JSON; what is damaged is refused with its place."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from offmate.solver.files import (
    FileError,
    load_problem,
    load_solution,
    problem_from_dict,
    save,
    solution_from_dict,
    to_dict,
)
from offmate.solver.solve import solve

from .random_problems import random_problem


@pytest.mark.parametrize("seed", range(5))
def test_what_is_saved_is_read_back(seed: int, tmp_path: Path) -> None:
    problem = random_problem(random.Random(seed), update="external" if seed == 0 else "planned")
    save(problem, tmp_path / "problem.json")
    assert load_problem(tmp_path / "problem.json") == problem
    solution = solve(problem)
    save(solution, tmp_path / "solution.json")
    assert load_solution(tmp_path / "solution.json") == solution


def damaged(**changes: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(to_dict(random_problem(random.Random(1)))))
    return data | changes


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (damaged(version=99), "version 99"),
        (damaged(format="letters"), "'letters'"),
        (damaged(surprise=1), "'surprise'"),
        (damaged(update="sometimes"), "problem.update"),
        (damaged(start_s="soon"), "problem.start_s: expected float"),
        (damaged(device_budget_bytes=True), "problem.device_budget_bytes"),
        (damaged(start_s=-1.0), "start_s is -1.0"),
        (damaged(blocks=[]), "at least one block"),
        (damaged(groups=[3]), r"problem.groups\[0\]: expected an object"),
        (damaged(values={}), "problem.values: expected a list"),
        ({key: value for key, value in damaged().items() if key != "rates"}, "lacks 'rates'"),
    ],
)
def test_what_is_damaged_is_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(FileError, match=words):
        problem_from_dict(data)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        load_problem(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(FileError, match="not an object"):
        load_solution(tmp_path / "x.json")
    with pytest.raises(FileError, match="format"):
        solution_from_dict(damaged())


def test_a_solution_of_another_version_is_refused() -> None:
    solution = solve(random_problem(random.Random(1)))
    with pytest.raises(FileError, match="'offmate-solution', version 2: found 'offmate-solution', version 1"):
        solution_from_dict(to_dict(solution) | {"version": 1})
