"""How fast resources are while others work beside them, and what that makes loads on them take at least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from .resources import Path, Rates, Resource

Weights = Mapping[Resource, float]
_Vector = tuple[float, float, float]
_CLOSE = 1e-9


class Speeds:
    """The fraction of its full speed at which each resource works, by those that work at the same time.

    If both links of a path together exceed its total rate, both slow down in proportion; so do links and workers that
    together exceed the rate of host memory. On shared cores each of k resources has 1/k of its speed.

    Parameters
    ----------
    rates: the resources, the rates of their links, and whether all share cores.
    """

    def __init__(self, rates: Rates) -> None:
        self._shared_cores, self._memory = rates.shared_cores, rates.host_memory_shares
        self._beside = {link: (other, path.together) for path in rates.paths.values() for link, other in _pairs(path)}
        self._known: dict[tuple[Resource, ...], tuple[float, ...]] = {}

    def of(self, working: tuple[Resource, ...]) -> tuple[float, ...]:
        """Return the speed of each of the resources that work at the same time."""
        if working not in self._known:
            self._known[working] = tuple(self._worked_out(working))
        return self._known[working]

    def _worked_out(self, working: tuple[Resource, ...]) -> list[float]:
        share = 1.0 / len(working) if self._shared_cores else 1.0
        speeds = []
        for resource in working:
            other, together = self._beside.get(resource, (None, 1.0))
            speeds.append(min(share, together) if other in working else share)
        if self._memory:
            taken = [self._memory.get(resource, 0.0) for resource in working]
            slower = max(1.0, sum(part * speed for part, speed in zip(taken, speeds)))
            speeds = [speed / slower if part else speed for part, speed in zip(taken, speeds)]
        return speeds


def least_seconds(rates: Rates) -> Iterator[tuple[str, Weights]]:
    """Yield what loads that share the host's memory take at least, however they overlap: named sums of their seconds.

    The memory moves all bytes. A resource slows down by what it and each other one need beyond the memory's rate, for
    as long as the other one works, since copies come as fast as they can and not evenly. For the links of a path and a
    worker the sums are exact: no loads take longer than the largest of them says.

    Returns: by resource, the weight of its seconds at full speed; none where the host's memory has no limit, and none
    that another one exceeds whatever the loads.
    """
    shares = rates.host_memory_shares
    if not shares:
        return
    sums: dict[str, Weights] = {"host memory": shares}
    for one, share in shares.items():
        part, beside = min(1.0, share), {one: max(1.0, share)}
        for other, more in shares.items():
            if other != one:
                beside[other] = max(1.0, more) * max(0.0, part + min(1.0, more) - 1)
        sums[f"{one} beside others"] = beside
    workers = [one for one in shares if one in rates.working]
    for path in rates.paths.values():
        if all(link in shares for link in path.links):
            for worker in workers:
                for number, weights in enumerate(_of_three(rates, (*path.links, worker))):
                    sums[f"{path.into}, {path.out} and {worker} {number}"] = weights
    yield from _largest(sums)


def _of_three(rates: Rates, three: tuple[Resource, Resource, Resource]) -> Iterator[Weights]:
    """Yield the exact sums for two links and a worker: the corners of all weights that no set of them can exceed.

    In a second in which a set works, the weighted work that it gets done is at most 1. So loads whose weighted sum is T
    take T seconds, and the largest sum at a corner is the time that they need. Corners without the worker are left out.
    """
    speeds, planes = Speeds(rates), list[tuple[_Vector, float]]()
    for size in (1, 2, 3):
        for working in combinations(three, size):
            speed = dict(zip(working, speeds.of(working)))
            planes.append((_vector(speed.get(one, 0.0) for one in three), 1.0))
    sets = list(planes)
    planes += [(_vector(float(one is other) for other in three), 0.0) for one in three]
    for corner in _corners(planes):
        if corner[2] and all(_dot(normal, corner) <= limit + _CLOSE for normal, limit in sets):
            yield dict(zip(three, corner))


def _corners(planes: Sequence[tuple[_Vector, float]]) -> Iterator[_Vector]:
    """Yield the points without negative parts in which three planes meet; each is a normal and its product there."""
    for (a, at_a), (b, at_b), (c, at_c) in combinations(planes, 3):
        bc, ca, ab = _cross(b, c), _cross(c, a), _cross(a, b)
        volume = _dot(a, bc)
        if abs(volume) > _CLOSE:
            met = _vector((at_a * x + at_b * y + at_c * z) / volume for x, y, z in zip(bc, ca, ab))
            if min(met) >= -_CLOSE:
                yield _vector(part if part > _CLOSE else 0.0 for part in met)


def _largest(sums: Mapping[str, Weights]) -> Iterator[tuple[str, Weights]]:
    """Yield the sums that no other one exceeds whatever the loads; of equal ones the first."""
    for place, (name, weights) in enumerate(sums.items()):
        for other_place, other in enumerate(sums.values()):
            if (
                other_place != place
                and _exceeds(other, weights)
                and not (other_place > place and _exceeds(weights, other))
            ):
                break
        else:
            yield name, weights


def _exceeds(larger: Weights, smaller: Weights) -> bool:
    return all(weight <= larger.get(one, 0.0) + _CLOSE for one, weight in smaller.items())


def _pairs(path: Path) -> tuple[tuple[Resource, Resource], ...]:
    """Pair each link of a path with the other one."""
    return (path.into, path.out), (path.out, path.into)


def _vector(parts: Iterable[float]) -> _Vector:
    x, y, z = parts
    return x, y, z


def _dot(a: _Vector, b: _Vector) -> float:
    return sum(x * y for x, y in zip(a, b))


def _cross(a: _Vector, b: _Vector) -> _Vector:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]
