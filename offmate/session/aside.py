"""A forward without gradients between a training forward and its backward, as preference losses need it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import InfeasibleBudget, ProtocolError
from ..sizes import format_bytes
from .autograd import Iteration
from .residence import Residence
from .variants import Call, Variant


def aside(
    residence: Residence, model: torch.nn.Module, iteration: Iteration, call: Call
) -> tuple[Variant, dict[str, torch.Tensor]]:
    """Run a forward while the tensors that a training forward left on the device wait on the host.

    Parameters
    ----------
    iteration: the one that waits for its backward.

    Returns: the variant that ran, and its outputs. Raises: ProtocolError on a device with its own allocator, or if the
    budget less what stays on the device is too little; the training forward then still waits for its backward.
    """
    training = residence.active
    assert training is not None
    if residence.device.arena is not None:
        raise ProtocolError(
            f"{residence.request.device} cannot run a forward without gradients between a training forward and its "
            "backward(): the device's memory is in use for the training forward. Call it before the training forward, "
            "or after optimizer.step()"
        )
    residence.preparer.user_code.stops()
    with residence.whole():
        parked = training.executor.park(iteration.outputs)
        residence.truth.came_home()
        stays = iteration.output_bytes + training.prepared.plan.user_bytes
        recorder, residence.device.recorder = residence.device.recorder, None
    try:
        variant, tensors = residence.preparer.variant_for(
            model, replace(call, reserved_bytes=stays), make_room=lambda: None
        )
    except BaseException as error:
        training.executor.unpark(parked)
        residence.device.recorder = recorder
        if isinstance(error, InfeasibleBudget) and error.least_budget_bytes is not None:
            raise ProtocolError(
                "a forward without gradients between a training forward and its backward() needs "
                f"{format_bytes(error.least_budget_bytes)}. This is "
                f"{format_bytes(error.least_budget_bytes - error.budget_bytes)} too much: the training forward's "
                f"outputs and the reserve for your code take {format_bytes(stays)} of the budget of "
                f"{format_bytes(residence.request.budget_bytes)}. Raise gpu_budget by the missing amount, or call it "
                "before the training forward"
            ) from error
        raise
    with residence.whole(), residence.truth.low.aside():
        try:
            residence.device.ledger.add("o", stays)
            outputs = variant.executor.forward(tensors)
            variant.executor.unload()
        except BaseException:
            variant.executor.abandon()
            raise
        finally:
            residence.device.recorder = recorder
        training.executor.unpark(parked)
    return variant, outputs
