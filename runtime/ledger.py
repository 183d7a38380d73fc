"""The ledger of a device's bytes: every change in one total order, on the executor's thread, under a hard limit."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

_WORDS = {"p": "parameters", "s": "optimizer states", "b": "buffers and scalars"}
_REST = "activations and gradients"


class LimitExceeded(RuntimeError):
    """The device would hold more than its budget."""


class Level(NamedTuple):
    """Bytes held, in total and, for some kinds, by kind."""

    level_bytes: int
    moved: Counter[str]


class Ledger:
    """Counts the bytes on a device.

    State: `level_bytes` now, `peak_bytes` since the last reset. Changed by the executor alone.

    Parameters
    ----------
    limit_bytes: the budget; going above it raises LimitExceeded.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.level_bytes = 0
        self.peak_bytes = 0
        self._moved: Counter[str] = Counter()

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes held now, by description; results of operators are all of one kind."""
        moved = {word: self._moved[kind] for kind, word in _WORDS.items()}
        return {**moved, _REST: self.level_bytes - sum(moved.values())}

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are on the device regardless of the schedule: buffers and scalars."""
        return self._moved["b"]

    def add(self, kind: str, amount_bytes: int) -> None:
        """Count `amount_bytes` of kind `kind` (the prefix of an item's name) that came to the device."""
        if kind in _WORDS:
            self._moved[kind] += amount_bytes
        self.made(amount_bytes)

    def remove(self, kind: str, amount_bytes: int) -> None:
        """Count `amount_bytes` of kind `kind` that left the device."""
        if kind in _WORDS:
            self._moved[kind] -= amount_bytes
        self.freed(amount_bytes)

    def made(self, amount_bytes: int, workspace_bytes: int = 0) -> None:
        """Count `amount_bytes` that an operator made, and `workspace_bytes` that it held while it ran."""
        self.level_bytes += amount_bytes
        reached = self.level_bytes + workspace_bytes
        if reached > self.peak_bytes:
            if reached > self.limit_bytes:
                self._refuse(reached)
            self.peak_bytes = reached

    def freed(self, amount_bytes: int) -> None:
        """Count `amount_bytes` that were freed."""
        self.level_bytes -= amount_bytes

    def clear(self) -> None:
        """Set the bytes held to zero."""
        self.level_bytes = 0
        self._moved.clear()

    def put_aside(self) -> Level:
        """Set the bytes held to zero and return them for `restore`."""
        held = Level(self.level_bytes, self._moved.copy())
        self.clear()
        return held

    def restore(self, held: Level) -> None:
        """Replace the bytes held by those that were put aside."""
        self.level_bytes, self._moved = held.level_bytes, held.moved.copy()

    def reset_peak(self) -> None:
        """Restart the peak from the bytes held now."""
        self.peak_bytes = self.level_bytes

    def _refuse(self, reached: int) -> None:
        held = ", ".join(f"{kind} {amount}" for kind, amount in self.by_kind.items() if amount)
        raise LimitExceeded(
            f"{reached} bytes would be held, but the budget is {self.limit_bytes}; held by kind: {held}"
        )
