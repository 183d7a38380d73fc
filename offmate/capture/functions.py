"""Custom autograd functions: each is one operator of the captured graph, and is expanded where its block is traced.

Export differentiates what a function's forward does, and ignores its backward. So during export every `apply` becomes
one node that names the function and its plain arguments. Where the graph runs under autograd, the function itself runs,
and the trace sees its own forward and its own backward.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import hashlib
import inspect
import logging
import marshal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import CheckpointFunction

from ..errors import CaptureError
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.autograd import FunctionBase, without_torch_function_modes
from ..runtime.torch_names.operators import schema_of
from ..runtime.torch_names.tensors import version_of
from ..runtime.torch_names.tracing import FakeTensorMode, TorchDispatchMode, outside_of_modes
from . import draws, late_heads
from .decompositions import ValuesRefused

log = logging.getLogger("offmate")

_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_LIBRARY.define("function(Tensor[] tensors, str name) -> Tensor[]")
_LIBRARY.define(
    "function_that_draws(Tensor[] tensors, str name) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)
_NODES = (torch.ops.offmate.function.default, torch.ops.offmate.function_that_draws.default)
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

# Whether a function is being inspected; functions that it applies itself are part of it.
_looking = contextvars.ContextVar("looking", default=False)

# Tensors like those that the captured call returns: its node runs without autocast, which the function may query.
_seen: contextvars.ContextVar[tuple[torch.Tensor, ...] | None] = contextvars.ContextVar("seen", default=None)


class _Tensor:
    """Marks a tensor's place among a call's leaves."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()


@dataclass(frozen=True)
class _Call:
    """A function with all its arguments but tensors.

    Parameters
    ----------
    function: the class. spec: structure of its arguments. leaves: leaves of its arguments, tensors replaced by a mark.
    """

    function: type[torch.autograd.Function]
    spec: Any
    leaves: tuple[Any, ...]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """Apply the function to these tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return self.function.apply(*pytree.tree_unflatten(leaves, self.spec))


@dataclass(frozen=True)
class _Found:
    """The effects of applying a function.

    Parameters
    ----------
    tupled: whether it returns a tuple. outputs: what it returns, tensors replaced by a mark.
    made: the fake tensors among the outputs. draws: whether its forward draws random numbers.
    """

    tupled: bool
    outputs: tuple[Any, ...]
    made: tuple[torch.Tensor, ...]
    draws: bool


_calls: dict[str, _Call] = {}
"""Every call that was captured, by its name; entries are never removed."""


def _name_of(call: _Call) -> str:
    """Return a name that identifies a call, even in another process: class, code, and plain arguments."""
    function = call.function
    methods = [getattr(function, name, None) for name in ("forward", "setup_context", "backward", "vjp")]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods if method is not None]
    code = hashlib.sha256(b"".join(marshal.dumps(c, 2) for c in codes if c is not None)).hexdigest()[:16]
    name = f"{function.__module__}.{function.__qualname__} {code} {call.spec} {call.leaves!r}"
    number = 0
    while _calls.setdefault(key := f"{name} {number}" if number else name, call).function is not function:
        number += 1
    return key


def as_eager(target: Any) -> Callable[..., Any]:
    """Return what to run for a node of the flat graph so that autograd sees the same as in eager mode."""
    if target in _NODES:
        return _open
    run: Callable[..., Any] = draws.BY_HAND.get(target) or late_heads.BY_HAND.get(target, target)
    return run


def is_function(target: Any) -> bool:
    """Return whether a node of the flat graph stands for a custom function."""
    return target in _NODES


def _open(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Apply the function behind a node, and return the tensors that it returns."""
    result = _calls[name](tensors)
    outputs = result if isinstance(result, tuple) else (result,)
    return [output for output in outputs if isinstance(output, torch.Tensor)]


# -- during export ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def functions_kept() -> Iterator[None]:
    """Make every custom autograd function that the body exports one node of the graph.

    Raises: CaptureError naming a function that cannot be kept.
    """
    said: list[str] = []

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(FunctionBase, cls).apply
        if cls is CheckpointFunction and not _looking.get():
            if not said:
                said.append("gradient checkpointing of the model is ignored: the plan decides what is recomputed")
                log.info(said[0])
            return _unchecked(*args)
        if kwargs or _looking.get() or cls.__module__.split(".")[0] == "torch":
            return run(*args, **kwargs)
        return _as_node(cls, args)

    # Function.apply calls its base class's `apply` in the end, so that this also covers stored references.
    with mock.patch.object(FunctionBase, "apply", classmethod(apply), create=True):
        yield


