"""Shared parts of the examples: a tiny model with its tokenizer, made on the spot, or your own model, and some text.

python examples/trainer.py                                    # tiny, a few seconds
python examples/trainer.py --model Qwen/Qwen3-0.6B --gpu-budget 8GiB --steps 100
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = [text for text in pydoc_data.topics.topics.values() if len(text) > 500]


def arguments() -> argparse.Namespace:
    """Parse the options that every example takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or Hub id; default: a tiny model made on the spot")
    parser.add_argument("--gpu-budget", default="16MiB")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", default="example-output")
    return parser.parse_args()


def load(name: str | None) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """Return a causal language model in training mode, and its tokenizer."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name).train(), AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).train(), _tokenizer(config.vocab_size)


def _tokenizer(size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def rows(tokenizer: PreTrainedTokenizerFast, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Cut the texts into `input_ids` and `labels` of one length."""
    ids = torch.tensor([i for ids in tokenizer(TEXTS)["input_ids"] for i in ids])
    return [{"input_ids": part, "labels": part.clone()} for part in ids[: len(ids) // length * length].view(-1, length)]
