"""Which plan a call of the model needs: one per kind of call and outcome of what the model asks of its batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from . import decisions
from .errors import ProtocolError
from .planner import Prepared
from .runtime.executor import Executor


@dataclass
class Variant:
    """A prepared graph for one kind of call, with its executor."""

    prepared: Prepared
    executor: Executor
    trains: bool

    @property
    def output_nodes(self) -> tuple[str, ...]:
        """Names of the output values, in the order in which autograd sees them."""
        return self.prepared.binding.outputs


class CallKind(NamedTuple):
    """What of a call decides its plan, besides what the model asks of the batch."""

    arguments: str
    leaves: tuple[Any, ...]
    trains: bool
    training_mode: bool
    autocast: tuple[Any, ...]


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool, training_mode: bool) -> CallKind:
    """The kind of a call.

    Parameters
    ----------
    trains: whether a backward may follow. training_mode: of the model.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    described = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
    )
    autocast = tuple((k, torch.get_autocast_dtype(k)) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k))
    return CallKind(str(spec), described, trains, training_mode, autocast)


class Variants:
    """The variants of one model, by kind of call and decisions."""

    def __init__(self) -> None:
        self._kinds: dict[CallKind, tuple[decisions.Decision, ...]] = {}
        self._known: dict[Any, Variant] = {}

    def find(self, kind: CallKind, tensors: list[torch.Tensor]) -> Variant | None:
        """The variant for a call; None if it must be prepared.

        Raises: ProtocolError if the call would need a training plan for another kind of batch.
        """
        if kind in self._kinds:
            outcomes = decisions.ask_again(self._kinds[kind], tensors)
            return self._known.get((kind, outcomes))
        if kind.trains:
            for known in self._kinds:
                if known.trains:
                    raise ProtocolError(_difference(known, kind))
        return None

    def add(self, kind: CallKind, variant: Variant) -> None:
        """Keep a variant that was prepared for a call of this kind."""
        taken = variant.prepared.captured.taken
        self._kinds.setdefault(kind, taken)
        self._known[kind, tuple(d.outcome for d in taken)] = variant

    def forget_training(self) -> None:
        """Have the next training call planned anew."""
        self._known = {key: v for key, v in self._known.items() if not v.trains}
        self._kinds = {kind: taken for kind, taken in self._kinds.items() if not kind.trains}


def _difference(known: CallKind, kind: CallKind) -> str:
    """What about a call is not as planned, and what to do."""
    if known.training_mode != kind.training_mode:
        modes = ("eval()", "train()")
        return (
            f"the model was planned in model.{modes[known.training_mode]} mode and is trained in "
            f"model.{modes[kind.training_mode]} mode now; planning for both is not supported yet. Train in one mode, "
            "and evaluate under torch.no_grad()"
        )
    if known.autocast != kind.autocast:
        return (
            f"torch.autocast was {known.autocast or 'off'} when the model was planned and is {kind.autocast or 'off'}"
        )
    changed = next(((a, b) for a, b in zip(known.leaves, kind.leaves) if a != b), (known.arguments, kind.arguments))
    planned, given = (_words(leaf) for leaf in changed)
    return (
        f"the batch differs from the one that was planned: {given} instead of {planned}. Planning for several "
        "shapes is not supported yet; pad batches to one shape and drop the last short one (DataLoader(drop_last=True))"
    )


def _words(leaf: Any) -> str:
    if isinstance(leaf, str):
        return f"arguments {leaf}"
    first, second = leaf
    return f"a tensor of shape {first} and {second}" if isinstance(first, tuple) else f"{first.__name__} {second!r}"
