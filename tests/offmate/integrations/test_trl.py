"""The head of TRL's trainers, as an operator, gives TRL's own bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

utils: Any = pytest.importorskip("trl.trainer.utils")

from offmate.integrations.trl import OPTIONAL, PlannableLogProbs  # noqa: E402

ROWS, WIDTH, FEW, MANY = 37, 16, 301, 32768 + 40  # TRL's tiles have 32768 columns
BOTH = ("log_probs", "entropy")


@pytest.mark.parametrize(
    ("dtype", "autocast", "vocabulary", "has_bias", "softcap", "trains_weight", "outputs"),
    [
        (torch.float32, False, FEW, False, None, True, ("log_probs",)),
        (torch.float32, True, FEW, True, 30.0, True, (*BOTH, "is_top1")),
        (torch.bfloat16, False, FEW, True, None, False, ("log_probs", *OPTIONAL)),
        (torch.float32, False, MANY, False, None, True, (*BOTH, "mean_logits")),
    ],
    ids=["plain", "autocast", "frozen", "two-tiles"],
)
def test_the_head_gives_the_bits_of_trl(dtype, autocast, vocabulary, has_bias, softcap, trains_weight, outputs):
    def run(function: Any) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(ROWS, WIDTH), (vocabulary, WIDTH), (vocabulary,)][: 3 if has_bias else 2]
        given = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
        given[1].requires_grad_(trains_weight)
        targets = torch.randint(0, vocabulary, (ROWS,), generator=generator)
        hidden, weight, bias = [*given, None][:3]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = function.apply(hidden, weight, bias, targets, 0.7, 32768, softcap, 1.5, outputs)
        loss = (found[0] * torch.arange(ROWS)).sum()
        if "entropy" in outputs:
            loss = loss + found[1].sum()
        loss.backward()
        return [*found, *(each.grad for each in given)]

    for ours, trls in zip(run(PlannableLogProbs), run(utils._ChunkedLogProbFunction), strict=True):
        assert (ours is None) == (trls is None)
        assert ours is None or (ours.dtype == trls.dtype and torch.equal(ours, trls))
