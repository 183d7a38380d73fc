"""Search for the least number of micro-batches per update after which one more hardly adds tokens per second.

Everything that an update costs once is shared by its micro-batches, so more of them train more tokens per second until
computing is all that takes time. The seconds of an update grow ever more steeply with their number. So a few numbers
are solved, and between them these seconds lie below the line through two neighbours, and above the lines beyond them.

One micro-batch is apart: it may need no gate where two of them do, and then two are slower than twice one. So the
search looks at two and more, and compares the best of these with one at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, get_args

from .passes import between
from .problem import Problem
from .resources import Resource
from .solution import Solution, Status
from .solve import solve

Order = Literal["by batch", "by block"]
ORDERS: tuple[Order, ...] = get_args(Order)

MOST = 64  # micro-batches per update that are tried
WORTH = 1.01  # one more micro-batch must add tokens per second by this factor
_KNOWN = 1.005  # bounds of an update's seconds that are this close together need no further solve
_CLEARLY = 1.05  # an order that is slower by this factor is left out for more micro-batches
_MOST_REFINED = 8


@dataclass(frozen=True)
class AccumulationTrial:
    """A number of micro-batches per update in one order, and what the program predicts for it.

    Parameters
    ----------
    order: "by block" also where passes run some of them. per_pass: how many these are; 0 if they are one or all.
    update_s: seconds per update, in fractions of tensors; None if it does not fit, or if the search ran out of time.
    compute_s: seconds that its computes take alone, with room for everything. moved_s, moved_on: seconds that the bytes
        which it moves take alone on the path that they keep busy longest, and the tier that this path leads to.
    cpu_s: seconds of work on the CPU. solve_s: seconds of the solve. timed_out: whether the time limit ended it before
        any plan was found.
    """

    micro_batches: int
    order: Order
    update_s: float | None
    compute_s: float = 0.0
    moved_s: float = 0.0
    moved_on: str = ""
    cpu_s: float = 0.0
    solve_s: float = 0.0
    timed_out: bool = False
    per_pass: int = 0

    @property
    def micro_batches_per_pass(self) -> int:
        """The micro-batches for which each block runs in turn."""
        return self.per_pass or (1 if self.order == "by batch" else self.micro_batches)

    @property
    def fits(self) -> bool:
        """Whether a plan stays within the budgets."""
        return self.update_s is not None

    @property
    def rate(self) -> float:
        """Micro-batches per second; 0 if it does not fit."""
        return self.micro_batches / self.update_s if self.update_s else 0.0


def try_micro_batches(
    stated: Callable[[int, int], Problem | None],
    *,
    orders: tuple[Order, ...] = ORDERS,
    most: int = MOST,
    time_limit_s: float = 20.0,
    gap: float = 0.005,
    backend: str | None = None,
) -> Iterator[AccumulationTrial]:
    """Solve for 1, 2, 4, ... micro-batches per update until one more adds less than 1 %, then between these.

    Parameters
    ----------
    stated: states the problem of an update of so many micro-batches, of which each pass runs so many; None where that
        cannot run.
    orders: that are tried. Once one is clearly slower, it is left out for more micro-batches, unless the other does
        not fit. With both, passes of some micro-batches are tried where they may be faster (see passes.py).
    most: micro-batches. time_limit_s, gap, backend: as in `solve`, for each solve.

    Returns: trials in the order in which they are made. One micro-batch counts as "by batch".
    Source: GreedySnake, section 4.5 and algorithm 1, which counts up one by one.
    """
    search = _Search(stated, orders, {"time_limit_s": time_limit_s, "gap": gap, "backend": backend})
    count = 1
    yield from search.measured(count)
    if not search.fits(count):  # more need more memory
        return
    while not search.is_flat(count) and count < most:
        count = min(2 * count, most)
        yield from search.measured(count)
        if not search.fits(count):
            break
    for _ in range(_MOST_REFINED):
        between = search.unknown()
        if between is None:
            return
        yield from search.measured(between)


def fewest(trials: Iterable[AccumulationTrial]) -> AccumulationTrial:
    """Return the trial with the least micro-batches after which one more adds less than 1 % of tokens per second.

    One micro-batch is taken if that many train less than 1 % more tokens per second. Between numbers that were tried,
    the seconds of an update are those on the line through them. The number that is returned was tried, and is the next
    larger one if the least was not. If nothing fits, it is the first trial.
    """
    found = tuple(trials)
    seconds = _fastest(found)
    if not seconds:
        return found[0]
    several = _several(seconds)
    least = _least(several)
    taken = min((count for count in several if count >= least), default=max(several))
    if 1 in seconds and taken / seconds[taken] < WORTH / seconds[1]:
        taken = 1
    return max((one for one in found if one.micro_batches == taken), key=lambda one: one.rate)


def _fastest(trials: Iterable[AccumulationTrial]) -> dict[int, float]:
    """Return the seconds of an update in the faster order, by the number of micro-batches that fit, ascending."""
    found: dict[int, float] = {}
    for one in sorted(trials, key=lambda one: one.micro_batches):
        if one.update_s is not None:
            found[one.micro_batches] = min(one.update_s, found.get(one.micro_batches, inf))
    return found


def _several(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds of more than one micro-batch; all, if there are no such."""
    return {count: s for count, s in seconds.items() if count > 1} or dict(seconds)


