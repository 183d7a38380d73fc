"""The turns of the training loop, and the errors for a loop that does something out of turn."""

from __future__ import annotations

from enum import Enum

import torch

from ..errors import ProtocolError
from .autograd import Iteration, alive
from .variants import Call


class Turn(Enum):
    """The next step of the training loop."""

    FORWARD = "the model's forward"
    BACKWARD = "backward() on the loss of the last forward"
    STEP = "optimizer.step()"


class Turns:
    """The training loop as a small state machine: it says whether something may come next, and notes that it has.

    State: `turn`; `gate`, whether updates wait for optimizer.step(), and `together`, whether the micro-batches of this
    update run block by block; the `iteration` that is under way and the `micro_batches` of its update so far, of which
    `_left_out` had no backward() and add nothing;
    `_dropped`, forwards that were given up but through which backward() could still be called; `uncleared`, whether
    zero_grad() is due; `_cleared_early`, whether zero_grad() came before step(); `_read_early`, whether the user has
    read values between backward() and step(); `_graded`, parameters that have had a gradient since the last
    zero_grad(), `_zeroed`, those whose gradient it left at zero, and `_alone`, those whose gradient alone was cleared
    and that have had none since. Changed by one thread at a time.

    Parameters
    ----------
    per_update: micro-batches that make one update. gate: whether updates wait for optimizer.step(). one_by_one: what
        to do for micro-batches one after the other, as errors say it.
    """

    def __init__(self, per_update: int, gate: bool, one_by_one: str) -> None:
        self.one_by_one = one_by_one
        self._per_update, self.gate, self.together = per_update, gate, False
        self.turn = Turn.FORWARD
        self.iteration: Iteration | None = None
        self.micro_batches = self._left_out = 0
        self.uncleared = False
        self._dropped: list[Iteration] = []
        self._cleared_early = self._read_early = False
        self._graded: set[str] = set()
        self._zeroed: set[str] = set()
        self._alone: set[str] = set()

    @property
    def in_iteration(self) -> bool:
        """Return whether a forward or a backward waits for the next step, or gradients for zero_grad()."""
        return self.turn is not Turn.FORWARD or self.uncleared

    @property
    def in_update(self) -> bool:
        """Return whether an update has begun with a forward, and waits for backward(), further ones, or its step."""
        return self.turn is not Turn.FORWARD or self.micro_batches > 0

    @property
    def backwards(self) -> int:
        """Return how many micro-batches of the update under way have had their backward()."""
        return self.micro_batches - self._left_out

    @property
    def is_together(self) -> bool:
        """Return whether an update is under way whose micro-batches run together, and not all backwards have come."""
        return self.together and self.in_update and self.micro_batches < self._per_update

    @property
    def waits(self) -> bool:
        """Return whether no update has begun that the gradients so far belong to."""
        return self.gate or self.micro_batches < self._per_update

    def is_consumed(self, name: str) -> bool:
        """Return whether plain PyTorch would show a parameter's gradient, which the planned optimizer has consumed."""
        return self.uncleared and name not in self._alone

    def begin_update(self, gate: bool, *, together: bool) -> None:
        """Note how the update runs that begins with the next forward."""
        self.gate, self.together = gate, together

    # -- what may come next -------------------------------------------------------------------------------------------

    def check_call(self, call: Call) -> None:
        """Raise if the loop may not call the model now, or not with these inputs."""
        if self.turn is Turn.STEP and (call.trains or not self.gate):
            calls = "one backward() call" if self._per_update == 1 else f"{self._per_update} backward() calls"
            raise ProtocolError(
                f"a forward after backward() without optimizer.step(), but one update of this plan takes {calls}. Call "
                "optimizer.step() first, or zero_grad() to drop the gradients. To accumulate more micro-batches, "
                "compile with accumulation_steps=. To evaluate before the step, compile with "
                "max_grad_norm=float('inf'), which makes updates wait for the step"
            )
        for leaf in call.leaves:
            if torch.is_grad_enabled() and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise ProtocolError(
                    f"an input of shape {tuple(leaf.shape)} requires a gradient, but offmate computes gradients only "
                    "for parameters. Detach the input, or make it a parameter of the model. If one model feeds another "
                    "and the gradient has to pass through the second (a generator and its discriminator), compile only "
                    "the first"
                )

    def check_backward(self, iteration: Iteration) -> None:
        """Raise if the loop may not call backward() through this forward now."""
        if iteration.dropped or any(other.runs_now for other in self._dropped):
            raise ProtocolError(
                "backward() through a forward that was discarded, because the model was called again, a state was "
                "loaded or the optimizer stepped before it. The plan keeps one forward at a time, and no update was "
                "made. Call backward() on each loss before the next forward (to add up the gradients, compile with "
                "accumulation_steps=), or join the two batches"
            )
        if self.turn is not Turn.BACKWARD or iteration is not self.iteration:
            raise ProtocolError(
                f"a second backward() through the same forward, but the next call must be {self.turn.value}. The plan "
                "frees what a backward has read, so retain_graph has no effect. Sum the losses and call backward() once"
            )
        if self.uncleared and not self.backwards:
            raise ProtocolError(
                "the gradients of the last iteration were not cleared, so plain PyTorch would add to them, but the "
                "planned optimizer has consumed them. Call optimizer.zero_grad() before backward()"
            )

    def check_zeroed(self, updates: set[str]) -> None:
        """Raise if plain PyTorch would update parameters with gradients of zeros that the plan does not have.

        Parameters
        ----------
        updates: names of the parameters that the plan updates.
        """
        left = sorted(self._zeroed - updates)
        if left:
            raise ProtocolError(
                f"zero_grad(set_to_none=False) has left a gradient of zeros for {left[0]} ({len(left)} parameters). "
                "This forward does not use it: plain PyTorch would still update it, but the plan would not. Call "
                "zero_grad() without set_to_none=False"
            )
        self._graded |= updates
        self._alone -= updates

    def check_step(self, outside: bool) -> None:
        """Raise if the loop may not call optimizer.step() now.

        Parameters
        ----------
        outside: whether there are gradients that the plan has not made.
        """
        if self.backwards:
            self.check_all_came()
        if self._cleared_early and not self.backwards and not outside:
            raise ProtocolError(
                "optimizer.step() after zero_grad() cleared the gradients, so there is nothing to update. Skip this "
                "step(), too"
            )
        if not self.backwards:
            raise ProtocolError(f"optimizer.step() without a backward(); the next call must be {self.turn.value}")

    def check_all_came(self) -> None:
        """Raise if the model was not called with all micro-batches that run together."""
        if self.is_together:
            raise ProtocolError(
                f"optimizer.step() after {self.micro_batches} of the {self._per_update} micro-batches that "
                "model.offmate.batches() announced. Forwards of several run together, and so do their backwards, so "
                "gradients are not complete yet. Call the model with each batch before the step (a backward() may be "
                "left out), or zero_grad() to drop this update. For updates of fewer micro-batches, "
                f"{self.one_by_one}"
            )

    def check_loading(self) -> None:
        """Raise if a state is loaded in the middle of micro-batches that run together."""
        if self.is_together:
            raise ProtocolError(
                f"a state is loaded after {self.micro_batches} of {self._per_update} micro-batches that run together. "
                "Load it after optimizer.step(), or drop this update with zero_grad() before"
            )

    def check_next(self, call: Call) -> None:
        """Raise if the loop may not call the model now, in the middle of micro-batches that run together."""
        if not call.trains:
            raise ProtocolError(
                "a forward without gradients between the micro-batches of one update, which run together. Call it "
                f"after optimizer.step(), or {self.one_by_one}"
            )
        if self.turn is Turn.BACKWARD:
            raise ProtocolError(
                f"a forward without backward() of micro-batch {self.micro_batches + 1}, and not with the batch that "
                f"follows it in this update of {self._per_update} micro-batches, which run together. Call "
                "optimizer.step() after the last one, or zero_grad() to drop this update. For forwards with other "
                f"inputs, {self.one_by_one}"
            )

    def cleared_alone(self) -> frozenset[str]:
        """Return the parameters whose gradient alone was cleared in the middle of an update.

        Raises: ProtocolError if their sums are not there yet, since backwards are to run together.
        """
        names = frozenset(self._alone & self._graded) if self.micro_batches else frozenset()
        if names and self.is_together:
            raise ProtocolError(
                f"the gradient of {min(names)} was set to None between the micro-batches of an update that run "
                "together. Clear all gradients with zero_grad(), which drops this update, or clear some after the last "
                f"backward(), or {self.one_by_one}"
            )
        return names

    def check_clearing(self) -> None:
        """Raise if the loop may not call zero_grad() now."""
        if self.micro_batches and self.waits:
            if self.turn is Turn.BACKWARD and not self.together:
                raise ProtocolError(
                    "gradients were cleared between a forward and its backward(), while gradients of earlier "
                    "micro-batches were accumulating. Call zero_grad() after optimizer.step()"
                )
        elif self.turn is Turn.STEP:
            raise ProtocolError(
                "gradients were cleared between backward() and optimizer.step(), but updates with them have begun. "
                "Call optimizer.step() first. To drop gradients before the step, compile with "
                "max_grad_norm=float('inf'), which makes updates wait for the step"
            )

    # -- what has come ------------------------------------------------------------------------------------------------

    def forward_done(self, iteration: Iteration) -> None:
        """Note that a training forward has run and waits for its backward."""
        self.turn, self.iteration, self._cleared_early = Turn.BACKWARD, iteration, False

    def forward_dropped(self) -> None:
        """Give up the forward that waits for its backward; the sums of earlier micro-batches stay."""
        assert self.iteration is not None
        self.iteration.dropped = True
        self.iteration.ends()
        self._dropped = [*alive(self._dropped), self.iteration]
        self.turn, self.iteration = Turn.FORWARD, None
        if not self.backwards:  # nothing was added up, so that another update begins
            self.micro_batches = self._left_out = 0

    def left_out(self) -> None:
        """Note that backward() of the forward under way does not come, and that the update goes on without it."""
        done = self.micro_batches + 1, self._left_out + 1
        self.forward_dropped()
        self.micro_batches, self._left_out = done
        self.turn = Turn.STEP if self.micro_batches == self._per_update else Turn.FORWARD

    def backward_done(self, planned: bool) -> None:
        """Note that a backward has run; with a `planned` optimizer it may have been the last one of an update."""
        self.iteration = None
        if not planned:
            self.turn = Turn.FORWARD
            return
        self.micro_batches += 1
        whole = self.micro_batches == self._per_update
        self.turn, self.uncleared, self._read_early = Turn.STEP if whole else Turn.FORWARD, True, False

    def step_done(self) -> None:
        """Note that the update has been made, or will not be made."""
        self.turn, self.micro_batches, self._left_out = Turn.FORWARD, 0, 0

    def zeroing(self, set_to_none: bool) -> None:
        """Note that zero_grad() is about to clear the gradients."""
        self._zeroed = set() if set_to_none else self._zeroed | (self._graded - self._alone)
        self._graded, self._alone = set(), set()

    def clearing(self, name: str) -> bool:
        """Note that the gradient of one parameter is about to be cleared; return whether no other one is left."""
        self._zeroed.discard(name)
        self._alone.add(name)
        left = self._graded - self._alone
        self._graded = self._graded if left else set()
        return not left

    def dropped(self, names: frozenset[str]) -> None:
        """Note that the sums of some parameters were dropped."""
        self._graded -= names

    def cleared(self, early: bool) -> None:
        """Note that the gradients were cleared, `early` if before the step."""
        self._cleared_early = self._cleared_early or early
        self.uncleared = False

    def skipped(self) -> None:
        """Note that the scaler has the optimizer leave out an update; plain PyTorch still has its gradients."""
        self.given_up()
        self.uncleared = True

    def given_up(self) -> None:
        """Note that the iteration ends where it is."""
        self.turn, self.iteration, self.uncleared = Turn.FORWARD, None, False
        self.micro_batches = self._left_out = 0

    def reads_early(self) -> bool:
        """Return whether a read now shows values of an update before its step(); true once per iteration."""
        early = self.turn is Turn.STEP and not self.gate and not self._read_early
        self._read_early = self._read_early or early
        return early
