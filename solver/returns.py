"""The last return of an item from its copy off the device, after which the copy is needed no more."""

from __future__ import annotations

from collections import Counter

from .items import Item


class Returns:
    """Tells whether a return to the device is the last one from the same copy.

    State: `_so_far`, by item, the returns from its present copy.

    Parameters
    ----------
    in_all: how often items return from a copy; once, where it does not say.
    """

    def __init__(self, in_all: Counter[Item]) -> None:
        self._in_all = in_all
        self._so_far: Counter[Item] = Counter()

    def is_last(self, item: Item) -> bool:
        """Note a return, and return whether the copy off the device is needed no more."""
        self._so_far[item] += 1
        if self._so_far[item] < self._in_all[item]:
            return False
        del self._so_far[item]
        return True

    def clear(self) -> None:
        """Forget what has returned, since an iteration has ended in another way than planned."""
        self._so_far.clear()
