"""Rule 1 for Python itself: numbers and sizes that a forward takes out of the batch.

A vision encoder takes the sizes of its images out of a small tensor and builds indices of those sizes in Python. No
graph holds that for all values, but one does for given ones: such a tensor becomes part of what a plan is for, as
shapes are. What the forward computes from it alone is computed while it is captured, and is a constant of the graph.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.autograd import without_torch_function_modes
from ..runtime.torch_names.modules import CAUSAL_MASK_MAKER
from ..runtime.torch_names.operators import number_of, schema_of
from ..runtime.torch_names.tensors import storage_key, version_of
from ..runtime.torch_names.tracing import FakeTensor, TorchDispatchMode, outside_of_modes
from .data_dependent import NotFixed, NotFollowed, line_now
from .foreseen import Foreseen
from .plain import forward_replaced

VALUES = "values"
"""The decider of a decision (`batch_decisions`) that is the values of a tensor."""

MOST_VALUES = 4096
"""Elements of a tensor whose values may be part of what a plan is for."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASKED = -1e4  # and below: what a mask adds to the scores of what is not attended to
_LISTS = (torch.Tensor.tolist, torch.Tensor.numpy)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_SIZED = (torch.Tensor.repeat, torch.Tensor.expand, torch.Tensor.view, torch.Tensor.reshape, torch.reshape)
_FACTORIES = (torch.arange, torch.ones, torch.tensor, torch.as_tensor)
_NEAR = 4  # calls between a function and the mode that sees it


