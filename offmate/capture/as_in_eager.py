"""Corrections where a trace would differ from eager mode: writes, strides, autocast, and choices of algorithms."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from ..guards.surroundings import AUTOCAST_KINDS
from ..runtime.operators.checks import check_matrix
from ..runtime.operators.layouts import lay_out
from ..runtime.operators.products import product_backward
from ..runtime.torch_names.operators import eigh, linalg_check, schema_of, svd, trilinear
from ..runtime.torch_names.tracing import FunctionalTensor, TorchDispatchMode, replace_value, value_of
from .decompositions import asks_for_values
from .functions import as_eager, is_function

_ATEN = torch.ops.aten

# Operators whose kernels call others that autocast casts for, which a trace below autocast does not see.
_CASTING_INSIDE: dict[Any, str] = {trilinear: "bilinear", _ATEN.linalg_pinv: "pinv"}


def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Return what a write leaves in `target`; for a slice, the kernel of `copy` would make the whole storage."""
    order = sorted(range(target.dim()), key=target.stride, reverse=True)
    value = source.expand(target.shape).permute(order).to(target.dtype)
    back = sorted(range(target.dim()), key=order.__getitem__)
    return value.clone(memory_format=torch.contiguous_format).permute(back)


def run_openly(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator so that the trace sees what eager mode does: undeclared writes, and its choice of algorithms."""
    copies = {position: args[position].clone() for position in _silent_writes(target, args)}
    with contextlib.ExitStack() as stack:
        if _wants_values_alone(target, args, kwargs):
            stack.enter_context(_ValuesAlone())
        if any(map(torch.is_autocast_enabled, AUTOCAST_KINDS)):
            stack.enter_context(_CastsSeen())
        if is_function(target):
            stack.enter_context(_FunctionsAsInEager())
        run = _BY_HAND.get(target) or as_eager(target)
        result = run(*(copies.get(position, value) for position, value in enumerate(args)), **kwargs)
    for position, copy in copies.items():
        args[position].copy_(copy)
    if is_function(target):
        _backward_as_in_eager(result)
    return result


def _backward_as_in_eager(results: list[torch.Tensor]) -> None:
    """Correct what the backward of a custom function calls; the engine runs it outside of all function modes."""
    mode = _FunctionsAsInEager()

    def begin(grads: Any) -> None:
        mode.__enter__()

    def end(made: Any, given: Any) -> None:
        mode.__exit__(None, None, None)

    for node in {result.grad_fn for result in results}:
        if node is not None:
            node.register_prehook(begin)
            node.register_hook(end)


def _silent_writes(target: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the positions of such arguments: running statistics that cuDNN's batch norm writes in training."""
    if target is not torch.ops.aten.batch_norm.default or args[0].device.type != "cuda" or not args[5]:
        return ()
    return tuple(position for position in (3, 4) if args[position] is not None)


class _Product(torch.autograd.Function):
    """`prod` with eager mode's backward, which looks at the values."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.numbers = dim, keepdim, dtype
        return value.prod(dtype=dtype) if dim is None else value.prod(dim, keepdim, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return product_backward(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None


def _product(
    input: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    value = input
    if value.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(value.device.type):
        # Autocast's rule for products, which the function's own forward would hide from autograd.
        if value.device.type == "cpu":
            value = value.float()
        else:
            dtype = dtype or torch.float32
    return _Product.apply(value, dim, keepdim, dtype)


_BY_HAND: dict[Any, Any] = {_ATEN.prod.default: _product, _ATEN.prod.dim_int: _product}
"""What to run for operators whose backward eager mode chooses by values."""


class _FunctionsAsInEager(TorchFunctionMode):
    """Applies the same corrections to what the code of custom autograd functions calls, forward and backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.prod, torch.Tensor.prod):
            return _product(*args, **kwargs)
        with _ValuesAlone() if _wants_values_alone(func, args, kwargs) else contextlib.nullcontext():
            return func(*args, **kwargs)


def _wants_values_alone(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    needed = torch.is_grad_enabled() and any(a.requires_grad for a in args if isinstance(a, torch.Tensor))
    return not needed and asks_for_values(called, args, kwargs)


class _ValuesAlone(TorchDispatchMode):
    """Decomposes without vectors, as eager mode does where nothing needs a gradient."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is svd:
            args = (args[0], False, False)
        elif func is eigh:
            args = (args[0], args[1] if len(args) > 1 else "L", False)
        return func(*args, **(kwargs or {}))


class _CastsSeen(TorchDispatchMode):
    """Refuses operators inside whose kernels autocast, which is on, would cast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _CASTING_INSIDE.get(getattr(func, "overloadpacket", None))
        if name and any(isinstance(a, torch.Tensor) and a.dtype is torch.float32 for a in args):
            raise CaptureError(
                f"the forward calls {name} under torch.autocast, which casts inside the kernel, where a graph does not "
                "see it. Switch autocast off around that call: with torch.autocast(device_type, enabled=False): ..."
            )
        return func(*args, **(kwargs or {}))


class LayoutsKept(TorchDispatchMode):
    """Lets a tensor that was written in place keep its strides.

    The operator that replaces a write gives its result other strides. But rounding in kernels depends on the layout of
    their inputs: in a slice, vectors end with every row.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linalg_check:
            return check_matrix(*args, **(kwargs or {}))
        written = args[0] if schema_of(func).is_mutable and args else None
        # `transpose_` and similar operators write no value: they change strides.
        if not isinstance(written, FunctionalTensor) or torch.Tag.inplace_view in func.tags:
            return func(*args, **(kwargs or {}))
        stride = written.stride()
        result = func(*args, **(kwargs or {}))
        value = value_of(written)
        steps = [(a, b) for a, b, size in zip(value.stride(), stride, value.shape) if size != 1]
        if value.shape == written.shape and any(a != b for a, b in steps):
            replace_value(written, lay_out(value, list(value.shape), list(stride)))
        return result


@contextlib.contextmanager
def no_autocast() -> Any:
    with contextlib.ExitStack() as stack:
        for kind in AUTOCAST_KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
