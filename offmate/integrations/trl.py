"""The language-model head of TRL's trainers as one operator of a graph, which runs TRL's own code.

TRL computes per-token log-probabilities with its own autograd function, which writes buffers tile by tile so that the
logits never exist as a whole. A graph cannot hold that function, but it can hold an operator whose kernel calls the
function's forward, and one whose kernel calls its backward. So numbers are TRL's, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

DIFFERENTIATED = "log_probs"
OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_MADE_BY = "add_fused_lm_head"
_LOG_Z = 4  # of the tensors that TRL saves: hidden, weight, bias, targets, log_z, entropy

_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets"
_HOW = "float temperature, SymInt chunk_size, float? softcap, float scale, str[] outputs, ScalarType dtype"
_LIBRARY.define(
    f"chunked_log_probs({_HEAD}, {_HOW})"
    " -> (Tensor log_probs, Tensor entropy, Tensor log_sum_sq_probs, Tensor mean_logits, Tensor is_top1, Tensor log_z)"
)
_LIBRARY.define(
    f"chunked_log_probs_backward(Tensor? grad, Tensor? entropy_grad, {_HEAD}, Tensor log_z, Tensor entropy,"
    f" bool[] wanted, {_HOW}) -> (Tensor hidden_grad, Tensor weight_grad, Tensor bias_grad)"
)


class _Context:
    """What TRL's function takes for autograd's context. State: the attributes that it leaves, and what it saves."""

    saved_tensors: tuple[torch.Tensor | None, ...] = ()
    needs_input_grad: Sequence[bool] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """The operator says by itself which results have gradients."""

    def set_materialize_grads(self, value: bool) -> None:
        """The operator hands on what it gets."""


def _function() -> Any:
    from trl.trainer import utils

    return utils._ChunkedLogProbFunction


def _run(context: _Context, hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor | None, ...]:
    *given, outputs, dtype = rest
    # TRL's function reads from autocast in which precision it multiplies.
    with torch.autocast(hidden.device.type, dtype, enabled=dtype != hidden.dtype):
        found: tuple[torch.Tensor | None, ...] = _function().forward(context, hidden, *given, tuple(outputs))
    return found


def _forward(hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    context = _Context()
    found = _run(context, hidden, *rest)
    log_z = context.saved_tensors[_LOG_Z]
    assert log_z is not None
    absent = hidden.new_empty(0, dtype=torch.float32)
    return (*(absent.clone() if part is None else part for part in found), log_z)


def _backward(
    grad: torch.Tensor | None,
    entropy_grad: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    wanted: list[bool],
    *how: Any,
) -> tuple[torch.Tensor, ...]:
    context = _Context()
    # A forward without rows leaves the attributes that the backward reads, whatever they are.
    _run(context, hidden[:0], weight, bias, targets[:0], *how)
    context.needs_input_grad = wanted
    context.save_for_backward(hidden, weight, bias, targets, log_z, entropy if entropy.numel() else log_z)
    found = _function().backward(context, grad, entropy_grad)
    return tuple(hidden.new_empty(0) if part is None else part for part in found[: len(wanted)])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, bias, targets, *ctx.how = inputs
    _, entropy, *others, log_z = output
    ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
    ctx.mark_non_differentiable(*others, log_z)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Any, entropy_grad: Any, *_: Any) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    made = chunked_log_probs_backward(grad, entropy_grad, *ctx.saved_tensors, wanted, *ctx.how)
    return (*(part if wants else None for part, wants in zip(made, wanted)), *[None] * (1 + len(ctx.how)))


_LIBRARY.impl("chunked_log_probs", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("chunked_log_probs_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_autograd("offmate::chunked_log_probs", _differentiate, setup_context=_setup, lib=_LIBRARY)


@torch.library.register_fake("offmate::chunked_log_probs", lib=_LIBRARY)
def _(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs, dtype):
    def made(name: str, kind: torch.dtype) -> torch.Tensor:
        return hidden.new_empty(hidden.shape[:1], dtype=kind) if name in outputs else hidden.new_empty(0)

    full = [made(name, torch.float32) for name in OPTIONAL[:-1]]
    rows = hidden.new_empty(hidden.shape[:1], dtype=torch.float32)
    return rows, *full, made(OPTIONAL[-1], torch.bool), torch.empty_like(rows)


@torch.library.register_fake("offmate::chunked_log_probs_backward", lib=_LIBRARY)
def _(grad, entropy_grad, hidden, weight, bias, targets, log_z, entropy, wanted, *how):
    inputs = (hidden, weight, bias)
    return tuple(torch.empty_like(x) if wants else hidden.new_empty(0) for x, wants in zip(inputs, wanted))


chunked_log_probs = torch.ops.offmate.chunked_log_probs.default
"""TRL's function: what it returns, empty where it was not asked for, and the logarithm that its backward reads."""
chunked_log_probs_backward = torch.ops.offmate.chunked_log_probs_backward.default
"""Its backward: the gradients of the hidden states, the weight and the bias, empty where none is wanted."""


class PlannableLogProbs:
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
        """Compute log-probabilities of the targets, and the other `outputs` as far as they are asked for."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        # TRL's buffer has as many columns as a tile; a small vocabulary needs no more than it has words.
        chunk = min(chunk_size, weight.shape[0])
        asked = [name for name in OPTIONAL if name in outputs]
        found = chunked_log_probs(
            hidden, weight, bias, targets, float(temperature), chunk, softcap, float(scale), asked, dtype
        )
        return found[0], *(part if name in asked else None for name, part in zip(OPTIONAL, found[1:]))


def make_plannable(model: torch.nn.Module) -> bool:
    """Make the head that a trainer of TRL's has put on a model an operator; return whether the model has one."""
    found = False
    for module in model.modules():
        fused = module.__dict__.get("forward")
        if _is_fused(fused):
            module.__dict__["forward"] = types.MethodType(_plannable(fused), module)
            found = True
    return found


def _is_fused(forward: Any) -> bool:
    # TRL gives its function the name of the one that it wraps, but the code is TRL's.
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return _MADE_BY in getattr(code, "co_qualname", "")


def _plannable(fused: Any) -> Any:
    from trl.trainer import utils

    @functools.wraps(fused.__func__)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as replaced:
            replaced.enter_context(mock.patch.object(utils, "_ChunkedLogProbFunction", PlannableLogProbs))
            if hasattr(utils, "_use_triton"):
                # Where it is there, TRL gathers the rows that have labels; their number would differ in every batch.
                replaced.enter_context(mock.patch.object(utils, "_use_triton", lambda device: False))
            return fused(*args, **kwargs)

    return forward
