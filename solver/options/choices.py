"""Options of a block class: keep, recompute or offload, for each forward value that the backward reads."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from ..backends.cpsat import CpSat
from ..block_graph import BlockGraph

LEVELS = (0.25, 0.5, 0.75)  # of the bytes that keeping everything holds beyond recomputing everything
CHEAP_LINK = 0.25  # cost of a copy over a link that is idle anyway, relative to one that makes compute wait


@dataclass(frozen=True)
class Choice:
    """One option of a class.

    Parameters
    ----------
    keep, offload: storages that stay on the device; storages that leave after the forward and return before the
        backward.
    recompute: indices of the ops that the backward runs again, in program order.
    """

    name: str
    keep: frozenset[int]
    offload: frozenset[int]
    recompute: tuple[int, ...]
    keep_bytes: int
    offload_bytes: int
    recompute_s: float


def choices(
    graph: BlockGraph, link_bytes_per_s: float, max_choices: int = 8, cpsat: CpSat | None = None
) -> tuple[Choice, ...]:
    """Return the Pareto frontier of a class in bytes kept, bytes moved and seconds of recomputation.

    Parameters
    ----------
    link_bytes_per_s: rate at which offloaded storages leave, and at which they return. max_choices: at least 3.
    cpsat: answers the questions of several classes; None to start one for this class.

    Returns: "keep", which keeps the most bytes; then mixtures by falling bytes kept; "recompute", which keeps the
    least; and "offload", which keeps nothing and recomputes the storages that cost less to recompute than to move.
    """
    if link_bytes_per_s <= 0 or max_choices < 3:
        raise ValueError(
            f"link_bytes_per_s is {link_bytes_per_s}, not above 0, or max_choices is {max_choices}, not at least 3"
        )
    everything = _choice(graph, "keep", graph.own(graph.saved), frozenset())
    with CpSat() if cpsat is None else nullcontext(cpsat) as running:
        fixed, mixtures = _candidates(graph, everything, 2 / link_bytes_per_s, running)
    frontier = [m for m in _distinct(fixed + mixtures)[len(fixed) :] if not any(_beats(c, m) for c in fixed + mixtures)]
    frontier.sort(key=lambda c: (-c.keep_bytes, c.recompute_s, c.offload_bytes))
    chosen = _spread(frontier, max_choices - len(fixed))
    named = [_renamed(c, f"mixture {i}") for i, c in enumerate(chosen, 1)]
    return (fixed[0], *named, *fixed[1:])


def _candidates(
    graph: BlockGraph, everything: Choice, price_s: float, cpsat: CpSat
) -> tuple[list[Choice], list[Choice]]:
    """Return the choices that always exist, and the best at each level of bytes kept and price of the link."""
    least_bytes = _choice(graph, "", *cpsat.least_kept(graph)).keep_bytes
    recompute = _choice(graph, "recompute", *cpsat.fastest(graph, least_bytes, None))
    offload = _choice(graph, "offload", *cpsat.fastest(graph, 0, price_s))
    points: list[tuple[int, float | None]] = [(0, CHEAP_LINK * price_s)]
    for level in LEVELS:
        kept_bytes = least_bytes + int(level * (everything.keep_bytes - least_bytes))
        points += [(kept_bytes, price) for price in (None, price_s, CHEAP_LINK * price_s)]
    mixtures = [_choice(graph, "mixture", *cpsat.fastest(graph, kept, price)) for kept, price in points]
    return _distinct([everything, recompute, offload]), mixtures


def _choice(graph: BlockGraph, name: str, keep: frozenset[int], offload: frozenset[int]) -> Choice:
    """Derive the choice that keeps and offloads these storages: the ops to run again, and the storages still needed."""
    again: set[int] = set()
    needed: set[int] = set()
    wanted = list(graph.own(graph.saved))
    while wanted:
        j = wanted.pop()
        if j in needed:
            continue
        needed.add(j)
        if j not in keep and j not in offload and graph.maker[j] not in again:
            again.add(graph.maker[j])
            wanted.extend(graph.own(graph.ops[graph.maker[j]].reads))
    needed = {j for j in needed if graph.maker[j] not in again}
    return Choice(
        name=name,
        keep=keep & needed,
        offload=(offload - keep) & needed,
        recompute=tuple(sorted(again)),
        keep_bytes=graph.bytes_of(keep & needed),
        offload_bytes=graph.bytes_of((offload - keep) & needed),
        recompute_s=sum(graph.ops[a].seconds for a in sorted(again)),
    )


def _renamed(choice: Choice, name: str) -> Choice:
    return Choice(**(vars(choice) | {"name": name}))


def _costs(choice: Choice) -> tuple[int, int, float]:
    return choice.keep_bytes, choice.offload_bytes, choice.recompute_s


def _beats(one: Choice, other: Choice) -> bool:
    """Return whether `one` dominates `other`: no worse in any cost and better in at least one."""
    pairs = list(zip(_costs(one), _costs(other)))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _distinct(found: list[Choice]) -> list[Choice]:
    """Return the first of the choices with each combination of costs."""
    return list({_costs(c): c for c in reversed(found)}.values())[::-1]


def _spread(frontier: list[Choice], count: int) -> list[Choice]:
    """Return at most `count` of them, evenly spaced in their order."""
    if len(frontier) <= count:
        return frontier
    return [frontier[(2 * i + 1) * len(frontier) // (2 * count)] for i in range(count)]
