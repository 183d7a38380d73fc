"""The result of a run: a card that says what was trained and how to load it, and an adapter merged into its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from .finetune_kit import TEXT, arguments, finetune, make_models, refused


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and a text."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    (folder / "text.txt").write_text(TEXT[:10_000])
    return folder


def usual(base: Path, output: Path, **more: object) -> list[str]:
    settings = {"steps": 2, "learning_rate": 1e-2, "checkpoint_every": 2, "yes": True}
    return arguments(base / "llama", base / "text.txt", output, **(settings | more))


@pytest.mark.parametrize("when", ["at the end", "later"])
def test_a_merged_model_is_pefts(base: Path, tmp_path: Path, when: str) -> None:
    peft = pytest.importorskip("peft")
    output = tmp_path / "tuned"
    options = usual(base, output, lora="r=4", precision="bf16")
    finetune([*options, "--merge"] if when == "at the end" else options)
    if when == "later":
        assert not (output / "merged").exists()
        assert finetune(["finetune", "--json", "--output", str(output), "--resume", "--merge"])[-1]["event"] == "merged"
    plain = AutoModelForCausalLM.from_pretrained(base / "llama", dtype=torch.bfloat16)
    expected = peft.PeftModel.from_pretrained(plain, output).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(output / "merged", dtype="auto").state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_card_says_what_was_trained_and_how_to_load_it(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "tuned"
    events = finetune(usual(base, output, lora="r=4"))
    text = (output / "README.md").read_text()
    last = [event["loss"] for event in events if event["event"] == "step"][-1]
    for words in (
        f"`{base / 'llama'}`",
        "LoRA adapter of rank 4",
        f"last step's loss {last:.4f}",
        "offmate finetune --model",
    ):
        assert words in text
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)  # as a reader would
    assert names["model"].peft_config["default"].r == 4


def test_there_is_nothing_to_merge_without_an_adapter(base: Path, tmp_path: Path, capsys: Any) -> None:
    said = refused([*usual(base, tmp_path / "tuned"), "--merge"], capsys)
    assert "merge is for adapters" in said
    assert not (tmp_path / "tuned").exists()
