"""Items: what takes up bytes on a device, each of a kind, with a name, and printed as it parses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from .problem import Rows

_WITH_ROWS = re.compile(r"(.+)\[(?:(\d+):(\d+)|:)\]", re.DOTALL)


@dataclass(frozen=True, eq=False)
class ItemKind:
    """A kind of items, and what holds of all of them. A new one is known as soon as it is made.

    Parameters
    ----------
    prefix: what their printed form begins with, before the colon; no other kind has it.
    words: how an item is described to people, with its name for the braces.
    bytes_kind: the kind of bytes under which reports count them.
    by_batch: their sizes depend on the batch, and a copy on the host serves one pass only.
    leaves, returns: whether a schedule may send them to the host, and bring them from there.
    roams: whether they may wait on any tier, since nothing but the device needs them.

    Raises: ValueError if another kind has the prefix.
    """

    prefix: str
    words: str
    bytes_kind: str
    by_batch: bool = False
    leaves: bool = False
    returns: bool = False
    roams: bool = False

    PARAMETER: ClassVar[ItemKind]  # compute copy of a parameter
    GRADIENT: ClassVar[ItemKind]  # of a parameter, of one micro-batch
    TOTAL: ClassVar[ItemKind]  # of the gradients of several micro-batches, if the device updates
    STATE: ClassVar[ItemKind]
    VALUE: ClassVar[ItemKind]  # between blocks
    VALUE_GRADIENT: ClassVar[ItemKind]  # of a value or of an output
    KEPT: ClassVar[ItemKind]  # on the device for its backward
    OFFLOADED: ClassVar[ItemKind]
    SHARED: ClassVar[ItemKind]
    OUTPUT: ClassVar[ItemKind]  # of this pass
    OLD_OUTPUT: ClassVar[ItemKind]  # what an output becomes when its pass ends

    def __post_init__(self) -> None:
        other = _BY_PREFIX.setdefault(self.prefix, self)
        if other is not self:
            raise ValueError(f"items with the prefix {self.prefix!r} are {other.words.format('...')} already")

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _kind_of, (self.prefix,)

    @staticmethod
    def all() -> tuple[ItemKind, ...]:
        """Every kind that there is."""
        return tuple(_BY_PREFIX.values())


_BY_PREFIX: dict[str, ItemKind] = {}


def _kind_of(prefix: str) -> ItemKind:
    return _BY_PREFIX[prefix]


_MOVES = {"leaves": True, "returns": True}

ItemKind.PARAMETER = ItemKind("p", "parameter {}", "parameters", **_MOVES)
ItemKind.GRADIENT = ItemKind("g", "gradient of {}", "gradients", leaves=True)
ItemKind.TOTAL = ItemKind("t", "total gradient of {}", "gradients")
ItemKind.STATE = ItemKind("s", "optimizer state of {}", "optimizer states", **_MOVES, roams=True)
ItemKind.VALUE = ItemKind("v", "value {}", "activations", by_batch=True, **_MOVES, roams=True)
ItemKind.VALUE_GRADIENT = ItemKind("d", "gradient of {}", "gradients", by_batch=True)
ItemKind.KEPT = ItemKind("k", "values that block {} keeps", "activations", by_batch=True)
ItemKind.OFFLOADED = ItemKind("a", "values that block {} offloads", "activations", by_batch=True, **_MOVES, roams=True)
ItemKind.SHARED = ItemKind("x", "shared value {}", "shared", by_batch=True)
ItemKind.OUTPUT = ItemKind("o", "output {}", "outputs", by_batch=True)
ItemKind.OLD_OUTPUT = ItemKind("old", "last output {}", "outputs", by_batch=True)


class Item(str):
    """Something that takes up bytes on the device. It is the text that it prints as, so that dictionaries are fast.

    Printed as `PREFIX:NAME`; rows of an optimizer state as `s:NAME[A:B]`; and all rows of one whose name itself looks
    as if it ended with rows as `s:NAME[:]`.

    Parameters
    ----------
    kind: what it is. name: of the tensor or value; for what a block saves, the block's number.
    rows: which rows of an optimizer state, where it is several items; None for all of it.
    """

    __slots__ = ("kind", "name", "rows")
    kind: ItemKind
    name: str
    rows: Rows | None

    def __new__(cls, kind: ItemKind, name: str, rows: Rows | None = None) -> Item:
        text = f"{kind.prefix}:{name}"
        if rows is not None:
            text += f"[{rows[0]}:{rows[1]}]"
        elif kind is ItemKind.STATE and _WITH_ROWS.fullmatch(name):
            text += "[:]"
        item = super().__new__(cls, text)
        item.kind, item.name, item.rows = kind, name, rows
        return item

    def __reduce__(self) -> tuple[type[Item], tuple[ItemKind, str, Rows | None]]:
        return Item, (self.kind, self.name, self.rows)

    @property
    def block(self) -> int:
        """The number of the block that saved it; raises ValueError for items that no block saves."""
        return int(self.name)

    @staticmethod
    def parse(text: str) -> Item:
        """The item that prints as `text`; raises ValueError naming the text if there is none."""
        return _parsed(text)


@lru_cache(maxsize=1 << 14)
def _parsed(text: str) -> Item:
    prefix, colon, name = text.partition(":")
    kind = _BY_PREFIX.get(prefix)
    if kind is None or not colon or not name:
        known = ", ".join(_BY_PREFIX)
        raise ValueError(f"not an item: {text!r}; expected PREFIX:NAME with a prefix of {known}")
    found = _WITH_ROWS.fullmatch(name) if kind is ItemKind.STATE else None
    if found is None:
        return Item(kind, name)
    return Item(kind, found[1], None if found[2] is None else (int(found[2]), int(found[3])))


def parameter(tensor: str) -> Item:
    """The compute copy of a parameter tensor."""
    return Item(ItemKind.PARAMETER, tensor)


def gradient(tensor: str) -> Item:
    """A parameter's gradient of one micro-batch."""
    return Item(ItemKind.GRADIENT, tensor)


def total(tensor: str) -> Item:
    """The sum of a parameter's gradients over micro-batches, on the device."""
    return Item(ItemKind.TOTAL, tensor)


def state(tensor: str, rows: Rows | None = None) -> Item:
    """Some rows of a parameter's optimizer state; all of it with None."""
    return Item(ItemKind.STATE, tensor, rows)


def value(name: str) -> Item:
    """An interface value."""
    return Item(ItemKind.VALUE, name)


def value_gradient(name: str) -> Item:
    """The gradient of an interface value or of an output."""
    return Item(ItemKind.VALUE_GRADIENT, name)


def kept(block: int) -> Item:
    """What a block keeps on the device for its backward."""
    return Item(ItemKind.KEPT, str(block))


def offloaded(block: int) -> Item:
    """What a block sends to the host after its forward and needs back for its backward."""
    return Item(ItemKind.OFFLOADED, str(block))


def shared(name: str) -> Item:
    """A value that many blocks read and that is no parameter."""
    return Item(ItemKind.SHARED, name)


def output(name: str) -> Item:
    """An output of this pass."""
    return Item(ItemKind.OUTPUT, name)


def old_output(name: str) -> Item:
    """An output of the pass before, on the device until this pass's forwards have ended."""
    return Item(ItemKind.OLD_OUTPUT, name)


def names_of(those: Iterable[Item], kind: ItemKind) -> set[str]:
    """The names of those items that are of a kind."""
    return {item.name for item in those if item.kind is kind}


def after_pass(item: Item) -> Item:
    """What an item is called when a pass has ended: outputs become old ones."""
    return old_output(item.name) if item.kind is ItemKind.OUTPUT else item
