"""Calls of the model, and its variants: one per kind of call and outcome of the model's decisions about its batch."""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..capture import batch_decisions
from ..capture.byproducts import ByProduct
from ..capture.recipes import Recipe
from ..errors import CaptureError
from ..planning.request import Prepared, Request
from ..plans.break_even import BreakEven
from ..runtime.memory.reserve import MemoryLayout
from ..runtime.replay.executor import Executor
from ..runtime.replay.program import Slot
from ..runtime.replay.shapes import Shape
from ..runtime.torch_names import trees as pytree
from ..solver.items import ItemKind, names_of

_COUNT = "num_items_in_batch"

# What was decided, and of which tensor: one of the batch, or how it is computed from the batch.
_Questions = tuple[tuple[str, Recipe | int | None], ...]


class Unfit(Exception):
    """A batch cannot take the actions of another one's plan in the same memory; says nothing to users.

    Parameters
    ----------
    excess_bytes: by how much computes of it hold more at their peaks, if that is all; None if its actions or its items
        are others. why: what was raised when it was traced; empty if nothing was.
    """

    def __init__(self, excess_bytes: int | None = None, why: str = "") -> None:
        super().__init__(excess_bytes, why)
        self.excess_bytes, self.why = excess_bytes, why

    def again(self) -> Unfit:
        """Return the same without what it was raised in, which would stay in memory."""
        return Unfit(self.excess_bytes, self.why)


