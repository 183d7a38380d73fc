"""Scaled gradients: each is unscaled, and checked for values that are not finite, where it becomes complete."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..devices.device import Device
from ..events import Event
from ..torch_names.scalers import check_and_unscale

_HOST = "cpu"


class Unscaling:
    """Unscales the gradients of an iteration, with torch's own kernel; all plans of a session share it.

    State: `done`, the parameters whose gradients have been through it since `begin`; `norm`, the global norm of all of
    them, once it is known; `arrived`, the events after which the host has the inverse; `_inverses` and `_found`, by
    kind of device, the inverse of the scale, and 1 if a value was not finite. Workers of the host add to `done` and
    `_found` what the event of their work announces.

    Parameters
    ----------
    device: where the operators run.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.done: set[str] = set()
        self.norm: torch.Tensor | None = None
        self.arrived: tuple[Event, ...] = ()
        self._inverses: dict[str, torch.Tensor] = {}
        self._found: dict[str, torch.Tensor] = {}

    def begin(self, inverse: torch.Tensor) -> None:
        """Begin with gradients of which none has been through it.

        Parameters
        ----------
        inverse: of the scale, on whatever device that lies; 1 only checks.
        """
        for event in self.arrived:
            event.wait()  # the copy reads what is let go now
        self.done, self.norm, self.arrived, self._found = set(), None, (), {}
        where = self._device.torch_device
        self._inverses = {inverse.device.type: inverse, where.type: inverse.to(where)}
        if _HOST not in self._inverses:
            home = self._inverses[_HOST] = self._device.empty_host_like(inverse)
            self.arrived = (self._device.copy_out(home, inverse, ()),)

    def take(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Unscale complete gradients, by parameter; those that have been through it stay as they are."""
        left = {name: gradient for name, gradient in gradients.items() if name not in self.done}
        for where, dtype in {(gradient.device, gradient.dtype) for gradient in left.values()}:
            own = [gradient for gradient in left.values() if (gradient.device, gradient.dtype) == (where, dtype)]
            found = self._found.setdefault(where.type, torch.zeros((), device=where))
            check_and_unscale(own, found, self._inverses[where.type])
        self.done.update(left)

    @property
    def found_inf(self) -> dict[torch.device, torch.Tensor]:
        """By device, a number that is 1 if a value was not finite, as `GradScaler` keeps them."""
        return {found.device: found for found in self._found.values()}
