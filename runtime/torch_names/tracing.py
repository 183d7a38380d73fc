"""Private names of tracing: tensors without values, tensors without writes, and what export leaves in a graph."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch._aot_autograd import functional_utils
from torch._subclasses import fake_tensor, functional_tensor
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.utils import _python_dispatch, checkpoint

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
"""Tensors with everything but values. The public alternative, the device "meta", chooses other kernels."""

DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
"""Errors of an operator (`func`) that would have to look at values; publicly it appears only in the message."""

PRINTS_FAILED_KERNELS = fake_tensor.__name__
"""The logger that prints a traceback if an operator fails on tensors without values; no public setting names it."""

GuardOnDataDependentSymNode = symbolic_shapes.GuardOnDataDependentSymNode
"""The error of export at a branch or a bound that depends on values; publicly it is a `RuntimeError` like others."""

FunctionalTensor = functional_tensor.FunctionalTensor
FunctionalTensorMode = functional_tensor.FunctionalTensorMode
"""Tensors whose writes become operators; the public `torch.func.functionalize` runs no backward inside."""

has_data_mutation = functional_utils.has_data_mutation
"""Returns whether anything wrote into a functional tensor's values."""

make_fx = proxy_tensor.make_fx
"""Traces the graph of operators that a function runs, as `torch.export` does for modules."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees every operator that runs within a block; torch documents it under this name only."""

outside_of_modes = _python_dispatch._disable_current_modes
"""Leaves, within a block, all modes that trace or watch; publicly each mode ends where it began."""

set_grad_enabled = torch._C._set_grad_enabled
"""The node in an exported graph at which a grad mode begins."""

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
"""The nodes in an exported graph at which an autocast region begins and ends."""

# Passes of export that fold grad modes and autocast regions into subgraphs; of two nested ones they lose one.
_FOLDING = ("replace_autocast_with_hop_pass", "replace_set_grad_with_hop_pass")


@contextlib.contextmanager
def said_by_errors_alone() -> Iterator[None]:
    """Have export print no graph and log no warning where it fails: its error says what it has to say."""
    logger = logging.getLogger(symbolic_shapes.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with mock.patch.object(importlib.import_module("torch.export._trace"), "print", _print_nothing, create=True):
            yield
    finally:
        logger.setLevel(level)


def _print_nothing(*_: Any, **__: Any) -> None:
    pass


@contextlib.contextmanager
def nothing_folded() -> Iterator[None]:
    """Have export leave grad modes and autocast regions where they begin and end; it has no setting for it."""
    with contextlib.ExitStack() as stack:
        for name in _FOLDING:
            module = importlib.import_module(f"torch._export.passes.{name}")
            stack.enter_context(mock.patch.object(module, name, lambda graph, signature: (graph, signature)))
        yield


def without_stack_traces() -> contextlib.AbstractContextManager[Any]:
    """Have tracing note no lines of code at nodes; a torch without the setting notes them as ever."""
    return mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True, create=True)


def checkpoints_as_calls() -> contextlib.AbstractContextManager[Any]:
    """Have checkpoints without reentrance call their function and do nothing else; torch has no switch for it.

    Export leaves grad mode off after a checkpoint in another.
    """

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    return mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", nothing)


def to_functional(tensor: torch.Tensor) -> torch.Tensor:
    """Wrap a traced tensor as a functional one, with as much of its autograd metadata as it has."""
    wrapped = FunctionalTensor.to_functional(tensor)
    torch._mirror_autograd_meta_to(tensor, wrapped)  # type: ignore[attr-defined]
    return wrapped


def from_functional(tensor: Any) -> torch.Tensor:
    """Give the traced tensor with what was written into a functional one so far."""
    torch._sync(tensor)
    return value_of(tensor)


def value_of(tensor: Any) -> torch.Tensor:
    """Give the traced tensor that a functional one stands for now, without what waits to be written."""
    value: torch.Tensor = torch._from_functional_tensor(tensor.elem)
    return value


def replace_value(tensor: Any, value: torch.Tensor) -> None:
    """Let a functional tensor stand for another traced one."""
    torch._functionalize_replace(tensor.elem, value)
