"""The memory that an optimizer holds for a parameter on an accelerator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Updated:
    """The memory that an optimizer holds for a parameter on the device.

    Parameters
    ----------
    state_bytes: bytes of each tensor of its state, in the order in which the first update makes them. workspace_bytes:
        additional bytes during its update. n_known: how many of these tensors, the first ones, exist before.
    """

    state_bytes: tuple[int, ...]
    workspace_bytes: int = 0
    n_known: int = 0
