"""Fake tensors laid out as the real kernels lay out their results, where the fake kernels say otherwise.

Kernels of the CPU and of accelerators do not always keep the layout of inputs that are not contiguous as their fake
kernels promise: a batch norm of a transposed sequence, the backward of a layer norm, softplus. What runs afterwards
would round in another order than eager mode. So an operator that reads such inputs is run once, on zeros, and the trace
goes on with the strides that it returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from ..machines.devices import rng_untouched
from ..runtime.layouts import steps_of
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.operators import OpOverload, schema_of
from ..runtime.torch_names.tracing import FakeTensor, FakeTensorMode, outside_of_modes

_ATEN = torch.ops.aten
# Their results are contiguous whatever they read, and large ones take long.
_TRUSTED = frozenset((_ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default))

_asks = ContextVar("asks the real kernels", default=True)
_found: dict[tuple[Any, ...], tuple[tuple[int, ...] | None, ...]] = {}


@contextlib.contextmanager
def fake_kernels_believed() -> Iterator[None]:
    """Run no kernel in the body, for a model whose device is not here or whose tensors would not fit."""
    token = _asks.set(False)
    try:
        yield
    finally:
        _asks.reset(token)


def kernels_asked() -> bool:
    """Return whether traces made now have the strides of the real kernels."""
    return _asks.get()


class TrueStridesMode(FakeTensorMode):
    """A mode of fake tensors whose results have the strides that the real kernels give them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _ATEN.view.default:
            return self._viewed(args[0], result)
        if not _asks.get() or not _in_doubt(func, args, kwargs or {}):
            return result
        strides = _strides(func, args, kwargs or {})
        if not strides:
            return result
        leaves, spec = pytree.tree_flatten(result)
        corrected = [self._laid_out(leaf, stride) for leaf, stride in zip(leaves, strides, strict=True)]
        return pytree.tree_unflatten(corrected, spec)

    def _viewed(self, source: Any, view: Any) -> Any:
        """Return a view with the strides that it really has: its fake kernel gives dimensions of size 1 others.

        By these, too, a convolution tells whether a picture has its channels last.
        """
        if 1 not in view.shape:
            return view
        with outside_of_modes():
            like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
            stride = like.view(view.shape).stride()
        if view.stride() == stride:
            return view
        with self:
            return view.as_strided(view.shape, stride)

    def _laid_out(self, fake: Any, stride: tuple[int, ...] | None) -> Any:
        if not isinstance(fake, torch.Tensor) or stride is None or steps_of(fake.shape, stride) == _steps(fake):
            return fake
        with self:
            return torch.empty_strided(fake.shape, stride, dtype=fake.dtype, device=fake.device)


def _in_doubt(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator of torch's own makes new tensors from tensors that are not contiguous.

    Operators that read integers are left out: indices, pivots and workspaces of zeros can crash a kernel.
    """
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func in _TRUSTED:
        return False
    schema = schema_of(func)
    if any(value.alias_info is not None for value in (*schema.arguments, *schema.returns)):
        return False
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return any(not t.is_contiguous() for t in tensors) and all(map(_may_be_zeros, tensors))


def _may_be_zeros(tensor: torch.Tensor) -> bool:
    strided = isinstance(tensor, FakeTensor) and tensor.layout is torch.strided and tensor.device.type != "meta"
    return strided and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _strides(func: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...] | None, ...]:
    """Return the strides of the tensors among the leaves of what the real kernel returns, None for other leaves.

    Empty if the kernel does not run on zeros, or if the call cannot be told apart from others.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (func, str(spec), *(_layout(leaf) for leaf in leaves))
    try:
        known = _found.get(key)
    except TypeError:
        return ()
    if known is None:
        known = _found[key] = _ask(func, leaves, spec)
    return known


def _layout(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device
    return type(leaf), leaf


def _ask(func: Any, leaves: list[Any], spec: Any) -> tuple[tuple[int, ...] | None, ...]:
    device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    with outside_of_modes(), torch.no_grad(), rng_untouched(device if device.type != "cpu" else None):
        args, kwargs = pytree.tree_unflatten([_zeros(leaf) for leaf in leaves], spec)
        try:
            result = func(*args, **kwargs)
        except Exception:
            # A kernel that looks at values may refuse zeros; whether its strides are true is seen when it is measured.
            return ()
    return tuple(r.stride() if isinstance(r, torch.Tensor) else None for r in pytree.tree_leaves(result))


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    elements = leaf.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride()))
    whole = torch.zeros(max(0, elements), dtype=leaf.dtype, device=leaf.device)
    return whole.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


def _steps(tensor: torch.Tensor) -> list[int]:
    return steps_of(tensor.shape, tensor.stride())
