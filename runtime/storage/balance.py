"""Moves stored bytes away from paths that have become slow, and back once they are fast again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...sizes import format_bytes
from .disk_rates import MeanRates
from .engine import Engine
from .mapped import MappedStore

log = logging.getLogger("offmate")

_APART = 0.1  # part of the slowest path's seconds by which the fastest one is done before
_ITERATIONS = 3  # in a row
_WORTH = 0.05  # part by which new shares must be faster
_WORTH_S = 0.05  # seconds of work of the slowest path in an iteration; less does not matter
_PATIENCE = 30  # iterations after nothing could be moved


class Balance:
    """Looks after each iteration whether the paths of an engine are done at the same time.

    If one of them takes longer than another by more than a tenth in three iterations, shares are worked out anew from
    the rates of the last iterations, and bytes move when they are written next.

    State: `_slowest`, the path that took longest, and `_apart`, in how many iterations in a row; `_resting`, iterations
    that are not looked at. Changed by the thread that calls it.

    Parameters
    ----------
    engine: has the paths. store: whose bytes move.
    """

    def __init__(self, engine: Engine, store: MappedStore) -> None:
        self._engine, self._store = engine, store
        self._slowest, self._apart, self._resting = 0, 0, 0

    def iteration_done(self) -> None:
        """Note that an iteration has ended, and let bytes move if that makes the next ones faster."""
        found = self._engine.iteration_done()
        if len(found) > 1 and self._is_apart([busy_s for busy_s, _ in found]):
            self._apart = 0
            self._share_anew([means for _, means in found])

    def _is_apart(self, busy_s: Sequence[float]) -> bool:
        if self._resting:
            self._resting -= 1
            return False
        most_s = max(busy_s)
        slowest = busy_s.index(most_s)
        if most_s < _WORTH_S or min(busy_s) >= (1 - _APART) * most_s:
            self._apart = 0
            return False
        self._apart = self._apart + 1 if slowest == self._slowest else 1
        self._slowest = slowest
        return self._apart >= _ITERATIONS

    def _share_anew(self, means: Sequence[MeanRates]) -> None:
        turns_s = [one.turn_s for one in means]
        before = self._engine.bytes_by_path
        known = [turn_s for turn_s in turns_s if turn_s is not None]
        if len(known) < len(turns_s) or not sum(before):
            return
        speeds = [1 / turn_s for turn_s in known]
        now_s = max(n_bytes * turn_s for n_bytes, turn_s in zip(before, known))
        if now_s <= (1 + _WORTH) * sum(before) / sum(speeds):
            return
        # Thousandths are close enough, and are quick to count with.
        moving_bytes = self._store.move([max(0.001, round(speed / sum(speeds), 3)) for speed in speeds])
        self._resting = 1 if moving_bytes else _PATIENCE  # the next iteration still reads from the old places
        if moving_bytes:
            self._say(before, speeds, moving_bytes)

    def _say(self, before: Sequence[int], speeds: Sequence[float], moving_bytes: int) -> None:
        after = self._engine.bytes_by_path
        paths = (
            f"{folder} gets {100 * new / sum(after):.0f} % of the bytes instead of {100 * old / sum(before):.0f} %, "
            f"since it reads and writes {format_bytes(int(2 * speed))} per second"
            for folder, old, new, speed in zip(self._engine.folders, before, after, speeds)
        )
        log.info(
            "the storage paths share the stored bytes anew: %s. %s move when they are written next",
            "; ".join(paths), format_bytes(moving_bytes),
        )  # fmt: skip
