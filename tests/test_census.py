"""A sample of the census (`python -m benchmarks.census`), and what a model that crashes or hangs costs it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.census import processes
from benchmarks.census.lists import LISTS, List
from benchmarks.census.processes import Row, checked
from benchmarks.census.table import markdown
from offmate.check.subject import Subject

from . import warm

SAMPLE = {
    "transformers": ("mamba",),
    "modules": ("nn.BatchNorm2d (1)", "nn.GRU (1)"),
    "optimizers": ("Adafactor()", "Muon()"),
}


def _sample_of(list_name: str, names: tuple[str, ...], out: Path) -> None:
    """Check these; in a process of its own, since torch's tables of cases forbid to set global flags from then on."""
    known = set(LISTS[list_name].names())
    found = {name: processes._checked(list_name, name) for name in names if name in known}
    out.write_text(json.dumps({name: (row.outcome, row.words) for name, row in found.items()}))


@pytest.mark.slow
@pytest.mark.parametrize("list_name", SAMPLE)
def test_a_sample_is_equal(list_name: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert warm.run(said, _sample_of, list_name, SAMPLE[list_name], tmp_path / "rows.json") == 0, said.read_text()
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found == {name: ["equal", ""] for name in SAMPLE[list_name]}


def _subjects(name: str) -> Iterator[Subject]:
    def build() -> torch.nn.Module:
        if name == "ends":
            os._exit(3)
        if name == "hangs":
            time.sleep(600)
        if name == "cannot be built":
            raise ImportError("no such package")
        return torch.nn.Linear(4, 2)

    yield Subject(name, build, lambda step: (torch.randn(3, 4),))


def _census_of(names: list[str], out: Path) -> None:
    """Check the made-up list; in a process of its own, since what has run a backward in threads cannot be forked."""
    LISTS["made up"] = List(lambda: names, _subjects)
    found = {row.name: (row.outcome, row.words) for row in checked("made up", names, processes=1, limit_s=20)}
    out.write_text(json.dumps(found))


def test_a_model_that_ends_its_process_or_takes_too_long_costs_one_row(tmp_path: Path) -> None:
    names = ["first", "ends", "hangs", "cannot be built", "last"]

    said = tmp_path / "said"
    assert warm.run(said, _census_of, names, tmp_path / "rows.json") == 0, said.read_text()

    found = json.loads((tmp_path / "rows.json").read_text())
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "first": "equal",
        "ends": "crashed",
        "hangs": "too long",
        "cannot be built": "plain_fails",
        "last": "equal",
    }
    assert found["cannot be built"][1] == "ImportError: no such package"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("`x`, /home/me/lib/site-packages/timm/layers.py, line 3", "`x`, timm/layers.py, line 3"),
        ("`x / 2`, /home/me/benchmarks/census/lists.py, line 3", "`x / 2`, lists.py, line 3"),
        ("a and/or b", "a and/or b"),
    ],
)
def test_rows_name_no_folder_of_the_machine(said: str, kept: str) -> None:
    assert processes.without_folders(said) == kept


def test_the_page_counts_shares_among_what_was_compared() -> None:
    rows = [
        Row("a", "equal", "", 1.0),
        Row("b", "equal", "", 1.0),
        Row("c", "equal", "", 1.0),
        Row("d|", "refused", "a [list] of *marks*, timm/layers.py, line 3", 1.0),
        Row("e", "not built", "no data", 1.0),
    ]
    found = {
        "python": "3.11",
        "versions": {"torch": "2.13.0"},
        "rows": [{"list": "modules", **vars(row)} for row in rows],
    }

    page = markdown(found)

    assert "| modules | 3 | 1 | 0 | 0 | 1 | 75 % |" in page
    assert "| refused | a \\[list\\] of \\*marks\\*, timm/layers.py, line 3 |" in page
    assert "Equal: a, b, c." in page
