"""Seconds of launching are apart from those of the device: from a hardware file's rate, or measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import offmate
from offmate.errors import OffmateError
from offmate.machines.hardware import load
from offmate.machines.replaying import replaying_s
from offmate.machines.stopwatch import clock_of, launching_s

pytestmark = pytest.mark.as_users

GIB = 1 << 30


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    return model, torch.optim.AdamW(model.parameters())


def planned(hardware: str | None, device: str | None = None) -> offmate.Plan:
    model, optimizer = small()
    batch = (torch.ones(4, 16),)
    config = offmate.Config(cache_dir=None)
    return offmate.plan(
        model, GIB, example_inputs=batch, optimizer=optimizer, hardware=hardware, device=device, config=config
    )


def with_instruction_s(value: object, folder: Path) -> str:
    data = json.loads((Path(offmate.__file__).parent / "machines" / "rtx4090.json").read_text())
    data["instruction_s"] = {"value": value, "source": "a test"}
    path = folder / "machine.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_a_block_takes_the_larger_of_both(tmp_path: Path) -> None:
    fast, slow = (planned(with_instruction_s(value, tmp_path)) for value in (1e-9, 1e-3))
    for own, other in zip(slow.problem.blocks, fast.problem.blocks):
        assert own.options[0].launched.forward_device_s == other.options[0].launched.forward_device_s
        assert own.options[0].forward_s == own.options[0].launched.forward_launch_s >= 1e-3
        assert other.options[0].forward_s == other.options[0].launched.forward_device_s
    assert "the CPU launches operators more slowly" in str(slow) and "launches" not in str(fast)


def test_a_file_that_does_not_say_plans_with_the_devices_seconds(tmp_path: Path) -> None:
    assert all(o.launched is None for b in planned(with_instruction_s(0, tmp_path)).problem.blocks for o in b.options)
    assert load("emulated").instruction_s == 0


@pytest.mark.parametrize("value", [-1e-6, float("nan"), "fast", True])
def test_a_rate_that_is_none_is_refused_by_name(value: object, tmp_path: Path) -> None:
    with pytest.raises(OffmateError, match="instruction_s"):
        load(with_instruction_s(value, tmp_path))


def test_on_the_emulated_device_nothing_is_launched() -> None:
    assert launching_s(lambda: None, torch.device("cpu")) == 0
    assert all(o.launched is None for b in planned(None, "emulated").problem.blocks for o in b.options)


def test_the_replay_takes_time_of_its_own() -> None:
    assert replaying_s() > 0


def test_on_an_accelerator_both_are_measured(sim) -> None:
    where = torch.accelerator.current_accelerator()
    one = torch.ones(64, 64, device=where)
    assert launching_s(lambda: one @ one, where) > 0 and clock_of(where)(lambda: one @ one) > 0
    for block in planned(None, str(where)).problem.blocks:
        for option in block.options:
            assert option.launched is not None and option.launched.forward_launch_s > 0
            assert option.forward_s == max(option.launched.forward_device_s, option.launched.forward_launch_s)
