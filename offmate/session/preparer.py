"""Finds the plan that a call needs: one that is kept, or a new one that is bound to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..capture.byproducts import put
from ..capture.checks import check_module_hooks
from ..errors import CaptureError, OffmateError
from ..guards.surroundings import surroundings
from ..guards.watch import Watch
from ..optim.state_bytes import state_forms
from ..optim.updater import Updater
from ..planning.follow import Seen
from ..planning.request import Request
from ..plans.plan import Plan
from ..runtime.replay.executor import Executor
from .host_state import Truth
from .maker import Maker
from .user_code import UserCode
from .variants import Call, Counts, Followers, Unfit, Variant, Variants, most_kept


class Preparer:
    """Finds the variant that a call needs, or has it made.

    It knows nothing about the loop: the caller has made sure that a call is allowed now.

    State: the variants that are kept; `_followers`, by executor, those that use it in slots of the same steps; whether
    counts of items are passed as tensors; `training`, the variant that trained last. Changed on the training thread
    only.

    Parameters
    ----------
    watch: watches the model's Python state. truth, updater: what variants run on. user_code: measures it.
    """

    def __init__(self, maker: Maker, watch: Watch, truth: Truth, updater: Updater | None, user_code: UserCode) -> None:
        self.maker, self.user_code = maker, user_code
        self._watch, self._truth, self._updater = watch, truth, updater
        self._variants = Variants(maker.request.config.shape_buckets, most_kept(maker.request))
        self._followers: dict[Executor, Followers] = {}
        self._counts: Counts | None = None
        self.training: Variant | None = None

    @property
    def request(self) -> Request:
        """The requirements of plans, with the budgets and files as they are now."""
        return self.maker.request

    @property
    def plan(self) -> Plan | None:
        """The plan of the training iteration, once there is one."""
        return self.training.prepared.plan if self.training is not None else self.maker.given

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans kept for training, the most recently used one last."""
        return tuple(variant.prepared.plan for variant in self._variants.of_training())

    # -- a call -------------------------------------------------------------------------------------------------------

    def call_of(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool) -> Call:
        """Build the call with these arguments, as a graph takes it.

        Parameters
        ----------
        gradients: whether autograd records; the call trains if, in addition, any parameter requires a gradient.
        """
        self._counts = self._counts or Counts(model)
        state, given = self._watch.look(), (args, kwargs)
        trains = gradients and self._watch.trains
        return Call(args, self._counts.as_tensor(kwargs), given, trains, state, surroundings())

    def variant_for(
        self, model: torch.nn.Module, call: Call, make_room: Callable[[], None]
    ) -> tuple[Variant, list[torch.Tensor | None]]:
        """Return the variant for a call, planning it if no kept one fits.

        Parameters
        ----------
        make_room: removes everything from the device; called before a plan is made.

        Returns: the variant, and the call's leaves as its executor takes them. Raises: as planning does.
        """
        try:
            return self._variant(model, call, make_room), call.tensors
        except CaptureError:
            if self._counts is None or not self._counts.keep(call.given[1]):
                raise
            call = call.as_given()
            return self._variant(model, call, make_room), call.tensors

    def known(self, call: Call) -> Variant | None:
        """Return the variant that is kept for a call; None if it would have to be planned."""
        return self._variants.find(call.kind, [tensor for tensor in call.tensors if tensor is not None])

    def account_for_user_code(self) -> None:
        """Discard a plan if the user's code was seen to hold more than it reserves; it may have room for that."""
        short = self.user_code.account()
        if short is None:
            return
        dropped, lead = self._variants.forget(short), short.lead
        if lead.executor in self._followers:
            dropped += self._followers[lead.executor].variants.forget(short)
        if self.user_code.held_by(lead.kind) is None:  # it rests on the same estimate
            dropped += self._variants.forget(lead)
        for variant in dropped:
            self.maker.use_earlier(variant.prepared.plan)

    def _variant(self, model: torch.nn.Module, call: Call, make_room: Callable[[], None]) -> Variant:
        variant = self.known(call)
        if variant is None:
            _check_weights(model)
            check_module_hooks(model)
            make_room()
            self.maker.look_at_files()
            if self.maker.look_at_device():
                self._variants.clear()
            near = self._variants.near(call.kind) if call.trains else ()
            variant = self.maker.make(model, call, near, self.training)
            self._learn(variant)
            self._variants.add(call.kind, variant)
        if call.trains:
            self.training = variant
        return variant

    def _learn(self, variant: Variant) -> None:
        """Learn from a new variant's trace what the model's forward reads and changes."""
        captured = variant.prepared.captured
        self._watch.learn(captured.read, captured.free)
        for holder, name, value in captured.changed:
            put(holder, name, value)

    def replan(self, variant: Variant, plan: Plan) -> None:
        """Have the next call of a variant's kind take another plan."""
        self.maker.use_earlier(plan)
        self._variants.drop(variant)

    def put_back(self, variant: Variant) -> None:
        """Have the next call of a variant's kind take it again."""
        self.maker.forget_earlier(variant.prepared.plan.fingerprint)
        self._variants.replace(variant)

    def follower(
        self, model: torch.nn.Module, call: Call, lead: Variant, seen: Seen, make_room: Callable[[], None]
    ) -> Variant:
        """Return the variant for a call that takes the actions of another one's plan, in slots of the same steps.

        Parameters
        ----------
        lead: has an executor of its own. seen: what was seen of this batch before. make_room: as in `variant_for`.

        Raises: Unfit if such calls cannot take these actions in the same memory.
        """
        known = self.known(call)
        if known is not None and known.executor is lead.executor:
            return known
        followers, tensors = self._followers_of(lead), [tensor for tensor in call.tensors if tensor is not None]
        found = followers.variants.find(call.kind, tensors)
        if found is None:
            followers.check(call.kind, tensors)
            make_room()
            try:
                found = self.maker.follow(model, call, lead, seen)
            except Unfit as why:
                followers.refuse(call.kind, seen.taken, why)
                raise
            self._learn(found)
            followers.variants.add(call.kind, found)
        return found

    def _followers_of(self, lead: Variant) -> Followers:
        """Return those that use a variant's executor; those of executors that nothing else uses are dropped."""
        used = self._variants.executors
        self._followers = {executor: those for executor, those in self._followers.items() if executor in used}
        return self._followers.setdefault(lead.executor, Followers(most_kept(self.request)))

    @property
    def spare_bytes(self) -> int:
        """What plans of steps for several micro-batches leave to batches of other shapes."""
        return self.maker.spare_bytes

    def leave_room(self, spare_bytes: int) -> None:
        """Have plans of steps for several micro-batches leave some bytes, and forget those that were made without."""
        self.maker.spare_bytes = spare_bytes
        self._variants.forget_together()

    def reserve_states(self, variant: Variant) -> None:
        """Take the space in files for the states that the first updates of a variant will make.

        Raises: StorageError if there is too little space.
        """
        host, updater = self._truth.host, self._updater
        if updater is None or not variant.kind.trains:
            return
        missing = [name for name in host.in_store if not host.states.get(name)]
        variant.executor.reserve_states(
            {name: state_forms(updater, host.params[name], updater.groups[name]) for name in missing}
        )


def _check_weights(model: torch.nn.Module) -> None:
    meta = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    if meta:
        raise OffmateError(
            f"{len(meta)} parameters are on the meta device ({meta[0]}, ...); a plan needs no weights, but training "
            "does. Load them before the first batch, for example with from_pretrained"
        )
