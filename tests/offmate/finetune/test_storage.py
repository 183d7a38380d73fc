"""`offmate finetune --storage`: the same bits, with optimizer states in files where RAM has no room for them."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.measure import PathRates, rates

from offmate import cli
from offmate.errors import OffmateError, StorageError
from offmate.finetune import loop
from offmate.finetune.checkpoint import Moment, restore_updates, save_checkpoint
from offmate.finetune.settings import differences, make_settings, read_yaml
from offmate.finetune.state_folders import StateFolders, measured
from offmate.finetune.updates import UpdateRule
from offmate.finetune.weights import load_model
from offmate.planning import storage
from offmate.session.linked_states import load_linked

from ...warm import run
from .finetune_kit import (
    SMALL_REQUESTS,
    TEXT,
    arguments,
    dies,
    finetune,
    losses,
    make_models,
    plain_run,
    refused,
    replaced,
    same,
    stop_after,
    weights,
)

STEPS = 4
NAMED = {"model": "m", "data": "d", "output": "o"}
SHORT = {"gpu_budget": "400KiB", "cpu_budget": "300KiB"}
"""Too little for the states, and enough for all the rest."""


def measured_once(path: Any, n_bytes: int) -> PathRates:
    """Measure a drive, and say the same of it every time, so that a plan can be used again."""
    found = rates(path, n_bytes)
    assert min(found.read_bytes_per_s, found.write_bytes_per_s, found.both_bytes_per_s) > 0
    return PathRates(1e9, 1e9, 1e9)


REPLACED = {**SMALL_REQUESTS, (storage, "PROBE_BYTES"): 1 << 16, (storage, "rates"): measured_once}
"""Buffers that fit beside a small model, and as few bytes to measure a drive with."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models and a text."""
    folder = tmp_path_factory.mktemp("finetune")
    make_models(folder)
    (folder / "text.txt").write_text(TEXT[:10_000])
    return folder


@pytest.fixture(autouse=True)
def _small_requests(monkeypatch: pytest.MonkeyPatch, cache_dir: str) -> Iterator[None]:
    with replaced(monkeypatch, cache_dir, REPLACED):
        yield


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A folder for states, with a file of the user's."""
    folder = tmp_path / "drive"
    folder.mkdir()
    (folder / "mine.txt").write_text("precious")
    return folder


def usual(base: Path, output: Path, **more: object) -> list[str]:
    settings: dict[str, object] = {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 2, "checkpoint_every": 2}
    settings |= {"eval_fraction": 0, "yes": True, "max_grad_norm": "none", **SHORT}
    return arguments(base / "llama", base / "text.txt", output, **(settings | more))


def lines(events: list[dict[str, Any]]) -> dict[str, str]:
    """The lines of a plan, by their first words."""
    plan = next(event for event in events if event["event"] == "plan")
    return {line.partition(":")[0]: line for line in plan["lines"]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"max_grad_norm": None, "gpu_budget": "500KiB"}])
def test_equals_plain_pytorch_and_leaves_only_checkpoints_on_the_drive(base, drive, tmp_path, more):
    output = tmp_path / "out"
    said = finetune(usual(base, output, storage=drive, **more))
    state, expected, _ = plain_run(output, tmp_path)
    assert losses(said) == expected
    assert same(weights(output), state)
    assert names(drive) == ["mine.txt", "offmate-checkpoints"]
    assert read_yaml(output / "finetune.yaml")["storage"] == [str(drive)]
    assert str(drive) not in (output / "README.md").read_text(), "it is of the machine, not of the result"


def killed(count: int, argv: list[str]) -> None:
    dies(count, argv, REPLACED)


def test_killed_it_resumes_bit_for_bit_and_what_it_left_is_removed(base, drive, tmp_path):
    broken, log = tmp_path / "broken", tmp_path / "said"
    assert run(log, killed, 3, usual(base, broken, storage=drive)) == -signal.SIGKILL, log.read_text()
    assert len(list(drive.glob("offmate-*.tensor"))) > 2, log.read_text()
    rest = finetune(usual(base, broken, storage=None, resume=True))
    state, expected, _ = plain_run(broken, tmp_path)
    assert losses(rest) == expected[2:]
    assert same(weights(broken), state)
    assert names(drive) == ["mine.txt", "offmate-checkpoints"]


