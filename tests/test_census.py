"""A sample of the census (`python -m benchmarks.census`), and what a model that crashes or hangs costs it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks.census import processes
from benchmarks.census.lists import LISTS, List
from benchmarks.census.processes import Row, checked
from benchmarks.census.table import markdown
from offmate.check.subject import Subject

SAMPLE = {
    "transformers": ("mamba",),
    "modules": ("nn.BatchNorm2d (1)", "nn.GRU (1)"),
    "optimizers": ("Adafactor()", "Muon()"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("list_name", "name"), [(kind, name) for kind, names in SAMPLE.items() for name in names])
def test_a_sample_is_equal(list_name: str, name: str) -> None:
    assert name in LISTS[list_name].names()
    row = processes._checked(list_name, name)
    assert (row.outcome, row.words) == ("equal", "")


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


def test_a_model_that_ends_its_process_or_takes_too_long_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["first", "ends", "hangs", "cannot be built", "last"]
    monkeypatch.setitem(LISTS, "made up", List(lambda: names, _subjects))

    found = {row.name: row for row in checked("made up", names, processes=1, limit_s=20)}

    assert {name: row.outcome for name, row in found.items()} == {
        "first": "equal",
        "ends": "crashed",
        "hangs": "too long",
        "cannot be built": "plain_fails",
        "last": "equal",
    }
    assert found["cannot be built"].words == "ImportError: no such package"


def test_the_page_counts_shares_among_what_was_compared() -> None:
    rows = [
        Row("a", "equal", "", 1.0),
        Row("b", "equal", "", 1.0),
        Row("c", "equal", "", 1.0),
        Row("d|", "refused", "a [list] of *marks*, /home/me/lib/site-packages/timm/layers.py, line 3", 1.0),
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
