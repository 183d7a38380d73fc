"""Tiny models with all that a user may change behind a captured graph, and batches of three sizes for each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = dict[str, Any]


class _Backwards(torch.autograd.Function):
    """A gradient that no forward tells: halved, with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -0.5 * grad


class Mlp(nn.Module):
    """Two streams of plain Python state: attributes that scale, and habits that a graph cannot have."""

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.25)
        self.fixed = nn.Linear(12, 12).requires_grad_(False)
        self.second = nn.Linear(12, 12)
        self.last = nn.Linear(12, 4)
        self.register_buffer("shift", torch.zeros(12))
        self.scale = 1.0
        self.options: dict[str, float] = {"gain": 0.5}
        self.gains = [1.0, 0.5]
        self.habit = habit
        self.calls = 0
        self.average: Any = None

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        h = self.drop(self.act(self.norm(self.first(x)))) + self.shift
        h = h + self.options["gain"] * self.fixed(h)
        h = self._habit(h)
        h = h + self.gains[0] * self.act(self.second(h)) * self.scale
        return _result(self.last(h), y)

    def _habit(self, h: torch.Tensor) -> torch.Tensor:
        if self.habit == "count":
            self.calls += 1
            return h * (1 + 0.1 * self.calls)
        if self.habit == "skip at random":
            return h if random.random() < 0.5 else 2 * h
        if self.habit == "average":
            self.average = h.detach().mean() if self.average is None else 0.9 * self.average + 0.1 * h.detach().mean()
            return h - self.average
        return _Backwards.apply(h) if self.habit == "own backward" else h


class Conv(nn.Module):
    """Convolutions with statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.GELU()
        self.drop = nn.Dropout2d(0.2)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.last = nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        h = self.drop(self.act(self.norm(self.first(x))))
        h = h + self.scale * self.act(self.second(h))
        return _result(self.last(h.mean((2, 3))), y)


class Tied(nn.Module):
    """An embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))
        self.last = nn.Linear(8, 11, bias=False)
        self.last.weight = self.embed.weight
        self.scale = 1.0

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        h = self.embed(x)
        return _result(self.last(h + self.scale * self.mix(h)).flatten(0, 1), None if y is None else y.flatten())


class Routed(nn.Module):
    """An argument chooses the branch, another one is a number that the forward works with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.act = nn.SiLU()
        self.branches = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(8, 4)
        self.scale = 1.0

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None, branch: str = "a", power: int = 1
    ) -> dict[str, torch.Tensor]:
        h = self.act(self.first(x))
        h = h + self.drop(self.branches[branch](h)) * self.scale / power
        return _result(self.last(h if isinstance(power, int) else 2 * h), y)


class Attention(nn.Module):
    """One head over words, with torch's attention kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(8, 11)
        self.scale = 1.0
        self.attention_dropout = 0.1

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        h = self.embed(x)
        query, key, value = (made(h)[:, None] for made in (self.query, self.key, self.value))
        rate = self.attention_dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        h = h + self.scale * self.drop(self.act(mixed[:, 0]))
        return _result(self.last(h).flatten(0, 1), None if y is None else y.flatten())


def _result(scores: torch.Tensor, y: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {"scores": scores} if y is None else {"loss": functional.cross_entropy(scores, y), "scores": scores}


# -- of others --------------------------------------------------------------------------------------------------------


def _llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            attention_dropout=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2,
            use_cache=False,
        )
    )  # fmt: skip


def _adapted(base: nn.Module, targets: list[str], **settings: Any) -> nn.Module:
    """Two adapters, of which the first is active."""
    import peft

    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=targets, **settings)
    model = peft.get_peft_model(base, config)  # type: ignore[arg-type]
    model.add_adapter("other", config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, with which no adapter does anything
            nn.init.normal_(parameter, std=0.1)
    return model


def _adapters() -> nn.Module:
    return _adapted(Attention(), ["query", "last"])


def _lora() -> nn.Module:
    return _adapted(_llama(), ["q_proj", "up_proj"], task_type="CAUSAL_LM")


# -- the table --------------------------------------------------------------------------------------------------------


def _vectors(size: int, random_: torch.Generator) -> Batch:
    count = (6, 4, 3)[size]
    return {"x": torch.randn(count, 6, generator=random_), "y": torch.randint(0, 4, (count,), generator=random_)}


def _pictures(size: int, random_: torch.Generator) -> Batch:
    count, side = ((4, 6), (2, 6), (4, 4))[size]
    x = torch.randn(count, 2, side, side, generator=random_)
    return {"x": x, "y": torch.randint(0, 3, (count,), generator=random_)}


def _words(size: int, random_: torch.Generator) -> Batch:
    shape = ((3, 7), (2, 7), (3, 5))[size]
    return {name: torch.randint(0, 11, shape, generator=random_) for name in ("x", "y")}


def _tokens(size: int, random_: torch.Generator) -> Batch:
    ids = torch.randint(3, 24, ((2, 8), (1, 8), (2, 6))[size], generator=random_)
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Parameters
    ----------
    batch: of a size 0 (largest), 1 or 2, from a generator. label: name of the argument without which there is no loss.
    weight: how often it is taken. has: what actions may ask for.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    label: str
    weight: int
    has: frozenset[str]


def _kind(build: Callable[[], nn.Module], batch: Any, label: str, weight: int, has: str) -> Kind:
    return Kind(build, batch, label, weight, frozenset(has.split()))


KINDS: dict[str, Kind] = {
    "mlp": _kind(Mlp, _vectors, "y", 20, "dropout batchnorm scale fixed options habit act buffer"),
    "mlp with a habit": _kind(Mlp, _vectors, "y", 2, "dropout batchnorm scale fixed options habit act buffer"),
    "conv": _kind(Conv, _pictures, "y", 12, "dropout batchnorm scale act buffer"),
    "tied": _kind(Tied, _words, "y", 12, "dropout scale"),
    "routed": _kind(Routed, _vectors, "y", 12, "dropout scale act routed"),
    "attention": _kind(Attention, _words, "y", 8, "dropout attention scale act"),
    "adapters": _kind(_adapters, _words, "y", 10, "dropout attention fixed peft"),
    # These take several times as long.
    "llama": _kind(_llama, _tokens, "labels", 1, "attention config"),
    "gpt2": _kind(_gpt2, _tokens, "labels", 2, "dropout attention config"),
    "lora": _kind(_lora, _tokens, "labels", 2, "dropout attention config fixed peft"),
}
HABITS = ("count", "skip at random", "average", "own backward")
