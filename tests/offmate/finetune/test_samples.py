"""Samples after each evaluation, and results that go to the Hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from offmate.finetune.samples import read_prompts, sample_lines
from offmate.finetune.settings import make_settings
from offmate.session.generation_fit import Asked, fit

from .finetune_kit import POSITIONS, TEXT, arguments, finetune, losses, make_models, refused, same, weights

PROMPT = "The import statement"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models and a text."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    (folder / "text.txt").write_text(TEXT[:30_000])
    return folder


def usual(base: Path, output: Path, **more: object) -> list[str]:
    settings = {"steps": 4, "learning_rate": 1e-3, "checkpoint_every": 2, "yes": True}
    return arguments(base / "llama", base / "text.txt", output, **(settings | more))


def written_by_plain_transformers(folder: Path, n_tokens: int) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=n_tokens)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_a_sample_is_what_the_result_writes_and_changes_no_number(base: Path, tmp_path: Path) -> None:
    finetune(usual(base, tmp_path / "without"))
    events = finetune(usual(base, tmp_path / "with", sample=PROMPT, sample_tokens=12, gpu_budget="700KiB"))
    samples = [event for event in events if event["event"] == "sample"]
    assert [sample["step"] for sample in samples] == [2, 4] and samples[-1]["prompt"] == PROMPT
    assert samples[-1]["text"] == written_by_plain_transformers(tmp_path / "with", 12)
    assert same(weights(tmp_path / "with"), weights(tmp_path / "without"))
    assert samples[-1]["text"].splitlines()[0] in (tmp_path / "with" / "README.md").read_text()
    (line,) = [line for event in events for line in event.get("lines", []) if line.startswith("samples: ")]
    assert "1 of up to 12 tokens after each evaluation" in line and "per token" in line


def test_samples_are_written_without_held_out_text_and_at_every_evaluation(base: Path, tmp_path: Path) -> None:
    more = {"sample": PROMPT, "sample_tokens": 3, "eval_fraction": 0, "eval_every": 1}
    events = finetune(usual(base, tmp_path / "out", **more))
    assert [event["step"] for event in events if event["event"] == "sample"] == [1, 2, 3, 4]
    assert not losses(events, "evaluation")


def test_what_a_sample_takes_is_known_beforehand(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base / "llama")
    tokenizer = AutoTokenizer.from_pretrained(base / "llama")
    settings = make_settings({"model": "m", "data": "d", "output": "o", "sample": [PROMPT, "Hi"], "sample_tokens": 8})
    prompts = read_prompts(settings, tokenizer, POSITIONS)
    longest = max(ids.shape[1] for ids in prompts.ids) + 8
    bare = model.to("meta")
    ample = fit(bare, 2**30, Asked(1, longest), emulated=True)
    assert ample.streamed_bytes == 0 and ample.stays_bytes == sum(p.nbytes for p in model.parameters())
    tight = fit(bare, ample.stays_bytes * 3 // 4 + ample.working_bytes, Asked(1, longest), emulated=True)
    assert 0 < tight.streamed_bytes < ample.stays_bytes
    assert ample.least_token_s(1e9, 1e9) < tight.least_token_s(1e6, 1e9) == tight.streamed_bytes / 1e6
    for budget, words in (
        (2**30, "all parameters stay"),
        (ample.stays_bytes * 3 // 4 + ample.working_bytes, "are copied to the device for every token"),
        (ample.working_bytes, "written by the CPU"),
    ):
        (line,) = sample_lines(settings, prompts, bare, budget, "emulated", "emulated")
        assert line.startswith("samples: 2 of up to 8 tokens after each evaluation") and words in line


def test_a_prompt_is_what_a_user_says_if_there_is_a_chat_template(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base / "llama")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    settings = make_settings({"model": "m", "data": "d", "output": "o", "sample": "Hi"})
    (ids,) = read_prompts(settings, tokenizer, None).ids
    assert tokenizer.decode(ids[0]) == "[user]Hi</s>[assistant]"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sample": " "}, "write a prompt"),
        ({"sample": "word " * 40}, f"the model takes at most {POSITIONS} in all"),
        ({"sample": "Hi", "sample_tokens": 0}, "sample_tokens is 0"),
        ({"push": "my-model"}, "such as me/my-model"),
    ],
)
def test_what_cannot_be_sampled_or_pushed(base: Path, tmp_path: Path, capsys: Any, more: dict, words: str) -> None:
    assert words in refused(usual(base, tmp_path / "out", **more), capsys)
    assert not (tmp_path / "out").exists()


class Hub:
    """The Hub as the library shows it, to someone who is logged in."""

    def __init__(self) -> None:
        self.sent: dict[str, Any] = {}
        self.fault: Exception | None = None

    def whoami(self) -> dict[str, Any]:
        return {"name": "me", "orgs": [{"name": "us"}]}

    def create_repo(self, name: str, **how: Any) -> str:
        self.sent["repository"] = name, how
        return f"https://hub/{name}"

    def upload_folder(self, *, folder_path: Path, ignore_patterns: list[str], **how: Any) -> None:
        if self.fault is not None:
            raise self.fault
        files = (str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file())
        self.sent["files"] = set(huggingface_hub.utils.filter_repo_objects(files, ignore_patterns=ignore_patterns))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    return found


def test_a_result_goes_to_the_hub_without_its_checkpoints(base: Path, tmp_path: Path, hub: Hub) -> None:
    events = finetune(usual(base, tmp_path / "out", lora=4, merge=True, push="us/tuned"))
    assert [event["event"] for event in events][-3:] == ["merged", "pushed", "done"]
    assert hub.sent["repository"] == ("us/tuned", {"private": True, "exist_ok": True})
    names = hub.sent["files"]
    assert {"adapter_config.json", "README.md", "tokenizer.json", "merged/config.json"} <= names
    assert not [name for name in names if "checkpoints" in name or name.startswith((".", "sources"))]


def test_a_push_that_fails_leaves_the_result_and_is_tried_again(
    base: Path, tmp_path: Path, capsys: Any, hub: Hub
) -> None:
    hub.fault = ConnectionError("no route")
    output = tmp_path / "out"
    said = refused(usual(base, output, push="me/tuned"), capsys)
    assert "no route" in said and f"--output {output} --resume --push me/tuned" in said
    hub.fault = None
    events = finetune(["finetune", "--json", "--output", str(output), "--resume", "--push", "me/tuned"])
    assert events[-1] == {"event": "pushed", "url": "https://hub/me/tuned"}
    assert "model.safetensors" in hub.sent["files"]


@pytest.mark.parametrize("way", ["no login", "no network", "another's"])
def test_a_push_that_cannot_work_is_refused_before_training(
    base: Path, tmp_path: Path, capsys: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "no login":
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    if way == "no network":
        monkeypatch.setattr(hub, "whoami", lambda: SimpleNamespace().name)
    said = refused(usual(base, tmp_path / "out", push="them/tuned" if way == "another's" else "me/tuned"), capsys)
    assert {"no login": "hf auth login", "no network": "does not respond", "another's": "may write only to me, us"}[
        way
    ] in said
    assert not (tmp_path / "out").exists()
