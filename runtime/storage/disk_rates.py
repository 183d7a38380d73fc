"""Bytes and seconds of a disk, apart by what was under way, and rates as means that forget."""

from __future__ import annotations

from typing import NamedTuple

_READS, _WRITES, _BOTH = range(3)  # what was under way: reads alone, writes alone, or both
_KEPT = 1 / 3  # of what a mean is made of, after another iteration
_ENOUGH_S, _ENOUGH = 0.05, 0.1  # seconds, and their part of all, below which they say little about a rate

Mark = tuple[float, ...]


class MeanRates(NamedTuple):
    """What a disk did in the last iterations, newer ones counting more.

    Parameters
    ----------
    seconds, transferred: in which reads alone, writes alone and both were under way, and their bytes. read_bytes,
        written_bytes: of all.
    """

    seconds: tuple[float, float, float]
    transferred: tuple[float, float, float]
    read_bytes: float
    written_bytes: float

    @property
    def rates(self) -> tuple[float | None, float | None, float | None]:
        """Return bytes per second of reads alone, writes alone and both together; None where too little was done."""
        least_s = max(_ENOUGH_S, _ENOUGH * sum(self.seconds))
        read, write, both = (done / took_s if took_s >= least_s else None
                             for done, took_s in zip(self.transferred, self.seconds))  # fmt: skip
        return read, write, both

    @property
    def turn_s(self) -> float | None:
        """Return the seconds of work for a byte read and a byte written; None if nothing was done."""
        turns = (self.read_bytes + self.written_bytes) / 2
        return (sum(self.seconds) / turns or None) if turns else None

    def slower_than(self, rates: tuple[float, float, float]) -> float | None:
        """Return how many times as long the disk took as with other rates; None if too little was done."""
        expected_s = sum(done / rate for done, rate in zip(self.transferred, rates))
        return sum(self.seconds) / expected_s if expected_s and sum(self.seconds) >= _ENOUGH_S else None


class DiskRates:
    """What a disk has done. It is changed under the lock of the disk's queue.

    A request's bytes count for reads alone, writes alone and both at once in proportion to its seconds in each.

    State: `_under_way`, requests by direction; `_since_s`, the moment up to which seconds are counted; `_seconds` and
    `_bytes`, by what was under way, and `_done_bytes`, by direction, all from the start on; `_seen`, these three at the
    end of the last iteration, and `_mean`, these three as sums that forget.
    """

    def __init__(self) -> None:
        self._under_way, self._since_s = [0, 0], 0.0
        self._seconds, self._bytes, self._done_bytes = [0.0] * 3, [0.0] * 3, [0, 0]
        self._seen: tuple[float, ...] = (0.0,) * 8
        self._mean: tuple[float, ...] = (0.0,) * 8

    def begins(self, writes: bool, now_s: float) -> Mark:
        """Count a request as begun; give the mark to `ends`."""
        self._count_seconds(now_s)
        self._under_way[writes] += 1
        return tuple(self._seconds)

    def ends(self, writes: bool, n_bytes: int, mark: Mark, now_s: float) -> None:
        """Count a request as ended.

        Parameters
        ----------
        n_bytes: what it has transferred; none if it failed.
        """
        self._count_seconds(now_s)
        self._under_way[writes] -= 1
        self._done_bytes[writes] += n_bytes
        spent = [now - then for now, then in zip(self._seconds, mark)]
        total_s = sum(spent)
        if total_s:
            self._bytes = [known + n_bytes * part_s / total_s for known, part_s in zip(self._bytes, spent)]

    def _count_seconds(self, now_s: float) -> None:
        reads, writes = self._under_way
        if reads or writes:
            self._seconds[_BOTH if reads and writes else _READS if reads else _WRITES] += now_s - self._since_s
        self._since_s = now_s

    @property
    def done_bytes(self) -> tuple[int, int]:
        """Return the bytes read and written."""
        return self._done_bytes[0], self._done_bytes[1]

    @property
    def busy_s(self) -> tuple[float, float, float]:
        """Return the seconds in which reads, writes, or either were under way."""
        reads_s, writes_s, both_s = self._seconds
        return reads_s + both_s, writes_s + both_s, reads_s + writes_s + both_s

    def iteration_done(self, now_s: float) -> float:
        """Let the means forget, and take in what was done since the last call.

        Returns: the seconds since then in which anything was under way.
        """
        self._count_seconds(now_s)
        now = (*self._seconds, *self._bytes, *self._done_bytes)
        new = [after - before for after, before in zip(now, self._seen)]
        self._seen = now
        self._mean = tuple(_KEPT * known + one for known, one in zip(self._mean, new))
        return sum(new[:3])

    @property
    def means(self) -> MeanRates:
        """Return what was done in the last iterations, newer ones counting more."""
        mean = self._mean
        return MeanRates((mean[0], mean[1], mean[2]), (mean[3], mean[4], mean[5]), mean[6], mean[7])
