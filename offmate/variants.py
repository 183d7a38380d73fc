"""Calls of the model, and its variants: one per kind of call and outcome of what the model asks of its batch."""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from . import decisions
from .request import Prepared
from .runtime.executor import Executor
from .runtime.reserve import Place

_COUNT = "num_items_in_batch"


class CallKind(NamedTuple):
    """What of a call decides its plan, besides what the model asks of the batch."""

    arguments: str
    leaves: tuple[Any, ...]
    trains: bool
    training_mode: bool
    autocast: tuple[Any, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tensors."""
        return tuple(first for first, _ in self.leaves if isinstance(first, tuple))

    @property
    def without_shapes(self) -> tuple[Any, ...]:
        """Everything else, dimensions counted."""
        leaves = tuple((len(a) if isinstance(a, tuple) else a, b) for a, b in self.leaves)
        return self._replace(leaves=leaves)


@dataclass(frozen=True)
class Call:
    """A call of the model, as its graph takes it.

    Parameters
    ----------
    args, kwargs: with tensors for the numbers that change from batch to batch. given: both, as the user gave them.
    trains: whether a backward may follow. training_mode: of the model.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    trains: bool
    training_mode: bool

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """The arguments in the order in which graphs take them."""
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """Per leaf, None where it is something else."""
        return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in self.leaves]

    @functools.cached_property
    def kind(self) -> CallKind:
        """What decides its plan, under the autocast that holds when it is first asked for."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        described = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
        )
        autocast = tuple((k, torch.get_autocast_dtype(k)) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k))
        return CallKind(str(spec), described, self.trains, self.training_mode, autocast)

    def as_given(self) -> Call:
        """The same with its numbers as they are."""
        args, kwargs = self.given
        return replace(self, args=args, kwargs=kwargs)


@dataclass
class Variant:
    """A prepared graph for one kind of call, with its executor.

    Parameters
    ----------
    place: where its memory comes from, on a device with an allocator of its own.
    """

    prepared: Prepared
    executor: Executor
    kind: CallKind
    place: Place | None = None

    @property
    def output_nodes(self) -> tuple[str, ...]:
        """Names of the output values, in the order in which autograd sees them."""
        return self.prepared.binding.outputs

    def returned(self, outputs: dict[str, torch.Tensor]) -> Any:
        """What the model returns, from its output values by name."""
        captured = self.prepared.captured
        leaves = [outputs[o] if isinstance(o, str) else o[0] for o in captured.outputs]
        return pytree.tree_unflatten(leaves, captured.out_spec)


class Variants:
    """The variants of one model, by kind of call and decisions.

    State: `_known`, the one used last at the end; `_asked`, what the model asks of a batch of each kind.

    Parameters
    ----------
    buckets: sizes between which batches share decisions. most: how many are kept, training or not each.
    """

    def __init__(self, buckets: tuple[int, ...], most: int) -> None:
        self._buckets, self._most = buckets, most
        self._asked: dict[CallKind, tuple[decisions.Decision, ...]] = {}
        self._known: dict[tuple[CallKind, tuple[bool, ...]], Variant] = {}

    def find(self, kind: CallKind, tensors: list[torch.Tensor]) -> Variant | None:
        """The variant for a call; None if it must be prepared."""
        if kind not in self._asked:
            return None
        key = kind, decisions.ask_again(self._asked[kind], tensors)
        variant = self._known.pop(key, None)
        if variant is not None:
            self._known[key] = variant
        return variant

    def add(self, kind: CallKind, variant: Variant) -> None:
        """Keep a variant that was prepared for a call of this kind; the one used longest ago may have to go."""
        taken = variant.prepared.captured.taken
        self._asked.setdefault(kind, taken)
        self._known[kind, tuple(d.outcome for d in taken)] = variant
        alike = [key for key in self._known if key[0].trains == kind.trains]
        for key in alike[: -self._most]:
            del self._known[key]

    def forget(self, variant: Variant) -> None:
        """Have the next call that would use this variant planned anew."""
        self._known = {key: v for key, v in self._known.items() if v is not variant}

    def of_training(self) -> tuple[Variant, ...]:
        """Those that train, the one used last at the end."""
        return tuple(v for (kind, _), v in self._known.items() if kind.trains)

    def near(self, kind: CallKind) -> tuple[Prepared, ...]:
        """Plans for larger training batches that differ in shapes only and share a bucket, the smallest first."""
        found = [
            (sum(map(math.prod, known.shapes)), variant.prepared)
            for (known, _), variant in self._known.items()
            if kind.trains and known.without_shapes == kind.without_shapes and self._shares(kind, known)
        ]
        return tuple(prepared for _, prepared in sorted(found, key=lambda pair: pair[0]))

    def _shares(self, small: CallKind, large: CallKind) -> bool:
        sizes = [pair for a, b in zip(small.shapes, large.shapes) for pair in zip(a, b)]
        bucket = [(bisect.bisect_left(self._buckets, a), bisect.bisect_left(self._buckets, b)) for a, b in sizes]
        return all(a <= b for a, b in sizes) and all(a == b for a, b in bucket)


class Numbers:
    """Whole numbers among a call's arguments that change from batch to batch, handed on as tensors.

    A graph is captured for every value of a Python number, for none of a tensor's. A whole number becomes a tensor of
    int64 without dimensions, with which arithmetic rounds as with the number itself; floats would not.

    State: `_seen`, the values by place; `_changing`, the places that have held several; `_needed`, those where a tensor
    does not export.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], int] = {}
        self._changing: set[tuple[str, int]] = set()
        self._needed: set[tuple[str, int]] = set()

    def as_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with changing numbers as tensors."""
        if isinstance(kwargs.get(_COUNT), int):
            kwargs = {**kwargs, _COUNT: torch.tensor(kwargs[_COUNT])}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [(str(spec), i) for i, leaf in enumerate(leaves) if type(leaf) is int]
        for place in places:
            if self._seen.setdefault(place, leaves[place[1]]) != leaves[place[1]]:
                self._changing.add(place)
        for place in places:
            if place in self._changing - self._needed:
                leaves[place[1]] = torch.tensor(leaves[place[1]])
        return pytree.tree_unflatten(leaves, spec)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Have the changing numbers of such a call handed on as they are from now on; false if there are none."""
        spec = str(pytree.tree_structure((args, kwargs)))
        tried = {place for place in self._changing - self._needed if place[0] == spec}
        self._needed |= tried
        return bool(tried)
