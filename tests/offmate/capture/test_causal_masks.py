"""PyTorch's own transformer looks whether a mask is the causal one, and then takes another kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offmate
from tests.offmate import parity

_LENGTH = 6


class Translator(nn.Module):
    """A transformer whose mask is made in the forward or, if `make` is None, a buffer; `is_causal` is passed on."""

    def __init__(self, make: Callable[[], torch.Tensor] | None, is_causal: bool | None = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.inner = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.make, self.is_causal = make, is_causal
        self.register_buffer("mask", causal())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = self.mask if self.make is None else self.make()
        hidden = self.embedding(ids)
        hidden = self.inner(hidden, hidden, src_mask=mask, tgt_mask=mask, **self._said())
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())

    def _said(self) -> dict[str, Any]:
        return {} if self.is_causal is None else {"src_is_causal": self.is_causal, "tgt_is_causal": self.is_causal}


def causal() -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(_LENGTH)


def causal_in_bools() -> torch.Tensor:
    return torch.triu(torch.ones(_LENGTH, _LENGTH, dtype=torch.bool), diagonal=1)


def banded() -> torch.Tensor:
    return causal_in_bools() | causal_in_bools().tril(2)


def _trains(build: Callable[[], nn.Module], budget: str) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [{"ids": torch.randint(0, 32, (3, _LENGTH), generator=generator)} for _ in range(3)]
    parity.check(parity.Case("causal", build, lambda: batches, loss=lambda output, batch: output), budget, None)


@pytest.mark.parametrize("make", [causal, causal_in_bools, banded])
@pytest.mark.parametrize("budget", [parity.AMPLE, parity.LEAST])
def test_masks_that_are_made_in_the_forward(make: Callable[[], torch.Tensor], budget: str) -> None:
    _trains(lambda: Translator(make), budget)


@pytest.mark.parametrize("is_causal", [True, False])
def test_masks_of_which_it_is_said(is_causal: bool) -> None:
    _trains(lambda: Translator(None, is_causal), parity.AMPLE)


def test_other_masks_are_refused_with_the_remedy() -> None:
    config = offmate.Config(cache_dir=None)
    compiled = offmate.compile(Translator(None), "1GiB", device="emulated", config=config)
    with pytest.raises(
        offmate.CaptureError, match=r"self\.inner\(.*in Translator, which calls TransformerEncoder.*is_causal=True"
    ):
        compiled(torch.randint(0, 32, (3, _LENGTH)))
