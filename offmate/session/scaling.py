"""The user's gradient scaler beside a planned optimizer: the same object, but gradients are unscaled where they lie."""

from __future__ import annotations

import copyreg
from typing import Any

import torch

from ..errors import ProtocolError
from ..optim.updater import PLAIN
from ..runtime.torch_names.scalers import UnscalesElsewhere, scale_of, unscales_itself
from ..runtime.torch_names.tensors import version_of
from .ending import plan_ends_it
from .outside import Outside
from .residence import Residence


class PlannedScaler(UnscalesElsewhere):
    """A scaler of a planned optimizer's gradients: the same instance, but the plan has the gradients.

    A mixin for the scaler's own class.
    """

    def unscaled(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, only_checks: bool
    ) -> dict[torch.device, torch.Tensor] | None:
        """Unscale the gradients that a plan has made for this scaler, or only check them."""
        session = getattr(optimizer, "_offmate", None)
        if session is None or session.updates.scaling is None or session.updates.scaling.scaler is not self:
            return None
        found: dict[torch.device, torch.Tensor] | None = session.updates.unscale(None if only_checks else inverse)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the plain scaler, for copies and pickles."""
        # Pickle refuses the usual way, since this object is not of the plain class.
        return copyreg._reconstructor, (getattr(type(self), PLAIN), object, None), self.__getstate__()  # type: ignore[attr-defined]


def take_over(scaler: torch.amp.GradScaler) -> None:
    """Turn the scaler, in place, into one for which sessions unscale; several sessions may share it."""
    plain = type(scaler)
    if not isinstance(scaler, PlannedScaler):
        scaler.__class__ = type(f"Offmate{plain.__name__}", (PlannedScaler, plain), {PLAIN: plain})


class Scaling:
    """What a session knows of its scaler.

    State: `looked`, whether the scaler has looked at the gradients of this update; `unscaled`, whether they are
    unscaled as they become complete or else when asked; `_scale_then`, the scale's memory and version at the last
    backward. Changed on the training thread only.

    Parameters
    ----------
    scaler: an enabled one. optimizer: the one whose updates are planned. clips: whether gradients are clipped.
    """

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, clips: bool) -> None:
        self.scaler = scaler
        self._optimizer, self._clips = optimizer, clips
        self.looked = self.unscaled = False
        self._scale_then: tuple[int, int] | None = None

    def backward_begins(self, micro_batches: int) -> torch.Tensor:
        """Return the factor for gradients that become complete: the scale's inverse, or 1 if a kernel unscales later.

        Parameters
        ----------
        micro_batches: how many of the same update have had their backward.

        Raises: ProtocolError if the gradients of this update are unscaled already, or no loss was scaled yet.
        """
        self.looked = self.looked and micro_batches > 0
        if self.looked:
            raise ProtocolError(
                "backward() was called after grad_scaler unscaled this update's gradients, so scaled gradients would "
                "be added to unscaled ones. Call the scaler's unscale_() and step() after the last backward()"
            )
        scale = scale_of(self.scaler)
        if scale is None:
            raise ProtocolError(
                "backward() was called on a loss that grad_scaler= has not scaled; call "
                "grad_scaler.scale(loss).backward(), or compile without grad_scaler="
            )
        self._scale_then = _written(scale)
        self.unscaled = self._clips or not unscales_itself(self._optimizer)
        return _inverse(scale) if self.unscaled else torch.ones_like(scale)

    def looks(self, asks: bool) -> None:
        """Note that the scaler looks at the gradients; if it `asks`, they will be unscaled afterwards.

        Raises: ProtocolError if they were unscaled with another scale; ValueError for float16 gradients, as torch does.
        """
        scale = scale_of(self.scaler)
        if self.unscaled and (scale is None or _written(scale) != self._scale_then):
            raise ProtocolError(
                "the scale of grad_scaler= changed between backward() and the scaler's unscale_() or step(); gradients "
                "were unscaled with the old scale in backward(). Call the scaler's update() or load_state_dict() after "
                "its step()"
            )
        if self.unscaled or asks:
            params = [param for group in self._optimizer.param_groups for param in group["params"]]
            if any(param.requires_grad and param.dtype == torch.float16 for param in params):
                raise ValueError("Attempting to unscale FP16 gradients.")
        self.looked, self.unscaled = True, self.unscaled or asks

    def check_step(self) -> None:
        """Raise ProtocolError if the optimizer is about to step without the scaler."""
        if not self.looked:
            raise ProtocolError(
                "optimizer.step() was called without the scaler; plain PyTorch would update with scaled gradients. No "
                "update was made. Call grad_scaler.step(optimizer), or compile without grad_scaler= to train without "
                "scaling"
            )

    def left_to_the_kernel(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the scale that the optimizer's kernel divides gradients by; {} if they are unscaled.

        Parameters
        ----------
        device: where updates run, besides the host.

        Returns: the scale by kind of device.
        """
        scale = None if self.unscaled else getattr(self._optimizer, "grad_scale", None)
        return {} if scale is None else {place.type: scale.to(place) for place in (device, torch.device("cpu"))}


def unscale(
    residence: Residence, scaling: Scaling, outside: Outside, inverse: torch.Tensor | None
) -> dict[torch.device, torch.Tensor]:
    """Have the gradients of an update unscaled wherever they lie, as far as that was not done in its backwards.

    Parameters
    ----------
    outside: finds gradients from outside the plan. inverse: of the scale; None if the scaler only checks, since the
        optimizer's kernel unscales.

    Returns: by device, 1 if a value was not finite. Raises: ProtocolError if there are gradients from outside the plan.
    """
    if outside.any:
        raise outside.cannot_be_unscaled()
    in_backward, unscaling, training = scaling.unscaled, residence.truth.host.unscaling, residence.preparer.training
    assert unscaling is not None and training is not None
    scaling.looks(asks=inverse is not None)
    if not plan_ends_it(residence):
        residence.bring_home()
    with residence.whole():
        training.executor.unscale()
        if inverse is not None and not in_backward:  # they were only checked; nothing is under way any more
            unscaling.begin(inverse)
            training.executor.unscale()
    found, scale = unscaling.found_inf, scale_of(scaling.scaler)
    if scale is not None and scale.device.type == "cpu":
        found = {where: one.cpu() for where, one in found.items()}  # the scaler reads its own copy without waiting
    return found


def skip(residence: Residence) -> None:
    """Drop the gradients of an update that a fused optimizer leaves out; it still makes the states that it lacks."""
    updater, host = residence.updater, residence.truth.host
    assert updater is not None and host.unscaling is not None
    residence.give_up()
    residence.turns.skipped()
    updater.grad_scales = {}
    updater.snapshot()
    for name in host.unscaling.done:
        state = host.states.setdefault(name, {})
        if not state:
            updater.begin_state(name, host.params[name], state)
    residence.truth.came_home()


def _written(scale: torch.Tensor) -> tuple[int, int]:
    return scale.data_ptr(), version_of(scale)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return the inverse as `GradScaler.unscale_` computes it."""
    return scale.double().reciprocal().float()