@pytest.mark.parametrize("more", [{"storage": "other"}, {"storage": "none", "cpu_budget": "4GiB"}])
def test_it_resumes_with_another_folder_and_without_one(base, drive, tmp_path, monkeypatch, capsys, more):
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        assert "stopped by the test" in refused(usual(base, output, storage=drive), capsys)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    rest = finetune(usual(base, output, resume=True, **more))
    state, expected, _ = plain_run(output, tmp_path)
    assert losses(rest) == expected[2:]
    assert same(weights(output), state)
    assert names(tmp_path / "other") == (["offmate-checkpoints"] if more["storage"] == "other" else [])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-master"])
def test_loaded_states_stay_in_the_checkpoints_file(base, tmp_path, precision):
    """So that a resumed run needs no RAM for them."""
    settings = make_settings({**NAMED, "precision": precision})
    saved, loaded = (
        UpdateRule(load_model(base / "llama", torch.bfloat16 if "bf16" in precision else torch.float32), settings)
        for _ in range(2)
    )
    for param in saved.params:
        param.grad = torch.ones_like(param)
    saved.optimizer.step()
    path = save_checkpoint(tmp_path, Moment(1, "t", 1, torch.__version__), saved.model, saved, None, 1)
    restore_updates(path, loaded)
    mapped = re.findall(r"^(\w+)-(\w+) .*optimizer\.pt$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    for own, other in zip(saved.params, loaded.params):
        before, after = saved.optimizer.state[own], loaded.optimizer.state[other]
        assert before.keys() == after.keys() and before
        for key, value in after.items():
            assert value.dtype == before[key].dtype and torch.equal(value, before[key])
            in_file = any(int(first, 16) <= value.data_ptr() < int(last, 16) for first, last in mapped)
            assert in_file == (value.dim() > 0), "a number in it would hold the file of a checkpoint that is removed"


def test_states_of_another_model_are_refused(base, tmp_path):
    settings = make_settings(NAMED)
    whole = UpdateRule(load_model(base / "llama", torch.float32), settings)
    part = UpdateRule(torch.nn.Linear(2, 2), settings)
    path = save_checkpoint(tmp_path, Moment(1, "t", 1, torch.__version__), whole.model, whole, None, 1)
    with pytest.raises(OffmateError, match=r"optimizer\.pt does not hold what a run writes there"):
        restore_updates(path, part)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def states_of(checkpoint: Path) -> dict[str, Any]:
    """What the page's lines load from a checkpoint."""
    page = (Path(__file__).parents[3] / "docs" / "finetune.md").read_text()
    (lines,) = re.findall(r"```python\n(import json.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(lines.replace("tuned/checkpoints/step-00000500", str(checkpoint)), names)
    return names["optimizer"]["state"]


def test_a_checkpoint_links_states_and_the_pages_lines_put_them_together(base, drive, tmp_path):
    output, plain = tmp_path / "out", tmp_path / "plain"
    finetune(usual(base, output, storage=drive))
    finetune(usual(base, plain, cpu_budget="4GiB"))
    for name in ("step-00000002", "step-00000004"):
        checkpoint = output / "checkpoints" / name
        linked = load_linked(checkpoint / "states.json")
        linked.check()  # the files of the first one are as they were, after two more steps
        assert all(drive / "offmate-checkpoints" in file.parents for file in linked.files) and len(linked.files) > 2
        assert all(file.stat().st_nlink == 1 for file in linked.files), "the states in use are gone with the run"
        expected = torch.load(plain / "checkpoints" / name / "optimizer.pt")["state"]
        assert (checkpoint / "optimizer.pt").stat().st_size < sum(
            value.nbytes for own in expected.values() for value in own.values()
        )
        found = states_of(checkpoint)
        assert found.keys() == expected.keys()
        for number, own in expected.items():
            assert own.keys() == found[number].keys()
            assert all(torch.equal(value, found[number][key]) for key, value in own.items())


@pytest.fixture
def stopped(base: Path, drive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The output of a run that was stopped after three steps, with a checkpoint of each."""
    output = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        assert "stopped by the test" in refused(usual(base, output, storage=drive, checkpoint_every=1), capsys)
    gc.collect()  # the run that failed still stores in the folder, until nobody holds it any more
    assert names(drive) == ["mine.txt", "offmate-checkpoints"]
    return output


def test_a_folder_that_is_missing_is_named_and_found_where_it_is_now(base, drive, stopped, tmp_path, capsys):
    elsewhere = drive.rename(tmp_path / "elsewhere")
    drive.mkdir()
    said = refused(usual(base, stopped, resume=True), capsys)
    newest = stopped / "checkpoints" / "step-00000003"
    assert f"{newest}: optimizer states of this checkpoint lie in {drive}/offmate-checkpoints/" in said
    assert f"which is missing, and not in {drive} either. Connect the drive of {drive}." in said
    assert "name the one that contains offmate-checkpoints/" in said and "with --resume --storage FOLDER" in said
    rest = finetune(usual(base, stopped, resume=True, storage=elsewhere))
    state, expected, _ = plain_run(stopped, tmp_path)
    assert losses(rest) == expected[3:] and same(weights(stopped), state)


@pytest.mark.parametrize("harm", ["flip", "shorten", "remove"])
def test_a_file_that_is_not_as_it_was_written_is_named_and_an_older_checkpoint_used(
    base, drive, stopped, tmp_path, caplog, harm
):
    newest = stopped / "checkpoints" / "step-00000003"
    file = load_linked(newest / "states.json").files[1]
    if harm == "flip":
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    elif harm == "shorten":
        os.truncate(file, 100)
    else:
        file.unlink()
    rest = finetune(usual(base, stopped, resume=True))
    (said,) = (words for words in caplog.messages if words.startswith(f"{newest} is damaged"))
    assert str(file) in said
    state, expected, _ = plain_run(stopped, tmp_path)
    assert losses(rest) == expected[2:] and same(weights(stopped), state)


def test_a_checkpoint_that_goes_takes_its_files_with_it(base, drive, stopped):
    assert names(stopped / "checkpoints") == [".states.json", "step-00000002", "step-00000003"]
    (folder,) = (drive / "offmate-checkpoints").iterdir()
    assert [name[: len("step-00000002")] for name in names(folder)] == ["step-00000002", "step-00000003"]


def test_where_there_are_no_hard_links_states_are_copied_which_is_said_before(base, drive, tmp_path, monkeypatch):
    def link(self: SystemFiles, path: Path, new: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(SystemFiles, "link", link)
    output = tmp_path / "out"
    said = finetune(usual(base, output, storage=drive))
    (line,) = (line for event in said if event["event"] == "plan" for line in event["lines"] if "no hard links" in line)
    assert re.match(
        rf"checkpoints: the file system of {drive} has no hard links \(Operation not permitted\), so every checkpoint "
        r"copies \d+ KiB there",
        line,
    )
    state, _, _ = plain_run(output, tmp_path)
    assert same(weights(output), state)
    for name in ("step-00000002", "step-00000004"):
        load_linked(output / "checkpoints" / name / "states.json").check()


def test_room_for_checkpoints_is_printed_and_a_run_without_it_refused(base, drive, tmp_path, monkeypatch, capsys):
    said = finetune(usual(base, tmp_path / "out", storage=drive, dry_run=True))
    (line,) = (line for event in said if event["event"] == "plan" for line in event["lines"] if "needs" in line)
    assert re.match(rf"checkpoints: {drive} needs \d+ KiB for the states in use and in 2 checkpoints, and has", line)
    own = SystemFiles.free_bytes
    monkeypatch.setattr(SystemFiles, "free_bytes", lambda self, folder: min(own(self, folder), 1 << 18))
    words = refused(usual(base, tmp_path / "out", storage=drive), capsys)
    assert f"KiB in {drive}, which also gets" in words and "there is room for 251 KiB" in words


# -- what a dry run says ----------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_is_read_and_written_and_leaves_nothing(base, drive, tmp_path):
    said = lines(finetune(usual(base, tmp_path / "out", storage=drive, dry_run=True)))
    assert said["fits"]
    assert re.search(
        r"storage: \d+ KiB of optimizer states are read from the storage paths per step, and \d+ KiB written: .* 1,000 "
        r"steps write .*B; a consumer drive of 2 TB is usually rated for",
        said["storage"],
    )
    assert names(drive) == ["mine.txt"] and names(tmp_path) == ["drive"]


def test_where_ram_has_room_nothing_changes_on_the_screen(base, drive, tmp_path, monkeypatch):
    monkeypatch.setattr("offmate.finetune.preview.available_host_bytes", lambda: 2**30)
    with_one, without = (
        lines(finetune(usual(base, tmp_path / "out", cpu_budget="1GiB", dry_run=True, storage=folder)))
        for folder in (drive, None)
    )
    assert with_one == without


def test_states_that_may_leave_are_not_counted_as_ram(base, drive, tmp_path, monkeypatch):
    """There are 400 KiB: too few for weights and states on the emulated device, enough for weights."""
    monkeypatch.setattr("offmate.finetune.needs.available_host_bytes", lambda: 400 << 10)
    doubts = []
    for folder in (None, drive):
        said = finetune(
            usual(base, tmp_path / "out", storage=folder, dry_run=True, gpu_budget="1MiB", cpu_budget="4GiB")
        )
        doubts.append(next(event for event in said if event["event"] == "needs")["doubts"])
    assert re.search(
        r"the run needs \d+ KiB of RAM, but 400 KiB are free; .*\. Optimizer states take \d+ KiB of the RAM: --storage "
        r"DIR may help",
        *doubts[0],
    )
    assert doubts[1] == []


@pytest.mark.parametrize(("cpu_budget", "helps"), [("500KiB", True), ("100KiB", False)])
def test_a_run_that_does_not_fit_names_storage_where_it_helps(base, tmp_path, capsys, cpu_budget, helps):
    """Weights and gradients alone need more than 100 KiB."""
    argv = usual(base, tmp_path / "out", gpu_budget="352KiB", cpu_budget=cpu_budget, dry_run=True)
    assert cli.main([word for word in argv if word != "--json"]) == 1
    captured = capsys.readouterr()
    advice = r"does not fit: .* \(cpu_budget\)\. Optimizer states take \d+ KiB of the RAM: --storage DIR may help"
    assert bool(re.search(advice, " ".join(captured.out.split()))) == helps
    assert ("--storage DIR may help" in captured.err) == helps
    assert "does not fit" in captured.out


def test_a_run_that_does_not_fit_with_storage_has_one_reason(base, drive, tmp_path, capsys):
    """What a plan for more RAM needs, which stores nothing, is not said beside it."""
    argv = usual(base, tmp_path / "out", gpu_budget="352KiB", cpu_budget="100KiB", dry_run=True, storage=drive)
    assert cli.main([word for word in argv if word != "--json"]) == 1
    captured = capsys.readouterr()
    shown, error = (" ".join(text.split()) for text in (captured.out, captured.err))
    assert "does not fit 352 KiB of GPU memory and 100 KiB of RAM, also with optimizer states in files" in shown
    assert "training needs" not in shown and error.count("100 KiB") == 1
    assert "of RAM for buffers" in error and "with more RAM:" in shown


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_whose_drive_fails_says_how_it_goes_on(base, drive, tmp_path, monkeypatch, capsys, step):
    own, output = loop._step, tmp_path / "out"

    def failing(run: Any, number: int, *rest: Any) -> Any:
        if number == step:
            raise StorageError("the drive has a fault")
        return own(run, number, *rest)

    monkeypatch.setattr(loop, "_step", failing)
    assert cli.main([word for word in usual(base, output, storage=drive) if word != "--json"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    resume = f". Continue from it with: offmate finetune --output {output} --resume"
    assert "offmate: the drive has a fault" in said
    assert (f"The last checkpoint is {output}/checkpoints/step-00000002{resume}" in said) == (step == 3)


def test_too_small_a_drive_is_a_doubt(base, drive, tmp_path, monkeypatch):
    own = SystemFiles.free_bytes
    monkeypatch.setattr(SystemFiles, "free_bytes", lambda self, folder: min(own(self, folder), 1 << 17))
    said = finetune(usual(base, tmp_path / "out", storage=drive, dry_run=True))
    (doubt,) = (doubt for event in said if event["event"] == "plan" for doubt in event["doubts"])
    assert re.match(
        rf"optimizer states need \d+ KiB in {drive}, which also gets \d+ KiB of the output, for those in use and in 2 "
        r"checkpoints, and there is room for 125 KiB; free space there, keep fewer checkpoints",
        doubt,
    )


# -- folders that cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "status", "said"),
    [
        (["absent"], 1, "absent is not a folder; make it, or name another one"),
        (["drive/mine.txt"], 1, "drive/mine.txt is not a folder"),
        (["drive", "drive"], 2, "/drive are the same folder; name each one once"),
        (["drive", "same"], 2, "are on the same disk"),
        (["7GB/s"], 2, "--storage '7GB/s' is a rate, and a folder on that drive is needed"),
        ([""], 2, "storage is ''; name a folder such as /mnt/nvme/offmate"),
    ],
)
def test_a_folder_that_cannot_be_is_refused_before_anything_is_made(
    base, drive, tmp_path, monkeypatch, capsys, folders, status, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same").mkdir()
    argv = usual(base, tmp_path / "out") + [word for folder in folders for word in ("--storage", folder)]
    assert cli.main(argv) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("offmate: ") and said in line
    assert names(tmp_path) == ["drive", "same"] and names(drive) == ["mine.txt"]


def test_a_folder_that_is_not_writable_is_refused(base, drive, tmp_path, monkeypatch, capsys):
    def forbidden(self: SystemFiles, path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(SystemFiles, "open", forbidden)
    assert cli.main(usual(base, tmp_path / "out", storage=drive)) == 1
    assert "cannot be stored in: Permission denied; name a folder that you may write to" in capsys.readouterr().err


def test_a_folder_that_another_run_stores_in_is_refused(base, drive, tmp_path, capsys):
    with Engine([SimpleNamespace(folder=drive)]):  # type: ignore[list-item]
        assert f"stores in {drive}; delete that model" in refused(usual(base, tmp_path / "out", storage=drive), capsys)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "folders"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), (None, ()), ([], ()), ("none", ()), (["none"], ())],
)
def test_storage_is_a_folder_several_or_none(tmp_path, value, folders):
    settings = make_settings({**NAMED, "storage": value})
    assert settings.storage == folders
    settings.save(tmp_path / "s.yaml")
    assert make_settings(read_yaml(tmp_path / "s.yaml")) == settings


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "storage is 3; name a folder such as /mnt/nvme/offmate, several of them, or none"),
        ({"a": "7GB/s"}, "storage is {'a': '7GB/s'}; name a folder"),
        (["a", 3], "storage is 3; name a folder"),
        ("a\0b", "storage is 'a\\x00b'; a null byte"),
    ],
)
def test_storage_that_names_no_folder_is_refused(value, said):
    with pytest.raises(OffmateError) as caught:
        make_settings({**NAMED, "storage": value})
    assert said in str(caught.value)


def test_storage_may_be_given_several_times_and_changes_no_numbers(capsys):
    given = ["--storage", "a", "--storage", "b"]
    assert cli._parser().parse_args(["finetune", *given]).storage == ["a", "b"]
    assert cli.main(["init", *given]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["storage"] == ["a", "b"]
    assert differences(make_settings(NAMED), {"storage": ["a"]}) == []


def test_no_folder_is_no_storage():
    assert measured(()) == StateFolders() and StateFolders().given is None
