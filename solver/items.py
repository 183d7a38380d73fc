"""Items: what takes up bytes on a device, each of a kind, with a name, and printed as it parses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from .problem import Rows

_WITH_ROWS = re.compile(r"(.+)\[(?:(\d+):(\d+)|:)\]", re.DOTALL)


@dataclass(frozen=True)
class Traits:
    """What holds of all items of a kind.

    Parameters
    ----------
    prefix: what their printed form begins with, before the colon.
    words: how an item is described to people, with its name for the braces.
    bytes_kind: the kind of bytes under which reports count them.
    by_batch: their sizes depend on the batch, and a copy on the host serves one pass only.
    leaves, returns: whether a schedule may send them to the host, and bring them from there.
    """

    prefix: str
    words: str
    bytes_kind: str
    by_batch: bool = False
    leaves: bool = False
    returns: bool = False


class ItemKind(Enum):
    """The kinds of items."""

    PARAMETER = Traits("p", "parameter {}", "parameters", leaves=True, returns=True)  # compute copy of a parameter
    GRADIENT = Traits("g", "gradient of {}", "gradients", leaves=True)  # of a parameter, of one micro-batch
    TOTAL = Traits("t", "total gradient of {}", "gradients")  # of several micro-batches, if the device updates
    STATE = Traits("s", "optimizer state of {}", "optimizer states", leaves=True, returns=True)
    VALUE = Traits("v", "value {}", "activations", by_batch=True, leaves=True, returns=True)  # between blocks
    VALUE_GRADIENT = Traits("d", "gradient of {}", "gradients", by_batch=True)  # of a value or of an output
    KEPT = Traits("k", "values that block {} keeps", "activations", by_batch=True)  # on the device for its backward
    OFFLOADED = Traits("a", "values that block {} offloads", "activations", by_batch=True, leaves=True, returns=True)
    SHARED = Traits("x", "shared value {}", "shared", by_batch=True)
    OUTPUT = Traits("o", "output {}", "outputs", by_batch=True)  # of this pass
    OLD_OUTPUT = Traits("old", "last output {}", "outputs", by_batch=True)  # what an output becomes when its pass ends

    __hash__ = object.__hash__  # members are keys of what the simulator touches most


_BY_PREFIX = {kind.value.prefix: kind for kind in ItemKind}


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
        text = f"{kind.value.prefix}:{name}"
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
    def traits(self) -> Traits:
        """What holds of all items of its kind."""
        return self.kind.value

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
