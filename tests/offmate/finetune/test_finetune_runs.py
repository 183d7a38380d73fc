"""`offmate finetune` from end to end: plain PyTorch's numbers, kills and resumes, adapters, results that load."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from offmate import cli
from offmate.errors import OffmateError
from offmate.finetune import checkpoint, folders, forecast, loop
from offmate.finetune.settings import read_yaml
from offmate.optim.updater import Updater

from ...warm import run
from .finetune_kit import TEXT, arguments, finetune, losses, make_models, plain_run, refused, same, stop_after, weights

STEPS = 6
GATED = {"max_grad_norm": 0.5, "accumulation": 2}

# When a process kills itself: at a call of a function of the tool, before or after it.
MOMENTS = {
    "step": (loop, "_step", False),
    "writing": (folders, "write_manifest", False),
    "pruning": (checkpoint, "remove", True),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models and a text."""
    folder = tmp_path_factory.mktemp("finetune")
    make_models(folder)
    (folder / "text.txt").write_text(TEXT[:30_000])
    return folder


@pytest.fixture(autouse=True)
def _one_cache(monkeypatch: pytest.MonkeyPatch, cache_dir: str) -> None:
    monkeypatch.setenv("OFFMATE_CACHE_DIR", cache_dir)


@pytest.fixture(scope="module")
def unbroken(base: Path, tmp_path_factory: pytest.TempPathFactory, cache_dir: str) -> tuple[list[dict], Path]:
    """The usual run that nothing breaks off: what it said, and its folder."""
    output = tmp_path_factory.mktemp("unbroken") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFMATE_CACHE_DIR", cache_dir)
        return finetune(usual(base, output)), output


def usual(base: Path, output: Path, model: str = "llama", **more: object) -> list[str]:
    settings = {"steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 2, "checkpoint_every": 2, "eval_fraction": 0}
    # How fast a tiny model seems depends on what else the machine does.
    settings["yes"] = True
    # Without a gate, so that updates begin during the backward and the budget decides who makes them.
    settings["max_grad_norm"] = "none"
    return arguments(base / model, base / "text.txt", output, **(settings | more))


def reports_in_pairs(events: list[dict]) -> list[tuple[str, int]]:
    """The checkpoints whose next report is the evaluation of the same step."""
    said = [(e["event"], e["step"]) for e in events if e["event"] in ("evaluation", "checkpoint")]
    return [a for a, b in pairwise(said) if (a[0], b) == ("checkpoint", ("evaluation", a[1]))]


@pytest.mark.parametrize(("model", "more"), [("llama", {}), ("llama", {"max_grad_norm": None}), ("gpt2", GATED)])
def test_equals_plain_pytorch_bit_for_bit(base, tmp_path, model, more):
    output = tmp_path / "out"
    events = finetune(usual(base, output, model, eval_fraction=0.04, **more))
    state, expected, held_out = plain_run(output, tmp_path)
    assert losses(events) == expected
    assert losses(events, "evaluation")[-1] == held_out
    assert reports_in_pairs(events) == [("checkpoint", step) for step in (2, 4, STEPS)]
    assert losses(events, "evaluation")[-1] < losses(events, "evaluation")[0]
    assert same(weights(output), state)
    norms = [event["gradient_norm"] for event in events if event["event"] == "step"]
    assert all(norms) if more else norms == [None] * STEPS
    assert not (output / "tokens").exists()
    assert len(list((output / "checkpoints").iterdir())) == 2
    assert '"OffmateL' not in (output / "config.json").read_text()
    assert finetune(usual(base, output, model, eval_fraction=0.04, **more, resume=True)) == [{"event": "finished"}]


def dies(moment: str, count: int, argv: list[str]) -> None:
    """Run the tool up to the count-th such moment; nothing is cleaned up, as by kill -9."""
    module, name, after = MOMENTS[moment]
    own, left = getattr(module, name), count

    def call(*args: object) -> object:
        nonlocal left
        left -= 1
        result = own(*args) if after or left else None
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, call)
    sys.exit(cli.main(argv))


