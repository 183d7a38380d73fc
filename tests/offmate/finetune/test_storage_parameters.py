"""`offmate finetune --storage-parameters`: the same bits, where RAM has no room for the weights either."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offmate
from offmate import cli
from offmate.finetune import weights as weights_read
from offmate.finetune.settings import continued, make_settings
from offmate.session.linked_states import load_linked
from offmate.sizes import parse_bytes

from ...fuzz.figures import from_hardware_file
from ...warm import run
from .finetune_kit import (
    arguments,
    dies,
    finetune,
    losses,
    plain_run,
    refused,
    replaced,
    same,
    stop_after,
    weights,
)
from .test_storage import NAMED, REPLACED, base, drive, lines, names

__all__ = ["base", "drive"]  # fixtures

STEPS = 4
SHORT = {"gpu_budget": "430KiB", "cpu_budget": "100KiB"}
"""Too little for the states, and for the weights."""


@pytest.fixture(autouse=True)
def _small_requests(monkeypatch: pytest.MonkeyPatch, cache_dir: str) -> Iterator[None]:
    with replaced(monkeypatch, cache_dir, REPLACED):
        yield


def usual(base: Path, output: Path, drive: Path, **more: object) -> list[str]:
    settings: dict[str, object] = {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 2, "checkpoint_every": 2}
    settings |= {"yes": True, "max_grad_norm": "none", "storage": drive, "eval_fraction": 0, **SHORT}
    return arguments(base / "llama", base / "text.txt", output, **{"storage_parameters": True, **settings, **more})


def killed(count: int, argv: list[str]) -> None:
    dies(count, argv, REPLACED)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "max_grad_norm": None,
            "gpu_budget": "470KiB",
            "cpu_budget": "50KiB",
            "eval_fraction": 0.1,
            "sample": "The",
            "sample_tokens": 2,
        },
    ],
)
def test_equals_plain_pytorch_and_weights_are_not_read_into_ram(base, drive, tmp_path, monkeypatch, more):
    monkeypatch.setattr(weights_read, "read_weights", None)  # whoever reads them all would call it
    output = tmp_path / "out"
    said = finetune(usual(base, output, drive, **more))
    monkeypatch.undo()
    state, expected, _ = plain_run(output, tmp_path)
    assert losses(said) == expected
    assert same(weights(output), state)
    assert re.search(r" of [a-z ,]*parameters[a-z ]* are read", lines(said)["storage"])
    assert names(drive) == ["mine.txt", "offmate-checkpoints"]
    own = put_together_by_the_page(output)
    assert own and same(own, {name: state[name] for name in own})  # the plan may keep some in RAM


def put_together_by_the_page(output: Path) -> dict[str, torch.Tensor]:
    """Return the weights that the documentation's lines put together from the last checkpoint's files."""
    page = (Path(__file__).parents[3] / "docs" / "finetune.md").read_text()
    (code,) = re.findall(r"```python\n(import json.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code.replace("tuned/checkpoints/step-00000500", str(output / "checkpoints" / "step-00000004")), found)
    return found["weights"]


def test_weights_in_another_dtype_are_written_to_a_folder_first(base, drive, tmp_path, monkeypatch):
    more = {"precision": "bf16-master", "gpu_budget": "330KiB", "cpu_budget": "50KiB"}
    whole, output = tmp_path / "whole", tmp_path / "out"
    expected = finetune(usual(base, whole, drive, storage_parameters=None, **{**more, "cpu_budget": "4GiB"}))
    monkeypatch.setattr(weights_read, "read_weights", None)
    said = finetune(usual(base, output, drive, **more))
    assert losses(said) == losses(expected)
    assert same(weights(output), weights(whole))
    plan = offmate.load_plan(output / "checkpoints" / "step-00000002" / "plan.json")
    assert plan.schedule.trained_homes
    assert [name[:13] for name in names(drive)] == ["mine.txt", "offmate-base-", "offmate-check"]


def test_checkpoints_link_weights_and_a_killed_run_resumes_bit_for_bit(base, drive, tmp_path):
    broken, log = tmp_path / "broken", tmp_path / "said"
    assert run(log, killed, 3, usual(base, broken, drive)) == -signal.SIGKILL, log.read_text()
    checkpoint = broken / "checkpoints" / "step-00000002"
    linked = load_linked(checkpoint / "states.json")
    in_files = {one.parameter for one in linked.tensors if isinstance(one.parameter, str)}
    copied = load_file(checkpoint / "model.safetensors") if (checkpoint / "model.safetensors").exists() else {}
    assert in_files and not in_files & copied.keys()  # which ones hangs on measured seconds
    rest = finetune(usual(base, broken, drive, resume=True))
    state, expected, _ = plain_run(broken, tmp_path)
    assert losses(rest) == expected[2:]
    assert same(weights(broken), state)
    linked.check()  # its files were not written to again


def test_it_resumes_without_a_folder_in_ample_ram(base, drive, tmp_path, capsys):
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        assert "stopped by the test" in refused(usual(base, output, drive), capsys)
    argv = usual(base, output, "none", cpu_budget="4GiB", resume=True, storage_parameters=None)  # type: ignore[arg-type]
    rest = finetune(argv)
    state, expected, _ = plain_run(output, tmp_path)
    assert losses(rest) == expected[2:]
    assert same(weights(output), state)


def test_a_spoilt_file_of_weights_is_named_and_an_older_checkpoint_used(base, drive, tmp_path, capsys, caplog):
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        refused(usual(base, output, drive, checkpoint_every=1), capsys)
    gc.collect()  # the run that failed still stores in the folder, until nobody holds it any more
    newest = output / "checkpoints" / "step-00000002"
    values = next(one for one in load_linked(newest / "states.json").tensors if isinstance(one.parameter, str))
    os.truncate(values.pieces[0].path, 10)
    rest = finetune(usual(base, output, drive, resume=True))
    assert any(words.startswith(f"{newest} is damaged") for words in caplog.messages)
    state, expected, _ = plain_run(output, tmp_path)
    assert losses(rest) == expected[1:] and same(weights(output), state)


def test_with_states_alone_in_files_it_does_not_fit(base, drive, tmp_path, capsys):
    assert "100 KiB" in refused(usual(base, tmp_path / "out", drive, storage_parameters=None, dry_run=True), capsys)


def test_the_forecast_is_what_a_plan_of_the_loaded_model_is(base, drive, tmp_path):
    """Bytes on the drive, in RAM, and what checkpoints need are those of the plan that the run then follows."""
    with from_hardware_file():
        dry = finetune(usual(base, tmp_path / "dry", drive, dry_run=True))
    (needs,) = (event for event in dry if event["event"] == "needs")
    said = r"weights: RAM is short, so 1\d\d KiB of parameters are mapped"
    assert any(re.match(said, line) for line in needs["lines"])
    assert needs["doubts"] == []
    output = tmp_path / "out"
    with from_hardware_file():
        finetune(usual(base, output, drive))
    plan = offmate.load_plan(output / "checkpoints" / "step-00000002" / "plan.json")
    assert plan.schedule.trained_homes and plan.host_bytes <= 100 << 10
    before = lines(dry)
    (read,) = re.findall(r"storage: (\S+ \SiB) of [a-z ,]*parameters[a-z ]* are read", before["storage"])
    assert parse_bytes(read) == pytest.approx(plan.stored_bytes[0], rel=0.1)
    (needed,) = re.findall(r"needs (\S+ \SiB) for the states and parameters in use and in 2", before["checkpoints"])
    assert parse_bytes(needed) == pytest.approx(3 * plan.schedule.bytes_in_files, rel=0.1)


def test_settings_that_cannot_be_are_refused(base, drive, tmp_path, capsys):
    argv = usual(base, tmp_path / "out", drive)
    where = argv.index("--storage")
    assert cli.main(argv[:where] + argv[where + 2 :]) == 2
    assert "storage_parameters keeps trained parameters in the folders of storage, and none is named" in (
        capsys.readouterr().err
    )
    with pytest.raises(offmate.OffmateError, match="storage_parameters is 'yes'; it must be true or false"):
        make_settings({**NAMED, "storage": "a", "storage_parameters": "yes"})
    both = make_settings({**NAMED, "storage": "a", "storage_parameters": True})
    assert not continued(both, {"storage": "none"}).storage_parameters
    assert continued(both, {"storage": "b"}).storage_parameters
