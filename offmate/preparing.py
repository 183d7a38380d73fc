"""Which plan a call needs: one that is kept, or one that is made for it and bound to the device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .devices import accelerator, check_budget, rng_untouched
from .errors import BudgetExceeded, CaptureError, OffmateError
from .evaluate import make_stream
from .failures import out_of_memory
from .fitting import fitted, pockets
from .optimizer import Updater
from .plain import Plainness
from .planner import make_plan
from .plans import Plan
from .progress import Progress
from .request import Prepared, Request
from .runtime.device import Device
from .runtime.executor import Executor
from .runtime.gate import Clip
from .runtime.reserve import Place
from .truth import Truth
from .user_code import UserCode
from .variants import Call, Numbers, Variant, Variants

log = logging.getLogger("offmate")


class Preparer:
    """Finds the variant that a call needs, or has it planned.

    It knows nothing of the loop: whoever asks has made sure that a call may come now.

    State: the variants that are kept, and the numbers that calls were seen to change; `training`, the variant that
    trained last; `user_code`, what it was seen to hold; earlier plans; what keeps the pockets apart, see `fitting`.
    Changed on the training thread only.

    Parameters
    ----------
    request: what plans are for. plainness: of the model. truth, device, updater: what variants run on.
    max_grad_norm: of all gradients; None clips nothing. given: a plan to use. progress: of planning, on screen.
    """

    def __init__(
        self,
        request: Request,
        plainness: Plainness,
        truth: Truth,
        device: Device,
        updater: Updater | None,
        max_grad_norm: float | None,
        given: Plan | None,
        progress: Callable[[], contextlib.AbstractContextManager[Progress]],
    ) -> None:
        self._request, self._plainness = request, plainness
        self._truth, self._device, self._updater = truth, device, updater
        self._max_grad_norm, self._given, self._progress = max_grad_norm, given, progress
        self._variants = Variants(request.config.shape_buckets, request.config.max_plans)
        self._numbers = Numbers()
        self._earlier: dict[str, Plan] = {}
        self._pockets: tuple[torch.Tensor, ...] = ()
        self.user_code = UserCode(device.torch_device)
        self.training: Variant | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the training iteration, once there is one."""
        return self.training.prepared.plan if self.training is not None else self._given

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those kept for training, the one used last at the end."""
        return tuple(variant.prepared.plan for variant in self._variants.of_training())

    def use_earlier(self, plan: Plan) -> None:
        """Have a plan used where it fits a batch, instead of searching."""
        self._earlier[plan.fingerprint] = plan

    # -- a call -------------------------------------------------------------------------------------------------------

    def call_of(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Call:
        """The call with these arguments, as a graph takes it."""
        return Call(*self._numbers.as_tensors(args, kwargs), (args, kwargs), trains, model.training)

    def variant_for(
        self, model: torch.nn.Module, call: Call, make_room: Callable[[], None]
    ) -> tuple[Variant, list[torch.Tensor | None]]:
        """The variant for a call; it is planned if none is kept that does.

        Parameters
        ----------
        make_room: takes everything off the device; called before a plan is made.

        Returns: the variant, and the call's leaves as its executor takes them. Raises: as planning does.
        """
        try:
            return self._variant(model, call, make_room), call.tensors
        except CaptureError:
            if not self._numbers.keep(*call.given):
                raise
            call = call.as_given()
            return self._variant(model, call, make_room), call.tensors

    def account_for_user_code(self) -> None:
        """Have the training iteration planned anew if the user's code was seen to hold more than is reserved."""
        if self.user_code.account(self.training):
            assert self.training is not None
            self._variants.forget(self.training)

    def _variant(self, model: torch.nn.Module, call: Call, make_room: Callable[[], None]) -> Variant:
        variant = self._variants.find(call.kind, [tensor for tensor in call.tensors if tensor is not None])
        if variant is None:
            _check_weights(model)
            make_room()
            self._truth.pin(self._device)
            variant = self._prepare(model, call)
            self._variants.add(call.kind, variant)
        if call.trains:
            self.training = variant
        return variant

    # -- a plan -------------------------------------------------------------------------------------------------------

    def _prepare(self, model: torch.nn.Module, call: Call) -> Variant:
        with (
            self._plainness.of(model),
            self._progress() as say,
            rng_untouched(accelerator(self._request.device)),
        ):
            make = (self._iteration_maker if call.trains else self._forward_maker)(model, call, say)
            prepared, place = self._placed(make, model, (call.args, call.kwargs))
        if call.trains:
            log.info("plan ready:\n%s", prepared.plan.explain())
        return self._bound(prepared, model, call, place)

    def _forward_maker(self, model: torch.nn.Module, call: Call, say: Progress) -> Callable[[int], Prepared]:
        """Makes plans of a forward, given the bytes that they leave to the device's allocator."""
        request = self._request
        return lambda margin_bytes: make_stream(
            model, call.args, call.kwargs, replace(request, margin_bytes=margin_bytes), say
        )

    def _iteration_maker(self, model: torch.nn.Module, call: Call, say: Progress) -> Callable[[int], Prepared]:
        """Makes plans of an iteration, given the bytes that they leave to the device's allocator."""
        kind = call.kind
        if self.training is not None:
            log.info("planning for batches with %s", ", ".join(str(list(shape)) for shape in kind.shapes))
        request = replace(
            self._request, user_bytes=self.user_code.held_bytes.get(kind), user_factor=self.user_code.factor
        )
        given = self._given if self.training is None else None
        near = self._variants.near(kind)
        return lambda margin_bytes: make_plan(
            model, call.args, call.kwargs, replace(request, margin_bytes=margin_bytes), self._updater, say,
            None if margin_bytes else given, near=near, kept=self._earlier,
        )  # fmt: skip

    def _placed(
        self, make: Callable[[int], Prepared], model: torch.nn.Module, batch: Any
    ) -> tuple[Prepared, Place | None]:
        """A plan that fits the device's allocator too, and its place, given what makes one that leaves it so much."""
        where = accelerator(self._request.device)
        if where is None:
            return make(0), None
        budget_bytes = self._request.budget_bytes
        # Other processes may have come since the model was compiled.
        check_budget(self._request.device, budget_bytes)
        try:
            self._pockets = self._pockets or pockets(where, model, batch)
            return fitted(make, model, self._updater, where, budget_bytes)
        except torch.OutOfMemoryError as error:
            raise BudgetExceeded(f"{out_of_memory(where, budget_bytes, None)}. ({error})") from error

    def _bound(self, prepared: Prepared, model: torch.nn.Module, call: Call, place: Place | None) -> Variant:
        plan = prepared.plan
        executor = Executor(
            plan.schedule,
            prepared.binding,
            self._truth.host,
            self._device,
            self._updater if call.trains else None,
            plan.fixed_bytes,
            self._clip(model) if call.trains else None,
            place.updated if place is not None else None,
        )
        return Variant(prepared, executor, call.kind, place)

    def _clip(self, model: torch.nn.Module) -> Clip | None:
        if self._max_grad_norm is None:
            return None
        return Clip(self._max_grad_norm, tuple(name for name, _ in model.named_parameters()))


def _check_weights(model: torch.nn.Module) -> None:
    meta = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    if meta:
        raise OffmateError(
            f"{len(meta)} parameters are on the meta device ({meta[0]}, ...); a plan needs no weights, training "
            "does: load them, for example with from_pretrained, before the first batch"
        )
