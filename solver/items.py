"""Items: everything that occupies bytes on a device, each with a kind and a name, and printed in a form that parses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from .problem import Rows

_WITH_ROWS = re.compile(r"(.+)\[(?:(\d+):(\d+)|:)\]", re.DOTALL)
_IN_SLOT = re.compile(r"(.+)@(\d+)", re.DOTALL)


@dataclass(frozen=True, eq=False)
class ItemKind:
    """A kind of items, and the properties that all of them share. Creating one registers it.

    Parameters
    ----------
    prefix: the beginning of their printed form, before the colon; unique to the kind.
    words: description of an item for people; the braces stand for its name.
    bytes_kind: the category in which reports count their bytes.
    by_batch: whether their sizes depend on the batch; a copy on the host then serves one pass only.
    leaves, returns: whether a schedule may copy them to the host, and from there.
    roams: whether they may wait on any tier, since only the device needs them.

    Raises: ValueError if another kind has this prefix.
    """

    prefix: str
    words: str
    bytes_kind: str
    by_batch: bool = False
    leaves: bool = False
    returns: bool = False
    roams: bool = False

    PARAMETER: ClassVar[ItemKind]  # compute copy of a parameter
    GRADIENT: ClassVar[ItemKind]  # of a parameter, for one pass
    PARTIAL: ClassVar[ItemKind]  # of a parameter, for one micro-batch of a pass, while blocks still add to it
    TOTAL: ClassVar[ItemKind]  # sum of the gradients of several micro-batches, if the device updates
    STATE: ClassVar[ItemKind]
    VALUE: ClassVar[ItemKind]  # between blocks
    VALUE_GRADIENT: ClassVar[ItemKind]  # of a value or of an output
    KEPT: ClassVar[ItemKind]  # values that stay on the device for a block's backward
    OFFLOADED: ClassVar[ItemKind]
    SHARED: ClassVar[ItemKind]
    OUTPUT: ClassVar[ItemKind]  # made by this pass
    LOG: ClassVar[ItemKind]  # on the host only: the old values of a parameter that was updated before the gate
    OLD_OUTPUT: ClassVar[ItemKind]  # what an output becomes when its pass ends

    def __post_init__(self) -> None:
        other = _BY_PREFIX.setdefault(self.prefix, self)
        if other is not self:
            raise ValueError(f"the prefix {self.prefix!r} is taken by {other.words.format('...')}; choose another")

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _kind_of, (self.prefix,)

    @staticmethod
    def all() -> tuple[ItemKind, ...]:
        """Return every kind that has been registered."""
        return tuple(_BY_PREFIX.values())


_BY_PREFIX: dict[str, ItemKind] = {}


def _kind_of(prefix: str) -> ItemKind:
    return _BY_PREFIX[prefix]


_MOVES = {"leaves": True, "returns": True}

ItemKind.PARAMETER = ItemKind("p", "parameter {}", "parameters", **_MOVES)
ItemKind.GRADIENT = ItemKind("g", "gradient of {}", "gradients", **_MOVES)
ItemKind.PARTIAL = ItemKind("part", "partial gradient of {}", "gradients", by_batch=True)
ItemKind.TOTAL = ItemKind("t", "total gradient of {}", "gradients", **_MOVES)
ItemKind.STATE = ItemKind("s", "optimizer state of {}", "optimizer states", **_MOVES, roams=True)
ItemKind.VALUE = ItemKind("v", "value {}", "activations", by_batch=True, **_MOVES, roams=True)
ItemKind.VALUE_GRADIENT = ItemKind("d", "gradient of {}", "gradients", by_batch=True, **_MOVES, roams=True)
ItemKind.KEPT = ItemKind("k", "values that block {} keeps", "activations", by_batch=True)
ItemKind.OFFLOADED = ItemKind("a", "values that block {} offloads", "activations", by_batch=True, **_MOVES, roams=True)
ItemKind.SHARED = ItemKind("x", "shared value {}", "shared", by_batch=True)
ItemKind.OUTPUT = ItemKind("o", "output {}", "outputs", by_batch=True)
ItemKind.LOG = ItemKind("u", "undo log of {}", "optimizer states")
ItemKind.OLD_OUTPUT = ItemKind("old", "last output {}", "outputs", by_batch=True)

WHOLE_GRADIENTS = (ItemKind.GRADIENT, ItemKind.TOTAL)  # an update reads one of them


class Item(str):
    """Something that occupies bytes on the device. It is a string, its own printed form, so that dictionaries are fast.

    It prints as `PREFIX:NAME`. Rows of an optimizer state print as `s:NAME[A:B]`. What belongs to a micro-batch of a
    step other than the first prints as `PREFIX:NAME@SLOT`. A name that itself ends like rows or like a slot is followed
    by `[:]` or `@0`.

    Parameters
    ----------
    kind: its kind. name: of the tensor or value; for values that a block saves, the block's number.
    rows: the rows of an optimizer state that it holds, if the state is several items; None for all of it.
    slot: of items that depend on the batch, the micro-batch that it belongs to among those for which a step runs.
    """

    __slots__ = ("kind", "name", "rows", "slot")
    kind: ItemKind
    name: str
    rows: Rows | None
    slot: int

    def __new__(cls, kind: ItemKind, name: str, rows: Rows | None = None, slot: int = 0) -> Item:
        text = f"{kind.prefix}:{name}"
        if rows is not None:
            text += f"[{rows[0]}:{rows[1]}]"
        elif kind is ItemKind.STATE and _WITH_ROWS.fullmatch(name):
            text += "[:]"
        elif kind.by_batch and (slot or _IN_SLOT.fullmatch(name)):
            text += f"@{slot}"
        item = super().__new__(cls, text)
        item.kind, item.name, item.rows, item.slot = kind, name, rows, slot
        return item

    def __reduce__(self) -> tuple[type[Item], tuple[ItemKind, str, Rows | None, int]]:
        return Item, (self.kind, self.name, self.rows, self.slot)

    def at(self, slot: int) -> Item:
        """Return the same item of another micro-batch of the step; itself if it does not depend on the batch."""
        return Item(self.kind, self.name, self.rows, slot) if self.kind.by_batch and slot != self.slot else self

    @property
    def words(self) -> str:
        """A description for people, such as "gradient of lm_head.weight"."""
        rows = f"[{self.rows[0]}:{self.rows[1]}]" if self.rows else ""
        of = f" of micro-batch {self.slot + 1}" if self.slot else ""
        return self.kind.words.format(f"{self.name}{rows}") + of

    @property
    def block(self) -> int:
        """The number of the block that saved it; raises ValueError for items that no block saves."""
        return int(self.name)

    @staticmethod
    def parse(text: str) -> Item:
        """Return the item that prints as `text`; raises ValueError, naming the text, if there is none."""
        return _parsed(text)


@lru_cache(maxsize=1 << 14)
def _parsed(text: str) -> Item:
    prefix, colon, name = text.partition(":")
    kind = _BY_PREFIX.get(prefix)
    if kind is None or not colon or not name:
        known = ", ".join(_BY_PREFIX)
        raise ValueError(f"not an item: {text!r}; expected PREFIX:NAME with one of the prefixes {known}")
    found = _IN_SLOT.fullmatch(name) if kind.by_batch else None
    if found is not None:
        return Item(kind, found[1], slot=int(found[2]))
    found = _WITH_ROWS.fullmatch(name) if kind is ItemKind.STATE else None
    if found is None:
        return Item(kind, name)
    return Item(kind, found[1], None if found[2] is None else (int(found[2]), int(found[3])))


def parameter(tensor: str) -> Item:
    """Return the item of a parameter tensor's compute copy."""
    return Item(ItemKind.PARAMETER, tensor)


