"""Ends updates that the plan alone does not end: on the host, with gradients from outside, or not at all."""

from __future__ import annotations

import torch

from ..errors import ProtocolError
from .outside import Outside, add_up
from .residence import Residence
from .turns import Turn


def plan_ends_it(residence: Residence) -> bool:
    """Return whether the active plan ends the iteration behind a gate.

    It has all micro-batches, updates all parameters with a gradient, and no float32 copy has to follow an edit before.
    """
    active, truth = residence.active, residence.truth
    if residence.turns.turn is not Turn.STEP or active is None or not active.kind.trains:
        return False
    return truth.host.totals <= active.updates and not truth.copies.differ(active.updates)


def take_outside(residence: Residence, outside: Outside) -> list[dict[str, torch.Tensor]]:
    """Take the gradients that the plan has not made and that this step adds.

    Raises: ProtocolError if they cannot be added; the iteration has then ended.
    """
    if not outside.any:
        return []
    try:
        return outside.take()
    except ProtocolError:
        if residence.turns.gate:
            residence.give_up()
        else:
            residence.bring_home()
            residence.turns.step_done()
        raise


def finish_on_host(residence: Residence, outside: list[dict[str, torch.Tensor]]) -> None:
    """End an iteration on the host, with gradients from outside the plan added to its own."""
    truth, training = residence.truth, residence.preparer.training
    assert training is not None
    residence.bring_home()
    residence.renew()  # what numpy has written counts, too, and what is in files is read again
    truth.adopt_tensors()
    add_up(truth.host, outside, residence.device.empty_host_like)
    updated = frozenset(truth.host.totals)
    truth.copies.doubt(truth.edited())
    truth.copies.match(updated)
    residence.active = training.lead
    with residence.whole():
        truth.current = False
        training.executor.finish()
    residence.active = None
    residence.turns.step_done()
    truth.copies.updated(updated)
    truth.accept()
    truth.came_home()
