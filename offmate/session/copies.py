"""Which float32 copies of weights have to follow the user's edits before the next update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..optim.chunks import take_over_edits, was_edited
from ..optim.masters import MASTER, has_master
from ..optim.updater import Updater
from ..runtime.replay.binding import HostState


class Copies:
    """The float32 copies in the states of a planned optimizer, and their parameters.

    State: `_unmatched`, the parameters from which their copies may differ; `_written`, those whose copies the user has
    written into since their last update, so that the copies count.

    Parameters
    ----------
    updater: None if the user's code updates; there are no copies then. host: the tensors. written: copies that were
        written into before.
    """

    def __init__(self, updater: Updater | None, host: HostState, written: Iterable[str]) -> None:
        self._updater, self._host = updater, host
        self._unmatched, self._written = set(host.params), set(written)

    def are_unmatched(self, names: Iterable[str]) -> bool:
        """Return whether the copy of any of these parameters may have to follow an edit."""
        return not self._unmatched.isdisjoint(names)

    def doubt(self, names: Iterable[str]) -> None:
        """Note that these parameters may differ from their copies."""
        self._unmatched.update(names)

    def doubt_all(self) -> None:
        """Note that all parameters may differ from their copies, in which nothing is known to be written."""
        self.doubt(self._host.params)

    def loaded(self) -> None:
        """Note that all copies are new."""
        self._unmatched, self._written = set(self._host.params), set()

    def note_states(self, written: Iterable[str], replaced: Iterable[str]) -> None:
        """Note which copies the user has written into, and which were replaced: the parameters count there."""
        self._written = self._written.union(written).difference(replaced)
        self._unmatched.update(replaced)

    def updated(self, names: Iterable[str]) -> None:
        """Note that these parameters have had an update: what the user wrote into their copies before is in it."""
        self._written.difference_update(names)

    def match(self, updated: Iterable[str]) -> None:
        """Have copies follow the user's edits where an update comes next; the host must hold the newest values.

        The others follow before their own next update, as in plain PyTorch: what is edited back until then is no edit.

        Parameters
        ----------
        updated: parameters that the next step updates.
        """
        for param, copy in self._following(updated):
            take_over_edits(param, copy)
            self._host.written((copy,))
        self._unmatched.difference_update(updated)

    def differ(self, updated: Iterable[str]) -> bool:
        """Return whether copies of what the next step updates have to follow edits before it."""
        if any(was_edited(param, copy) for param, copy in self._following(updated)):
            return True
        self._unmatched.difference_update(updated)
        return False

    def _following(self, updated: Iterable[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name in self._unmatched.intersection(updated):
            param: torch.Tensor = self._host.params[name]
            state: dict[str, Any] = self._host.states.get(name, {})
            follows = self._updater is not None and MASTER in state and has_master(self._updater.base, param)
            # Nobody can have read, or written into, what is older than its copy.
            if follows and name not in self._written and name not in self._host.newer_copies:
                yield param, state[MASTER]
