"""Plans with optimizer states on drives: rates from a hardware file, what each drive does, and what a refusal names."""

from __future__ import annotations

import argparse
import functools
import json
import logging
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from offmate.runtime.storage.engine import Engine

import offmate
from offmate import cli
from offmate.cli.arguments import add_machine
from offmate.cli.drives import planned_storage
from offmate.cli.summary import summary
from offmate.errors import ArgumentValueError, InfeasibleBudget
from offmate.lowering.state_files import StateFiles
from offmate.machines.hardware import load
from offmate.planning import storage
from offmate.planning.request import Request
from offmate.plans.drives import path_words
from offmate.session import state_storage
from offmate.sizes import format_wear

from ...fuzz.figures import from_hardware_file
from ..session import test_state_storage
from ..session.test_state_storage import batch, made

CARD = json.loads((resources.files("offmate") / "machines" / "emulated.json").read_text())
GPU_BUDGET, CPU_BUDGET = 850_000, 1_000_000
FAST = {"read": "3GB/s", "write": "3GB/s", "both": "3GB/s"}
SLOW = {"read": "1GB/s", "write": "1GB/s", "both": "1GB/s"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A small model, buffers that fit beside it, and plans that are made once and do not depend on the machine."""
    monkeypatch.setattr(test_state_storage, "LAYERS", 3)
    engine = functools.partial(Engine, n_threads=2, request_bytes=1 << 14)
    for module in (storage, state_storage):
        monkeypatch.setattr(module, "Engine", engine)
    for name, value in (("BUFFERS_BYTES", 0), ("N_THREADS", 2), ("REQUEST_BYTES", 1 << 14)):
        monkeypatch.setattr(storage, name, value)
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "plans"))
    with from_hardware_file():
        yield


@pytest.fixture
def listed(tmp_path: Path) -> str:
    """A hardware file that lists two drives."""

    def figure(value: float) -> dict[str, Any]:
        return {"value": value, "source": "a test"}

    drives = [
        {"folder": folder, **{f"{name}_bytes_per_s": figure(rate) for name in ("read", "write", "both")}}
        for folder, rate in (("/mnt/fast", 3e9), ("/mnt/slow", 1e9))
    ]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CARD | {"storage": drives}))
    return str(path)


def planned(paths: Any, hardware: str, **settings: Any) -> offmate.Plan:
    model, optimizer = made()
    settings = {"cpu_budget": CPU_BUDGET, **settings}
    return offmate.plan(
        model, GPU_BUDGET, example_inputs=(batch(0),), optimizer=optimizer, hardware=hardware, storage=paths, **settings
    )


def state_files(paths: Any, hardware: str) -> StateFiles:
    found = storage.with_drives(
        made()[0], paths, Request(1 << 30, 1 << 30, "emulated", offmate.Config()), load(hardware), planned=True
    )
    assert found.storage is not None
    return found.storage


def test_a_folder_has_the_rates_that_the_hardware_file_lists(listed):
    found = state_files("/mnt/fast", listed)
    assert found.tier == state_files(offmate.StoragePath("/mnt/fast", **FAST), "rtx3060").tier
    assert state_files("/mnt/slow/", listed).read_bytes_per_s == 1e9
    assert state_files(offmate.StoragePath("/mnt/slow", **FAST), listed).read_bytes_per_s == 3e9, "what is given counts"


def test_a_folder_that_is_not_listed_is_never_guessed(listed):
    with pytest.raises(ArgumentValueError, match="lists only /mnt/fast, /mnt/slow, and a drive of another machine"):
        planned("/mnt/other", listed)
    with pytest.raises(ArgumentValueError, match=r"lists no drives.*offmate profile --storage /mnt/fast --json FILE"):
        planned("/mnt/fast", "rtx3060")


def test_what_is_free_on_a_listed_drive_bounds_what_lies_there(listed):
    data = json.loads(Path(listed).read_text())
    data["storage"][0]["free_bytes"] = {"value": 1e6, "source": "a test"}
    Path(listed).write_text(json.dumps(data))
    assert state_files(["/mnt/fast", "/mnt/slow"], listed).capacity_bytes == int(0.98e6 / 0.75)


def test_each_of_several_drives_is_said(listed, tmp_path):
    plan = planned(["/mnt/fast", "/mnt/slow"], listed)
    read, written = plan.stored_bytes
    fast, slow = plan.about.storage
    assert (fast.share, slow.share) == pytest.approx((0.75, 0.25))
    lines = plan.path_words
    assert [line.partition(":")[0] for line in lines] == ["/mnt/fast", "/mnt/slow"]
    for line, one in zip(lines, (fast, slow)):
        busy = one.share * (read + written) / one.both_bytes_per_s / plan.predicted_step_s
        assert f"{100 * busy:.0f} % of the step" in line
        assert f"1,000 steps write {format_wear(round(1000 * one.share * written))} there" in line
    plan.save(tmp_path / "plan.json")
    again = offmate.load_plan(tmp_path / "plan.json")
    assert again.path_words == lines
    for text in (plan.explain(), plan.to_html(), "\n".join(str(text) for _, text in summary(again))):
        assert all(line in text for line in (plan.stored_words, *lines))
    assert path_words((read, written), (fast,), plan.predicted_step_s) == [], "all has been said of one alone"


def test_a_plan_that_stores_nothing_names_no_drive(listed, tmp_path):
    plan = planned("/mnt/fast", listed, cpu_budget="1GiB")
    assert plan.stored_bytes == (0, 0) and plan.about.storage == () and plan.path_words == []
    plan.save(tmp_path / "plan.json")
    assert "storage" not in json.loads((tmp_path / "plan.json").read_text())["about"]


def test_a_refusal_names_storage_where_it_would_help(listed):
    words = (
        r"Or name a folder on an NVMe drive \(storage=\): with optimizer states and activations in files there, it fits"
    )
    with pytest.raises(InfeasibleBudget, match=words):
        planned(None, listed)
    with pytest.raises(InfeasibleBudget) as error:
        planned(None, listed, cpu_budget="250KB")
    assert "NVMe" not in str(error.value), "parameters do not fit either"
    with pytest.raises(InfeasibleBudget) as error:
        planned("/mnt/fast", listed, cpu_budget="250KB")
    assert "NVMe" not in str(error.value), "it is named already"


def test_a_refusal_names_a_drive_that_is_too_full(listed):
    data = json.loads(Path(listed).read_text())
    data["storage"][0]["free_bytes"] = {"value": 1e4, "source": "a test"}
    Path(listed).write_text(json.dumps(data))
    words = r"With more room than the 9.5\d KiB that storage= has for files, it fits: free space there, or name another"
    with pytest.raises(InfeasibleBudget, match=words):
        planned("/mnt/fast", listed)


def test_where_ram_has_no_room_for_buffers_the_plan_is_the_one_without_storage(listed, monkeypatch):
    monkeypatch.setattr(storage, "REQUEST_BYTES", 1 << 20)
    plan, without = (planned(paths, listed, cpu_budget=1_600_000) for paths in ("/mnt/fast", None))
    assert plan.stored_bytes == (0, 0) and plan.schedule.actions == without.schedule.actions
    refused = []
    for paths in "/mnt/fast", None:
        with pytest.raises(InfeasibleBudget, match="a budget of 830 KiB is too small") as error:
            planned(paths, listed)
        refused.append(str(error.value))
    words = ". Copies to and from the storage path take 2 MiB of RAM for buffers"
    assert words in refused[0] and refused[0].replace(words, "") == refused[1], "and so is the refusal"


def here(paths: Any) -> offmate.Plan:
    model, optimizer = made()
    return offmate.plan(
        model, GPU_BUDGET, example_inputs=(batch(0),), optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
        storage=paths,
    )  # fmt: skip


def test_a_cached_plan_for_other_rates_is_made_anew(tmp_path, caplog):
    """Its seconds and its decisions would be those of another drive."""
    caplog.set_level(logging.INFO, "offmate")
    first = here(offmate.StoragePath(tmp_path, **FAST))
    assert any(first.stored_bytes)
    almost = here(offmate.StoragePath(tmp_path, read="2.8GB/s", write="3.2GB/s", both="3GB/s"))
    assert almost.from_cache and almost.schedule == first.schedule
    slower = here(offmate.StoragePath(tmp_path, **SLOW))
    assert not slower.from_cache
    assert "an earlier plan is ignored: it is for storage paths on which 2.79 GiB/s are read" in caplog.text
    (tier,) = (tier for tier in slower.schedule.rates.tiers if tier.for_states)
    assert tier.path.in_bytes_per_s == 1e9
    assert here(offmate.StoragePath(tmp_path, **SLOW)).from_cache


def test_a_given_plan_for_other_rates_is_said_to_be(tmp_path, caplog):
    (tmp_path / "disk").mkdir()
    plan = here(offmate.StoragePath(tmp_path / "disk", **SLOW))
    model, optimizer = made()
    settings: dict[str, Any] = {"optimizer": optimizer, "device": "emulated", "cpu_budget": CPU_BUDGET}
    fast = offmate.StoragePath(tmp_path / "disk", **FAST)
    offmate.compile(model, GPU_BUDGET, plan=plan, storage=fast, **settings)
    model(batch(0))
    assert "the seconds of the given plan do not hold" in caplog.text
    model, optimizer = made()
    offmate.compile(model, GPU_BUDGET, plan=plan, **settings | {"optimizer": optimizer})
    with pytest.raises(offmate.PlanFileError, match=r"storage=.*plan with states or activations in files, now without"):
        model(batch(0))


# -- the command line -------------------------------------------------------------------------------------------------


def parsed(*words: str) -> list[Any]:
    parser = argparse.ArgumentParser()
    add_machine(parser)
    return parser.parse_args([part for word in words for part in ("--storage", word)]).storage


def test_a_folder_on_the_command_line_has_the_rates_of_the_file(listed):
    machine = load(listed)
    (path,) = planned_storage(parsed("/mnt/fast/"), machine)
    assert path.rates == (3e9, 3e9, 3e9)
    first, second = planned_storage(parsed("/mnt/slow", "7GB/s,5GB/s"), machine)
    assert (first.folder, first.rates) == ("/mnt/slow", (1e9, 1e9, 1e9))
    assert (second.folder, second.rates[:2]) == ("drive 2", (7e9, 5e9))
    assert planned_storage(parsed("3GB/s"), machine) == 3e9
    assert planned_storage(None, machine) is None


@pytest.mark.parametrize("verb", [["plan", "tiny-llama"], ["fits", "--only", "tiny-llama"]])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/mnt/other"], "--storage /mnt/other: the rates of that folder's drive are not known, since"),
        (["/mnt/fast", "3GB/s"], "only the rate of reads, 3GB/s; write READ,WRITE for each"),
        (["/mnt/fast", "/mnt/./fast"], "/mnt/fast and /mnt/./fast are the same folder; name each one once"),
    ],
)
def test_drives_that_cannot_be_planned_with(listed, capsys, verb, words, said):
    pytest.importorskip("transformers")
    drives = [part for word in words for part in ("--storage", word)]
    assert cli.main([*verb, "--card", listed, *drives]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_folders_and_rates_are_told_apart():
    assert parsed("/mnt/s", "./fast") == [offmate.StoragePath("/mnt/s"), offmate.StoragePath("./fast")]
    assert parsed("2GB/s", "2GB/s,1GB/s") == [2e9, offmate.StoragePath("the drive", 2e9, 1e9)]
    for word in ("fast", "1TB/s,", "nan,5GB/s", "-7GB/s", "2GB/s,fast", "1GB/s,1GB/s,1GB/s,1GB/s"):
        with pytest.raises(SystemExit):
            parsed(word)
