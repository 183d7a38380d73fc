"""The names of computes: "start", "F3", "user", "B3" and "gate", with "@2" for the third micro-batch of a step."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"
START, USER, GATE = "start", "user", "gate"


class ComputeName(NamedTuple):
    """A compute's name, in its parts.

    Parameters
    ----------
    what: "F" or "B" for a block's forward or backward; otherwise "start", "user" or "gate".
    block: the block's number; None if it is of no block.
    slot: the micro-batch that it runs for, among those of its step.
    """

    what: str
    block: int | None = None
    slot: int = 0

    def __str__(self) -> str:
        name = self.what if self.block is None else f"{self.what}{self.block}"
        return f"{name}@{self.slot}" if self.slot else name


@lru_cache(maxsize=1 << 14)
def parse(name: str) -> ComputeName:
    """Return the parts of a name; raises ValueError if it is none."""
    word, _, slot = name.partition("@")
    number = int(slot) if slot else 0
    if word in (START, USER, GATE):
        return ComputeName(word, None, number)
    if word[:1] not in (FORWARD, BACKWARD):
        raise ValueError(f"not a compute: {name!r}; expected start, F3, user, B3 or gate, perhaps with @2")
    return ComputeName(word[0], int(word[1:]), number)
