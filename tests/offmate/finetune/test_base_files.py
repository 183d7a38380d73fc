"""A frozen base that RAM has no room for stays in files: the bits of a run with plenty of RAM."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offmate.runtime.storage.measure import PathRates
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from offmate import cli
from offmate.errors import OffmateError
from offmate.finetune import base_cache, base_forecast, loop
from offmate.finetune.base_files import InFiles
from offmate.finetune.lock import locked
from offmate.finetune.weights import load_model
from offmate.machines.mapped_files import mapped_bytes
from offmate.planning import files as planning_files
from offmate.planning import storage
from offmate.session import checkpoint_files

from ...fuzz.figures import from_hardware_file
from ...warm import run
from .finetune_kit import (
    POSITIONS,
    SMALL_REQUESTS,
    TEXT,
    VOCABULARY,
    arguments,
    dies,
    finetune,
    losses,
    make_models,
    make_tokenizer,
    refused,
    replaced,
    same,
    stop_after,
)

STEPS = 4
SHORT = {"gpu_budget": "1MiB", "cpu_budget": "900KiB"}
"""RAM for about half of the base in float32."""
PLENTY = {"gpu_budget": "1MiB", "cpu_budget": "1GiB"}
REPLACED = {
    **SMALL_REQUESTS,
    (checkpoint_files, "Engine"): SMALL_REQUESTS[storage, "Engine"],
    (storage, "rates"): lambda path, n_bytes: PathRates(1e9, 1e9, 1e9),
    (planning_files, "N_THREADS"): 2,
    (planning_files, "REQUEST_BYTES"): 1 << 14,
    (checkpoint_files, "read_rate"): lambda path, n_bytes: 1e9,
    (base_forecast, "read_rate"): lambda path, n_bytes: 1e9,
}
"""Buffers that fit beside a small model, and seconds that do not depend on the machine."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in float32, one with experts, small ones of other kinds, and a text."""
    folder = tmp_path_factory.mktemp("base")
    make_models(folder)
    common = {"vocab_size": VOCABULARY, "eos_token_id": 1, "bos_token_id": 0, "max_position_embeddings": POSITIONS}
    torch.manual_seed(0)
    wide = LlamaConfig(hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, **common)
    LlamaForCausalLM(wide).save_pretrained(folder / "wide", max_shard_size="800KB")
    tied = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=True,
        **common,
    )  # fmt: skip
    LlamaForCausalLM(tied).save_pretrained(folder / "tied")
    experts = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, **common,
    )  # fmt: skip
    MixtralForCausalLM(experts).save_pretrained(folder / "experts")
    make_tokenizer().save_pretrained(folder / "wide")
    (folder / "text.txt").write_text(TEXT[:10_000])
    return folder