def kill(said: Path, moment: str, count: int, argv: list[str]) -> None:
    """Run the tool in a process of its own that dies at the count-th such moment."""
    assert run(said, dies, moment, count, argv) == -signal.SIGKILL, said.read_text()


def test_killed_anywhere_it_resumes_bit_for_bit(base, unbroken, tmp_path):
    said, broken = tmp_path / "said", tmp_path / "broken"
    events, whole = unbroken
    first = random.randint(1, 4)
    kill(said, "step", first, usual(base, broken, keep_checkpoints=1))
    resume = usual(base, broken, resume=True)
    kill(said, "writing", 1, resume)
    kill(said, "pruning", 1, resume)
    rest = finetune(resume)
    assert losses(rest) == losses(events)[STEPS - len(losses(rest)) :]
    assert same(weights(broken), weights(whole))


def test_dropout_and_float32_copies_resume_bit_for_bit(base, tmp_path, monkeypatch):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    finetune(usual(base, unbroken, "gpt2", precision="bf16-master", **GATED))
    stop_after(monkeypatch, random.randint(2, STEPS - 1))
    with pytest.raises(OffmateError, match="stopped by the test"):
        finetune_raising(usual(base, broken, "gpt2", precision="bf16-master", **GATED))
    monkeypatch.undo()
    finetune(usual(base, broken, "gpt2", resume=True, max_grad_norm=None))
    assert same(weights(broken), weights(unbroken))
    assert weights(broken)["transformer.wte.weight"].dtype == torch.bfloat16


def finetune_raising(argv: list[str]) -> None:
    """Run a command line whose error is to be seen."""
    parsed = cli._parser().parse_args(argv)
    parsed.run(parsed)


def test_an_adapter_resumes_and_loads_with_plain_peft(base, tmp_path, monkeypatch):
    more = {"lora": "r=4,dropout=0.1", "learning_rate": 1e-2}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    finetune(usual(base, unbroken, **more))
    stop_after(monkeypatch, 3)
    with pytest.raises(OffmateError, match="stopped by the test"):
        finetune_raising(usual(base, broken, **more))
    monkeypatch.undo()
    finetune(usual(base, broken, resume=True))
    ids = torch.arange(12)[None]
    logits = [adapted(base, output)(input_ids=ids).logits for output in (unbroken, broken)]
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], AutoModelForCausalLM.from_pretrained(base / "llama")(input_ids=ids).logits)
    assert not (unbroken / "model.safetensors").exists()
    assert peft.PeftConfig.from_pretrained(unbroken).base_model_name_or_path == str(base / "llama")


def adapted(base: Path, output: Path) -> torch.nn.Module:
    """The base model with a result's adapter, by plain peft."""
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "llama"), output).eval()


def test_nan_stops_and_keeps_the_last_good_checkpoint(base, tmp_path, capsys):
    argv = usual(base, tmp_path / "out", learning_rate=1e30, optimizer="sgd", warmup_steps=0, checkpoint_every=1)
    said = refused(argv, capsys)
    assert "NaN" in said or "nan" in said
    assert "step" in said and "learning_rate" in said


def test_told_to_stop_it_finishes_the_step_and_its_checkpoint(base, tmp_path, monkeypatch, capsys):
    own, output = loop._step, tmp_path / "out"

    def step(run, number, *args):
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return own(run, number, *args)

    monkeypatch.setattr(loop, "_step", step)
    assert cli.main(usual(base, output, quiet=True)) == 130
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    said, err = capsys.readouterr()
    assert said == ""
    assert re.search(rf"stopped: 3 of {STEPS} steps done, about \d+ s left. Continue with: offmate finetune", err)


