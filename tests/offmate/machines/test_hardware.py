"""Hardware files load, name their sources, and bad ones are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from offmate.solver.resources import Rates

import offmate
from offmate.cli.shapes import batch_for, build
from offmate.errors import OffmateError
from offmate.machines.devices import make_device
from offmate.machines.hardware import BASES, load, names
from offmate.machines.links import measure_copies, measure_host_memory, measure_link

FOLDER = resources.files("offmate") / "machines"


@pytest.mark.parametrize("name", names())
def test_rates_are_sensible(name: str) -> None:
    machine = load(name)
    assert machine.device_memory_bytes > 0
    # Where host and device are one memory, two copies at once are no faster than one.
    least = 0.8 if machine.shared_cores else 1.0
    assert machine.both_bytes_per_s >= least * max(machine.in_bytes_per_s, machine.out_bytes_per_s)
    assert machine.flops_per_s("letters") == machine.flops_per_s("float32")


def test_the_machines_that_are_promised() -> None:
    promised = {"emulated", "rtx3060", "rtx3090", "rtx4090", "a100-40", "h100", "h200", "gh200"}
    promised |= {"rtx3070", "rtx3080", "rtx4060-8", "rtx4060ti-16", "rtx4070", "rtx4080", "rtx5070", "rtx5070ti"}
    promised |= {"rtx5080", "rtx5090", "laptop-rtx3060-6", "laptop-rtx4050-6", "laptop-rtx4060-8"}
    promised |= {"t4", "l4", "a10g", "a6000", "l40s", "a100-80"}
    assert promised | {"offmate-rtx3060", "offmate-rtx3090"} <= set(names())


@pytest.mark.parametrize("name", names())
def test_every_figure_names_its_source_and_every_file_its_basis(name: str) -> None:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    figures = [value for value in data.values() if isinstance(value, dict) and "value" in value]
    figures += data["matrix_flops_per_s"].values()
    assert len(figures) > 8 and all(len(figure["source"]) > 8 for figure in figures)
    assert load(name).basis == data["basis"] in BASES
    if data["basis"] == "data sheets":
        assert "share" in data["matrix_flops_per_s"]["float16"]["source"]
        assert "share" in data["memory_bytes_per_s"]["source"]


def test_an_unknown_basis_is_refused_and_none_is_allowed(tmp_path: Path) -> None:
    data = json.loads((FOLDER / "h100.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data | {"basis": "rumours"}))
    with pytest.raises(OffmateError, match="basis is 'rumours'; it must be one of data sheets, paper, measured"):
        load(str(path))
    del data["basis"]
    path.write_text(json.dumps(data))
    assert load(str(path)) == replace(load("h100"), basis="")


def test_unknown_and_damaged(tmp_path: Path) -> None:
    with pytest.raises(OffmateError, match="rtx3060"):
        load("rtx3060ti")
    data = json.loads((FOLDER / "h100.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert load(str(path)).in_bytes_per_s == load("h100").in_bytes_per_s
    for change in ({"format": 9}, {"in_bytes_per_s": 3}, {"in_bytes_per_s": {"value": -1, "source": "x"}}):
        path.write_text(json.dumps(data | change))
        with pytest.raises(OffmateError):
            load(str(path))
    path.write_text("{")
    with pytest.raises(OffmateError, match="not JSON"):
        load(str(path))
    with pytest.raises(OffmateError, match="is not known"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [("in_bytes_per_s", 0), ("device_memory_bytes", 0), ("cpu_update_bytes_per_s", 0), ("memory_bytes_per_s", 10**400),
     ("host_memory_bytes_per_s", 1e-300), ("host_memory_bytes_per_s", -1), ("launch_s", float("nan"))],
)  # fmt: skip
def test_figures_that_no_machine_has(tmp_path: Path, key: str, value: float) -> None:
    data = json.loads((FOLDER / "h100.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data | {key: {"value": value, "source": "x"}}))
    with pytest.raises(OffmateError, match=f"{key} is .*must be"):
        load(str(path))


@pytest.mark.parametrize(
    ("key", "typed", "said"),
    [
        ("in_bytes_per_s", "in_byte_per_s", "there is no in_bytes_per_s, but 'in_byte_per_s'"),
        ("device_memory_bytes", "device_memory", "'device_memory' is not known; did you mean 'device_memory_bytes'?"),
        (None, "host_memory_byte", "'host_memory_byte' is not known; did you mean 'host_memory_bytes'?"),
        (None, "per_copy", "did you mean 'per_copy_s'?"),
        (None, "comment", None),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest(
    tmp_path: Path, key: str | None, typed: str, said: str | None
) -> None:
    data = json.loads((FOLDER / "rtx3060.json").read_text())
    data[typed] = data.pop(key) if key else {"value": 1, "source": "a test"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    if said is None:
        assert load(str(path))
        return
    with pytest.raises(OffmateError, match=re.escape(said)):
        load(str(path))


@pytest.mark.parametrize("shared", ["yes", 1, None, []])
def test_shared_cores_are_true_or_false(tmp_path: Path, shared: object) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(json.loads((FOLDER / "h100.json").read_text()) | {"shared_cores": shared}))
    with pytest.raises(OffmateError, match=r"shared_cores is .*; it must be true or false"):
        load(str(path))


def test_files_that_are_deep_or_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for content, words in ((b"[" * 100_000, "nested too deeply"), (b"\xff", "not JSON")):
        path.write_bytes(content)
        with pytest.raises(OffmateError, match=words):
            load(str(path))
    for name in ("a" * 300, "a\0b"):
        with pytest.raises(OffmateError, match="is not known"):
            load(name)


def test_updates_of_float32_copies_cost_what_they_cost(tmp_path: Path) -> None:
    machine = load("rtx3090")
    plain, masters = machine.update_s(10**9, masters=False), machine.update_s(10**9, masters=True)
    assert plain == (4e9 / machine.cpu_update_bytes_per_s, 4e9 / machine.device_update_bytes_per_s)
    assert masters == pytest.approx((plain[0] * 30 / 28, plain[1] * 40 / 28))  # by the file: memory limits both
    data = json.loads((FOLDER / "rtx3090.json").read_text())
    del data["cpu_master_update_bytes_per_s"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert load(str(path)).update_s(10**9, masters=True)[0] == pytest.approx(plain[0] / 0.55)
    path.write_text(json.dumps(data | {"cpu_master_update_bytes_per_s": {"value": 1e9, "source": "measured"}}))
    assert load(str(path)).update_s(10**9, masters=True) == pytest.approx((4.0, masters[1]))


def test_a_limit_of_host_memory_is_planned_with_unless_cores_are_shared(tmp_path: Path) -> None:
    model = build("tiny-llama", "fp32")
    data = json.loads((FOLDER / "rtx3090.json").read_text())
    path = tmp_path / "mine.json"

    def rates(**change: object) -> Rates:
        path.write_text(json.dumps(data | change))
        plan = offmate.plan(
            model, "12MiB", example_inputs=batch_for(model, 2, 64), optimizer=torch.optim.AdamW(model.parameters()),
            hardware=str(path), config=offmate.Config(cache_dir=None),
        )  # fmt: skip
        assert plan.schedule.rates == plan.problem.rates
        return plan.schedule.rates

    assert rates().host_memory_bytes_per_s == 40e9
    assert rates().worker_bytes_per_s == pytest.approx(35e9)  # 28 bytes for each four of the file's rate
    assert rates(shared_cores=True).host_memory_shares == {}
    del data["host_memory_bytes_per_s"]
    assert rates().host_memory_shares == {}


def test_seconds_that_the_cpu_needs_for_everything_else_are_planned_with(tmp_path: Path) -> None:
    """H of the OffMate paper: the CPU makes no update meanwhile, in any step."""
    model = build("tiny-llama", "fp32")
    data = json.loads((FOLDER / "rtx3090.json").read_text())
    path = tmp_path / "mine.json"

    def planned(seconds: float) -> offmate.Plan:
        path.write_text(json.dumps(data | {"manage_s": {"value": seconds, "source": "measured"}}))
        return offmate.plan(
            model, "12MiB", example_inputs=batch_for(model, 2, 64), optimizer=torch.optim.AdamW(model.parameters()),
            hardware=str(path), config=offmate.Config(cache_dir=None, updates="host"),
        )  # fmt: skip

    slow, none = planned(1e-3), planned(0.0)
    assert slow.problem.rates.manage_s == slow.schedule.rates.manage_s == 1e-3
    assert slow.predicted_step_s > slow.problem.pass_steps * 1e-3 > none.predicted_step_s


CURVE = [
    {"direction": direction, "bytes": size, "bytes_per_s": ways * size / (2e-5 + ways * size / 1e10)}
    for direction, ways in (("in", 1), ("out", 1), ("both", 2))
    for size in (1 << 14, 1 << 16, 1 << 20, 1 << 24)
]


def test_seconds_per_copy_of_a_file_are_planned_with(tmp_path: Path) -> None:
    """They are stated, or follow from the copies of several sizes that `offmate profile` writes."""
    model = build("tiny-llama", "fp32")
    data = json.loads((FOLDER / "rtx3090.json").read_text())
    path = tmp_path / "mine.json"

    def planned(**change: object) -> offmate.Plan:
        path.write_text(json.dumps(data | change))
        return offmate.plan(
            model, "12MiB", example_inputs=batch_for(model, 2, 64), optimizer=torch.optim.AdamW(model.parameters()),
            hardware=str(path), config=offmate.Config(cache_dir=None, updates="host"),
        )  # fmt: skip

    free, followed = planned(), planned(copies=CURVE)
    stated = planned(copies=CURVE, per_copy_s={"value": 1e-3, "source": "measured"})
    assert free.problem.rates.per_copy_s == 0.0
    assert followed.problem.rates.per_copy_s == followed.schedule.rates.per_copy_s == pytest.approx(2e-5, rel=1e-6)
    assert stated.problem.rates.per_copy_s == 1e-3
    # Every parameter's gradient goes out and its new value comes in.
    tensors = len(list(model.parameters()))
    assert stated.predicted_step_s > 1e-3 * tensors > free.predicted_step_s


@pytest.mark.parametrize(
    "copies, message",
    [
        (3, "copies must be a list, found 3"),
        ([{"direction": "up", "bytes": 1, "bytes_per_s": 1}], r"copies\[0\] must have a direction \(in, out, both\)"),
        ([*CURVE, {"direction": "in", "bytes": 0, "bytes_per_s": 1}], r"copies\[12\] must have"),
        (["in"], r"copies\[0\] must have"),
        (CURVE[:4], "copies: no copy in direction out, both"),
    ],
)
def test_copies_that_no_machine_makes(tmp_path: Path, copies: object, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(json.loads((FOLDER / "rtx3090.json").read_text()) | {"copies": copies}))
    with pytest.raises(OffmateError, match=message):
        load(str(path))


def test_links_of_the_simulated_accelerator_are_measured_by_events(sim) -> None:
    device = make_device("sim:0", 1 << 30)
    try:
        curve = measure_copies(device, (1 << 12, 1 << 16), repeats=2)
        found = measure_link(device)
        assert device.recorder is None
    finally:
        device.close()
    assert [(one.direction, one.bytes) for one in curve] == [
        (way, size) for size in (1 << 12, 1 << 16) for way in ("in", "out", "both")
    ]
    assert min(found.in_bytes_per_s, found.out_bytes_per_s, found.both_bytes_per_s) > 0 <= found.per_copy_s
    assert set(found.figures()) <= {"in_bytes_per_s", "out_bytes_per_s", "both_bytes_per_s", "per_copy_s"}


def test_host_memory_is_measured_beside_copies(sim) -> None:
    device = make_device("sim:0", 1 << 30)
    try:
        link = measure_link(device)
        found = measure_host_memory(device, link)
        # Links so slow that their copies disturb nothing.
        none = measure_host_memory(device, replace(link, both_bytes_per_s=1e3))
    finally:
        device.close()
    assert found == 0.0 or 1e8 < found < 1e12
    assert none == 0.0