class CallKind(NamedTuple):
    """The properties of a call that decide its plan, besides the model's decisions about the batch.

    Parameters
    ----------
    arguments, leaves: the structure of the arguments, and a description of each. trains: whether a backward may follow.
    together: how many such calls run in turn, block by block. early: whether updates may come before the gate, where
        plans of both kinds are kept.
    state: number of the state that the model's Python is in (`Watch`). around: torch's settings (`surroundings`).
    strides: strides per tensor; () for contiguous ones.
    """

    arguments: str
    leaves: tuple[Any, ...]
    trains: bool
    state: int
    around: tuple[Any, ...]
    reserved_bytes: int = 0
    strides: tuple[tuple[int, ...], ...] = ()
    together: int = 1
    early: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors."""
        return tuple(first for first, _ in self.leaves if isinstance(first, tuple))

    @property
    def n_elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(map(math.prod, self.shapes))

    def may_follow(self, other: CallKind, buckets: tuple[int, ...]) -> bool:
        """Return whether such calls may take the decisions for another kind of calls, which is nowhere smaller.

        Parameters
        ----------
        buckets: sizes between which batches share decisions.
        """
        if self.without_shapes != other.without_shapes:
            return False
        sizes = [pair for own, its in zip(self.shapes, other.shapes) for pair in zip(own, its)]
        bucket = [(bisect.bisect_left(buckets, a), bisect.bisect_left(buckets, b)) for a, b in sizes]
        return all(a <= b for a, b in sizes) and all(a == b for a, b in bucket)

    @property
    def without_shapes(self) -> tuple[Any, ...]:
        """All properties with shapes replaced by their number of dimensions, and without strides and integer values."""
        leaves = tuple((len(a), b) if isinstance(a, tuple) else (a, None if a is int else b) for a, b in self.leaves)
        return self._replace(leaves=leaves, strides=())


@dataclass(frozen=True)
class Call:
    """A call of the model, as its graph takes it.

    Parameters
    ----------
    args, kwargs: as the user gave them, or with a tensor for the number of items. given: both, as the user gave them.
    trains, state, around: as in `CallKind`.
    reserved_bytes: the part of the budget that other tensors on the device take while it runs.
    together: how many such calls run in turn, block by block. early: as in `CallKind`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    trains: bool
    state: int
    around: tuple[Any, ...]
    reserved_bytes: int = 0
    together: int = 1
    early: bool = False

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """The arguments in the order in which graphs take them."""
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """The tensor of each leaf, None for other leaves."""
        return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in self.leaves]

    @functools.cached_property
    def kind(self) -> CallKind:
        """The properties that decide its plan."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        described = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), _told_apart(leaf))
            for leaf in leaves
        )
        odd = next((type(leaf).__name__ for leaf in leaves if getattr(type(leaf), "__hash__", None) is None), None)
        if odd is not None:
            raise CaptureError(
                f"an argument is a {odd}, which cannot be checked for changes; pass tensors, numbers, text or tuples "
                "of them (torch.from_numpy makes a tensor of an array)"
            )
        strides = tuple(_strides(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return CallKind(
            str(spec), described, self.trains, self.state, self.around, self.reserved_bytes, strides, self.together,
            self.early,
        )  # fmt: skip

    def as_given(self) -> Call:
        """Return the same call with its numbers as the user gave them."""
        args, kwargs = self.given
        return replace(self, args=args, kwargs=kwargs)


def _told_apart(leaf: Any) -> Any:
    """Return a value that is equal for two leaves of a type if a forward cannot tell them apart: nan, but not -0.0."""
    return leaf.hex() if isinstance(leaf, float) else leaf


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's strides, 0 for dimensions of size 1, () if contiguous: kernels and forwards may read them."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride()))


@dataclass
class Variant:
    """A prepared graph for one kind of call, with its executor.

    Parameters
    ----------
    shape: what the executor's actions work on in such calls. place: where its memory comes from, on a device with its
        own allocator. followed: the variant, of larger batches, whose executor it uses since it takes the same actions;
        None for its own. figures: how its plan compares with one that updates otherwise, where both are kept.
    """

    prepared: Prepared
    executor: Executor
    kind: CallKind
    shape: Shape
    place: MemoryLayout | None = None
    followed: Variant | None = None
    figures: BreakEven | None = None

    @property
    def lead(self) -> Variant:
        """The variant for which its executor was made."""
        return self if self.followed is None else self.followed

    @property
    def room_bytes(self) -> int:
        """The part of the budget that its plan never uses."""
        plan = self.prepared.plan
        return plan.budget_bytes - plan.predicted_peak_bytes

    @property
    def output_nodes(self) -> tuple[str, ...]:
        """Names of the output values, in the order in which autograd sees them."""
        return self.prepared.binding.outputs

    @functools.cached_property
    def read_by_backward(self) -> frozenset[str]:
        """Values that some block's backward reads; outputs among them may not change before the backward."""
        found: set[str] = set()
        for block in self.prepared.binding.blocks:
            slots = pytree.tree_leaves([(i.args, i.kwargs) for i in block.backward.instructions])
            read = {slot.index for slot in slots if isinstance(slot, Slot)}
            found |= {port.name for port in (*block.inputs, *block.results) if port.register in read}
        return frozenset(found)

    @functools.cached_property
    def used_inside(self) -> frozenset[str]:
        """Output values that the model itself uses further."""
        nodes = [node for node in self.prepared.captured.graph.nodes if node.name in self.output_nodes]
        return frozenset(n.name for n in nodes if any(user.op != "output" for user in n.users))

    def named(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return output values by the names under which the model returns them."""
        captured = self.prepared.captured
        names = {o: n for o, n in zip(captured.outputs, captured.output_names) if isinstance(o, str)}
        return {names.get(node, node): output for node, output in outputs.items()}

    @property
    def updates(self) -> set[str]:
        """Names of the parameters that its iteration updates."""
        schedule = self.prepared.plan.schedule
        return schedule.update_cpu_s.keys() | schedule.update_device_s.keys()

    @functools.cached_property
    def graded(self) -> frozenset[str]:
        """Names of the parameters that its backward makes gradients for."""
        return frozenset(names_of(self.prepared.plan.schedule.item_bytes, ItemKind.GRADIENT))

    def returned(self, outputs: dict[str, torch.Tensor]) -> tuple[Any, list[tuple[ByProduct, list[torch.Tensor]]]]:
        """Build what the model returns, from its output values by name, and its by-products with their tensors."""
        captured = self.prepared.captured
        leaves = [outputs[o] if isinstance(o, str) else o[0] for o in captured.outputs]
        result, tensors = pytree.tree_unflatten(leaves, captured.out_spec)
        rest = iter(tensors)
        return result, [(b, [next(rest) for _ in range(b.n_tensors)]) for b in captured.by_products]


class Variants:
    """The variants of one model, by kind of call and decisions.

    State: `_known`, an LRU cache, the most recently used one last; `_asked`, the decisions about a batch of each kind,
    several lists where what is asked next depends on what was decided.

    Parameters
    ----------
    buckets: sizes between which batches share decisions. most: how many are kept, for training and for evaluation each.
    """

    def __init__(self, buckets: tuple[int, ...], most: int) -> None:
        self._buckets, self._most = buckets, most
        self._asked: dict[CallKind, dict[_Questions, tuple[batch_decisions.Decision, ...]]] = {}
        self._known: dict[tuple[CallKind, _Questions, tuple[Any, ...]], Variant] = {}

    def find(self, kind: CallKind, tensors: list[torch.Tensor]) -> Variant | None:
        """Return the variant for a call; None if it must be prepared."""
        for questions, decisions in self._asked.get(kind, {}).items():
            key = kind, questions, batch_decisions.ask_again(decisions, tensors)
            variant = self._known.pop(key, None)
            if variant is not None:
                self._known[key] = variant
                return variant
        return None

    def add(self, kind: CallKind, variant: Variant) -> None:
        """Keep a variant that was prepared for a call of this kind, dropping the least recently used one if needed."""
        taken = variant.prepared.captured.taken
        questions = tuple((d.decider, d.source) for d in taken)
        self._asked.setdefault(kind, {}).setdefault(questions, taken)
        self._known[kind, questions, tuple(d.outcome for d in taken)] = variant
        alike = [key for key in self._known if key[0].trains == kind.trains]
        for key in alike[: -self._most]:
            del self._known[key]

    def forget(self, variant: Variant) -> list[Variant]:
        """Drop a variant, and that of other updates for the same calls, so that the next such call is planned anew.

        Returns: those that were dropped.
        """
        other = variant.kind._replace(early=not variant.kind.early)
        dropped = [v for v in self._known.values() if v is variant or v.kind == other]
        self._known = {key: v for key, v in self._known.items() if v is not variant and v.kind != other}
        return dropped

    def drop(self, variant: Variant) -> None:
        """Drop a variant, and those that use its executor."""
        self._known = {key: v for key, v in self._known.items() if v.executor is not variant.executor}

    def replace(self, variant: Variant) -> None:
        """Keep a variant instead of those for the same kind of calls."""
        self._known = {key: v for key, v in self._known.items() if v.kind != variant.kind}
        self.add(variant.kind, variant)

    @property
    def executors(self) -> set[Executor]:
        """Those that the variants use."""
        return {variant.executor for variant in self._known.values()}

    def forget_together(self) -> None:
        """Drop the variants whose steps run several micro-batches."""
        self._known = {key: v for key, v in self._known.items() if key[0].together == 1}

    def clear(self) -> None:
        """Drop all variants, so that every next call is planned anew."""
        self._known.clear()

    def of_training(self) -> tuple[Variant, ...]:
        """Return the variants that train, the most recently used one last."""
        return tuple(v for (kind, *_), v in self._known.items() if kind.trains)

    def near(self, kind: CallKind) -> tuple[Variant, ...]:
        """Return those of larger training batches that differ only in shapes and share a bucket, smallest first."""
        found = [
            (known.n_elements, variant)
            for (known, *_), variant in self._known.items()
            if kind.trains and kind.may_follow(known, self._buckets)
        ]
        return tuple(variant for _, variant in sorted(found, key=lambda pair: pair[0]))


class Followers:
    """The variants that use a variant's executor beside it, each in slots of its own of the same steps.

    State: `variants`; `_unfit`, by kind of calls, those that cannot follow: what the model decided about them, and why.

    Parameters
    ----------
    most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self.variants = Variants((), most)
        self._unfit: dict[CallKind, list[tuple[tuple[batch_decisions.Decision, ...], Unfit]]] = {}

    def check(self, kind: CallKind, tensors: list[torch.Tensor]) -> None:
        """Raise Unfit if it is known that a call cannot follow."""
        for taken, why in self._unfit.get(kind, ()):
            if batch_decisions.ask_again(taken, tensors) == tuple(one.outcome for one in taken):
                raise why.again()

    def refuse(self, kind: CallKind, taken: tuple[batch_decisions.Decision, ...], why: Unfit) -> None:
        """Note that calls of a kind cannot follow about which the model decides like this."""
        self._unfit.setdefault(kind, []).append((taken, why.again()))


class Counts:
    """The number of items of a batch, which transformers' models take as an integer that differs in every batch.

    A Python number needs a graph for each of its values; a tensor does not. transformers divides a float32 loss by this
    number, with the same bits in both forms. Every other number stays as it is, since a forward may check its type, and
    lower precisions round differently.

    State: `_needed`, whether the model was seen to need a number.

    Parameters
    ----------
    model: counts of items are passed as tensors if its forward belongs to transformers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        plain = getattr(model, "get_base_model", lambda: model)()
        self._needed = not type(plain).__module__.startswith("transformers.models.")

    def as_tensor(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with a count of items as a tensor."""
        if self._needed or type(kwargs.get(_COUNT)) is not int:
            return kwargs
        return {**kwargs, _COUNT: torch.tensor(kwargs[_COUNT])}

    def keep(self, kwargs: dict[str, Any]) -> bool:
        """Pass counts on unchanged from now on; return False if this call has none or that was so already."""
        changed = not self._needed and type(kwargs.get(_COUNT)) is int
        self._needed = True
        return changed


def most_kept(request: Request) -> int:
    """Return how many variants are kept, for training and for evaluation each."""
    return request.config.max_plans * (2 if request.chooses else 1)
