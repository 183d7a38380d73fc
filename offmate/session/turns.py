"""What a training loop may do next, and what is said to one that does something else."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from ..capture.checks import late_hooks
from ..errors import OffmateError, ProtocolError

if TYPE_CHECKING:
    from ..optim.updater import Updater
    from .autograd import Iteration
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
    if session.turn is Turn.STEP and (call.trains or not session.request.gate):
        raise ProtocolError(
            f"a forward after backward() without optimizer.step(); {session.request.micro_batches} backward() calls "
            "make one update in this plan. Call optimizer.step() first, or zero_grad() to drop the gradients; to add "
            "up the gradients of more micro-batches compile with accumulation_steps=; to evaluate before the step "
            "compile with a gate, which has updates wait for it: max_grad_norm=float('inf')"
        )
    for leaf in call.leaves:
        if torch.is_grad_enabled() and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise ProtocolError(
                f"an input of shape {tuple(leaf.shape)} requires a gradient; offmate gives gradients to parameters "
                "only, and what the input was computed from would get none. Detach the input, or make it a parameter "
                "of the model. Where one model feeds another (a generator its discriminator) and the gradient has to "
                "pass through the second, compile the first one only and leave the second plain"
            )
    if call.trains:
        session.assigned.check_none()


def check_backward(session: Session, iteration: Iteration) -> None:
    """Raise if the loop may not call backward() now; a forward whose parameters were edited is given up."""
    if iteration.dropped or any(other.runs_now for other in session.dropped):
        raise ProtocolError(
            "backward() through a forward that was given up, since the model was called again, a state was loaded or "
            "the optimizer stepped before it; the plan keeps one forward at a time. No update was made. Call "
            "backward() on each loss before the next forward (compile with accumulation_steps= to add the gradients "
            "up), or make one batch of the two"
        )
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
    changed = iteration.changed_outputs()
    if changed:
        session.give_up()
        raise ProtocolError(
            f"the output {changed[0]!r} was changed in place between the forward and backward(), which may read it; "
            "the forward was given up, and no update was made. Make a new tensor instead: out = out * 2, not "
            "out.mul_(2)"
        )
    written = iteration.edited_buffers()
    if written:
        session.give_up()
        raise ProtocolError(
            f"the buffer {written[0]} was edited in place between the forward and backward(), which may read it; the "
            "forward was given up, and no update was made. Edit buffers after optimizer.step(), or put a new tensor "
            "in its place: module.buffer = module.buffer + 1"
        )
    asked = iteration.asked_gradients()
    if asked:
        session.give_up()
        raise ProtocolError(
            f"the output {asked[0]!r} has retain_grad() or a hook on its gradient, and the model itself goes on from "
            "it; backward() would give the loss's part of the gradient without the model's own. The forward was given "
            "up, and no update was made. Leave it out; copy.deepcopy(model) is a plain model that gives the whole"
        )
    edited = session.truth.edited()
    if edited:
        session.give_up()
        raise ProtocolError(
            f"{edited[0]} was edited between the forward and backward(); the forward was given up, the edit is "
            "used from the next forward on. Edit parameters after optimizer.step()"
        )
    if session.truth.has_other_parameters(trains=True):
        session.give_up()
        raise ProtocolError(
            "requires_grad of parameters changed between the forward and backward(); the forward was given up. Freeze "
            "and unfreeze parameters before the forward"
        )
    hooked = late_hooks(session.watch.parameters, iteration.fed) if session.updater is not None else []
    if hooked:
        session.give_up()
        raise ProtocolError(
            f"{hooked[0]} got a hook on its gradient between the forward and backward(); the forward was given up, and "
            "no gradient was made. Register hooks before the forward"
        )
    try:
        states = session.truth.take_states()
    except ProtocolError:
        session.give_up()
        raise
    if states:
        session.give_up()
        raise ProtocolError(
            f"the optimizer's state of {states[0]} was changed between the forward and backward(); the forward was "
            "given up, the change is used from the next forward on. Change states after optimizer.step()"
        )


def check_groups(updater: Updater) -> None:
    """Raise if the optimizer no longer holds the parameters that it was compiled with."""
    held = {id(param) for group in updater.optimizer.param_groups for param in group["params"]}
    missing = [name for param, name in updater.names.items() if id(param) not in held]
    if missing or len(held) != len(updater.names):
        what = f"{missing[0]} ({len(missing)} in all) was removed from" if missing else "a parameter was added to"
        raise ProtocolError(
            f"{what} optimizer.param_groups after offmate.compile; the plan updates the parameters that were there "
            "then. Put the groups back as they were. To leave a parameter as it is give its group lr=0 and "
            "weight_decay=0, or freeze it and compile a new model and optimizer"
        )


def check_inputs(wanted: frozenset[str] | None, updated: set[str]) -> None:
    """Raise if backward(inputs=...) leaves out parameters that the plan updates.

    Parameters
    ----------
    wanted: names of the parameters that it names; None if it names none.
    """
    missing = sorted(updated - wanted) if wanted is not None else []
    if missing:
        raise ProtocolError(
            f"backward(inputs=...) leaves out {missing[0]} ({len(missing)} parameters in all), which the plan updates. "
            "Name all trained parameters, freeze the others before compiling, or compile without optimizer="
        )


def check_zeroed(zeroed: set[str], updates: set[str]) -> None:
    """Raise if plain PyTorch would update parameters with gradients of zeros that the plan does not have.

    Parameters
    ----------
    zeroed: parameters whose gradients zero_grad(set_to_none=False) has left at zero. updates: those of the plan.
    """
    left = sorted(zeroed - updates)
    if left:
        raise ProtocolError(
            f"zero_grad(set_to_none=False) has left a gradient of zeros for {left[0]} ({len(left)} parameters), with "
            "which plain PyTorch would update it although this forward does not use it; the plan would not. Call "
            "zero_grad() without set_to_none=False"
        )


def check_step(session: Session) -> None:
    """Raise if the loop may not call optimizer.step() now."""
    if session.cleared_early and not session.micro_batches and not session.outside.any:
        raise ProtocolError(
            "optimizer.step() after the gradients were cleared by zero_grad(), so there is nothing to update; leave "
            "out this step(), too"
        )
    if not session.micro_batches:
        raise ProtocolError(f"optimizer.step() without a backward(); next comes {session.turn.value}")


def refuse_late_edits(session: Session, edited: tuple[str, ...]) -> None:
    """Raise if parameters or states were edited after their update, before optimizer.step(); the iteration ends."""
    if not edited:
        return
    # Everything was brought home for the edit; what the plan would still do would undo it.
    session.bring_home()
    session.turn = Turn.FORWARD
    raise ProtocolError(
        f"{edited[0]} or its optimizer state was edited between backward() and optimizer.step(), after its update had "
        "been made instead of before it; the step is done and the edit stays. Edit after optimizer.step(), or compile "
        "with a gate, which has updates wait for it: max_grad_norm=float('inf')"
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
            "call optimizer.step() first. To drop gradients before the step compile with a gate, which has updates "
            "wait for it: max_grad_norm=float('inf')"
        )