def gradient(tensor: str) -> Item:
    """Return the item of a parameter's gradient for one micro-batch."""
    return Item(ItemKind.GRADIENT, tensor)


def partial(tensor: str) -> Item:
    """Return the item of a parameter's gradient for one micro-batch of a pass, while blocks still add to it."""
    return Item(ItemKind.PARTIAL, tensor)


def total(tensor: str) -> Item:
    """Return the item of the sum of a parameter's gradients over micro-batches, on the device."""
    return Item(ItemKind.TOTAL, tensor)


def state(tensor: str, rows: Rows | None = None) -> Item:
    """Return the item of some rows of a parameter's optimizer state; all of it with None."""
    return Item(ItemKind.STATE, tensor, rows)


def log(tensor: str) -> Item:
    """Return the item of the old values that undo a parameter's update; it is on the host only."""
    return Item(ItemKind.LOG, tensor)


def value(name: str) -> Item:
    """Return the item of an interface value."""
    return Item(ItemKind.VALUE, name)


def value_gradient(name: str) -> Item:
    """Return the item of the gradient of an interface value or of an output."""
    return Item(ItemKind.VALUE_GRADIENT, name)


def kept(block: int) -> Item:
    """Return the item of the values that a block keeps on the device for its backward."""
    return Item(ItemKind.KEPT, str(block))


def offloaded(block: int) -> Item:
    """Return the item of the values that a block sends away after its forward and needs back for its backward."""
    return Item(ItemKind.OFFLOADED, str(block))


def shared(name: str) -> Item:
    """Return the item of a value that many blocks read and that is no parameter."""
    return Item(ItemKind.SHARED, name)


def output(name: str) -> Item:
    """Return the item of an output of this pass."""
    return Item(ItemKind.OUTPUT, name)


def old_output(name: str) -> Item:
    """Return the item of the previous pass's output, on the device until this pass's forwards have ended."""
    return Item(ItemKind.OLD_OUTPUT, name)


def names_of(those: Iterable[Item], kind: ItemKind) -> set[str]:
    """Return the names of those items that are of a kind."""
    return {item.name for item in those if item.kind is kind}


def after_pass(item: Item) -> Item:
    """Return what an item becomes when its pass ends: an output becomes an old output."""
    return old_output(item.name).at(item.slot) if item.kind is ItemKind.OUTPUT else item
