"""Layouts of the gradients that the user's own loss hands into the model's outputs.

Kernels add up a transposed tensor, or one that repeats an element, in another order than a dense one. How a gradient
arrives is decided by code that no plan sees, so a plan takes it for dense unless it is told.

A layout names the gradient's dimensions from the outermost in memory to the innermost; those along which it repeats
one element, as the gradient of a sum does, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..errors import CaptureError
from ..runtime.layouts import steps_of
from .captured import Captured
from .spec import dense_stride

Strides = tuple[int, ...]


def layout_of(gradient: torch.Tensor) -> tuple[int, ...] | None:
    """Return the layout of a gradient, None if it has gaps, which no layout has."""
    dims = [dim for dim in range(gradient.dim()) if gradient.shape[dim] == 1 or gradient.stride(dim)]
    ones = {dim for dim in dims if gradient.shape[dim] == 1}
    steps = gradient.stride()
    order = sorted((dim for dim in dims if dim not in ones), key=lambda dim: -steps[dim])
    layout = (*sorted(ones), *order)
    strides = strides_in(layout, gradient.shape)
    return layout if steps_of(gradient.shape, strides) == steps_of(gradient.shape, gradient.stride()) else None


def strides_in(layout: Sequence[int], shape: Sequence[int]) -> Strides:
    """Return the strides of a tensor of this shape in a layout."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(layout):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def incoming_strides(
    captured: Captured, differentiated: Mapping[str, fx.Node], layouts: Mapping[str, tuple[int, ...]]
) -> dict[str, Strides]:
    """Return the strides in which the gradients of outputs are planned, by output node.

    Parameters
    ----------
    differentiated: the output nodes that receive a gradient from the user, by name. layouts: by name of the output,
        those that the user has named.

    Raises: CaptureError if a layout names an output that there is not, or dimensions that it does not have.
    """
    names = {output: name for output, name in zip(captured.outputs, captured.output_names) if isinstance(output, str)}
    known = {names[node] for node in differentiated}
    unknown = sorted(layouts.keys() - known)
    if unknown:
        raise CaptureError(
            f"gradient_layouts names {', '.join(unknown)}; outputs that get a gradient: {', '.join(sorted(known))}"
        )
    found = {}
    for node, fx_node in differentiated.items():
        fake = fx_node.meta["fake"]
        layout = layouts.get(names[node])
        if layout is not None and (len(set(layout)) < len(layout) or not set(layout) <= set(range(fake.dim()))):
            raise CaptureError(
                f"gradient_layouts gives {names[node]} the dimensions {layout}; it has {fake.dim()}, and each can be "
                "named once"
            )
        found[node] = dense_stride(fake) if layout is None else strides_in(layout, fake.shape)
    return found
