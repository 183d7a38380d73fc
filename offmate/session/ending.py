"""How an update ends that the plan alone does not end: on the host, with what came from outside, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ProtocolError
from .outside import add_up
from .turns import Turn

if TYPE_CHECKING:
    from .session import Session


def plan_ends_it(session: Session) -> bool:
    """Whether the active plan ends the iteration: it has all micro-batches, and updates all that has a gradient."""
    active = session.active
    if session.turn is not Turn.STEP or active is None or not active.kind.trains:
        return False
    return session.truth.host.totals <= active.updates


def take_outside(session: Session) -> list[dict[str, torch.Tensor]]:
    """The gradients that the plan has not made and this step adds.

    Raises: ProtocolError if they cannot be added; the iteration has ended then.
    """
    if not session.outside.any:
        return []
    try:
        return session.outside.take()
    except ProtocolError:
        if session.request.gate:
            session.give_up()
        else:
            session.bring_home()
            session.turn, session.micro_batches = Turn.FORWARD, 0
        raise


def finish_on_host(session: Session, outside: list[dict[str, torch.Tensor]]) -> None:
    """End an iteration on the host, with gradients from outside the plan added to its own."""
    assert session.training is not None
    session.bring_home()
    session.truth.adopt_tensors()
    add_up(session.truth.host, outside, session.device.empty_host_like)
    session.active = session.training
    with session.whole():
        session.truth.current = False
        session.training.executor.finish()
    session.active, session.micro_batches, session.turn = None, 0, Turn.FORWARD
    session.truth.accept()
    session.truth.came_home()
