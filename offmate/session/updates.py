"""The planned optimizer's turns of the training loop: its step, its zero_grad, and gradients that the user assigns."""

from __future__ import annotations

import logging

import torch

from ..errors import ProtocolError, StorageError
from ..optim.updater import Updater
from . import ending
from .assigned import Assigned
from .choice import Choice
from .contexts import alone, outside_inference
from .edits import check_groups, check_inputs, late_edit
from .left_out import leave_out_the_last
from .orders import Orders
from .outside import Outside
from .replanning import Replanning
from .residence import Residence
from .scaling import Scaling, skip, unscale
from .state_storage import StateStorage
from .turns import Turn
from .variants import Variant

log = logging.getLogger("offmate")


class Updates:
    """Ends iterations on behalf of the planned optimizer.

    State: `outside`, gradients that the plan does not make; `assigned`, gradients that the user sets; `scaling`, what
    the scaler has done; and what `residence` holds. Changed by one thread at a time.

    Parameters
    ----------
    names: of the parameters that the optimizer holds. scaling: None if losses are not scaled. storage: the files that
        states lie in. orders: knows which micro-batches run together. choice: decides whether updates come before the
        gate, if that is left to it. replanning: looks whether the plan still holds.
    """

    def __init__(
        self,
        residence: Residence,
        updater: Updater,
        names: dict[torch.Tensor, str],
        scaling: Scaling | None,
        storage: StateStorage,
        orders: Orders,
        choice: Choice,
        replanning: Replanning,
    ) -> None:
        self.storage, self.orders, self.choice, self.replanning = storage, orders, choice, replanning
        self.residence, self.updater, self.scaling = residence, updater, scaling
        self.turns, self.truth = residence.turns, residence.truth
        self.assigned, self.outside = Assigned(), Outside(names, self.turns)
        self.process, self.lock = residence.process, residence.lock

    def backward_begins(self, variant: Variant, wanted: frozenset[str] | None) -> None:
        """Check that the plan's backward may run, and note what it begins with.

        Parameters
        ----------
        wanted: the parameters that backward(inputs=...) names; None stands for all.
        """
        self._drop_alone()
        check_groups(self.updater)
        check_inputs(wanted, variant.updates)
        self.turns.check_zeroed(variant.updates)
        self.outside.backward_begins(self.turns.backwards)
        if self.scaling is not None:
            assert self.truth.host.unscaling is not None
            self.truth.host.unscaling.begin(self.scaling.backward_begins(self.turns.backwards))

    def speculates(self, variant: Variant) -> bool:
        """Return whether updates may begin before the gate in the backward that begins, with what holds now.

        They may not if a float32 copy may have to follow an edit first, or if a kernel is to unscale its gradients.
        """
        asked = variant.prepared.plan.schedule.log_cpu_s or self.choice.clipping is not None
        if not (self.turns.gate and asked):
            return False
        copies = self.truth.copies
        if copies.are_unmatched(variant.updates) and copies.differ(variant.updates):
            return False
        if self.scaling is not None:
            if not self.scaling.unscaled:
                return False
            self.updater.grad_scales = {}
        try:
            self.storage.make_room()  # a checkpoint may have been made since the forward
        except StorageError:  # step() will say so, before any update
            return False
        self.updater.snapshot()
        return True

    def _retract_if_changed(self) -> None:
        """Undo updates that were made before the gate with other hyperparameters than the step's."""
        active = self.residence.active
        if active is not None and active.executor.has_speculated and self.updater.has_changed():
            with self.residence.whole():
                active.executor.retract()

    @alone
    @outside_inference
    def step(self) -> None:
        """Handle the user's optimizer.step()."""
        self.process.check()
        self.residence.stream.check()
        leave_out_the_last(self.residence, self.orders, self.speculates)
        self.turns.check_step(self.outside.any)
        if self.turns.turn is Turn.BACKWARD:
            self.residence.drop_forward()
        self._drop_alone()
        check_groups(self.updater)
        if self.scaling is not None:
            self.scaling.check_step()
            self.updater.grad_scales = self.scaling.left_to_the_kernel(self.residence.device.torch_device)
        if self.turns.gate:
            self._retract_if_changed()
            self.storage.make_room()  # a checkpoint may have been made since the forward
            self.updater.snapshot()
        else:
            self.updater.check_unchanged()
        edited = self.truth.trained(self.truth.check_edits()) + self.truth.take_states()
        self.residence.preparer.account_for_user_code()
        outside = ending.take_outside(self.residence, self.outside)
        if outside and self.truth.host.unscaling is not None:
            self.truth.host.unscaling.norm = None  # gradients of unscaled terms, after unscale_(), count too
        if self.turns.gate:
            self.residence.renew()  # so that float32 copies follow what numpy has written
        if self.turns.gate and (edited or outside or not ending.plan_ends_it(self.residence)):
            ending.finish_on_host(self.residence, outside)
            self._ended(kept=False)
            return
        if edited:
            # End the iteration on the host, since the rest of the plan would undo the edit.
            self.residence.bring_home()
            self.turns.step_done()
            raise late_edit(edited[0])
        active = self.residence.active
        assert active is not None
        self.residence.renew()
        with self.residence.whole():
            self.truth.current = False
            active.executor.turn_around()
            self.turns.step_done()
        self.truth.copies.updated(active.updates)
        self._ended(kept=active.executor.kept)
        self.residence.pace.step_done(active.prepared.plan)
        self.storage.iteration_done()
        self.replanning.update_done()

    @alone
    @outside_inference
    def unscale(self, inverse: torch.Tensor | None) -> dict[torch.device, torch.Tensor] | None:
        """Unscale the gradients of this update on behalf of the user's scaler; see `scaling.unscale`."""
        self.process.check()
        self.residence.stream.check()
        if not self.turns.backwards:
            return None
        leave_out_the_last(self.residence, self.orders, self.speculates)
        self.turns.check_all_came()
        if self.turns.turn is Turn.BACKWARD:
            self.residence.drop_forward()
        self._drop_alone()
        assert self.scaling is not None
        return unscale(self.residence, self.scaling, self.outside, inverse)

    @alone
    @outside_inference
    def skip(self) -> None:
        """Handle an optimizer.step() that makes no update, since the scaler has found a value that is not finite."""
        self.process.check()
        leave_out_the_last(self.residence, self.orders, self.speculates)
        self.turns.check_step(self.outside.any)
        self._drop_alone()
        self.residence.preparer.account_for_user_code()
        skip(self.residence)
        self._ended(kept=False)

    def _ended(self, *, kept: bool) -> None:
        training = self.residence.preparer.training
        if training is not None and self.turns.gate:
            self.choice.updated(training, kept=kept)

    @alone
    @outside_inference
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Handle the user's zero_grad(); the planned optimizer has consumed the plan's gradients already."""
        self.turns.zeroing(set_to_none)
        self.process.check()
        self.assigned.clear()
        self.turns.check_clearing()
        self.outside.clear()
        self._drop()

    @alone
    @outside_inference
    def clear(self, param: torch.nn.Parameter) -> None:
        """Handle `param.grad = None`; what the plan has of that gradient is dropped before the update goes on."""
        self.process.check()
        self.turns.check_clearing()
        name = self.updater.names[param]
        self.assigned.clear_one(param)
        self.outside.clear_one(param, name)
        if self.turns.clearing(name):
            self._drop()

    def forward_begins(self) -> None:
        """Drop what was cleared before a forward that trains. Raises: ProtocolError if gradients were assigned."""
        self._drop_alone()
        self.assigned.check_none()

    def _drop_alone(self) -> None:
        names = self.turns.cleared_alone()
        if not names:
            return
        if self.scaling is not None and self.turns.turn is Turn.STEP:
            raise ProtocolError(
                f"the gradient of {min(names)} was set to None after the last backward() of an update. With "
                "grad_scaler=, that backward() has checked it together with the others. Set it to None before the last "
                "forward, or clear all gradients with zero_grad()"
            )
        self.residence.bring_home()
        self.truth.host.totals -= names
        self.turns.dropped(names)

    def _drop(self) -> None:
        early = self.turns.backwards if self.turns.waits else 0
        if early:
            log.info("zero_grad() before optimizer.step(): the gradients of %d backward() are dropped", early)
            under_way = self.orders.under_way
            ahead = under_way.drop() if under_way is not None else ""
            if ahead:
                log.warning(
                    "the update is dropped, but the forwards of all micro-batches of its pass had run together, so "
                    "that %s are ahead of plain PyTorch's", ahead,
                )  # fmt: skip
            self.residence.give_up()
        self.turns.cleared(early > 0)

    @alone
    def assign(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Set a parameter's gradient. Raises: ProtocolError in the middle of an iteration."""
        if self.turns.in_iteration:
            raise ProtocolError(
                "a gradient was assigned to a parameter whose updates are planned, in the middle of an iteration, "
                "where the plan does not see it. To work on .grad, compile without optimizer="
            )
        self.residence.bring_home()
        self.assigned.take(param, value)

    def step_assigned(self, optimizer: torch.optim.Optimizer) -> None:
        """Update on the host as plain PyTorch does, with the optimizer's own step."""
        self.updater.base.step(optimizer)
        self.truth.adopt_states()
