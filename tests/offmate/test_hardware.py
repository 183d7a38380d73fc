"""Hardware files load, name their sources, and bad ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offmate.hardware import FOLDER, HardwareError, load, names


@pytest.mark.parametrize("name", names())
def test_every_figure_has_a_source(name: str) -> None:
    machine = load(name)
    assert machine.device_bytes < machine.host_bytes
    assert machine.both_bytes_per_s >= max(machine.in_bytes_per_s, machine.out_bytes_per_s)
    assert all(machine.sources.values())
    assert machine.seconds(0, 0) == machine.launch_s
    assert machine.seconds(1e15, 0, "bfloat16") == pytest.approx(1e15 / machine.matrix_flops_per_s["bfloat16"])


def test_the_machines_that_are_promised() -> None:
    promised = {"rtx3060", "rtx3090", "rtx4090", "a100-40", "h100", "h200", "emulated"}
    assert promised | {"offmate-rtx3060", "offmate-rtx3090"} <= set(names())
    assert load("RTX 3060").name == load("rtx3060").name


def test_unknown_and_damaged(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="did you mean 'rtx3060'"):
        load("rtx3060ti")
    data = json.loads((FOLDER / "h100.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert load(path).name == load("h100").name
    for change, words in (({"version": 9}, "version 1"), ({"figures": {}}, "lacks the figure 'device_bytes'")):
        path.write_text(json.dumps(data | change))
        with pytest.raises(HardwareError, match=words):
            load(path)
    data["figures"]["in_bytes_per_s"]["value"] = -1
    path.write_text(json.dumps(data))
    with pytest.raises(HardwareError, match="in_bytes_per_s is -1"):
        load(path)
    path.write_text("{")
    with pytest.raises(HardwareError, match="not JSON"):
        load(path)
