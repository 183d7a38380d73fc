"""Private names of gradient scalers: their scale, the kernel that unscales, and the method that calls it."""

from __future__ import annotations

import abc
from typing import Any

import torch

_TYPES_ON_CUDA = (torch.float16, torch.float32, torch.float64)

check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies tensors with the inverse of a scale, and notes if any value is not finite; only scalers have it public."""

_UNSCALES_ITSELF = "_step_supports_amp_scaling"


def can_unscale(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether that kernel takes gradients of a type; CUDA's lacks bfloat16, which needs no scaler."""
    return device.type != "cuda" or dtype in _TYPES_ON_CUDA


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Give a scaler's scale where it lies, None before the first loss was scaled; `get_scale` waits for the device."""
    return scaler._get_scale_async()


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a scaler leaves unscaling and skipping to an optimizer, as it does to fused ones."""
    return bool(getattr(optimizer, _UNSCALES_ITSELF, False))


def unscales_in_its_own_way(scaler: torch.amp.GradScaler) -> bool:
    """Say whether a scaler's class has replaced the method that unscales gradients."""
    own: Any = type(scaler)._unscale_grads_
    return own not in (torch.amp.GradScaler._unscale_grads_, UnscalesElsewhere._unscale_grads_)


class UnscalesElsewhere(torch.amp.GradScaler, abc.ABC):
    """Mixin for a scaler's class: gradients that lie elsewhere than in `.grad` are unscaled there."""

    @abc.abstractmethod
    def unscaled(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, only_checks: bool
    ) -> dict[torch.device, torch.Tensor] | None:
        """Unscale an optimizer's gradients, or only check them.

        Parameters
        ----------
        inverse: of the scale; 1 if it `only_checks`.

        Returns: by device, a number above 0 if a value was not finite; None if the gradients lie in `.grad`.
        """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = self.unscaled(optimizer, inv_scale, allow_fp16)
        if found is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return found
