"""The random generator from which the forwards on a device draw."""

from __future__ import annotations

from typing import Any

import torch

_SEED_BYTES, _STATE_BYTES = 8, 16


class Generator:
    """Reads and places the generator of a device: torch's own for the CPU, and an accelerator's otherwise.

    A CUDA card's generator counts. Its state is a seed and a position, and each kernel that draws moves the position by
    a number that follows from its shapes. So where it will be is known without drawing.

    Parameters
    ----------
    device: where forwards run, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def _module(self) -> Any:
        return torch if self._device.type == "cpu" else torch.get_device_module(self._device)

    @property
    def counts(self) -> bool:
        """Whether its state is a seed and a position."""
        return self._device.type == "cuda" and self.state().numel() == _STATE_BYTES

    def state(self) -> torch.Tensor:
        """Return its state, as bytes on the CPU."""
        where = () if self._device.type == "cpu" else (self._device.index,)
        state: torch.Tensor = self._module.get_rng_state(*where)
        return state

    def place(self, state: torch.Tensor) -> None:
        """Set its state."""
        where = () if self._device.type == "cpu" else (self._device.index,)
        self._module.set_rng_state(state, *where)


def position_of(state: torch.Tensor) -> int:
    """Return the position in the state of a generator that counts."""
    return int(state[_SEED_BYTES:].view(torch.int64).item())


def moved(state: torch.Tensor, by: int) -> torch.Tensor:
    """Return the state of a generator that counts after its position has moved."""
    state = state.clone()
    state[_SEED_BYTES:].view(torch.int64).add_(by)
    return state
