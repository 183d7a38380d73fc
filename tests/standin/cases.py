"""Tiny models of all kinds, and how each is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import offmate

Batch = dict[str, torch.Tensor]
TOKENS = 96  # no multiple of what kernels of attention work on at once


@dataclass(frozen=True)
class Case:
    """A model, its batches and how it is trained.

    Parameters
    ----------
    model, batch: each makes a new one. settings: of `offmate.compile`. planned: whether the optimizer is given to it.
    autocast: whether the forward runs in bfloat16 while parameters are float32. sizes: of each micro-batch in one
        dimension of its tensors, and the number of that dimension, if they differ. kind: the optimizer's class.
    """

    model: Callable[[], torch.nn.Module]
    batch: Callable[[], Batch]
    settings: dict[str, Any] = field(default_factory=dict)
    planned: bool = True
    autocast: bool = False
    sizes: tuple[tuple[int, ...], int] | None = None
    kind: Any = torch.optim.AdamW

    def micro_batches(self) -> list[Batch]:
        """Those of an update."""
        whole = [self.batch() for _ in range(self.settings.get("accumulation_steps", 1))]
        if self.sizes is None:
            return whole
        sizes, dim = self.sizes
        return [
            {n: t.narrow(dim, 0, own).clone() for n, t in one.items()} for one, own in zip(whole, sizes, strict=True)
        ]

    @property
    def by_block(self) -> bool:
        """Whether all micro-batches of an update run block by block."""
        config = self.settings.get("config")
        return config is not None and config.accumulation_order == "by block"

    @property
    def host_looks_at_gradients(self) -> bool:
        """Whether the host itself waits for each gradient: for its norm, or because the user may read it."""
        return not self.planned or "max_grad_norm" in self.settings

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.autocast else contextlib.nullcontext()


def words() -> Batch:
    ids = torch.randint(0, 256, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def pictures() -> Batch:
    return {"pixels": torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(0))}


_SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip


def llama(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES)).to(dtype).train()


def gemma() -> torch.nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**_SIZES, head_dim=64, sliding_window=32)).to(torch.bfloat16).train()


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=TOKENS, n_embd=256, n_layer=4, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config).to(torch.bfloat16).train()


class Convolutions(torch.nn.Module):
    """Residual convolutions with normalisation by channel, and their loss."""

    def __init__(self, channels: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.GroupNorm(8, channels), torch.nn.SiLU(), torch.nn.Conv2d(channels, channels, 3, padding=1)
            )
            for _ in range(depth)
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        value = self.first(pixels)
        for block in self.blocks:
            value = value + block(value)
        return value.square().mean()


class Wide(torch.nn.Module):
    """Large layers, each of which is staged in pieces."""

    def __init__(self, size: int = 1536, depth: int = 6) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(depth))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.nn.functional.silu(layer(rows))
        return rows.square().mean()


class Narrow(Wide):
    """Small layers of many rows: what they hand on is most of what the device holds."""

    def __init__(self) -> None:
        super().__init__(128, 4)
        self.first = torch.nn.Linear(2, 128)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(rows))


def rows() -> Batch:
    return {"rows": torch.randn(8, 1536, generator=torch.Generator().manual_seed(0))}


def wide() -> torch.nn.Module:
    torch.manual_seed(0)
    return Wide()


WIDE = Case(wide, rows)
WITH_MASTERS = Case(
    lambda: wide().to(torch.bfloat16),
    lambda: {"rows": rows()["rows"].to(torch.bfloat16)},
    kind=offmate.with_master_weights(torch.optim.AdamW),
)


def many_rows() -> Batch:
    return {"rows": torch.randn(1 << 15, 2, generator=torch.Generator().manual_seed(0))}


def narrow() -> torch.nn.Module:
    torch.manual_seed(0)
    return Narrow()


def convolutions(layout: torch.memory_format = torch.contiguous_format) -> torch.nn.Module:
    torch.manual_seed(0)
    return Convolutions().to(memory_format=layout)


def _by_block(micro_batches: int) -> dict[str, Any]:
    return {"accumulation_steps": micro_batches, "config": offmate.Config(accumulation_order="by block")}


CASES = {
    "llama": Case(llama, words),
    "llama in bfloat16": Case(lambda: llama(torch.bfloat16), words),
    "llama under autocast": Case(llama, words, autocast=True),
    "llama, clipped, three micro-batches": Case(llama, words, {"max_grad_norm": 1.0, "accumulation_steps": 3}),
    "llama without optimizer": Case(llama, words, planned=False),
    "gpt2 with dropout": Case(gpt2, words),
    "gemma2 in bfloat16": Case(gemma, words),
    "twenty micro-batches, block by block": Case(narrow, many_rows, _by_block(20)),
    "llama, micro-batches of several lengths, block by block": Case(
        llama, words, _by_block(6), sizes=((96, 40, 71, 96, 8, 64), 1)
    ),
    "micro-batches of several sizes, one after the other": Case(
        narrow, many_rows, {"accumulation_steps": 4}, sizes=((1 << 15, 5000, 20000, 1 << 15), 0)
    ),
    "twelve micro-batches of several sizes, block by block": Case(
        narrow, many_rows, _by_block(12), sizes=((1 << 15, 20000, 9001, 31000, 64, 12345) * 2, 0)
    ),
    "convolutions": Case(convolutions, pictures),
    "convolutions, channels last": Case(lambda: convolutions(torch.channels_last), pictures),
}
