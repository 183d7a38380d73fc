"""What eager mode decides by a mask is asked again for every batch, however the forward computes the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offmate

from ..loops import CPU_BUDGET

transformers = pytest.importorskip("transformers")

_PLACE, _PADDING = 7, 9  # the token at which a model for pictures puts them, and the one that pads


def given(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask


def joined(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask * (ids != 0)


def made(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (ids != _PADDING).long()


def prefixed(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([mask.new_ones(2, 1), mask[:, 1:]], 1)


def written(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(ids)
    made[:, :4] = 1
    made[:, 4:].add_(mask[:, 4:])
    return made


def drawn(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask * (torch.rand(ids.shape) < 0.5)


def _pictures(masks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    class Pictures(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        """Takes no other tokens than those that fit its pictures, as models for pictures do."""

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any) -> Any:
            torch._check_tensor_all((input_ids == _PLACE).sum() == 2, lambda: "a picture without a token")
            return super().forward(input_ids=input_ids, attention_mask=masks(input_ids, attention_mask), **others)

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return Pictures(config)


def _losses(masks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], compiles: bool) -> tuple[list[float], int]:
    """Train on batches of which one is padded. Returns: the losses, and the number of plans."""
    torch.manual_seed(0)
    model = _pictures(masks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compiles:
        offmate.compile(
            model, 1 << 30, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
            config=offmate.Config(cache_dir=None, options_per_block=3),
        )  # fmt: skip
    losses = []
    for step in range(4):
        ids = torch.randint(10, 32, (2, 6), generator=torch.Generator().manual_seed(step))
        mask = torch.ones_like(ids)
        ids[:, 0] = _PLACE
        if step == 2:
            ids[1, 4:], mask[1, 4:] = _PADDING, 0
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, len(model.offmate.plans) if compiles else 0


@pytest.mark.parametrize("masks", [given, joined, made, prefixed, written])
def test_a_padded_batch_after_others(masks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    losses, plans = _losses(masks, True)
    assert losses == _losses(masks, False)[0]
    assert plans == 2


def test_masks_that_are_drawn_are_refused() -> None:
    with pytest.raises(offmate.CaptureError, match=r"mask is drawn at random.*pass it as an argument"):
        _losses(drawn, True)
