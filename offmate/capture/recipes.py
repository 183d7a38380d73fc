"""Notes how a forward computes a tensor from its batch alone, so that it can be computed for another batch, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CaptureError
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.operators import schema_of
from ..runtime.torch_names.tensors import storage_key
from ..runtime.torch_names.tracing import FakeTensor, TorchDispatchMode


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands among those of a recipe; the batch's come first."""

    index: int


@dataclass(frozen=True)
class _Step:
    """One operator: its arguments, flattened, with places instead of tensors, and the places of its results.

    `reads` and `touches` are the storages of its arguments, and those that it makes, or writes into.
    """

    func: Any
    given: tuple[Any, ...]
    spec: Any
    made: tuple[_Place | None, ...]
    reads: frozenset[int]
    touches: frozenset[int]


@dataclass(frozen=True)
class Recipe:
    """How a tensor is computed from a batch. Two are equal if they read the same, whatever their constants hold.

    Parameters
    ----------
    text: all steps, in words. result: the place of the tensor. constants: tensors by their places.
    """

    text: str
    steps: tuple[_Step, ...] = field(compare=False)
    result: _Place = field(compare=False)
    constants: dict[_Place, torch.Tensor] = field(compare=False)

    def made_of(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Compute the tensor on the host from the tensors of another batch, in flattening order."""
        tensors = {_Place(index): tensor for index, tensor in enumerate(batch)}
        # Copies, since a step may write into them.
        tensors |= {place: tensor.clone() for place, tensor in self.constants.items()}
        for step in self.steps:
            given = [tensors[leaf].cpu() if isinstance(leaf, _Place) else leaf for leaf in step.given]
            args, kwargs = pytree.tree_unflatten(given, step.spec)
            results = pytree.tree_leaves(step.func(*args, **kwargs))
            tensors |= {place: result for place, result in zip(step.made, results) if place is not None}
        return tensors[self.result]


class Recipes(TorchDispatchMode):
    """Notes, while a forward runs on fake parameters, the operators on tensors with values.

    State: `_steps`; `_places`, where a tensor stands, by identity; `_kept`, these tensors, so that no other one takes
    their identity; `_constants`, copies of those that no step has made.

    Parameters
    ----------
    batch: the tensors of the batch, in flattening order; the forward must not write into them.
    """

    def __init__(self, batch: list[torch.Tensor]) -> None:
        super().__init__()
        self._steps: list[_Step] = []
        self._places: dict[int, _Place] = {}
        self._kept: list[torch.Tensor] = []
        self._constants: dict[_Place, torch.Tensor] = {}
        self._batch = [self._place(tensor) for tensor in batch]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        tensors = _tensors(leaves)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **(kwargs or {}))
        given = tuple(self._read(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        result = func(*args, **(kwargs or {}))
        results = pytree.tree_leaves(result)
        if not any(isinstance(leaf, FakeTensor) for leaf in results):
            made = tuple(self._place(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in results)
            reads = _storages(tensors)
            touches = _storages(_tensors(results)) | (reads if schema_of(func).is_mutable else frozenset())
            self._steps.append(_Step(func, given, spec, made, reads, touches))
        return result

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """Return how this tensor was computed from the batch; None if it was not.

        Raises: CaptureError if random numbers were drawn for it.
        """
        needed = _storages([tensor])
        steps: list[_Step] = []
        for step in reversed(self._steps):
            if step.touches & needed:
                needed |= step.reads
                steps.insert(0, step)
        if not needed & _storages([self._kept[place.index] for place in self._batch]):
            return None
        if any(torch.Tag.nondeterministic_seeded in step.func.tags for step in steps):
            raise CaptureError(
                "an attention mask is drawn at random, so the model skips something else at each call; draw it before "
                "the call and pass it as an argument, or use attn_implementation='eager'"
            )
        result = self._places[id(tensor)]
        text = "; ".join(f"{step.made} = {step.func}{step.given}" for step in steps) + f"; {result}"
        read = {leaf for step in steps for leaf in step.given if isinstance(leaf, _Place)}
        return Recipe(text, tuple(steps), result, {p: self._constants[p] for p in read if p in self._constants})

    def _read(self, tensor: torch.Tensor) -> _Place:
        is_constant = id(tensor) not in self._places
        place = self._place(tensor)
        if is_constant:
            self._constants[place] = tensor.detach().clone()
        return place

    def _place(self, tensor: torch.Tensor) -> _Place:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = _Place(len(self._kept))
            self._kept.append(tensor)
        return self._places[id(tensor)]


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _storages(tensors: list[torch.Tensor]) -> frozenset[int]:
    # Sparse tensors have none, and are refused later.
    return frozenset(storage_key(t.untyped_storage()) for t in tensors if t.layout is torch.strided)
