"""Finds parameters that autocast's cache casts once for several uses, so that their gradients add up rounded.

Under `torch.autocast`, eager mode casts a parameter at its first use and keeps the copy until the region ends. The
gradients of all uses are added up in the lower precision, at the copy, before they are cast back.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..guards.surroundings import inside_autocast
from ..runtime.torch_names.operators import CASTS, cast
from ..runtime.torch_names.tracing import TorchDispatchMode

_EXPLICIT = (*CASTS, "offmate.")


class Casts(TorchDispatchMode):
    """Watches which parameters autocast casts for which node, while a flat graph runs.

    State: `_nodes`, placeholders of trained parameters by the identity of their values, from `knows`; `_seen`, per
    parameter the region and precision of every cast.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, fx.Node] = {}
        self._seen: dict[fx.Node, list[tuple[object, torch.dtype]]] = defaultdict(list)
        self._around = inside_autocast()
        self._shared = torch.is_autocast_cache_enabled()
        self._at: fx.Node | None = None

    def knows(self, node: fx.Node, value: torch.Tensor) -> None:
        """Note that the placeholder of a trained parameter has this value."""
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
        kept = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with self:
                yield
        finally:
            torch.set_autocast_cache_enabled(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is cast and id(args[0]) in self._nodes and "dtype" in kwargs:
            self._seen[self._nodes[id(args[0])]].append((self._region(), kwargs["dtype"]))
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

        Raises: CaptureError for one that has other uses, too: then the order of the sum in eager mode is not known.
        """
        uses: Counter[fx.Node] = Counter()
        for node in graph.nodes:
            fx.map_arg((node.args, node.kwargs), lambda n: uses.update([n]))
        found = {}
        for node, casts in self._seen.items():
            if all(count < 2 for count in Counter(casts).values()):
                continue
            if len(set(casts)) > 1 or len(casts) < uses[node]:
                raise CaptureError(
                    f"{node.name} is used several times in one torch.autocast region, and elsewhere too; the order in "
                    "which its gradients add up in the lower precision cannot be followed. Use "
                    "torch.autocast(..., cache_enabled=False), or keep all its uses in one region"
                )
            found[node] = casts[0][1]
        return found


def added(total: torch.Tensor, part: torch.Tensor, precision: torch.dtype | None) -> torch.Tensor:
    """Add two gradients; if both belong to one copy in a lower precision, round the sum to that precision."""
    both = total + part
    return both if precision is None else both.to(precision).to(both.dtype)