def _unchecked(body: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Compute what reentrant checkpointing computes: nothing has a gradient unless one of its arguments has."""
    differentiates = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with ValuesRefused() if differentiates else torch.no_grad():
        return body(*args)


def _as_node(function: Any, args: tuple[Any, ...]) -> Any:
    leaves, spec = pytree.tree_flatten(args)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise _refusal(
                function,
                f"is given an object of {type(leaf).__name__}",
                "give it tensors and plain values (numbers, strings, dtypes), and call modules or callables before or "
                "after the function",
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    call = _Call(function, spec, tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))
    found = _look_at(call, tensors)
    token = _seen.set(found.made)
    try:
        results = iter(_NODES[found.draws](tensors, _name_of(call)))
    finally:
        _seen.reset(token)
    differentiable = iter(made.requires_grad for made in found.made)
    outputs = tuple(
        _marked(next(results), next(differentiable)) if output is _TENSOR else output for output in found.outputs
    )
    return outputs if found.tupled else outputs[0]


def _marked(result: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return result if requires_grad or not result.requires_grad else result.detach()


def _refusal(function: Any, what: str, remedy: str) -> CaptureError:
    return CaptureError(
        f"the custom autograd.Function {function.__qualname__} {what}, which cannot be planned; {remedy}"
    )


class _Watch(TorchDispatchMode):
    """Watches for random draws. State: `drew`, the operators that drew random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drew: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seeded = any(argument.name == "philox_seed" for argument in schema_of(func).arguments)
        if torch.Tag.nondeterministic_seeded in func.tags and not seeded:
            self.drew.append(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Run the body without tracing anything."""
    token = _looking.set(True)
    try:
        with outside_of_modes(), without_torch_function_modes():
            yield
    finally:
        _looking.reset(token)


def _look_at(call: _Call, tensors: list[torch.Tensor]) -> _Found:
    """Apply a function to fake tensors, forward and backward, and note what it does.

    Raises: CaptureError naming the function if a graph cannot hold what it does.
    """
    with _aside(), FakeTensorMode(), _Watch() as watch:
        given = [_fake(tensor) for tensor in tensors]
        try:
            result = call(given)
            _check_untouched(call.function, given, "changes an argument in place")
            drew, watch.drew = watch.drew, []
            outputs = result if isinstance(result, tuple) else (result,)
            made = [output for output in outputs if isinstance(output, torch.Tensor)]
            _look_at_backward(call.function, made, given)
        except CaptureError:
            raise
        except Exception as error:
            _check_untouched(call.function, given, "changes an argument in place")
            raise _as_refusal(call.function, error) from error
    if watch.drew:
        raise _refusal(
            call.function,
            f"draws random numbers in its backward ({watch.drew[0]})",
            "draw them in the forward and save them",
        )
    if torch.ops.aten.bernoulli.p in drew:
        raise _refusal(
            call.function, "draws with torch.bernoulli(x, p)", "write torch.empty_like(x).bernoulli_(p) instead"
        )
    marked = tuple(_TENSOR if isinstance(output, torch.Tensor) else output for output in outputs)
    for output in marked:
        if not isinstance(output, (_Tensor, *_PLAIN)):
            raise _refusal(call.function, f"returns an object of {type(output).__name__}", "return tensors")
    return _Found(isinstance(result, tuple), marked, tuple(made), bool(drew))


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(tensor.requires_grad)


def _look_at_backward(function: Any, made: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    outputs = [output for output in made if output.requires_grad]
    wanted = [tensor for tensor in given if tensor.requires_grad]
    if not outputs or not wanted:
        return
    tangents = [_fake(output.detach()) for output in outputs]
    torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
    _check_untouched(function, tangents, "changes its incoming gradient in place")
    _check_untouched(function, given, "changes an argument in place in its backward")


def _check_untouched(function: Any, tensors: list[torch.Tensor], what: str) -> None:
    if any(map(version_of, tensors)):
        raise _refusal(function, what, "have it return a new tensor (clone first)")


def _as_refusal(function: Any, error: Exception) -> CaptureError:
    """Turn an error that a function raised on fake tensors into a refusal."""
    words = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "FakeTensorMode" in words or "fake mode" in words.lower():
        return _refusal(
            function,
            "reads a tensor that is not among its arguments",
            "pass parameters, buffers and constants as arguments of apply",
        )
    return _refusal(
        function,
        f"does not trace ({type(error).__name__}: {words})",
        "its forward and backward must not read values of tensors (no .item(), no branch on data, no numpy); write it "
        "as tensor operations",
    )


# -- the operators ----------------------------------------------------------------------------------------------------


def _outputs_alike(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    made: Sequence[torch.Tensor] | None = _seen.get()
    if made is None:
        token = _looking.set(True)
        try:
            with torch.no_grad(), without_torch_function_modes():
                made = _open([tensor.detach() for tensor in tensors], name)
        finally:
            _looking.reset(token)
    return [torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=m.device) for m in made]


def _differentiated(ctx: Any, *gradients: Any) -> Any:
    raise CaptureError("the model computes gradients inside its forward; compute them outside of it")


for _node in ("function", "function_that_draws"):
    _LIBRARY.impl(_node, _open, "CompositeExplicitAutograd")
    torch.library.register_fake(f"offmate::{_node}", _outputs_alike, lib=_LIBRARY)
    # Outputs must require a gradient where the function's do, since a model may read `requires_grad`.
    torch.library.register_autograd(f"offmate::{_node}", _differentiated, lib=_LIBRARY)
