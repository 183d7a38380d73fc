"""What a training loop may do next, and what is said to one that does something else."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from .errors import OffmateError, ProtocolError

if TYPE_CHECKING:
    from .replay import Iteration
    from .session import Session
    from .variants import Call


class Turn(Enum):
    """Whose turn it is in the training loop."""

    FORWARD = "the model's forward"
    BACKWARD = "backward() on the loss of the last forward"
    STEP = "optimizer.step()"


def check_call(session: Session, call: Call) -> None:
    """Raise if the loop may not call the model now, or not with these inputs."""
    if session.truth.torn and call.trains:
        raise OffmateError(
            f"after an earlier failure {session.truth.torn_words()}. Load a checkpoint into the model and the "
            "optimizer before training goes on; to go on from here all the same, load their own: "
            "model.load_state_dict(model.state_dict()), optimizer.load_state_dict(optimizer.state_dict())"
        )
    if session.turn is Turn.BACKWARD:
        _refuse_second_forward(session)
    if session.turn is Turn.STEP:
        raise ProtocolError(
            f"a forward after backward() without optimizer.step(); {session.request.micro_batches} backward() calls "
            "make one update in this plan. Call optimizer.step() first; to add up the gradients of more "
            "micro-batches compile with accumulation_steps="
        )
    for leaf in call.leaves:
        if call.trains and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise ProtocolError(
                f"an input of shape {tuple(leaf.shape)} requires a gradient; offmate gives gradients to parameters "
                "only. Detach the input, or make it a parameter of the model"
            )
    if call.trains:
        session.assigned.check_none()
        session.truth.check_trained()


def _refuse_second_forward(session: Session) -> None:
    message = (
        "a second forward before backward(); the plan frees what a forward keeps in its own backward, so there is "
        "one forward at a time, torch.no_grad() included. "
    )
    assert session.iteration is not None
    if session.iteration.given_up:
        session.give_up()
        raise ProtocolError(message + "The earlier forward was given up, since nothing leads to its backward any "
                            "more; the next call starts afresh")  # fmt: skip
    raise ProtocolError(message + "Call backward() first, or let go of that forward's outputs to give it up")


def check_backward(session: Session, iteration: Iteration) -> None:
    """Raise if the loop may not call backward() now; a forward whose parameters were edited is given up."""
    if session.turn is not Turn.BACKWARD or iteration is not session.iteration:
        raise ProtocolError(
            f"a second backward() through the same forward; next comes {session.turn.value}. The plan frees what a "
            "backward has read, so retain_graph cannot be honoured; sum the losses and call backward() once"
        )
    if session.uncleared and not session.micro_batches:
        raise ProtocolError(
            "the gradients of the last iteration were not cleared, so plain PyTorch would add to them, but the "
            "planned optimizer has consumed them. Call optimizer.zero_grad() before backward()"
        )
    edited = session.truth.edited()
    if edited:
        session.give_up()
        raise ProtocolError(
            f"{edited[0]} was edited between the forward and backward(); the forward was given up, the edit is "
            "used from the next forward on. Edit parameters after optimizer.step()"
        )


def check_step(session: Session) -> None:
    """Raise if the loop may not call optimizer.step() now."""
    if session.turn is Turn.BACKWARD or not session.micro_batches:
        raise ProtocolError(f"optimizer.step() without a backward(); next comes {session.turn.value}")


def refuse_late_edits(session: Session, edited: tuple[str, ...]) -> None:
    """Raise if parameters were edited after their update and before optimizer.step(); the iteration ends."""
    if not edited:
        return
    # Everything was brought home for the edit; what the plan would still do would undo it.
    session.bring_home()
    session.turn = Turn.FORWARD
    raise ProtocolError(
        f"{edited[0]} was edited between backward() and optimizer.step(), after its update had been made "
        "instead of before it; the step is done and the edit stays. Edit parameters after optimizer.step()"
    )


def check_clearing(session: Session) -> None:
    """Raise if the loop may not call zero_grad() now."""
    if session.micro_batches and session.request.gate:
        if session.turn is Turn.BACKWARD:
            raise ProtocolError(
                "gradients were cleared between a forward and its backward() while those of earlier micro-batches "
                "were being added up; call zero_grad() after optimizer.step()"
            )
    elif session.turn is Turn.STEP:
        raise ProtocolError(
            "gradients were cleared between backward() and optimizer.step(), but updates with them have begun; "
            "call optimizer.step() first"
        )
