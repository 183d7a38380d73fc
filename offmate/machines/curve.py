"""Copy curves: how long copies of several sizes take, and the rates and seconds per copy that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

DIRECTIONS = ("in", "out", "both")


@dataclass(frozen=True)
class Copied:
    """A point of a curve.

    Parameters
    ----------
    direction: to the device, from it, or one copy each way at the same time. bytes: of one copy.
    bytes_per_s: rate that was reached, added up for both.
    """

    direction: str
    bytes: int
    bytes_per_s: float


class Line(NamedTuple):
    """Copies that take seconds of their own and seconds for each byte."""

    bytes_per_s: float
    per_copy_s: float


@dataclass(frozen=True)
class Fitted:
    """The figures of a link that a curve gives, in bytes per second and seconds; named as in `LinkRates`."""

    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float
    per_copy_s: float


def fitted(curve: Iterable[Copied]) -> Fitted:
    """Return a link's rates and its seconds per copy, the mean of both directions.

    Raises: ValueError naming the direction of which there is no copy.
    """
    points: dict[str, list[tuple[int, float]]] = {direction: [] for direction in DIRECTIONS}
    for one in curve:
        moved_bytes = 2 * one.bytes if one.direction == "both" else one.bytes
        points[one.direction].append((moved_bytes, moved_bytes / one.bytes_per_s))
    missing = [direction for direction, found in points.items() if not found]
    if missing:
        raise ValueError(f"no copy in direction {', '.join(missing)}")
    into, out, both = (line(points[direction]) for direction in DIRECTIONS)
    return Fitted(into.bytes_per_s, out.bytes_per_s, both.bytes_per_s, (into.per_copy_s + out.per_copy_s) / 2)


def line(points: Sequence[tuple[int, float]]) -> Line:
    """Fit a straight line to copies, so that a few that were disturbed do not move it.

    Its slope is the median of the slopes between any two sizes. Its height is the median of what the smaller half of
    the copies take beyond their bytes, since these are the ones of which that is a large part.

    Parameters
    ----------
    points: bytes and seconds, at least one.

    Source: the slope is the estimator of Theil (1950) and Sen (1968).
    """
    points = sorted(points)
    slopes = [(t - s) / (b - a) for (a, s), (b, t) in combinations(points, 2) if a != b]
    per_byte_s = statistics.median(slopes) if slopes else 0.0
    if per_byte_s <= 0:  # one size only, or sizes too alike for their copies' noise
        largest_bytes, seconds = points[-1]
        return Line(largest_bytes / seconds, 0.0)
    small = points[: (len(points) + 1) // 2]
    return Line(1 / per_byte_s, max(0.0, statistics.median(seconds - size * per_byte_s for size, seconds in small)))
