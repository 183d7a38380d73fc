"""Refuses sizes and Python numbers that a forward makes from a tensor's values, which no plan can hold."""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.modules import CAUSAL_MASK_FINDER
from ..runtime.torch_names.tracing import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in \S+\n(?P<code>[^\n]*)')
_PACKAGES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent}/")
_STANDARD = (f"{sysconfig.get_path('stdlib')}/", "<frozen")
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def check_sizes(graph: fx.Graph) -> None:
    """Raise LineWanted for the first operator that makes a size or a Python number from a tensor's values.

    Parameters
    ----------
    graph: captured with all input sizes known, so that any symbolic size comes from values.
    """
    for node in graph.nodes:
        leaves = pytree.tree_leaves(node.meta.get("val"))
        number = any(isinstance(leaf, _SYMBOLS) for leaf in leaves)
        if number or any(isinstance(leaf, torch.Tensor) and _has_symbols(leaf) for leaf in leaves):
            raise LineWanted(str(_refusal(node.target, line_of_node(node), number)))


class ValuesTaken(CaptureError):
    """Raised for a size or a Python number that a forward makes from a tensor's values."""


class NotFollowed(CaptureError):
    """Raised where a graph for given values cannot follow a forward either; it says more than `ValuesTaken`."""


class NotFixed(CaptureError):
    """Raised for a batch tensor whose values cannot be part of what a plan is for."""


class LineWanted(ValuesTaken):
    """Raised for a node of a graph; it names the model's line if the graph was captured with stack traces."""


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Raise CaptureError if a forward on fake tensors in the body makes a size or a Python number from values."""
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        number = isinstance(error, DataDependentOutputException)
        raise _refusal(error.func, line_of(error), number, _asks_for_a_causal_mask(error)) from error
    except GuardOnDataDependentSymNode as error:
        raise _refusal("the forward", line_of(error), True, _asks_for_a_causal_mask(error)) from error


def _asks_for_a_causal_mask(error: BaseException) -> bool:
    """Return whether an error comes from torch's own layers, as they look whether a mask is the causal one."""
    return any(frame.f_code.co_name == CAUSAL_MASK_FINDER for frame, _ in traceback.walk_tb(error.__traceback__))


def line_of(error: BaseException) -> str:
    """Return the model's own line that an error comes from, as text that follows a name; empty if it is unknown."""
    return _line_of_frames(list(traceback.walk_tb(error.__traceback__)))


def line_now() -> str:
    """Return the model's own line that runs now, as text that follows a name."""
    return _line_of_frames(list(traceback.walk_stack(sys._getframe(1)))[::-1])


def line_of_node(node: fx.Node) -> str:
    """Return the model's own line that a node comes from; empty if the graph was captured without stack traces."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    module = f"{modules[-1][0]}, a {str(modules[-1][1]).rpartition('.')[2]}" if modules and modules[-1][0] else ""
    frames = (match.groups() for match in _FRAME.finditer(node.meta.get("stack_trace") or ""))
    return _line([(file, line, code, module) for file, line, code in frames])


def _line_of_frames(frames: list[tuple[FrameType, int]]) -> str:
    found = []
    for frame, number in frames:
        file, own = frame.f_code.co_filename, frame.f_locals.get("self")
        module = type(own).__name__ if isinstance(own, torch.nn.Module) else ""
        found.append((file, number, linecache.getline(file, number), module))
    return _line(found)


def _line(frames: list[tuple[Any, ...]]) -> str:
    """Format the innermost frame (file, line, code, module) that belongs to the model."""
    own = [frame for frame in frames if _is_the_models(frame[0])]
    inner = next((module for _, _, _, module in reversed(frames) if module), "")
    if not own:  # a model that is made of torch's modules alone has no line of its own
        return f" (in {inner})" if inner else ""
    file, number, code, module = own[-1]
    place = f"in {module}" if module in ("", inner) else f"in {module}, which calls {inner}"
    return f" (`{code.strip()}`, {file}, line {number}{f', {place}' if module else ''})"


def _is_the_models(file: str) -> bool:
    # Outside a virtual environment, packages are in a folder of the standard library. Torch runs strings, too.
    if file == "<string>":
        return False
    return not file.startswith(_PACKAGES) and (not file.startswith(_STANDARD) or "site-packages" in file)


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride()))


def _refusal(culprit: Any, line: str, number: bool, causal: bool = False) -> ValuesTaken:
    if causal:
        return ValuesTaken(
            f"{culprit}{line} checks whether an attention mask is causal, but a plan is made before its values are "
            "known. Pass this with the mask: is_causal=True or False (tgt_is_causal= in nn.Transformer and its "
            "decoder), or make the mask in the forward with nn.Transformer.generate_square_subsequent_mask"
        )
    if number:
        return ValuesTaken(
            f"{culprit}{line} reads a Python number from a tensor (.item(), .tolist(), int(), an `if` or a bound of a "
            "slice), but a plan is made before the values are known. Keep it as a tensor and use arithmetic or masks "
            "(torch.where), or pass the number as an argument of the call"
        )
    return ValuesTaken(
        f"{culprit}{line} gives a result whose shape depends on values, which cannot be planned. Keep the size fixed "
        "with torch.where, masked_fill or a product with the mask. Or select the elements before the call and pass "
        "them as an argument"
    )
