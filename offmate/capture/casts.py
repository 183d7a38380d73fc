"""Watches which parameters autocast casts.

Under `torch.autocast`, eager mode casts a trained parameter at its first use and keeps the copy until the region ends.
The gradients of all uses are added up in the lower precision, at the copy, before they are cast back. A frozen
parameter that is only ever cast could as well be kept in the lower precision.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import fx

from ..errors import CaptureError
from ..guards.surroundings import inside_autocast
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.operators import CASTS, cast
from ..runtime.torch_names.tracing import TorchDispatchMode

_EXPLICIT = (*CASTS, "offmate.")


class Watch(Protocol):
    """Watches parameters while a flat graph runs."""

    def knows(self, node: fx.Node, value: torch.Tensor) -> None:
        """Note that the placeholder of a parameter has this value."""
        ...

    def of(self, node: fx.Node) -> AbstractContextManager[None]:
        """Watch what a node does."""
        ...


class Together:
    """Several watches at once."""

    def __init__(self, *watches: Watch) -> None:
        self._watches = watches

    def knows(self, node: fx.Node, value: torch.Tensor) -> None:
        """Tell all of them."""
        for watch in self._watches:
            watch.knows(node, value)

    @contextlib.contextmanager
    def of(self, node: fx.Node) -> Iterator[None]:
        """Have all of them watch."""
        with contextlib.ExitStack() as stack:
            for watch in self._watches:
                stack.enter_context(watch.of(node))
            yield


class Casts(TorchDispatchMode):
    """Finds trained parameters that autocast casts once for several uses, so that their gradients add up rounded.

    State: `_nodes`, placeholders of trained parameters by the identity of their values, from `knows`; `_seen`, per
    parameter the region and precision of every cast; `_readers`, per parameter the node for which each was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, fx.Node] = {}
        self._seen: dict[fx.Node, list[tuple[object, torch.dtype]]] = defaultdict(list)
        self._readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._around = inside_autocast()
        self._shared = torch.is_autocast_cache_enabled()
        self._at: fx.Node | None = None

    def knows(self, node: fx.Node, value: torch.Tensor) -> None:
        """Note that the placeholder of a parameter has this value."""
        if value.requires_grad:
            self._nodes[id(value)] = node

    @contextlib.contextmanager
    def of(self, node: fx.Node) -> Iterator[None]:
        """Watch the casts for a node, if it can have any; the cache is off, so that each one is seen."""
        region = node.meta["region"]
        explicit = str(node.target).startswith(_EXPLICIT)
        if explicit or not region.grad or not (self._around or region.autocast is not None):
            yield
            return
        self._at = node
        with _without_cache(), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is cast and id(args[0]) in self._nodes and "dtype" in kwargs:
            param = self._nodes[id(args[0])]
            self._seen[param].append((self._region(), kwargs["dtype"]))
            assert self._at is not None
            self._readers[param].append(self._at)
        return func(*args, **kwargs)

    def _region(self) -> object:
        """Return a key for the lifetime of the copy: casts with equal keys and precisions share one copy."""
        assert self._at is not None
        region = self._at.meta["region"]
        if self._around:
            return "around" if self._shared else object()
        cache = region.autocast[3]
        return region.instance if (self._shared if cache is None else cache) else object()

    def rounded(self, graph: fx.Graph) -> dict[fx.Node, torch.dtype]:
        """Return the parameters of which one copy has several uses, with the copy's precision.

        An operator that casts a parameter several times, as a GRU does once per time step, shares the copy, too.

        Raises: CaptureError for one that has other uses, too: then the order of the sum in eager mode is not known.
        """
        uses: Counter[fx.Node] = Counter()
        for node in graph.nodes:
            fx.map_arg((node.args, node.kwargs), lambda n: uses.update([n]))
        found = {}
        for node, casts in self._seen.items():
            if all(count < 2 for count in Counter(casts).values()):
                continue
            readers = Counter(self._readers[node])
            again = uses[node] > 1 and max(readers.values()) > 1  # then parts of parts are added up
            if again or len(set(casts)) > 1 or len(readers) < len(node.users):
                raise CaptureError(
                    f"{node.name} is used several times in one torch.autocast region and also outside it, or by a "
                    "layer that uses it at every time step. A plan cannot add up its gradients in the same order in "
                    "the lower precision. Use torch.autocast(..., cache_enabled=False), or keep all its uses in one "
                    "region"
                )
            found[node] = casts[0][1]
        return found


class Reads(TorchDispatchMode):
    """Finds parameters that autocast casts to one precision wherever they are read.

    State: `_nodes`, placeholders of parameters by the identity of their values, from `knows`; `_trained`, those of
    trained ones; `_precisions`, per parameter that of each of its casts; `_whole`, those that an operator reads as they
    are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, fx.Node] = {}
        self._precisions: dict[fx.Node, list[torch.dtype]] = defaultdict(list)
        self._whole: set[fx.Node] = set()
        self._trained: set[fx.Node] = set()

    def knows(self, node: fx.Node, value: torch.Tensor) -> None:
        """Note that the placeholder of a parameter has this value."""
        self._nodes[id(value)] = node
        if value.requires_grad:
            self._trained.add(node)

    @contextlib.contextmanager
    def of(self, node: fx.Node) -> Iterator[None]:
        """Watch how a node reads parameters. One that casts explicitly may give a parameter itself, which is a read."""
        if str(node.target).startswith(_EXPLICIT):
            self._whole.update(node.all_input_nodes)
        with _without_cache(), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = [self._nodes[id(x)] for x in pytree.tree_leaves((args, kwargs)) if id(x) in self._nodes]
        if func is cast and "dtype" in kwargs:
            for node in known:
                self._precisions[node].append(kwargs["dtype"])
        elif func.namespace != "prim":  # which asks where a tensor is, not for its values
            self._whole.update(known)
        return func(*args, **kwargs)

    def only_cast(self) -> dict[fx.Node, torch.dtype]:
        """Return the parameters that are only ever cast to one precision, with it; trained ones if cast just once.

        The gradients of several casts of a trained parameter add up before or after rounding, depending on the program.
        """
        found = {node: seen for node, seen in self._precisions.items() if node not in self._whole}
        return {
            node: seen[0]
            for node, seen in found.items()
            if len(set(seen)) == 1 and (len(seen) == 1 or node not in self._trained)
        }


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Inside, autocast casts anew at every use, so that each cast is seen."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


def added(total: torch.Tensor, part: torch.Tensor, precision: torch.dtype | None) -> torch.Tensor:
    """Add two gradients; if both belong to one copy in a lower precision, round the sum to that precision."""
    both = total + part
    return both if precision is None else both.to(precision).to(both.dtype)