def test_a_full_disk_keeps_the_last_good_checkpoint(base, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"
    own, calls = torch.save, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return own(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    said = refused(usual(base, output), capsys)
    assert "the checkpoint of step 4 could not be written" in said and "No space left" in said and "--resume" in said
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.undo()


def test_dry_run_says_what_the_run_takes_reads_no_weights_and_leaves_nothing(base, tmp_path, monkeypatch):
    monkeypatch.setattr("offmate.finetune.job.build_model", None)
    events = {event["event"]: event for event in finetune(usual(base, tmp_path / "out", dry_run=True))}
    assert list(events) == ["device", "needs", "examples", "plan"]
    assert "EMULATED ON THE CPU" in events["device"]["words"]
    words = [line.split(":")[0] for name in ("needs", "plan") for line in events[name]["lines"]]
    assert words == ["model", "needs at least", "data", "training", "fits", "RAM", "speed", "run"]
    shown = events["examples"]["examples"]
    assert [example["kind"] for example in shown] == ["text"]
    assert all(example["text"].startswith("⟦") and example["text"].endswith("⟧") for example in shown)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("speculate", [None, True, "auto"])
def test_a_forecast_is_of_the_updates_that_the_run_starts_with(base, tmp_path, monkeypatch, speculate):
    """With "auto" they wait until it is seen how many steps clip."""
    planned, plan = [], forecast.plan_model

    def noted(*args, **kwargs):
        planned.append(plan(*args, **kwargs))
        return planned[-1]

    monkeypatch.setattr(forecast, "plan_model", noted)
    finetune(usual(base, tmp_path / "out", dry_run=True, speculate=speculate, max_grad_norm=0.5))
    assert planned and all(plan.problem.speculates == (speculate is True) for plan in planned)


def test_a_dry_run_prints_every_doubt_and_a_run_is_not_begun(base, tmp_path, capsys, monkeypatch):
    for name in ("needs.available_host_bytes", "preview.available_host_bytes", "forecast.default_host_budget_bytes"):
        monkeypatch.setattr(f"offmate.finetune.{name}", lambda: 2**17)
    monkeypatch.setattr("offmate.finetune.preview.shutil.disk_usage", lambda place: SimpleNamespace(free=10))
    monkeypatch.setattr("offmate.finetune.preview._LONG_S", 0)
    more = {"device": None, "cpu_budget": None, "warmup_steps": 99, "eval_fraction": 0.01}
    found = [
        "NO GPU WAS FOUND",
        "KiB of RAM, but 128 KiB are free",
        "the disk has 10 B free",
        "never ends",
        "days",
    ]
    events = {event["event"]: event for event in finetune(usual(base, tmp_path / "out", dry_run=True, **more))}
    assert all(any(said in doubt for doubt in events["plan"]["doubts"]) for said in found), events["plan"]["doubts"]
    argv = [a for a in usual(base, tmp_path / "out", dry_run=True, **more) if a != "--json"]
    monkeypatch.setenv("COLUMNS", "1000")
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert said.startswith("device: EMULATED ON THE CPU")
    assert all(words in said for words in found)
    assert said.count("DOUBT") == len(events["plan"]["doubts"])
    assert re.search(
        r"\ndoes not fit: with .* of GPU memory, training needs about .* of RAM, and there are 128 KiB free", said
    )
    assert "\nfits:" not in said


@pytest.mark.parametrize(
    ("budgets", "why"),
    [
        ({"cpu_budget": "16KiB", "sample": "a", "sample_tokens": 8}, "evaluations and samples stream"),
        ({"cpu_budget": "160KiB", "gpu_budget": "500KiB"}, "With more RAM than the 160 KiB"),
    ],
)
def test_a_dry_run_that_needs_more_ram_than_was_named_does_not_fit(base, tmp_path, capsys, monkeypatch, budgets, why):
    monkeypatch.setenv("COLUMNS", "1000")
    argv = [a for a in usual(base, tmp_path / "out", dry_run=True, **budgets) if a != "--json"]
    assert cli.main(argv) == 1
    captured = capsys.readouterr()
    words = r"\ndoes not fit: .* training needs about .*iB of RAM, and there are 1\d+ KiB \(cpu_budget\)"
    assert re.search(words, captured.out) and "\nfits:" not in captured.out
    assert why in captured.err and "--cpu-budget" in captured.err


def test_a_dry_run_that_does_not_fit_says_so_after_its_other_doubts(base, tmp_path, capsys):
    assert cli.main(usual(base, tmp_path / "out", dry_run=True, gpu_budget="70KiB", device=None)) == 1
    captured = capsys.readouterr()
    *_, plan, failed = [json.loads(line) for line in captured.out.splitlines()]
    assert failed["event"] == "error" and failed["message"] in captured.err
    assert "NO GPU WAS FOUND" in plan["doubts"][0] and "the least that works is" in plan["doubts"][-1]
    assert "the least that works is" in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folds", [40, 80, 120])
def test_the_preview_folds_to_the_terminal(base, tmp_path, capsys, monkeypatch, folds):
    monkeypatch.setenv("COLUMNS", str(folds))
    argv = [a for a in usual(base, tmp_path / "out", dry_run=True) if a != "--json"]
    assert cli.main(argv) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= folds


def test_without_a_card_a_run_asks_or_needs_the_device_by_name(base, tmp_path, capsys):
    argv = [a for a in usual(base, tmp_path / "out", device=None) if a != "--yes"]
    said = refused(argv, capsys)
    assert "NO GPU WAS FOUND" in said and "add --device emulated" in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_named_device_keeps_the_one_that_it_began_on(base, tmp_path, monkeypatch):
    output = tmp_path / "out"
    stop_after(monkeypatch, 2)
    with pytest.raises(OffmateError, match="stopped by the test"):
        finetune_raising(usual(base, output, device=None))
    monkeypatch.undo()
    assert read_yaml(output / "finetune.yaml")["device"] == "emulated"
    argv = [a for a in usual(base, output, device=None, resume=True) if a != "--yes"]
    assert len(losses(finetune(argv))) == STEPS - 2


def as_older_versions_wrote(output: Path) -> None:
    """A run's settings with an open device, and its tokens without counts of formats."""
    settings = read_yaml(output / "finetune.yaml")
    (output / "finetune.yaml").write_text(yaml.safe_dump({**settings, "device": None}))
    known = json.loads((output / "tokens" / "tokens.json").read_text())
    (output / "tokens" / "tokens.json").write_text(json.dumps({k: v for k, v in known.items() if k != "tally"}))


@pytest.mark.parametrize("more", [{}, {"device": "emulated"}])
def test_a_run_of_an_older_version_resumes_without_a_question(base, unbroken, tmp_path, monkeypatch, more):
    events, whole = unbroken
    output = tmp_path / "out"
    stop_after(monkeypatch, 2)
    with pytest.raises(OffmateError, match="stopped by the test"):
        finetune_raising(usual(base, output))
    monkeypatch.undo()
    as_older_versions_wrote(output)
    argv = [a for a in usual(base, output, resume=True, **{"device": None, **more}) if a != "--yes"]
    assert losses(finetune(argv)) == losses(events)[2:]
    assert same(weights(output), weights(whole))


def test_what_was_left_open_is_stored_as_it_was_taken(base, tmp_path, monkeypatch):
    """So that a resumed run, given the same open values, keeps it."""
    output, scratch = tmp_path / "out", tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(base / "llama").to(torch.bfloat16).save_pretrained(scratch)
    for file in (base / "llama").glob("*token*"):
        shutil.copy(file, scratch)
    open_values = {"warmup_steps": None, "learning_rate": None, "precision": "auto", "lora": 4}
    default = {"max_grad_norm": None}
    argv = usual(base, output, **open_values, **default)
    argv[argv.index(str(base / "llama"))] = str(scratch)
    stop_after(monkeypatch, 2)
    with pytest.raises(OffmateError, match="stopped by the test"):
        finetune_raising(argv)
    monkeypatch.undo()
    kept = read_yaml(output / "finetune.yaml")
    assert {name: kept[name] for name in open_values} == {
        "warmup_steps": 1, "learning_rate": 2e-4, "precision": "bf16",
        "lora": {"r": 4, "alpha": 16, "dropout": 0.0, "targets": ["all-linear"]},
    }  # fmt: skip
    assert kept["max_grad_norm"] == 1.0 and kept["train_on"] == "assistant"
    assert len(losses(finetune([*argv, "--resume"]))) == STEPS - 2
    adapter = load_file(output / "adapter_model.safetensors")
    assert {value.dtype for value in adapter.values()} == {torch.float32}
    assert {name.split(".")[-3] for name in adapter} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_a_chat_is_trained_on_what_the_assistant_says(base, tmp_path):
    """Sequences without a word of the assistant would have no loss, and are left out."""
    model, data = tmp_path / "chat", tmp_path / "chats.jsonl"
    shutil.copytree(base / "llama", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    tokenizer.save_pretrained(model)
    asked = [{"from": "human", "value": "why " * 80}, {"from": "gpt", "value": "because"}]
    data.write_text("\n".join([json.dumps({"conversations": asked})] * 60))
    events = finetune(arguments(model, data, tmp_path / "out", steps=3, yes=True))
    assert all(math.isfinite(loss) for loss in losses(events))
    plan = next(event for event in events if event["event"] == "plan")
    line = plan["lines"][0]
    assert "documents: 60 as ShareGPT" in line and "sequences left out, with nothing to learn" in line


def test_a_budget_that_does_not_work_is_refused_and_leaves_nothing(base, tmp_path, capsys):
    assert "least" in refused(usual(base, tmp_path / "out", gpu_budget="20KiB"), capsys)
    assert list(tmp_path.iterdir()) == []


def test_what_looks_wrong_is_asked(base, tmp_path, capsys):
    argv = [a for a in usual(base, tmp_path / "out", warmup_steps=99) if a != "--yes"]
    assert "the warm-up never ends" in refused(argv, capsys)
    assert list(tmp_path.iterdir()) == []


def test_resume_with_another_configuration_shows_the_differences(base, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"
    stop_after(monkeypatch, 2)
    assert "stopped" in refused(usual(base, output), capsys)
    said = refused(usual(base, output, resume=True, learning_rate=5e-3, seed=1), capsys)
    assert "learning_rate: 0.01 in the run, 0.005 now" in said and "seed: 0 in the run, 1 now" in said
    assert "exists already; continue it with --resume" in refused(usual(base, output), capsys)


def split_of(output: Path) -> dict[str, list[str]]:
    """Who updates what, as the newest checkpoint says."""
    newest = max((output / "checkpoints").iterdir())
    return json.loads((newest / "moment.json").read_text())["split"]


def updates_seem_to_take(cpu_update_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who updates what is then certain, whatever else the machine does."""
    cost = Updater.cost
    monkeypatch.setattr(Updater, "cost", lambda *given: replace(cost(*given), cpu_update_s=cpu_update_s))
    monkeypatch.setattr("offmate.profile.store._kept", {})
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(folder / "cache"))


@pytest.mark.parametrize(("begun", "resumed", "kept"), [("500KiB", "16MiB", True), ("16MiB", "352KiB", False)])
def test_on_resume_the_budget_may_change_and_the_split_stays(
    base, unbroken, tmp_path, monkeypatch, begun, resumed, kept
):
    """Where it does not fit another one is taken: on the emulated device that changes no bits."""
    broken, (events, whole) = tmp_path / "broken", unbroken
    updates_seem_to_take(0.0 if kept else 1.0, tmp_path, monkeypatch)
    stop_after(monkeypatch, 2)
    with pytest.raises(OffmateError, match="stopped by the test"):
        finetune_raising(usual(base, broken, gpu_budget=begun))
    monkeypatch.undo()
    before = split_of(broken)
    assert bool(before["host"]) == kept and any(before.values())
    rest = finetune(usual(base, broken, gpu_budget=resumed, resume=True))
    assert (split_of(broken) == before) == kept
    assert losses(rest) == losses(events)[2:]
    assert same(weights(broken), weights(whole))


def test_a_checkpoint_without_a_split_resumes(base, tmp_path, monkeypatch):
    """As older versions wrote them."""
    output = tmp_path / "out"
    stop_after(monkeypatch, 2)
    with pytest.raises(OffmateError, match="stopped by the test"):
        finetune_raising(usual(base, output))
    monkeypatch.undo()
    path = max((output / "checkpoints").iterdir())
    moment = json.loads((path / "moment.json").read_text())
    del moment["split"]
    (path / "moment.json").write_text(json.dumps(moment))
    folders.write_manifest(without_manifest(path))
    assert len(losses(finetune(usual(base, output, resume=True)))) == STEPS - 2


def without_manifest(path: Path) -> Path:
    (path / "manifest.json").unlink()
    return path


def test_on_an_accelerator_dropout_resumes_bit_for_bit(sim, base, tmp_path, monkeypatch):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    settings = {"device": "sim", "gpu_budget": "64MiB", "steps": 3}
    events = finetune(usual(base, unbroken, "gpt2", **settings))
    stop_after(monkeypatch, 2)
    with pytest.raises(OffmateError, match="stopped by the test"):
        finetune_raising(usual(base, broken, "gpt2", **settings))
    monkeypatch.undo()
    rest = finetune(usual(base, broken, "gpt2", resume=True, **settings))
    assert losses(rest) == losses(events)[2:]
    assert same(weights(broken), weights(unbroken))


@pytest.mark.parametrize("step", [2, STEPS])
def test_an_evaluation_that_was_cut_off_is_made_up_for(base, tmp_path, monkeypatch, capsys, step):
    output, own = tmp_path / "out", loop._evaluate
    unbroken = finetune(usual(base, tmp_path / "unbroken", eval_fraction=0.04))

    def evaluate(run, done):
        if done == step:
            raise OffmateError("stopped by the test")
        own(run, done)

    monkeypatch.setattr(loop, "_evaluate", evaluate)
    assert "stopped by the test" in refused(usual(base, output, eval_fraction=0.04), capsys)
    monkeypatch.undo()
    rest = losses(finetune(usual(base, output, eval_fraction=0.04, resume=True)), "evaluation")
    assert rest == losses(unbroken, "evaluation")[step // 2 - 1 :]
    assert "held-out loss" in (output / "README.md").read_text()


def test_a_run_whose_folder_is_removed_stops(base, tmp_path, capsys, monkeypatch):
    output, own = tmp_path / "out", loop._step

    def step(run, number, *args):
        if number == 3:
            shutil.rmtree(output)
        return own(run, number, *args)

    monkeypatch.setattr(loop, "_step", step)
    assert "was removed while the run trained" in refused(usual(base, output), capsys)


def test_a_merged_model_that_is_damaged_is_merged_again(base, tmp_path):
    output = tmp_path / "out"
    finetune(usual(base, output, lora="r=4", merge=True))
    before = (output / "merged" / "model.safetensors").read_bytes()
    (output / "merged" / "model.safetensors").unlink()
    again = [*usual(base, output, lora="r=4", merge=True, resume=True)]
    assert [event["event"] for event in finetune(again)] == ["finished", "merged"]
    assert (output / "merged" / "model.safetensors").read_bytes() == before


def test_the_card_has_the_whole_command(base, tmp_path):
    output = tmp_path / 'an "odd": folder'
    finetune(usual(base, output, lora="r=4,alpha=8"))
    text = (output / "README.md").read_text()
    assert "--lora r=4,alpha=8,dropout=0,targets=all-linear" in text and f"--steps {STEPS}" in text
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == str(base / "llama")
    compile(text.split("```python\n")[1].split("```")[0], "README.md", "exec")


def test_chosen_micro_batches_are_said_once_and_stay_the_runs_own(base, tmp_path, monkeypatch, capsys):
    output, more = tmp_path / "run", {"accumulation": "auto", "checkpoint_every": 1, "steps": 2}
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert cli.main(usual(base, output, **more)) == 1
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (chosen,) = (event for event in said if event["event"] == "accumulation")
    count = chosen["micro_batches"]
    assert {trial["micro_batches"] for trial in chosen["trials"]} >= {1, count}
    assert read_yaml(output / "finetune.yaml")["accumulation"] == count
    rest = finetune(usual(base, output, **more, resume=True))
    assert [event["event"] for event in rest].count("accumulation") == 0
    assert len(losses(rest)) == 1 and read_yaml(output / "finetune.yaml")["accumulation"] == count
