"""TRL's `SFTTrainer` with a language-model head of operators that a plan can keep, recompute and differentiate.

TRL computes per-token log-probabilities with its own autograd function, which writes buffers tile by tile so that the
logits never exist as a whole. A graph cannot hold that function. This module computes the same numbers, up to rounding,
with one matrix product and the loss in tiles of rows (`runtime.operators.losses`): the logits exist in the precision of
the product, in full precision only for a few rows, and their gradient is written over them.
"""

from __future__ import annotations

import functools
import types
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from ..runtime.operators.losses import tiled_cross_entropy, tiled_entropy

_EACH_ROW, _NONE_IGNORED = 0, -1  # reduction, and a class that no target names
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
        logits = functional.linear(hidden, weight, bias)
        if scale != 1 or softcap is not None or temperature != 1:
            logits = logits.float() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits / temperature
        loss = tiled_cross_entropy(logits, targets, _EACH_ROW, _NONE_IGNORED, torch.float32)[0]
        with torch.no_grad():
            entropy = tiled_entropy(logits, torch.float32) if "entropy" in outputs else None
            is_top1 = logits.argmax(-1) == targets
        return -loss, entropy, None, None, is_top1


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
