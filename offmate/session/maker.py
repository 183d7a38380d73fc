"""Makes variants: plans calls of a model, and binds the plans to its device."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..capture.plain import Plainness
from ..config import Config
from ..errors import BudgetExceeded, InfeasibleBudget
from ..guards.surroundings import chosen_by_time
from ..guards.watch import Watch
from ..machines.allocator import check_allocator
from ..machines.devices import accelerator, check_budget, rng_untouched, still_free_bytes
from ..optim.updater import Updater
from ..planning.follow import Seen
from ..planning.forward_only import make_stream
from ..planning.placement import fitted, has_place, pockets
from ..planning.planner import make_follower, make_plan, trace_once
from ..planning.request import Prepared, Request
from ..planning.restated import Restated, restated
from ..plans.plan import Plan
from ..progress import Progress
from ..runtime.current import entered
from ..runtime.devices.device import Device
from ..runtime.layouts import same_tensors
from ..runtime.memory.reserve import MemoryLayout
from ..runtime.replay.executor import Executor
from ..runtime.replay.gate import Clip
from ..runtime.replay.shapes import Shape
from ..runtime.replay.world import World
from ..sizes import format_bytes
from ..split import Split
from .checkpoint_files import CheckpointFiles
from .failures import out_of_memory
from .host_state import Truth
from .ram_at_rest import short_of_ram
from .state_storage import StateStorage
from .user_code import UserCode
from .variants import Call, Unfit, Variant

log = logging.getLogger("offmate")


class Maker:
    """Makes the variants of one model.

    State: `request`, with the budgets and files as they are now; `spare_bytes`, which plans of steps for several
    micro-batches leave to batches of other shapes; earlier plans; `_split`, the split of updates in the plans so far,
    and `_kept`, the part of it and of an earlier run's that later plans keep; the tensors that keep the pockets apart,
    see `pockets`; `_warned`, whether kernels chosen by time were warned of; `_rest_warned`, whether too little RAM for
    all values was; `_pins_late`, whether parameters are pinned once a plan has sent some to files. Changed on the
    training thread only.

    Parameters
    ----------
    request: the requirements of plans. plainness: that of the model. watch: watches its Python state. truth, device,
        updater: what variants run on. user_code: measures it.
    max_grad_norm: for all gradients together; None clips nothing. given: a plan to use. progress: makes a progress bar.
    files: the frozen parameters that lie in files. storage: the files that states and activations may leave to.
    """

    def __init__(
        self,
        request: Request,
        plainness: Plainness,
        watch: Watch,
        truth: Truth,
        device: Device,
        updater: Updater | None,
        user_code: UserCode,
        max_grad_norm: float | None,
        given: Plan | None,
        progress: Callable[[], contextlib.AbstractContextManager[Progress]],
        files: CheckpointFiles,
        storage: StateStorage,
    ) -> None:
        self._files, self._storage = files, storage
        self.request, self._plainness, self._watch = request, plainness, watch
        self._truth, self._device, self._updater, self._user_code = truth, device, updater, user_code
        self._max_grad_norm, self.given, self._progress = max_grad_norm, given, progress
        self.spare_bytes = 0
        self._earlier: dict[str, Plan] = {}
        self._pockets: tuple[torch.Tensor, ...] = ()
        self._split = self._kept = Split()
        self._warned, self._rest_warned, self._pins_late = False, False, False

    @property
    def split(self) -> Split:
        """The split of updates in the plans so far, joined with the one to which later plans are pinned."""
        return self._pinned().joined(self._split)

    def _pinned(self) -> Split:
        """Return what is known about the split of updates before there is any plan."""
        if self._updater is None:
            return Split()
        held, updates = tuple(self._updater.names.values()), self.request.config.updates
        if updates in ("host", "device"):
            return Split(**{updates: held})
        pinned = self._kept.joined(updates) if isinstance(updates, Split) else self._kept
        if self.given is not None:
            pinned = pinned.joined(self.given.split)
        # An earlier run may have had parameters that this one does not have.
        return pinned.among(held)

    def use_earlier(self, plan: Plan) -> None:
        """Let a plan be used where it fits a batch, instead of searching."""
        self._earlier[plan.fingerprint] = plan

    def forget_earlier(self, fingerprint: str) -> None:
        """Let no earlier plan be used for this request any more."""
        self._earlier.pop(fingerprint, None)

    def keep_split(self, split: Split) -> None:
        """Make plans update parameters where an earlier run did, as far as `Config.updates` leaves it open."""
        self._kept = self._kept.joined(split)

    # -- what is there now --------------------------------------------------------------------------------------------

    def look_at_files(self) -> None:
        """Find out which parameters may come from files; all of them go into RAM of their own if it has room."""
        self._files.find(self._watch.parameters)
        files = self._files.request(self.request.host_budget_bytes)
        storage = self._storage.files_for_plans(self._watch.parameters)
        self.request = replace(self.request, files=files, storage=storage)
        self._pins_late = storage is not None and storage.for_parameters
        if not self._pins_late:
            self._pin()
        if files is None:
            self._truth.host.files.clear()

    def pin_what_stays(self) -> None:
        """Move parameters into pinned memory that may have left to files, now that a plan has sent those that do."""
        if self._pins_late:
            self._pin()
        self._pins_late = False

    def _pin(self) -> None:
        """Move parameters into pinned memory, but those that are mapped from files or lie in them."""
        files = self.request.files
        self._truth.pin(self._device, but=() if files is None else files.names)

    def look_at_device(self) -> bool:
        """Take the budget, the allocator's settings and the choice of kernels as they are now.

        Returns: whether the budget has changed, so that earlier plans exceed it.
        """
        where = accelerator(self.request.device)
        check_allocator(where)
        shrunk = self._shrink()
        unsteady = "" if where is None else chosen_by_time()
        if unsteady and not self._warned:
            self._warned = True
            log.warning("%s", unsteady)
        return shrunk

    def _shrink(self) -> bool:
        """Let "auto" stand for a smaller budget if less memory is free than it has counted with; return whether so."""
        request = self.request
        left = still_free_bytes(request.device, request.budget_bytes) if request.automatic else request.budget_bytes
        if left == request.budget_bytes:
            return False
        log.warning(
            'gpu_budget "auto" now stands for %s instead of %s: less memory is free on the device than before',
            format_bytes(left), format_bytes(request.budget_bytes),
        )  # fmt: skip
        check_budget(request.device, left)
        self.request = replace(request, budget_bytes=left)
        self._device.limit(left)
        return True

    # -- a variant ----------------------------------------------------------------------------------------------------

    def make(self, model: torch.nn.Module, call: Call, near: tuple[Variant, ...], training: Variant | None) -> Variant:
        """Plan a call and bind the plan to the device.

        Parameters
        ----------
        near: variants of larger batches, whose decisions may be taken. training: the variant that trained last.

        Raises: as planning does.
        """
        with self._preparing(model) as say:
            if call.trains:
                make = self._iteration_maker(model, call, say, tuple(one.prepared for one in near), training)
            else:
                make = self._forward_maker(model, call, say)
            prepared, place = self._placed(make, model, (call.args, call.kwargs))
        if call.trains:
            log.info("plan ready:\n%s", prepared.plan.explain())
            self._split = self._split.joined(prepared.plan.split)
            if accelerator(self.request.device) is not None:
                # A CPU rounds differently, so parameters keep the side of their first update.
                self._kept = self._kept.joined(prepared.plan.split)
            with contextlib.suppress(Unfit):
                return self._following(model, prepared, call, near)
        return self._bound(prepared, model, call, place)

    def restate(self, model: torch.nn.Module, call: Call, plan: Plan) -> Restated:
        """State the problem of a plan for a call again, with what holds now. Raises: as planning does."""
        self.look_at_files()
        request = self._training_request(call)
        request = replace(request, config=self._config(request.config), margin_bytes=plan.allocator_bytes)
        with self._preparing(model) as say:
            return restated(model, call.args, call.kwargs, request, self._updater, say, plan)

    def follow(self, model: torch.nn.Module, call: Call, lead: Variant, seen: Seen) -> Variant:
        """Make the variant for a call that takes the actions of another one's plan, and runs on its executor.

        Parameters
        ----------
        seen: what was seen of this batch before, of any lead.

        Raises: Unfit if such calls cannot take these actions in the same memory.
        """
        request = self._training_request(call)
        request = replace(request, config=self._config(request.config))
        with self._preparing(model) as say:
            try:
                prepared = make_follower(
                    model, call.args, call.kwargs, request, self._updater, say, lead.prepared, seen
                )  # fmt: skip
            except Exception as error:  # the loop may call otherwise; alone, in the usual order, it says why
                lines = str(error).splitlines() or [type(error).__name__]
                raise Unfit(why=lines[0].rstrip(".")) from error
        if prepared is None:
            raise Unfit
        return self._following(model, prepared, call, (lead,))

    @contextlib.contextmanager
    def _preparing(self, model: torch.nn.Module) -> Iterator[Progress]:
        """Make the model plain and keep the user's settings inside; yields what reports progress."""
        with (
            self._plainness.of(model),
            self._progress() as say,
            rng_untouched(accelerator(self.request.device)),
            entered(accelerator(self.request.device)),
            torch.autograd.set_detect_anomaly(False),
        ):
            yield say

    def _following(self, model: torch.nn.Module, prepared: Prepared, call: Call, near: Iterable[Variant]) -> Variant:
        """Return the variant that runs a plan on the executor of one whose decisions it has taken.

        Raises: Unfit if none of those near has the same actions, and the memory.
        """
        where, excess = accelerator(self.request.device), list[int]()
        for lead in (variant.lead for variant in near):
            own = lead.shape.binding.constants
            if not same_tensors(prepared.binding.constants, own):
                continue  # they are on the device all the time, so that the executor would hold more
            followed = replace(prepared, binding=replace(prepared.binding, constants=own))
            shape = Shape(followed.plan.schedule, followed.binding)
            more_bytes = lead.shape.excess_bytes(shape)
            if more_bytes is None:
                continue
            if more_bytes > lead.room_bytes:
                excess.append(more_bytes)
            elif where is None or lead.place is None or has_place(lead.place, followed, model, self._updater, where):
                return Variant(followed, lead.executor, call.kind, shape, followed=lead)
        raise Unfit(min(excess, default=None))

    def _forward_maker(self, model: torch.nn.Module, call: Call, say: Progress) -> Callable[[int], Prepared]:
        """Return a function that plans a forward, given the bytes to leave to the device's allocator."""
        request, host = self.request, self._truth.host
        may_leave = request.storage is not None and request.storage.for_parameters
        apart_bytes = sum(own.nbytes for name, own in host.params.items() if may_leave or host.stores(name))
        request = replace(
            request,
            budget_bytes=max(1, request.budget_bytes - call.reserved_bytes),
            # These come through the system's cache, or are in RAM until the first training step anyway.
            host_budget_bytes=request.host_budget_bytes + apart_bytes,
        )
        return lambda margin_bytes: make_stream(
            model, call.args, call.kwargs, replace(request, margin_bytes=margin_bytes), say
        )

    def _iteration_maker(
        self,
        model: torch.nn.Module,
        call: Call,
        say: Progress,
        near: tuple[Prepared, ...],
        training: Variant | None,
    ) -> Callable[[int], Prepared]:
        """Return a function that plans an iteration, given the bytes to leave to the device's allocator."""
        if training is not None:
            self._say_why(call, training)
        request = self._training_request(call)
        given = self.given if training is None else None
        trace = trace_once(model, call.args, call.kwargs, request, say, near[0].cut if near else ())

        def make(margin_bytes: int, config: Config) -> Prepared:
            return make_plan(
                model, call.args, call.kwargs, replace(request, margin_bytes=margin_bytes, config=config),
                self._updater, say, None if margin_bytes else given, near=near,
                kept=None if margin_bytes else self._earlier, trace=trace,
            )  # fmt: skip

        def make_as_kept(margin_bytes: int) -> Prepared:
            config = self._config(request.config)
            try:
                return make(margin_bytes, config)
            except InfeasibleBudget:
                if config is request.config or accelerator(request.device) is not None:
                    raise
                log.info(
                    "the earlier run's split of updates does not fit, so a new one is used; on this device, this "
                    "changes no bits"
                )
                return make(margin_bytes, request.config)

        return make_as_kept

    def _say_why(self, call: Call, training: Variant) -> None:
        shapes = ", ".join(str(list(shape)) for shape in call.kind.shapes)
        changed = call.kind.state != training.kind.state
        changes = f"; changes since the last plan: {self._watch.changes}" if changed else ""
        early = ", with updates before the gate" if call.early else ""
        log.info("planning for batches with %s%s%s", shapes, early, changes)

    def _training_request(self, call: Call) -> Request:
        """Return the requirements of the plan for a call that trains."""
        request = self.request
        if call.together > 1:
            request = replace(request.in_passes(call.together), spare_bytes=self.spare_bytes)
        return replace(
            request.speculating(call.early) if self.request.chooses else request,
            user_bytes=self._user_code.held_by(call.kind),
            user_factor=self._user_code.factor,
        )

    def _config(self, config: Config) -> Config:
        """Return the configuration of a plan, with the split of updates of earlier plans."""
        kept = self._kept
        if self._updater is None or config.updates in ("host", "device") or kept == Split():
            return config
        return replace(config, updates=kept.joined(config.updates) if isinstance(config.updates, Split) else kept)

    def _placed(
        self, make: Callable[[int], Prepared], model: torch.nn.Module, batch: Any
    ) -> tuple[Prepared, MemoryLayout | None]:
        """Find a plan that fits the device's allocator, too, and its place; `make` plans with a margin in bytes."""
        where = accelerator(self.request.device)
        if where is None:
            return make(0), None
        budget_bytes = self.request.budget_bytes
        # Other processes may have come since the model was compiled.
        check_budget(self.request.device, budget_bytes)
        try:
            self._pockets = self._pockets or pockets(where, model, batch)
            return fitted(make, model, self._updater, where, budget_bytes)
        except torch.OutOfMemoryError as error:
            raise BudgetExceeded(f"{out_of_memory(where, budget_bytes, None)}. ({error})") from error

    def _bound(self, prepared: Prepared, model: torch.nn.Module, call: Call, place: MemoryLayout | None) -> Variant:
        plan = prepared.plan
        if call.trains:  # a forward alone streams what it can from files, and takes no RAM away from training
            self._files.settle(plan.schedule, self._truth, self._device)
            self._storage.check_room(plan.schedule)
            self._warn_of_rest(plan)
        world = World(
            plan.schedule,
            prepared.binding,
            self._truth.host,
            self._device,
            self._updater if call.trains else None,
            place.updated if place is not None else {},
        )
        executor = Executor(world, plan.fixed_bytes, self._clip(model) if call.trains else None)
        return Variant(prepared, executor, call.kind, world.shapes.own, place)

    def _warn_of_rest(self, plan: Plan) -> None:
        """Say once if RAM has no room for everything that comes back from the device."""
        words = "" if self._rest_warned else short_of_ram(plan, self.request)
        if words:
            self._rest_warned = True
            log.warning("%s", words)

    def _clip(self, model: torch.nn.Module) -> Clip | None:
        if self._max_grad_norm is None and not self.request.measures:
            return None
        return Clip(self._max_grad_norm or math.inf, tuple(name for name, _ in model.named_parameters()))
