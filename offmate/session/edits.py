"""Refuses the user's edits in the middle of an iteration that a plan cannot follow, each by name."""

from __future__ import annotations

from ..capture.checks import hooked
from ..errors import ProtocolError
from ..optim.updater import Updater
from .autograd import Iteration
from .host_state import Truth


def check_unchanged(iteration: Iteration, truth: Truth, planned: bool) -> None:
    """Raise if something that the backward reads was edited since the forward, which must then be given up.

    Parameters
    ----------
    planned: whether a planned optimizer takes the gradients.
    """
    changed = iteration.changed_outputs()
    if changed:
        raise ProtocolError(
            f"the output {changed[0]!r} was changed in place between the forward and backward(), which may read it. "
            "The forward was discarded, and no update was made. Make a new tensor instead: out = out * 2, not "
            "out.mul_(2)"
        )
    written = iteration.edited_buffers()
    if written:
        raise ProtocolError(
            f"the buffer {written[0]} was edited in place between the forward and backward(), which may read it. The "
            "forward was discarded, and no update was made. Edit buffers after optimizer.step(), or put a new tensor "
            "in its place: module.buffer = module.buffer + 1"
        )
    asked = iteration.asked_gradients()
    if asked:
        raise ProtocolError(
            f"the output {asked[0]!r} has retain_grad() or a hook on its gradient, but the model itself also uses it, "
            "so the plan would return only the loss's part of the gradient. The forward was discarded, and no update "
            "was made. Remove the hook or retain_grad(), or use a plain model, copy.deepcopy(model), for the whole "
            "gradient"
        )
    edited = truth.edited()
    if edited:
        raise ProtocolError(
            f"{edited[0]} was edited between the forward and backward(). The forward was discarded, and the edit "
            "counts from the next forward on. Edit parameters after optimizer.step()"
        )
    if truth.has_other_parameters(trains=True):
        raise ProtocolError(
            "requires_grad of parameters changed between the forward and backward(). The forward was discarded. Freeze "
            "and unfreeze parameters before the forward"
        )
    late = hooked(iteration.params)
    if late and (planned or (len(late) > 1 and not iteration.ordered)):
        raise ProtocolError(
            f"{late[-1]} got a hook on its gradient between the forward and backward(). The forward was discarded, and "
            "no gradient was made. Register hooks before the forward"
        )
    states = truth.take_states()
    if states:
        raise ProtocolError(
            f"the optimizer's state of {states[0]} was changed between the forward and backward(). The forward was "
            "discarded, and the change counts from the next forward on. Change states after optimizer.step()"
        )


def late_edit(name: str) -> ProtocolError:
    """Build the error for a parameter or state that was edited after its update, but before optimizer.step()."""
    return ProtocolError(
        f"{name} or its optimizer state was edited between backward() and optimizer.step(), but its update was already "
        "made. The step is done, and the edit stays. Edit after optimizer.step(), or compile with "
        "max_grad_norm=float('inf'), which makes updates wait for the step"
    )


def check_groups(updater: Updater) -> None:
    """Raise if the optimizer no longer holds the parameters that it was compiled with."""
    held = {id(param) for group in updater.optimizer.param_groups for param in group["params"]}
    missing = [name for param, name in updater.names.items() if id(param) not in held]
    if missing or len(held) != len(updater.names):
        what = f"{missing[0]} ({len(missing)} in all) was removed from" if missing else "a parameter was added to"
        raise ProtocolError(
            f"{what} optimizer.param_groups after offmate.compile; the plan updates the parameters that were there "
            "then. Restore the groups. To keep a parameter unchanged, give its group lr=0 and weight_decay=0, or "
            "freeze it and compile a new model and optimizer"
        )


def check_inputs(wanted: frozenset[str] | None, updated: set[str]) -> None:
    """Raise if backward(inputs=...) leaves out parameters that the plan updates.

    Parameters
    ----------
    wanted: the parameters that backward(inputs=...) names; None if it names none.
    """
    missing = sorted(updated - wanted) if wanted is not None else []
    if missing:
        raise ProtocolError(
            f"backward(inputs=...) leaves out {missing[0]} ({len(missing)} parameters in all), which the plan updates. "
            "Name all trained parameters, freeze the others before compiling, or compile without optimizer="
        )
