"""What an optimizer holds of a parameter on an accelerator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Updated:
    """What an optimizer holds of a parameter on the device.

    Parameters
    ----------
    state_bytes: of each tensor of its state, in the order in which the first update makes them. workspace_bytes: while
        it is updated.
    """

    state_bytes: tuple[int, ...]
    workspace_bytes: int = 0
