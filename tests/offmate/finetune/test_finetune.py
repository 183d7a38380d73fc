"""The parts of `offmate finetune`: settings, data, packing, loading, checkpoints, and what bad input is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from offmate import cli
from offmate.cli.finetune import given_settings
from offmate.errors import ArgumentValueError, OffmateError
from offmate.finetune import folders, lock, packing, preview
from offmate.finetune.checkpoint import (
    Moment,
    load_moment,
    newest_checkpoint,
    remove_unfinished,
    restore_random,
    restore_updates,
    save_checkpoint,
)
from offmate.finetune.data import check_source, pieces
from offmate.finetune.lock import locked
from offmate.finetune.lora import Lora
from offmate.finetune.packing import IGNORED, Batches, eval_batches, read_tokens, verify_tokens, write_tokens
from offmate.finetune.report import StepRow, make_reporters
from offmate.finetune.settings import continued, differences, make_settings, read_yaml, saved_settings
from offmate.finetune.updates import UpdateRule, learning_rate
from offmate.finetune.weights import load_model

from .finetune_kit import TEXT, arguments, make_models, refused, same

NAMED = {"model": "m", "data": "d", "output": "o"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(base: Path):
    return AutoTokenizer.from_pretrained(base / "llama")


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_survive_yaml(tmp_path):
    settings = make_settings({**NAMED, "lora": "r=8,alpha=32,targets=q_proj+v_proj", "learning_rate": "2e-5"})
    assert settings.lora == Lora(8, 32, 0.0, ("q_proj", "v_proj"))
    settings.save(tmp_path / "s.yaml")
    assert make_settings(read_yaml(tmp_path / "s.yaml")) == settings


@pytest.mark.parametrize("value", ["16", " 16 ", 16, "r=16", {"r": 16}])
def test_a_bare_rank_is_a_lora_setting(value):
    assert make_settings({**NAMED, "lora": value}).lora == Lora(16)


@pytest.mark.parametrize(
    ("given_values", "said"),
    [
        ({"learning_rates": 1}, "there is no setting 'learning_rates'"),
        ({"data": ""}, "no data is given; name it with --data, or with `data:`"),
        ({"batch_size": 0}, "batch_size is 0; it must be a whole number of at least 1"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"learning_rate": 0}, "learning_rate is 0; it must be more than 0"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        ({"eval_fraction": 1.0}, "eval_fraction is 1.0; it must be at least 0 and less than 1"),
        ({"schedule": "up"}, "schedule is 'up'; it must be one of cosine, linear, constant"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"optimizer": "best"}, "optimizer is 'best'"),
        ({"gpu_budget": "12Gb"}, "gpu_budget: '12Gb' is a size in bits"),
        ({"lora": "r=no"}, "lora r is 'no'; it must be a whole number of at least 1"),
        ({"lora": True}, "lora is True; write 16 for a rank"),
        ({"lora": {"r": 0}}, "lora r is 0"),
        ({"lora": "0"}, "lora r is 0"),
        ({"report": ["fax"]}, "report is 'fax'"),
        ({"report": 3}, "report is 3; it must be one of tensorboard, wandb, or a list"),
        ({"storage": ["none", "d1"]}, "none names no folder, so no other one can stand beside it"),
        ({"seed": 10**30}, "it must be a whole number of at least 0 and at most 1,000,000,000,000"),
        ({"batch_size": 10**9}, "batch_size is 1000000000; it must be a whole number of at least 1 and at most 65,536"),
        ({"learning_rate": 10**400}, "it must be more than 0, and finite"),
        ({"lora": {"r": 1, "targets": 3}}, "lora is {'r': 1, 'targets': 3}; write 16"),
        ({"lora": {"r": float("inf")}}, "lora r is inf; it must be a whole number"),
        ({"lora": {"r": 16.9}}, "lora r is 16.9; it must be a whole number"),
        ({"lora": {"r": True}}, "lora r is True; it must be a whole number"),
        ({"lora": {"r": 4, "alpha": 32.7}}, "lora alpha is 32.7; it must be a whole number"),
        ({"lora": {"r": 4, "dropout": False}}, "lora dropout is False"),
        ({"lora": {"r": 4, "targets": []}}, "lora targets is empty; name layers, such as q_proj"),
        ({"lora": {"r": 4, "targets": ["all-linear", "q_proj"]}}, "all-linear stands alone"),
        ({"lora": "r=4,r=8"}, "which names a part twice"),
        ({"max_grad_norm": "null"}, "max_grad_norm is 'null'; write a number above 0, or none to clip nothing"),
        ({"output": "a\0b"}, "output is 'a\\x00b'; a null byte"),
        ({"data": "a\udcff"}, "one that is not UTF-8"),
    ],
)
def test_bad_settings_are_named(given_values, said):
    with pytest.raises(OffmateError) as caught:
        make_settings({**NAMED, **given_values})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("value", "targets"),
    [
        ({"r": 4, "targets": "all-linear"}, ("all-linear",)),
        ({"r": 4, "targets": "o_proj"}, ("o_proj",)),
        ({"r": 4, "targets": "q_proj+v_proj"}, ("q_proj", "v_proj")),
        ({"r": 4, "targets": None, "alpha": None}, ("all-linear",)),
    ],
)
def test_targets_are_text_or_a_list(value, targets):
    assert make_settings({**NAMED, "lora": value}).lora == Lora(4, targets=targets)


def test_only_none_turns_a_setting_off(tmp_path):
    settings = make_settings({**NAMED, "lora": "none", "max_grad_norm": "none"})
    assert settings.lora is None and settings.max_grad_norm is None
    settings.save(tmp_path / "s.yaml")
    assert saved_settings(tmp_path / "s.yaml") == settings


def test_the_targets_of_an_older_version_stay_pefts_choice(tmp_path):
    values = {**NAMED, "lora": {"r": 4, "alpha": 8, "dropout": 0.0, "targets": []}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(values))
    saved = saved_settings(tmp_path / "s.yaml")
    assert saved.lora == Lora(4, 8, 0.0, ())
    assert continued(saved, {"gpu_budget": "1GiB"}).lora == saved.lora


def test_options_undo_what_yaml_sets():
    parse = cli._parser().parse_args
    assert given_settings(parse(["finetune", "--no-merge", "--lora", "none"])) == {"merge": False, "lora": "none"}
    assert given_settings(parse(["finetune", "--merge"])) == {"merge": True}
    assert given_settings(parse(["finetune", "--no-speculate"])) == {"speculate": False}
    assert given_settings(parse(["finetune", "--speculate"])) == {"speculate": True}
    assert given_settings(parse(["finetune", "--speculate", "auto", "--yes"])) == {"speculate": "auto"}
    assert given_settings(parse(["finetune"])) == {}


def test_only_what_changes_the_numbers_is_a_difference():
    saved = make_settings(NAMED)
    assert differences(saved, {"gpu_budget": "1GiB", "keep_checkpoints": 9, "seed": 0, "speculate": True}) == []
    assert differences(saved, {"seed": 3}) == ["seed: 0 in the run, 3 now"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "must map names to values"),
        ("a: [", "cannot be read as YAML"),
        (
            "seed: 1\nmodel: m\nseed: 2",
            "c.yaml: cannot be read as YAML: the key 'seed' stands in line 1 and again in line 3",
        ),
        ("lora: {r: 1, r: 2}", "the key 'r'"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_bad_configuration_file(tmp_path, text, said):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(OffmateError, match=said):
        read_yaml(path)
    with pytest.raises(OffmateError, match="no such configuration file"):
        read_yaml(tmp_path / "none.yaml")


def test_schedules():
    rates = [learning_rate(make_settings({**NAMED, "learning_rate": 1.0, "warmup_steps": 2}), s, 6) for s in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464], abs=1e-4)
    linear = make_settings({**NAMED, "learning_rate": 1.0, "schedule": "linear", "warmup_steps": 0})
    assert [learning_rate(linear, s, 4) for s in range(4)] == [1.0, 0.75, 0.5, 0.25]


# -- data -------------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, name: str, content: str | bytes) -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=5000))
def test_text_pieces_are_the_text(tmp_path_factory, text):
    path = written(tmp_path_factory.mktemp("t"), "a.txt", text)
    found = list(pieces(path))
    assert "".join(str(piece.content) for piece in found) == text.removeprefix("\ufeff")  # a byte-order mark
    assert [piece.first for piece in found] == [i == 0 for i in range(len(found))]
    assert [piece.last for piece in found] == [i == len(found) - 1 for i in range(len(found))]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', "a.jsonl, line 3: broken JSON"),
        ("a.jsonl", "[1]\n", "line 1: a list instead of an object"),
        ("a.jsonl", '{"body": "x"}\n', "line 1: none of the known formats (keys: body)"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "line 1: a message without 'role' and 'content'"),
        ("a.txt", b"abc\xff", "not UTF-8 text"),
        ("a.jsonl", '{"text": "so"}\n{"text": "oh \\ud83d no"}\n', "line 2: '\\ud83d' is half of a character"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "\\ude00"}]}\n', "line 1: '\\ude00' is half of a"),
    ],
)
def test_bad_data_are_named_with_their_line(tmp_path, name, content, said):
    with pytest.raises(OffmateError) as caught:
        list(pieces(written(tmp_path, name, content)))
    assert said in str(caught.value)


def test_missing_and_empty_sources(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    for source, said in (
        (str(tmp_path / "none.txt"), "no such file"),
        (written(tmp_path, "empty.txt", ""), "is empty"),
        (str(tmp_path), "is empty"),
        ("hf:a/b", "datasets is not installed"),
    ):
        with pytest.raises(OffmateError, match=said):
            check_source(source)


@pytest.mark.parametrize("source", ["hf:", "hf: ", "hf::test"])
def test_a_source_of_the_hub_needs_a_name(source):
    with pytest.raises(ArgumentValueError, match="names no data set; name one, such as hf:tatsu-lab/alpaca"):
        check_source(source)


def test_a_folder_and_a_data_set(tmp_path, monkeypatch):
    written(tmp_path, "b.jsonl", '{"text": "two"}\n{"text": ""}\n')
    written(tmp_path, "a.txt", "one")
    written(tmp_path, "c.bin", b"\xff")
    assert [piece.content for piece in pieces(str(tmp_path))] == ["one", "two", ""]
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return iter([{"text": "row" if args[0] == "org/name" else ""}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert [piece.content for piece in pieces("hf:org/name:test")] == ["row"]
    assert asked == [(("org/name",), {"split": "test", "streaming": True})]
    with pytest.raises(ArgumentValueError, match="data 'hf:org/none' is empty"):
        list(pieces("hf:org/none"))


# -- packing ----------------------------------------------------------------------------------------------------------


def test_documents_end_with_the_end_token_and_every_nth_is_held_out(tmp_path, tokenizer):
    lines = "".join(json.dumps({"text": f"d{i}"}) + "\n" for i in range(8))
    packed = write_tokens(written(tmp_path, "a.jsonl", lines), tokenizer, 0.25, tmp_path / "tokens")
    split = ["".join(tokenizer.convert_ids_to_tokens(part.tolist())) for part in (packed.train, packed.eval)]
    assert split == ["".join(f"d{i}</s>" for i in (0, 1, 2, 4, 5, 6)), "d3</s>d7</s>"]


def test_a_long_text_is_one_document(tmp_path, tokenizer):
    packed = write_tokens(written(tmp_path, "a.txt", TEXT[:20_000]), tokenizer, 0.0, tmp_path / "tokens")
    assert int((packed.train == tokenizer.eos_token_id).sum()) == 1
    assert tokenizer.decode(packed.train[:-1]) == TEXT[:20_000]


def test_of_chats_only_the_assistant_is_trained_on(tmp_path, base):
    tokenizer = AutoTokenizer.from_pretrained(base / "llama")
    rows = [
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]},
        {"text": "t"},
    ]
    file = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "</s>{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    )
    packed = write_tokens(file, tokenizer, 0.0, tmp_path / "tokens", assistant_only=True)
    everything = write_tokens(file, tokenizer, 0.0, tmp_path / "all")
    assert packed.digest != everything.digest
    batch = Batches(packed.train, len(packed.train), 1, 1, 0).batch([0])
    assert batch["input_ids"].tolist() == [everything.train.tolist()]
    trained = batch["labels"][batch["labels"] != IGNORED]
    assert tokenizer.decode(trained) == "answer</s>t</s>"
    held = next(eval_batches(packed.train, len(packed.train), 1))
    assert all(torch.equal(held[name], batch[name]) for name in batch)


def test_one_run_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(OffmateError, match=f"another run.*{os.getpid()}"), locked(tmp_path):
        pytest.fail("two runs at once")
    with locked(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_is_not_opened_through_a_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    folder.mkdir()
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(OffmateError, match=r"\.lock cannot be opened.*may write to"), locked(folder):
        pytest.fail("a link was followed")
    assert victim.read_text() == "mine"


def test_what_a_run_left_that_was_killed_before_it_began_is_no_run(tmp_path):
    for name in (".lock", ".finetune.yaml.0123456789abcdef.tmp"):
        (tmp_path / name).touch()
    assert lock.is_free(tmp_path) and lock.is_free(tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert not lock.is_free(tmp_path / "link")
    for name in ("notes.tmp", ".finetune.yaml.notes.tmp", "work.tmp"):
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / name).touch()
        assert not lock.is_free(tmp_path / "own")
        shutil.rmtree(tmp_path / "own")
    (tmp_path / ".lock").write_text("a list of mine")
    assert not lock.is_free(tmp_path)
    (tmp_path / ".lock").write_text("")
    (tmp_path / "finetune.yaml").touch()
    assert not lock.is_free(tmp_path)


def test_files_that_fail_are_named(tmp_path, tokenizer, monkeypatch):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "_write", fails)
    with pytest.raises(OffmateError, match=r"tokens cannot be written to .*No space left on device; free disk space"):
        write_tokens(written(tmp_path, "a.txt", TEXT[:100]), tokenizer, 0.0, tmp_path / "tokens")
    assert not list(tmp_path.glob(".*.tmp"))
    monkeypatch.setattr(lock.tempfile, "TemporaryDirectory", fails)
    with (
        pytest.raises(OffmateError, match=r"cannot be made in .*: No space left"),
        lock.place_for(tmp_path / "out", keep=False, dry_run=True),
    ):
        pytest.fail("a folder was made")
    monkeypatch.setattr(lock.os, "open", fails)
    with pytest.raises(OffmateError, match="lock cannot be opened: No space left"), locked(tmp_path):
        pytest.fail("the folder was locked")


def test_reporters_write_what_they_are_told(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    reporters = make_reporters(("tensorboard", "wandb"), tmp_path, {"steps": 1}, "quiet")
    row = StepRow(1, 2.5, 1e-3, 0.5, 100.0, 0.0, 1024, 2048)
    for reporter in reporters:
        reporter.start(0, 1)
        reporter.step(row)
        reporter.evaluation(1, 2.25)
        reporter.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.value for event in found.Scalars("train/loss")] == [2.5]
    assert [event.value for event in found.Scalars("eval/loss")] == [2.25]
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/gradient_norm" in record.read_bytes()


def test_chats_go_through_the_template(tmp_path, base):
    tokenizer = AutoTokenizer.from_pretrained(base / "llama")
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    data = written(tmp_path, "a.jsonl", row)
    with pytest.raises(OffmateError, match=r"a.jsonl, line 1: chat messages, but the tokenizer has no chat template"):
        write_tokens(data, tokenizer, 0.0, tmp_path / "tokens")
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>\n{% endfor %}"
    packed = write_tokens(data, tokenizer, 0.0, tmp_path / "tokens")
    assert tokenizer.decode(packed.train) == "[user]hi</s>\n"


def test_changed_tokens_are_noticed(tmp_path, tokenizer):
    packed = write_tokens(written(tmp_path, "a.txt", "some text"), tokenizer, 0.0, tmp_path / "tokens")
    assert verify_tokens(packed)
    file = tmp_path / "tokens" / "train.bin"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    assert not verify_tokens(read_tokens(tmp_path / "tokens"))
    file.write_bytes(b"")
    for text in (None, "[]", "3", "{}", '{"train": [], "eval": 0, "digest": ""}', "[" * 100_000):
        if text is not None:
            (tmp_path / "tokens" / "tokens.json").write_text(text)
        with pytest.raises(OffmateError, match=r"damaged.*remove that folder and resume"):
            read_tokens(tmp_path / "tokens")


def test_an_epoch_reads_every_sequence_once_and_any_step_can_begin():
    batches = Batches(np.arange(24, dtype=np.int32), 2, 2, 3, seed=5)
    steps = batches.steps(0)
    epochs = [[next(steps) for _ in range(2)] for _ in range(2)]
    orders = [[b["input_ids"].flatten().tolist() for step in epoch for b in step] for epoch in epochs]
    assert all(sorted(n for batch in order for n in batch) == list(range(24)) for order in orders)
    assert orders[0] != orders[1]
    later = next(batches.steps(3))
    assert [b["input_ids"].flatten().tolist() for b in later] == orders[1][3:]


def test_too_little_data_for_a_step():
    with pytest.raises(OffmateError, match="hold 7 training tokens, fewer than the 8 of one step"):
        Batches(np.arange(7, dtype=np.int32), 4, 2, 1, 0).check()


def test_what_fills_up_the_last_evaluation_batch_has_no_labels():
    found = list(eval_batches(np.arange(1, 6, dtype=np.int32), 2, 2))
    assert [b["labels"].tolist() for b in found] == [[[1, 2], [3, 4]]]
    found = list(eval_batches(np.arange(1, 8, dtype=np.int32), 2, 2))
    assert found[1]["labels"].tolist() == [[5, 6], [7, IGNORED]]


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_load_as_transformers_loads_them(base, name, dtype):
    own, theirs = load_model(base / name, dtype), AutoModelForCausalLM.from_pretrained(base / name, dtype=dtype)
    assert same(own.state_dict(), theirs.state_dict())
    assert own.generation_config.to_dict() == theirs.generation_config.to_dict()


MEASURED = """
import resource, sys, torch
from pathlib import Path
from transformers.models.llama import modeling_llama
from offmate.finetune.weights import load_model
torch.ones(2).sum()
load_model(Path(sys.argv[1]), torch.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(Path(sys.argv[2]), getattr(torch, sys.argv[3]))
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / weights)
"""


def test_loading_takes_one_copy_of_the_weights(base, tmp_path):
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=10, vocab_size=4000)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="200MB")
    del model
    for dtype in ("float32", "bfloat16"):
        argv = [sys.executable, "-c", MEASURED, str(base / "llama"), str(tmp_path), dtype]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
        assert float(done.stdout) <= 1.2, dtype


def test_damaged_and_missing_weights(base, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base / "llama" / name).read_bytes()[: None if "j" in name else -100])
    with pytest.raises(OffmateError, match="weights are damaged: the file ends too early"):
        load_model(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OffmateError, match="must be in safetensors"):
        load_model(tmp_path, torch.float32)
    for header in (
        b"[]",
        b"3",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0]}}',
        b"[" * 50_000,
    ):
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(OffmateError, match="weights are damaged"):
            load_model(tmp_path, torch.float32)
    for index in ("[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(OffmateError, match="the index of the weights is damaged"):
            load_model(tmp_path, torch.float32)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(base):
    model = load_model(base / "llama", torch.float32)
    updates = UpdateRule(model, make_settings(NAMED))
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    updates.optimizer.step()
    return model, updates


def saved(folder: Path, step: int, trained, keep: int = 2) -> Path:
    return save_checkpoint(folder, Moment(step, "digest", 1, "2"), *trained, None, keep)


def test_the_newest_whole_checkpoint_is_found(tmp_path, trained, caplog):
    for step in (1, 2, 3):
        saved(tmp_path, step, trained)
    (tmp_path / ".step-00000009.tmp").mkdir()
    (tmp_path / "step-00000002 (copy)").mkdir()
    (tmp_path / ".mine.tmp").mkdir()
    assert newest_checkpoint(tmp_path).name == "step-00000003"
    assert (tmp_path / ".step-00000009.tmp").is_dir()  # another run may be writing it
    remove_unfinished(tmp_path)
    for name in ("step-00000002 (copy)", ".mine.tmp"):
        (tmp_path / name).rmdir()  # they are still there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    file = tmp_path / "step-00000003" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    assert load_moment(newest_checkpoint(tmp_path)).step == 2
    assert "model.safetensors has changed" in caplog.text
    (tmp_path / "step-00000002" / "optimizer.pt").unlink()
    with pytest.raises(OffmateError, match="all 2 checkpoints are damaged"):
        newest_checkpoint(tmp_path)


def test_a_manifest_that_is_none_leaves_the_older_checkpoint(tmp_path, trained, caplog):
    for step in (1, 2):
        saved(tmp_path, step, trained)
    newest = tmp_path / "step-00000002"
    whole = (newest / "manifest.json").read_text()
    damaged = ["[]", "3", "null", "{}", '{"optimizer.pt": 3}', "[" * 100_000, whole.replace("[", '["x", ')]
    for text in damaged:
        (newest / "manifest.json").write_text(text)
        assert newest_checkpoint(tmp_path).name == "step-00000001"
    assert caplog.text.count("is damaged") == len(damaged)


@pytest.mark.parametrize("moment", ["[]", "{}", '{"step": -1, "tokens": "d", "threads": 0, "torch": "2"}'])
def test_a_checkpoint_made_by_hand(tmp_path, trained, moment):
    """Its manifest fits; what it holds is a sentence, and is never run."""
    updates = trained[1]
    made = saved(tmp_path, 1, trained)
    torch.save({"optimizer": print}, made / "optimizer.pt")
    with pytest.raises(OffmateError, match=r"optimizer\.pt does not hold what .*remove .*step-00000001"):
        restore_updates(made, updates)
    torch.save([1], made / "random.pt")
    with pytest.raises(OffmateError, match=r"random\.pt does not hold what a run writes there"):
        restore_random(made)
    (made / "moment.json").write_text(moment)
    (made / "manifest.json").unlink()
    folders.write_manifest(made)
    with pytest.raises(OffmateError, match="all 1 checkpoints are damaged"):
        newest_checkpoint(tmp_path)


def test_weights_that_are_not_finite_are_never_saved(tmp_path, trained):
    saved(tmp_path, 1, trained, keep=1)
    with torch.no_grad():
        trained[0].model.norm.weight[3] = float("nan")
    with pytest.raises(OffmateError, match=r"model.norm.weight has become infinite or NaN by step 2"):
        saved(tmp_path, 2, trained, keep=1)
    assert newest_checkpoint(tmp_path).name == "step-00000001"


def test_what_does_not_read_back_is_no_checkpoint(tmp_path, trained, monkeypatch):
    own = torch.save
    monkeypatch.setattr(torch, "save", lambda state, path: own({"optimizer": 1}, path))
    with pytest.raises(OffmateError, match=r"optimizer.pt does not read back"):
        saved(tmp_path, 1, trained)
    assert list(tmp_path.iterdir()) == []


# -- what is refused before anything is loaded ------------------------------------------------------------------------


def test_bad_input_is_refused_before_anything_runs(base, tmp_path, capsys):
    text, out = Path(written(tmp_path, "a.txt", TEXT[:2000])), tmp_path / "out"
    llama = base / "llama"
    chat = Path(written(tmp_path, "chat.jsonl", json.dumps({"messages": [{"role": "user", "content": "x"}]})))
    broken = Path(written(tmp_path, "broken.jsonl", '{"text": "x"}\n{"text"'))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for argv, said in (
        (arguments(tmp_path / "none", text, out), "no such folder"),
        (arguments(tmp_path / "full", text, out), "no config.json"),
        (arguments(llama, tmp_path / "none.txt", out), "no such file"),
        (arguments(llama, chat, out), "has no chat template"),
        (arguments(llama, broken, out), "broken.jsonl, line 2: broken JSON"),
        (
            arguments(llama, text, out, sequence_length=65),
            "sequence_length is 65, but the model takes at most 64 tokens",
        ),
        (arguments(llama, text, tmp_path / "full"), "exists already"),
        (arguments(llama, text, out, resume=True), "there is no run to resume"),
        (
            arguments(llama, text, out, lora="r=4,targets=nothing"),
            "no layer is named 'nothing'; its linear layers are named",
        ),
        (arguments(llama, text, out, lora="r=4,targets=q_proj+v_porj"), "no layer is named 'v_porj'"),
        (arguments(tmp_path / "none", text, out, device="tpu"), "device='tpu' is not known"),
        (arguments(tmp_path / "none", text, out, device="xpu:3"), "device='xpu:3': torch"),
    ):
        assert said in refused(argv, capsys)
        assert not out.exists()


def test_a_model_that_cannot_be_fetched_says_why(base, tmp_path, monkeypatch, capsys):
    def unreachable(*args, **kwargs):
        raise LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    text = Path(written(tmp_path, "a.txt", TEXT[:2000]))
    argv = arguments(base, text, tmp_path / "out")
    argv[argv.index(str(base))] = "nope"
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert "model 'nope': no such folder" in said and "the Hub cannot be reached" in said and "Errno" not in said


def test_too_little_disk_is_refused(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preview.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=10))
    (doubt,) = preview.disk_doubt(tmp_path / "not" / "yet", 11)
    assert "need up to 11 B, but the disk has 10 B free" in doubt
    assert preview.disk_doubt(tmp_path, 10) == []
    text = Path(written(tmp_path, "a.txt", TEXT[:2000]))
    assert "the disk has 10 B free" in refused(arguments(base / "llama", text, tmp_path / "out", yes=True), capsys)
    assert not (tmp_path / "out").exists()


def test_reporters_that_are_not_installed_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OffmateError, match="pip install wandb"):
        make_reporters(("wandb",), tmp_path, {}, "quiet")