@pytest.fixture(autouse=True)
def _small_requests(monkeypatch: pytest.MonkeyPatch, cache_dir: str) -> Iterator[None]:
    with replaced(monkeypatch, cache_dir, REPLACED):
        yield


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A folder for what is written."""
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def usual(base: Path, output: Path, **more: object) -> list[str]:
    settings: dict[str, object] = {"lora": 2, "steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 1, "yes": True}
    settings |= {"checkpoint_every": 2, "eval_fraction": 0.05, "batch_size": 2, **SHORT}
    return arguments(base / "wide", base / "text.txt", output, **(settings | more))


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory, cache_dir: str) -> Callable[[str], Any]:
    """The usual run with plenty of RAM, or with too little, made once: what it said, its folder and its plan."""

    @functools.cache
    def made(name: str) -> tuple[list[dict[str, Any]], Path, Any]:
        output, plans = tmp_path_factory.mktemp(name) / "out", []
        budgets = {"plenty": PLENTY, "short": SHORT}[name]
        train = loop.train
        with pytest.MonkeyPatch.context() as patch, replaced(patch, cache_dir, REPLACED):
            patch.setattr("offmate.finetune.job.train", lambda run: (train(run), plans.append(run.model.offmate.plan)))
            said = finetune(usual(base, output, merge=True, sample="The", sample_tokens=4, **budgets))
        return said, output, plans[0]

    return made


@pytest.fixture
def unbroken(runs: Callable[[str], Any]) -> tuple[list[dict[str, Any]], Path]:
    """The usual run with plenty of RAM: what it said, and its folder."""
    return runs("plenty")[:2]


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter_model.safetensors")


def said(events: list[dict[str, Any]], beginning: str) -> list[str]:
    """The lines of all events that begin so."""
    return [line for event in events for line in event.get("lines", ()) if line.startswith(beginning)]


def written(drive: Path) -> list[Path]:
    """The files of bases in a folder."""
    return sorted(drive.glob("offmate-base-*/*"))


# -- as the checkpoint has it -----------------------------------------------------------------------------------------


def test_a_base_in_files_gives_the_bits_of_one_in_ram(runs, unbroken):
    events, output, _ = runs("short")
    for kind in ("step", "evaluation"):
        assert losses(events, kind) == losses(unbroken[0], kind)
    texts, expected = ([one["text"] for one in all_ if one["event"] == "sample"] for all_ in (events, unbroken[0]))
    assert texts == expected and texts
    assert same(adapter(output), adapter(unbroken[1]))
    assert same(*(load_file(folder / "merged" / "model.safetensors") for folder in (output, unbroken[1])))
    assert any("stay in the checkpoint" in line for line in said(events, "base: RAM is short")), said(events, "base: ")


def test_it_reads_in_every_step_what_ram_has_no_room_for(runs):
    plan = runs("short")[2]
    assert plan.read_bytes > 500_000 and plan.host_bytes <= 900 << 10


def test_what_is_read_and_how_fast_is_said_before_a_run(base, tmp_path):
    events = finetune(usual(base, tmp_path / "out", dry_run=True))
    (first, second) = said(events, "base: ")
    assert re.fullmatch(
        r"base: RAM is short, so 1\.\d+ MiB of the base stay in the checkpoint's files; what RAM has no room for is "
        r"read from there in every step, at 954 MiB/s \(as measured\)",
        first,
    )
    assert re.match(r"base: \d+ KiB of frozen parameters are read from the checkpoint per step, at 954 MiB/s: ", second)
    (needs,) = said(events, "needs at least")
    assert int(re.match(r"needs at least: (\d+) KiB of RAM", needs)[1]) < 900
    assert said(events, "fits: ") and list(tmp_path.iterdir()) == []


def test_with_room_in_ram_nothing_changes(base, unbroken, drive):
    assert said(unbroken[0], "base: ") == []
    with_one = finetune(usual(base, drive / "out", storage=drive, precision="bf16", dry_run=True, **PLENTY))
    assert said(with_one, "base: ") == [] and written(drive) == []


def killed(count: int, argv: list[str]) -> None:
    dies(count, argv, REPLACED)


def test_killed_it_resumes_bit_for_bit(base, unbroken, tmp_path):
    log, broken = tmp_path / "said", tmp_path / "broken"
    assert run(log, killed, 3, usual(base, broken)) == -signal.SIGKILL, log.read_text()
    rest = finetune(usual(base, broken, resume=True))
    assert losses(rest) == losses(unbroken[0])[2:]
    assert same(adapter(broken), adapter(unbroken[1]))


def test_it_resumes_with_plenty_of_ram(base, unbroken, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert "stopped by the test" in refused(usual(base, tmp_path / "out"), capsys)
    rest = finetune(usual(base, tmp_path / "out", resume=True, **PLENTY))
    assert losses(rest) == losses(unbroken[0])[2:]
    assert same(adapter(tmp_path / "out"), adapter(unbroken[1]))


@pytest.fixture
def own(base: Path, tmp_path: Path) -> Path:
    """A folder with a model that a test may change."""
    shutil.copytree(base / "wide", tmp_path / "own" / "wide")
    shutil.copy(base / "text.txt", tmp_path / "own")
    return tmp_path / "own"


def test_a_checkpoint_that_changes_while_it_trains_ends_the_run_by_name(own, tmp_path, monkeypatch, capsys):
    step = loop._step

    def changing(run: Any, number: int, *args: Any) -> Any:
        if number == 1:
            for file in (own / "wide").glob("*.safetensors"):
                os.utime(file)
        return step(run, number, *args)

    monkeypatch.setattr(loop, "_step", changing)
    words = refused(usual(own, tmp_path / "out"), capsys)
    assert re.search(r"own/wide/model-\S+\.safetensors has changed since it was opened: it was written to", words)


def test_a_base_that_changed_is_not_gone_on_with(own, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        refused(usual(own, tmp_path / "out"), capsys)
    file = next((own / "wide").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    words = refused(usual(own, tmp_path / "out", resume=True), capsys)
    assert f"{file} has changed since the run began" in words


# -- what the checkpoint has otherwise --------------------------------------------------------------------------------

CAST = {"precision": "bf16", "cpu_budget": "500KiB", "gpu_budget": "600KiB"}


def test_another_dtype_is_written_once_and_read_from_there(base, drive, tmp_path, caplog):
    caplog.set_level("INFO", logger="offmate")
    plenty = finetune(usual(base, tmp_path / "plenty", **PLENTY, precision="bf16"))
    first = finetune(usual(base, tmp_path / "first", storage=drive, **CAST))
    (file,) = written(drive)
    words = "834 KiB of the base are not in its checkpoint as the run uses them; they were written to"
    assert f"{words} {file}" in caplog.text
    before = file.stat()
    again = finetune(usual(base, tmp_path / "again", storage=drive, **CAST))
    assert f"834 KiB of the base lie in {file}, as an earlier run has written them" in caplog.text
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    for events, name in ((first, "first"), (again, "again")):
        assert losses(events) == losses(plenty)
        assert same(adapter(tmp_path / name), adapter(tmp_path / "plenty"))
    assert re.match(
        r"base: 834 KiB are not in the checkpoint as the run uses them \(another dtype, or several tensors for one "
        rf"parameter\), so they are written to {drive}, unless an earlier run has done so, and read from there at ",
        said(first, "base: ")[0],
    )
    assert any("are read from the checkpoint per step" in line for line in said(first, "base: "))
    with safe_open(file, "pt") as opened:  # a safetensors file as any other
        assert "model.layers.0.mlp.up_proj.weight" in opened.keys()  # noqa: SIM118 - not a mapping


def test_without_a_folder_it_stays_in_ram_and_a_line_names_the_option(base, tmp_path):
    events = finetune(usual(base, tmp_path / "out", precision="bf16", cpu_budget="1000KiB", dry_run=True))
    (line,) = said(events, "base: ")
    assert line.endswith("so they stay in RAM; name --storage DIR to keep them in a file there")


@pytest.mark.parametrize("model", ["experts", "tied", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parameters_lie_in_files_and_are_those_that_are_read_into_ram(base, drive, model, dtype):
    """Experts, which are joined from several tensors, and shared embeddings, too."""
    digests: list[dict[str, str]] = [{}, {}, {}]
    expected = load_model(base / model, dtype, digests[0])
    for known in digests[1:]:
        found = load_model(base / model, dtype, known, InFiles(drive))
        params = {name: param.detach() for name, param in found.named_parameters()}
        assert mapped_bytes(params).keys() == params.keys()
        assert same(found.state_dict(), expected.state_dict())
        assert all(a.dtype == b.dtype for a, b in zip(found.parameters(), expected.parameters()))
    assert digests[0] == digests[1] == digests[2]
    if dtype == torch.float32 and model != "experts":
        assert list(drive.iterdir()) == [], "the checkpoint has all of it"


def damaged(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5000])


def another_header(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"F16" ', 1))


def another_source(file: Path) -> None:
    before, found, after = file.read_bytes().partition(b"norm.weight")  # first among what the file says of itself
    assert found and len(before) < 4096
    file.write_bytes(before + b"norm.height" + after)


@pytest.mark.parametrize("how", [damaged, cut, another_header, another_source])
def test_a_damaged_file_is_said_and_written_again(base, drive, caplog, how):
    expected = load_model(base / "llama", torch.bfloat16).state_dict()
    load_model(base / "llama", torch.bfloat16, None, InFiles(drive))
    (file,) = written(drive)
    whole = file.read_bytes()
    how(file)
    assert same(load_model(base / "llama", torch.bfloat16, None, InFiles(drive)).state_dict(), expected)
    assert f"{file} is damaged" in caplog.text and file.read_bytes() == whole


def test_another_content_of_the_checkpoint_is_another_file(own, drive):
    load_model(own / "wide", torch.bfloat16, None, InFiles(drive))
    damaged(next((own / "wide").glob("*.safetensors")))
    found = load_model(own / "wide", torch.bfloat16, None, InFiles(drive))
    assert len(written(drive)) == 2
    assert same(found.state_dict(), load_model(own / "wide", torch.bfloat16).state_dict())


def dies_writing(argv: list[str]) -> None:
    """Run the tool up to the moment in which the file would be complete."""
    for (module, name), value in REPLACED.items():
        setattr(module, name, value)
    base_cache.Writer.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with from_hardware_file():
        sys.exit(cli.main(argv))


def test_killed_while_it_writes_the_next_run_begins_anew(base, drive, tmp_path):
    log, argv = tmp_path / "log", usual(base, tmp_path / "out", storage=drive, **CAST)
    assert run(log, dies_writing, argv) == -signal.SIGKILL, log.read_text()
    assert [file.name for file in written(drive)] != ["base.safetensors"]
    events = finetune([*argv, "--resume"])
    assert len(losses(events)) == STEPS
    assert [file.name for file in written(drive)] == ["base.safetensors"]


def test_two_runs_do_not_write_at_once(base, drive, monkeypatch):
    load_model(base / "llama", torch.bfloat16, None, InFiles(drive))
    (file,) = written(drive)
    with locked(file.parent), pytest.raises(OffmateError, match=r"another run \(process \d+\) is writing into"):
        load_model(base / "llama", torch.bfloat16, None, InFiles(drive))


def test_a_full_drive_is_named_and_nothing_stays(base, drive, monkeypatch):
    def full(self: Any, name: str, tensor: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(base_cache.Writer, "_append", full)
    with pytest.raises(OffmateError, match=r"base\.safetensors cannot be written: No space left on device"):
        load_model(base / "llama", torch.bfloat16, None, InFiles(drive))
    assert list(drive.iterdir()) == []


def test_too_small_a_drive_is_a_doubt(base, drive, tmp_path, monkeypatch):
    monkeypatch.setattr(base_forecast, "has_room", lambda place, n_bytes: False)
    events = finetune(usual(base, tmp_path / "out", storage=drive, dry_run=True, **CAST))
    (doubt,) = next(event for event in events if event["event"] == "needs")["doubts"]
    assert re.match(rf"{drive}: the base needs 834 KiB there, and .* are free; free space", doubt)


def test_a_merge_that_ram_has_no_room_for_is_a_doubt_before_the_run(base, tmp_path, monkeypatch):
    monkeypatch.setattr("offmate.finetune.needs.available_host_bytes", lambda: 1 << 20)
    events = finetune(usual(base, tmp_path / "out", merge=True, dry_run=True))
    doubts = next(event for event in events if event["event"] == "needs")["doubts"]
    assert any(re.match(r"merging needs 1\.6\d MiB of RAM, but 1 MiB are free; leave out --merge", d) for d in doubts)


def test_damaged_and_missing_weights_are_named_as_when_they_are_read(own):
    file = next((own / "wide").glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(OffmateError, match="weights are damaged: the file ends too early"):
        load_model(own / "wide", torch.float32, {}, InFiles())
    for header in (b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(OffmateError, match="weights are damaged"):
            load_model(own / "wide", torch.float32, None, InFiles())
    file.unlink()
    with pytest.raises(OffmateError, match="must be in safetensors"):
        load_model(own / "wide", torch.float32, None, InFiles())


def test_a_model_that_is_not_here_yet_is_forecast_with_an_assumed_rate(own, tmp_path):
    for file in (own / "wide").glob("model*"):
        file.unlink()
    config = json.loads((own / "wide" / "config.json").read_text())
    assert config["dtype"] == "float32"
    events = finetune(usual(own, tmp_path / "out", dry_run=True))
    assert said(events, "base: ")[0].endswith("at 2.79 GiB/s (assumed, since it is not here yet)")
