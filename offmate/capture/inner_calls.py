"""Calls inside a forward that a graph cannot hold as they are: each is followed, or refused with the model's line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from ..errors import CaptureError
from ..runtime.torch_names.autograd import backward_under_way
from ..runtime.torch_names.modules import conversion
from ..runtime.torch_names.tracing import checkpoints_as_calls
from .data_dependent import line_now

_OWN = ("torch", "offmate")


@contextlib.contextmanager
def inner_calls_followed() -> Iterator[None]:
    """Follow in the body a forward's checkpoints and conversions that change nothing; refuse others by name.

    A checkpoint, also one in another, is a plain call: the plan decides what is recomputed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(checkpoints_as_calls())
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", _converted(torch.nn.Module.to)))
        for where, name in ((torch.autograd, "grad"), (torch.autograd, "backward"), (torch.Tensor, "backward")):
            called = f"{where.__name__}.{name}".replace("Tensor", "torch.Tensor")
            stack.enter_context(mock.patch.object(where, name, _refused(called, getattr(where, name))))
        yield


def _refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        own = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] in _OWN
        # The backward of a custom function may take gradients; it is no part of the forward.
        if own or backward_under_way() != -1:
            return original(*args, **kwargs)
        raise CaptureError(
            f"the model computes gradients inside its forward: it calls {name}(){line_now()}, but a graph of the "
            "forward holds no backward. Write that gradient as a formula of tensors, or compute this term (a gradient "
            "penalty, for example) with a plain PyTorch model"
        )

    return refused


def _converted(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, memory_format = conversion(args, kwargs)
        tensors = [*module.parameters(), *module.buffers()]
        changed = memory_format is not None or any(
            (device is not None and device != tensor.device)
            or (dtype is not None and tensor.is_floating_point() and dtype != tensor.dtype)
            for tensor in tensors
        )
        if not changed:
            return module
        what = ", ".join(str(asked) for asked in (device, dtype, memory_format) if asked is not None)
        raise CaptureError(
            f"the forward converts {type(module).__name__}.to({what}){line_now()}, which replaces its parameters while "
            "the model runs. A plan moves and updates only the parameters that the model already has. Convert the "
            "module before offmate.compile"
        )

    return to
