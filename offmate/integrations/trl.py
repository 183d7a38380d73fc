"""TRL's `SFTTrainer` with a language-model head of operators that a plan can keep, recompute and differentiate.

TRL computes per-token log-probabilities with its own autograd function, which writes buffers tile by tile so that the
logits never exist as a whole. A graph cannot hold that function. This module computes the same numbers, up to rounding,
with plain operators on tiles of tokens; the plan chooses which values of each tile stay for the backward.
"""

from __future__ import annotations

import functools
import types
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

# In tokens. If the plan recomputes logits, those of one tile exist at a time.
_TILE = 1024
_MADE_BY = "add_fused_lm_head"
DIFFERENTIATED = "log_probs"


class PlainLogProbs:
    """A replacement for TRL's autograd function, with the same arguments."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute log-probabilities of the targets and, for metrics, entropy and whether a target is the likeliest."""
        tiles = [
            _tile(h, weight, bias, t, temperature, softcap, scale)
            for h, t in zip(hidden.split(_TILE), targets.split(_TILE))
        ]
        log_probs, entropy, is_top1 = (torch.cat(parts) for parts in zip(*tiles))
        return log_probs, entropy if "entropy" in outputs else None, None, None, is_top1


def _tile(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = functional.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    scores = functional.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(scores.exp() * scores).sum(-1)
        is_top1 = scores.argmax(-1) == targets
    return scores.gather(-1, targets[:, None])[:, 0], entropy, is_top1


def make_plannable(model: torch.nn.Module) -> bool:
    """Make the head that SFTTrainer has put on a model use plain operators; return whether the model has one."""
    found = False
    for module in model.modules():
        fused = module.__dict__.get("forward")
        if _is_fused(fused):
            module.__dict__["forward"] = types.MethodType(_plainly(fused), module)
            found = True
    return found


def _is_fused(forward: Any) -> bool:
    # TRL gives its function the name of the one that it wraps, but the code is TRL's.
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return _MADE_BY in getattr(code, "co_qualname", "")


def _plainly(fused: Any) -> Any:
    from trl.trainer import utils

    @functools.wraps(fused.__func__)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(utils, "_ChunkedLogProbFunction", PlainLogProbs):
            return fused(*args, **kwargs)

    return forward