def _least(seconds: Mapping[int, float]) -> int:
    """Return the least number after which one more adds less than 1 %, or the largest one that is known."""
    for count in range(min(seconds), max(seconds)):
        if (count + 1) / _on_line(seconds, count + 1) < WORTH * count / _on_line(seconds, count):
            return count
    return max(seconds)


def _on_line(seconds: Mapping[int, float], count: int) -> float:
    below, above = max(n for n in seconds if n <= count), min(n for n in seconds if n >= count)
    if below == above:
        return seconds[below]
    return seconds[below] + (count - below) / (above - below) * (seconds[above] - seconds[below])


class _Search:
    """What is known of a search.

    State: `_known`, all trials by their numbers of micro-batches, per update and per pass; `_usual`, the last problem
    in the usual order; `_slower`, the order that is left out. Changed by one thread.

    Parameters
    ----------
    stated, orders: as in `try_micro_batches`. limits: of each solve.
    """

    def __init__(
        self, stated: Callable[[int, int], Problem | None], orders: tuple[Order, ...], limits: Mapping[str, object]
    ) -> None:
        self._stated, self._orders, self._limits = stated, orders, limits
        self._known: dict[tuple[int, int], AccumulationTrial] = {}
        self._usual: Problem | None = None
        self._slower: Order | None = None

    def measured(self, count: int) -> Iterator[AccumulationTrial]:
        """Solve for so many micro-batches, in the orders that may be the faster one."""
        orders: tuple[Order, ...] = ("by batch",) if count == 1 else self._orders
        tried = [order for order in orders if order != self._slower]
        of = [self._solved(count, _per_pass(count, order)) for order in tried]
        yield from of
        if not self.fits(count):
            of += [self._solved(count, _per_pass(count, order)) for order in orders if order not in tried]
            yield from of[len(tried) :]
        elif len(of) > 1 and all(one.fits for one in of):
            slower, faster = sorted(of, key=lambda one: one.rate)
            if faster.rate > _CLEARLY * slower.rate:
                self._slower = slower.order
        some = self._between(count) if len(orders) > 1 else None
        if some is not None:
            yield self._solved(count, some)

    def _between(self, count: int) -> int | None:
        """Return a number of micro-batches per pass, neither one nor all, that may be faster; None if none may."""
        if self._usual is None or self._usual.per_update != count:
            self._usual = self._stated(count, 1)
        if self._usual is None:
            return None
        all_fit = (whole := self._known.get((count, count))) is not None and whole.fits
        return between(self._usual, self._seconds.get(count, inf), all_fit=all_fit)

    def _solved(self, count: int, per_pass: int) -> AccumulationTrial:
        order: Order = "by batch" if per_pass == 1 else "by block"
        problem, some = self._stated(count, per_pass), 0 if per_pass in (1, count) else per_pass
        if per_pass == 1:
            self._usual = problem
        if problem is None:
            trial = AccumulationTrial(count, order, None, per_pass=some)
        else:
            trial = replace(tried(problem, order, solve(problem, **self._limits)), per_pass=some)  # type: ignore[arg-type]
        self._known[count, per_pass] = trial
        return trial

    def fits(self, count: int) -> bool:
        """Return whether so many micro-batches fit in some order."""
        return count in self._seconds

    @property
    def _seconds(self) -> dict[int, float]:
        return _fastest(self._known.values())

    def is_flat(self, count: int) -> bool:
        """Return whether more than so many micro-batches can add no 1 % per micro-batch."""
        seconds = self._seconds
        if count not in seconds:
            return False
        if WORTH * count * self._alone_s >= seconds[count]:
            return True
        before = max((n for n in seconds if 1 < n < count), default=None)
        if before is None:
            return False
        # The seconds grow ever more steeply: what the last ones have added on average is the most that one more adds.
        return count / seconds[count] < WORTH ** (count - before) * before / seconds[before]

    @property
    def _alone_s(self) -> float:
        """The least seconds in which the device computes a micro-batch, whatever else it waits for."""
        return max((one.compute_s / one.micro_batches for one in self._known.values()), default=0.0)

    def unknown(self) -> int | None:
        """Return the number at which a solve says most about the least one; None if enough is known."""
        seconds = _several(self._seconds)
        counts = list(seconds)
        if len(counts) < 2:
            return None
        least = _least(seconds)
        place = max(i for i, count in enumerate(counts) if count <= least)
        place = min(place, len(counts) - 2)
        for one in (place, place - 1):
            if one >= 0 and (one == place or counts[place] == least):
                found = self._where_lines_cross(seconds, counts, one)
                if found is not None:
                    return found
        return least if least not in seconds else None

    def _where_lines_cross(self, seconds: Mapping[int, float], counts: list[int], place: int) -> int | None:
        """Return where the lines beyond two neighbours cross; None if that is known well enough."""
        low, high = counts[place], counts[place + 1]
        if high - low < 2:
            return None
        rising = _slope(seconds, counts[place - 1], low) if place else 0.0
        after = _slope(seconds, high, counts[place + 2]) if place + 2 < len(counts) else self._alone_s
        after = max(after, _slope(seconds, low, high))
        rising = min(rising, _slope(seconds, low, high))
        if after <= rising:
            return None
        cross = (seconds[high] - seconds[low] + rising * low - after * high) / (rising - after)
        found = min(max(round(cross), low + 1), high - 1)
        left_s, right_s = seconds[low] + rising * (found - low), seconds[high] - after * (high - found)
        bound_s = max(left_s, right_s, found * self._alone_s)
        return found if _on_line(seconds, found) > _KNOWN * bound_s else None


def _per_pass(count: int, order: Order) -> int:
    return 1 if order == "by batch" else count


def _slope(seconds: Mapping[int, float], low: int, high: int) -> float:
    return (seconds[high] - seconds[low]) / (high - low)


def tried(problem: Problem, order: Order, solution: Solution) -> AccumulationTrial:
    """Return the trial that a solution is of.

    Parameters
    ----------
    problem: of an update in this order.
    """
    busy, count = solution.busy_s, problem.per_update
    fits, computes_s = bool(solution.options), problem.all_computes_s
    paths = problem.rates.paths
    moved = {tier: path.seconds(*(busy.get(link, 0.0) for link in path.links)) for tier, path in paths.items()}
    on = max(moved, key=lambda tier: moved[tier])
    return AccumulationTrial(
        count, order, solution.objective_s if fits else None, computes_s, moved[on], on, busy.get(Resource.CPU, 0.0),
        solution.solve_s, solution.status is Status.NO_ANSWER,
    )  # fmt: skip
