"""Tiny models with tokenizers, made on the spot, and runs of `offmate finetune` on them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pydoc_data.topics
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from offmate.runtime.storage.engine import Engine
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from offmate import cli
from offmate.errors import OffmateError
from offmate.finetune import loop
from offmate.finetune.loop import evaluate
from offmate.finetune.packing import Batches, eval_batches, write_tokens
from offmate.finetune.settings import Settings, make_settings, read_yaml
from offmate.finetune.updates import learning_rate
from offmate.planning import storage
from offmate.session import state_storage

from ...fuzz.figures import from_hardware_file

VOCABULARY = 300
POSITIONS = 64
LENGTH = 16
TEXT = "\n\n".join(pydoc_data.topics.topics.values())

SMALL = {"--gpu-budget": "16MiB", "--cpu-budget": "4GiB", "--device": "emulated", "--sequence-length": LENGTH}


def make_models(folder: Path) -> None:
    """Folders `llama` and `gpt2`, each a random model with a byte-level BPE tokenizer trained on the corpus."""
    common = {"vocab_size": VOCABULARY, "eos_token_id": 1, "bos_token_id": 0}
    torch.manual_seed(0)
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=POSITIONS, **common,
    )  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, **common)
    GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    for name in ("llama", "gpt2"):
        make_tokenizer().save_pretrained(folder / name)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT[:50_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def make_blank_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama-2's: a blank before the text, and no borders of words that tokens respect."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT[begin : begin + 300] for begin in range(0, 30_000, 300)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_likely_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer as T5's, of a likelihood over the whole text, which joins blanks."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT[begin : begin + 300] for begin in range(0, 30_000, 300)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_even_tokenizer(*, words: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of likelihoods to which "*" and "**" are equally likely in either order.

    Parameters
    ----------
    words: whether it takes a text apart at blanks first, as T5's and XLM-R's, or as one word.
    """
    scores = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.1), ("*", -3.3), ("**", -5.17), ("b", -1.7), ("c", -2.9)]
    tokenizer = Tokenizer(models.Unigram(scores, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=words)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def make_lower_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer as BERT's, of words in lower case, with special tokens on both sides."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT[begin : begin + 300] for begin in range(0, 30_000, 300)], trainer)
    both = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=both)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def arguments(model: Path, data: Path, output: Path, **more: Any) -> list[str]:
    """A command line; `more` are options, with _ for -, and None leaves one of the small defaults out."""
    options = {"--model": model, "--data": data, "--output": output, **SMALL}
    options |= {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    found = ["finetune"] if "quiet" in more else ["finetune", "--json"]
    for name, value in options.items():
        if value is True:
            found.append(name)
        elif value is not None:
            found += [name, str(value)]
    return found


def finetune(argv: list[str]) -> list[dict[str, Any]]:
    """Run a command line in this process; what it said, event by event."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert cli.main(argv) == 0
    return [json.loads(line) for line in said.getvalue().splitlines()]


def refused(argv: list[str], capsys: Any) -> str:
    """What a command line says that fails, or whose arguments cannot work."""
    assert cli.main(argv) in (1, 2)
    return capsys.readouterr().err


def stop_after(monkeypatch: pytest.MonkeyPatch, n_steps: int) -> None:
    """Let a run fail before its next step, once it has made some."""
    own, done = loop._step, []

    def step(*args):
        if len(done) == n_steps:
            raise OffmateError("stopped by the test")
        done.append(1)
        return own(*args)

    monkeypatch.setattr(loop, "_step", step)


def losses(events: list[dict[str, Any]], kind: str = "step") -> list[float]:
    """The losses of all steps, or of all evaluations."""
    return [event["loss"] for event in events if event["event"] == kind]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a result, as plain transformers loads them."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def plain_run(output: Path, scratch: Path) -> tuple[dict[str, torch.Tensor], list[float], float | None]:
    """The run in `output` once more, by a plain PyTorch loop: parameters, losses, held-out loss."""
    settings = make_settings(read_yaml(output / "finetune.yaml"))
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    packed = write_tokens(settings.data, tokenizer, settings.eval_fraction, scratch / "tokens")
    length, size, each = settings.sequence_length, settings.batch_size, settings.accumulation
    assert length is not None and settings.steps is not None and settings.learning_rate is not None
    model = AutoModelForCausalLM.from_pretrained(settings.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    steps = Batches(packed.train, length, size, each, settings.seed).steps(0)
    torch.manual_seed(settings.seed)
    seen = []
    for step in range(settings.steps):
        seen.append(_plain_step(model, optimizer, settings, step, next(steps)))
    return model.state_dict(), seen, evaluate(model, eval_batches(packed.eval, length, size))


def _plain_step(model: Any, optimizer: torch.optim.Optimizer, settings: Settings, step: int, batches: list) -> float:
    optimizer.param_groups[0]["lr"] = learning_rate(settings, step, settings.steps or 0)
    total = 0.0
    for batch in batches:
        loss = model(**batch).loss
        (loss / settings.accumulation).backward()
        total += loss.item()
    if settings.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total / len(batches)


SMALL_REQUESTS = {
    (storage, "Engine"): functools.partial(Engine, n_threads=2, request_bytes=1 << 14),
    (state_storage, "Engine"): functools.partial(Engine, n_threads=2, request_bytes=1 << 14),
    (storage, "BUFFERS_BYTES"): 0,
    (storage, "N_THREADS"): 2,
    (storage, "REQUEST_BYTES"): 1 << 14,
}
"""Buffers that fit beside a small model."""


@contextlib.contextmanager
def replaced(monkeypatch: pytest.MonkeyPatch, cache_dir: str, values: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Let these stand in their modules during the body, with plans that do not depend on the machine."""
    monkeypatch.setenv("OFFMATE_CACHE_DIR", cache_dir)
    for (module, name), value in values.items():
        monkeypatch.setattr(module, name, value)
    with from_hardware_file():
        yield


def dies(count: int, argv: list[str], replaced: Mapping[tuple[Any, str], Any]) -> None:
    """Run the tool up to the count-th step; nothing is cleaned up, as by kill -9.

    Parameters
    ----------
    replaced: by module and name, what stands there instead.
    """
    own, left = loop._step, count
    for (module, name), value in replaced.items():
        setattr(module, name, value)

    def step(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args)

    loop._step = step
    with from_hardware_file():
        sys.exit(cli.main(argv))
