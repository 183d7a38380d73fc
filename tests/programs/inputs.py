"""Tiny checkpoints, tokenizers and data for programs, made on the spot."""

from __future__ import annotations

import json
import pickle
import pydoc_data.topics
from pathlib import Path

import numpy
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 320
TEXTS = [text for text in pydoc_data.topics.topics.values() if len(text) > 500][:40]
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    found.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=CHAT
    )


def nothing(folder: Path) -> None:
    """An empty folder, for a program that makes its data itself."""


def language_model(folder: Path) -> None:
    """A Llama checkpoint with its tokenizer in `model`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")


def texts(folder: Path) -> None:
    """A checkpoint, `texts.txt`, and a stand-in for the package of metrics."""
    language_model(folder)
    (folder / "evaluate.py").write_text(METRIC)
    (folder / "texts.txt").write_text("\n".join(TEXTS))


def rows_of_text(folder: Path) -> None:
    """A checkpoint, and a dataset of texts in `data`, which loads by its folder's name."""
    language_model(folder)
    _write(folder / "data" / "train.jsonl", [{"text": text[:400]} for text in TEXTS])
    _write(folder / "data" / "test.jsonl", [{"text": text[400:700]} for text in TEXTS[:4] if len(text) > 700])


def preferences(folder: Path) -> None:
    """A checkpoint, and a dataset of prompts with a chosen and a rejected answer in `data`."""
    language_model(folder)
    rows = [{"prompt": text[:40], "chosen": text[40:100], "rejected": text[200:240]} for text in TEXTS]
    _write(folder / "data" / "train.jsonl", rows)
    _write(folder / "data" / "test.jsonl", rows[:4])


def characters(folder: Path) -> None:
    """Numbers of characters in `data/tiny`, as nanoGPT's character-level data sets hold them."""
    text = "".join(TEXTS)[:20_000]
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    place = folder / "data" / "tiny"
    place.mkdir(parents=True)
    for name, part in (("train", text[:18_000]), ("val", text[18_000:])):
        numpy.array([number[character] for character in part], dtype=numpy.uint16).tofile(place / f"{name}.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(number)}))


def pairs_of_sentences(folder: Path) -> None:
    """What Accelerate's example loads by name: `bert-base-cased`, `nyu-mll/glue` and the metric `glue`."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=1,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")
    tokenizer().save_pretrained(folder / "bert-base-cased")
    rows = [
        {"idx": index, "sentence1": text[:40], "sentence2": text[20:55], "label": index % 2}
        for index, text in enumerate(TEXTS)
    ]
    for name, part in (("train", rows), ("validation", rows[:8])):
        _write(folder / "nyu-mll" / "glue" / "mrpc" / f"{name}.jsonl", part)
    (folder / "nyu-mll" / "glue" / "README.md").write_text(CARD)
    # The real package would load the metric's code from a hub.
    (folder / "evaluate.py").write_text(METRIC)


CARD = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: mrpc/train.jsonl
  - split: validation
    path: mrpc/validation.jsonl
---
"""

METRIC = '''"""A metric that is at hand."""


def load(*_, **__):
    return Metric()


class Metric:
    def __init__(self):
        self.right, self.all = 0, 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.all += len(references)

    def compute(self, predictions=None, references=None):
        if predictions is not None:
            self.add_batch(predictions, references)
        return {"accuracy": self.right / max(self.all, 1), "f1": 0.0}
'''


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
