"""Micro-batches that run together and whose backward() never comes, since the loop skips their losses.

Their forwards have run, and they add nothing to the gradients, as in plain PyTorch. That a backward() does not come is
known at the next forward, or at optimizer.step() if it is that of the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ProtocolError
from .edits import check_unchanged
from .orders import Orders
from .residence import Residence
from .turns import Turn
from .variants import Variant


def leave_out(residence: Residence, orders: Orders, speculates: Callable[[Variant], bool]) -> None:
    """Go on without the backward() of the forward under way; the last one of a pass runs the pass's backwards.

    Parameters
    ----------
    speculates: returns whether updates may begin before the gate in the backward that begins.

    Raises: ProtocolError, and drops the update, if something was edited that the other backwards of the pass read.
    """
    together, turns, truth = orders.under_way, residence.turns, residence.truth
    assert together is not None and turns.iteration is not None
    iteration = turns.iteration
    iteration.is_left_out()
    residence.preparer.user_code.forget()
    try:
        check_unchanged(iteration, truth, planned=True)
        if together.is_last:
            together.check_outputs()
    except ProtocolError:
        residence.give_up()
        raise
    if not together.is_last:
        together.leave_out(iteration)
        turns.left_out()
        return
    residence.renew()
    with residence.whole():
        truth.current = False
        if not turns.gate and residence.updater is not None:
            residence.updater.snapshot()
        together.run(None, speculates(together.variant))
        turns.left_out()


def leave_out_the_last(residence: Residence, orders: Orders, speculates: Callable[[Variant], bool]) -> None:
    """Go on at the update's end without the backward() of its last micro-batch, if the others have had one.

    Parameters
    ----------
    speculates: as in `leave_out`.
    """
    together, turns = orders.under_way, residence.turns
    if together is None or turns.turn is not Turn.BACKWARD or not turns.backwards or not together.ends_update:
        return
    leave_out(residence, orders, speculates)
