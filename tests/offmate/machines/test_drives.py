"""The drives of a hardware file: read as they are written, found by their folders, and refused by name."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from offmate.errors import ArgumentValueError
from offmate.machines.hardware import Hardware, load

CARD = json.loads((resources.files("offmate") / "machines" / "rtx3060.json").read_text())


def rate(value: float) -> dict[str, Any]:
    return {"value": value, "source": "a test"}


def row(folder: str = "/mnt/nvme", **changes: Any) -> dict[str, Any]:
    rates = {"read_bytes_per_s": rate(7e9), "write_bytes_per_s": rate(5e9), "both_bytes_per_s": rate(5.8e9)}
    return {"folder": folder, **rates, **changes}


def written(tmp_path: Path, storage: Any) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CARD | {"storage": storage}))
    return path


def machine(tmp_path: Path, storage: Any) -> Hardware:
    return load(str(written(tmp_path, storage)))


def test_a_folder_is_found_however_it_is_spelt(tmp_path):
    found = machine(tmp_path, [row(free_bytes=rate(1e12)), row("/mnt/other")])
    first = found.drive("/mnt/nvme")
    assert first is not None and first.free_bytes == 10**12
    assert (first.read_bytes_per_s, first.write_bytes_per_s, first.both_bytes_per_s) == (7e9, 5e9, 5.8e9)
    assert found.drive("/mnt//nvme/") == found.drive("/mnt/x/../nvme") == first
    assert found.drive("/mnt") is None
    assert found.drives[1].free_bytes == 0


def test_drives_that_a_plan_does_not_use_change_nothing(tmp_path):
    """What a plan is kept under is made of a machine's text."""
    path = tmp_path / "without.json"
    path.write_text(json.dumps(CARD))
    assert repr(machine(tmp_path, [row()])) == repr(load(str(path)))


def test_a_drive_without_a_rate_of_both_takes_turns(tmp_path):
    drive = row(read_bytes_per_s=rate(6e9), write_bytes_per_s=rate(2e9))
    del drive["both_bytes_per_s"]
    (found,) = machine(tmp_path, [drive]).drives
    assert found.both_bytes_per_s == pytest.approx(3e9)


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ({}, "storage must be a list of folders with rates, found {}"),
        (["/mnt/nvme"], r"storage\[0\] must name a whole path"),
        ([row("nvme")], r"storage\[0\] must name a whole path"),
        ([row(), row("/mnt/other", write=rate(1))], r"storage\[1\]: 'write' is not known"),
        ([row(write_bytes_per_s=rate(0))], r"storage\[0\]: write_bytes_per_s is 0; it must be a number, 1 or more"),
        ([row(write_bytes_per_s={"value": 1e9})], "must be {\"value\": number, \"source\": text}"),
        ([{"folder": "/mnt/nvme", "read_bytes_per_s": rate(7e9)}], "write_bytes_per_s must be .*, and is missing"),
        ([row(), row("/mnt/nvme/")], "storage names /mnt/nvme twice"),
    ],
)  # fmt: skip
def test_what_is_no_drive(tmp_path, storage, said):
    with pytest.raises(ArgumentValueError, match=said):
        machine(tmp_path, storage)