class Sources(TorchDispatchMode):
    """Finds, while a forward runs on fake parameters, the batch tensors whose values Python code takes.

    State: `_of`, per storage the indices of the batch tensors that it was computed from; `found`, those of which a
    number or a size was taken. `_kept` keeps the storages, so that no other one takes a name of theirs.
    """

    def __init__(self, batch: list[Any]) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._of: dict[int, frozenset[int]] = {}
        self._kept: list[Any] = []
        for index, tensor in enumerate(batch):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, frozenset({index}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        sources = self.of(given)
        self.found |= self.of(_deciding(func, args, given))
        result = func(*args, **(kwargs or {}))
        changed = given if schema_of(func).is_mutable else []
        for tensor in (*changed, *pytree.tree_leaves(result)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                self._note(tensor, sources)
        return result

    def of(self, tensors: list[torch.Tensor]) -> frozenset[int]:
        """Return the batch tensors that these were computed from."""
        real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        return frozenset().union(*(self._of.get(storage_key(t.untyped_storage()), ()) for t in real))

    def _note(self, tensor: torch.Tensor, sources: frozenset[int]) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._of[storage_key(storage)] = self._of.get(storage_key(storage), frozenset()) | sources


def _deciding(func: Any, args: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors whose values an operator gives to Python, or makes a size of."""
    if func is number_of:
        return given
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    if func is torch.ops.aten.index.Tensor:  # picks a known number of elements, unless a mask picks
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return given[1:] if func is torch.ops.aten.masked_select.default else given


class Lists(torch.overrides.TorchFunctionMode):
    """Tells `Sources` of the values that Python takes without an operator."""

    def __init__(self, sources: Sources) -> None:
        super().__init__()
        self._sources = sources

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LISTS:
            self._sources.found |= self._sources.of([args[0]])
        if func in _INDEXED and isinstance(args[0], FakeTensor):
            args = (args[0], _by_numbers(args[1], lambda mask: not isinstance(mask, FakeTensor)), *args[2:])
        return func(*args, **(kwargs or {}))


def _by_numbers(index: Any, is_known: Callable[[torch.Tensor], bool]) -> Any:
    """Return an index in which known masks are the numbers of the elements that they pick: these have a size."""
    found: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, torch.Tensor) and part.dtype is torch.bool
        found += part.nonzero(as_tuple=True) if is_mask and is_known(part) else [part]
    return tuple(found) if len(found) != 1 or isinstance(index, tuple) else found[0]


class _Draws(TorchDispatchMode):
    """Sees whether random numbers are drawn: those of a call are not those of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _makes_a_causal_mask(func: Any) -> bool:
    """Return whether torch's own transformer makes a mask; models write hidden values into other full tensors."""
    callers = itertools.islice(traceback.walk_stack(sys._getframe(1)), _NEAR)
    return func is torch.full and any(frame.f_code.co_name == CAUSAL_MASK_MAKER for frame, _ in callers)


class KnownValues(torch.overrides.TorchFunctionMode):
    """Computes, within a block that is traced, what follows from known tensors alone, outside of the trace.

    What draws random numbers is traced. Where a known tensor meets another one, a copy of it becomes a constant of the
    graph.

    State: `_known`, the known tensors by identity; `_constants`, their copies, by identity and version.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in known}
        self._constants: dict[tuple[int, int], torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = [tensor for tensor in tensors if id(tensor) in self._known]
        if len(known) == len(tensors) and (tensors or func in _FACTORIES or _makes_a_causal_mask(func)):
            with outside_of_modes(), without_torch_function_modes(), _Draws() as drawn:
                result = func(*args, **kwargs)
            if not drawn.seen:
                pytree.tree_map(self._keep, result)
                return result
        if known:
            self._check_write(func, args, kwargs)
            if func in _INDEXED:
                with outside_of_modes(), without_torch_function_modes():
                    index = _by_numbers(args[1], lambda mask: id(mask) in self._known)
                args = (args[0], index, *args[2:])
            if func in _SIZED:
                args, kwargs = pytree.tree_map(self._size, (args, kwargs))
            args, kwargs = pytree.tree_map(self._constant, (args, kwargs))
        return func(*args, **kwargs)

    def _size(self, value: Any) -> Any:
        """Return a known whole number as a Python number, as it is needed where it is a size."""
        is_number = isinstance(value, torch.Tensor) and id(value) in self._known and value.dim() == 0
        return int(value) if is_number and not value.is_floating_point() else value

    def _keep(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._known[id(value)] = value

    def _constant(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) not in self._known:
            return value
        key = id(value), version_of(value)
        if key not in self._constants:
            with outside_of_modes(), without_torch_function_modes():
                self._constants[key] = value.detach().clone()
        return self._constants[key]

    def _check_write(self, func: Any, args: Any, kwargs: Any) -> None:
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        written = [*(args[:1] if writes else ()), *pytree.tree_leaves(kwargs.get("out"))]
        if any(id(value) in self._known for value in written):
            raise NotFollowed(
                f"{name}{line_now()} writes hidden values into a tensor computed from the batch, whose values the plan "
                "treats as known; make that tensor from one of the model's own (torch.zeros_like)"
            )


def fixed_leaves(
    run: Callable[..., Any], model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Find the tensors of a batch whose values have to be part of what a plan is for.

    Parameters
    ----------
    run: runs the model on fake parameters and this batch. args, kwargs: the batch, with values.

    Returns: their indices in flattening order.
    Raises: NotFixed if one has too many values, or values that are no whole numbers.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    sources = Sources(leaves)
    with sources, Lists(sources), Foreseen(checks=False):
        run(model, *pytree.tree_unflatten(leaves, spec))
    found = tuple(sorted(sources.found))
    for tensor in (leaves[index] for index in found):
        if tensor.numel() > MOST_VALUES or not (_is_whole(tensor) or _is_mask(tensor)):
            raise NotFixed(
                f"The forward reads numbers or sizes from a batch tensor of {tensor.numel():,} {tensor.dtype} values "
                f"(shape {tuple(tensor.shape)}). A plan can be made for whole numbers and for masks of 0, 1 and -inf, "
                f"with at most {MOST_VALUES:,} elements. Keep other values as tensors (torch.where, masked_fill), or "
                "pass the numbers as arguments"
            )
    return found


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_mask(tensor: torch.Tensor) -> bool:
    """Return whether all values are 0, 1 or very negative, as in masks of attention; other numbers differ by batch."""
    return tensor.is_floating_point() and bool(((tensor == 0) | (tensor == 1) | (tensor <= _MASKED)).all())


def values_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a plan is for of a tensor that is part of it: its values, of floating-point numbers the bits."""
    flat = tensor.flatten()
    return tuple((flat.view(_BITS[flat.element_size()]) if tensor.is_floating_point() else flat).tolist())


@contextlib.contextmanager
def values_known(model: torch.nn.Module, fixed: dict[int, torch.Tensor], order: tuple[str, ...]) -> Iterator[None]:
    """Let the forward find these tensors in its batch, with their values, and compute with them outside of a trace.

    Parameters
    ----------
    fixed: per index, in flattening order. order: the names of the keyword arguments in that order.
    """
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Export may give the arguments in another order.
        leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in order}))
        args, kwargs = pytree.tree_unflatten([fixed.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        before = {index: version_of(tensor) for index, tensor in fixed.items()}
        with Foreseen(checks=True), KnownValues(list(fixed.values())):
            output = original(*args, **kwargs)
        for index, tensor in fixed.items():
            if version_of(tensor) != before[index]:
                raise NotFollowed(
                    f"the forward reads numbers from a batch tensor of shape {tuple(tensor.shape)} and also writes "
                    "into it, which a plan would not do; let it write into a copy (tensor.clone())"
                )
        return output

    with forward_replaced(model, forward):
        yield
