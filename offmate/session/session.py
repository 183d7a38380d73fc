"""A compiled model at work: the turns of the training loop, and what is on the device for them."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..capture.byproducts import deliver
from ..capture.checks import check_hooks
from ..capture.kv_caches import has_cache, without_cache
from ..capture.plain import Plainness
from ..errors import OffmateError
from ..guards.watch import Watch
from ..machines.devices import make_device
from ..optim.updater import Updater
from ..planning.request import Request
from ..plans.plan import Plan
from ..progress import Progress
from ..runtime import interrupts
from ..runtime.layouts import on_storage
from . import ending
from .aside import aside
from .assigned import Assigned
from .autograd import Iteration, Replay, alive
from .contexts import Process, alone, ordinary, outside_inference
from .failures import described
from .gradients import fed, take_in
from .host_state import Truth
from .outside import Outside
from .pace import Pace
from .parameters import give_buffer_classes, give_classes
from .preparer import Preparer
from .turns import (
    Turn,
    check_backward,
    check_call,
    check_clearing,
    check_groups,
    check_inputs,
    check_step,
    check_zeroed,
    refuse_late_edits,
)
from .variants import Call, Variant

log = logging.getLogger("offmate")

_LASTS = 8  # iterations that a layout of the device's memory lasts at least


class Session:
    """What stands behind a compiled model.

    State: `turn`; the `iteration` that is under way and its `micro_batches` so far; `dropped`, forwards that were given
    up and through which somebody could still call backward(); `uncleared`, whether zero_grad() is
    due; `cleared_early`, whether it came before step(); `read_early`, whether somebody has read between backward() and
    step(); `graded` and `zeroed`, parameters that have had a gradient since, and those whose gradient it left at zero;
    `active`, the variant whose tensors are on the device; `replays`, iterations since the device's memory was laid
    out; `lock`, held by the thread that runs a method; `truth`, what the host holds; `preparer`, which variants there
    are; `pace`, how long steps take. Changed by one thread at a time.

    Parameters
    ----------
    request: what plans are for. max_grad_norm: of all gradients; None clips nothing.
    optimizer: the one whose updates are planned, and the names of its parameters. given: a plan to use.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        request: Request,
        optimizer: torch.optim.Optimizer | None,
        names: dict[torch.Tensor, str],
        given: Plan | None,
        progress: Callable[[], contextlib.AbstractContextManager[Progress]],
        max_grad_norm: float | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._plainness = Plainness(type(model), model.__dict__.get("forward"))
        self.request = request
        self.updater = Updater(optimizer, names, request.device) if optimizer is not None else None
        if self.updater is not None:
            self.updater.say_form()
        self.device = make_device(request.device, request.budget_bytes)
        self.watch = Watch(model)
        self.truth = Truth(model, self.updater, self.watch)
        self.assigned = Assigned(self)
        self.outside = Outside(names, request.gate)
        self.preparer = Preparer(
            request, self._plainness, self.watch, self.truth, self.device, self.updater, max_grad_norm, given, progress
        )
        self.active: Variant | None = None
        self.turn = Turn.FORWARD
        self.iteration: Iteration | None = None
        self.dropped: list[Iteration] = []
        self.micro_batches = 0
        self.uncleared = self.cleared_early = self.read_early = False
        self.said: set[str] = set()
        self.pace = Pace(request.config.cache_dir, compiled=request.config.backend != "eager")
        self.replays = 0
        self.process, self.lock = Process(), threading.RLock()
        self.graded: set[str] = set()
        self.zeroed: set[str] = set()

    @property
    def model(self) -> torch.nn.Module:
        """The compiled model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def plain_class(self) -> type[torch.nn.Module]:
        """The model's class before it was compiled."""
        return self._plainness.model_class

    def plain(self) -> contextlib.AbstractContextManager[torch.nn.Module]:
        """The model as it was before it was compiled."""
        return self._plainness.of(self.model)

    @property
    def training(self) -> Variant | None:
        """The variant that trained last."""
        return self.preparer.training

    @property
    def in_iteration(self) -> bool:
        """Whether a forward or a backward waits for what follows it, or for zero_grad()."""
        return self.turn is not Turn.FORWARD or self.uncleared

    # -- a call -------------------------------------------------------------------------------------------------------

    @alone
    @outside_inference
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model as planned."""
        self.process.check()
        args, kwargs = pytree.tree_map(ordinary, (args, kwargs))
        call = self.preparer.call_of(self.model, args, self._without_cache(kwargs), torch.is_grad_enabled())
        check_call(self, call)
        check_hooks(self.watch.parameters, self.updater is not None)
        if self.turn is Turn.BACKWARD:
            if not call.trains and not self.truth.edited() and not self.truth.has_other_parameters(False):
                self.truth.adopt_buffers()
                return self._handed_over(*self._aside(call))
            self._drop_forward()
        self._follow_parameters(call.trains)
        self.preparer.account_for_user_code()
        edited = self.truth.check_edits()
        if self.truth.take_states():
            self.bring_home()
        self.truth.adopt_tensors()
        variant, tensors = self.preparer.variant_for(self.model, call, make_room=self.bring_home)
        self._renew_states()
        self._activate(variant, edited)
        if call.trains:
            outputs = self._train(variant, tensors)
        else:
            with self.whole():
                outputs = variant.executor.forward(tensors)
        return self._handed_over(variant, outputs)

    def _aside(self, call: Call) -> tuple[Variant, dict[str, torch.Tensor]]:
        """A forward without gradients before the backward; what it writes into buffers is not the user's edit."""
        assert self.iteration is not None
        edited = self.iteration.edited_buffers()
        result = aside(self, call)
        if not edited:
            self.iteration.reads()
        return result

    def _handed_over(self, variant: Variant, outputs: dict[str, torch.Tensor]) -> Any:
        """What the model returns; what its forward leaves besides is delivered."""
        result, by_products = variant.returned(outputs)
        deliver(by_products, self.watch)
        return result

    def _follow_parameters(self, trains: bool) -> None:
        """Take over which parameters there are and which are trained, if that has changed."""
        if self.truth.has_other_parameters(trains):
            self.bring_home()
            self.truth.follow()
            give_classes(self)

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Training never reads a cache."""
        if has_cache(self.model, kwargs):
            self.say_once("use_cache has no effect: the cache is dropped from the model's outputs")
        return without_cache(self.model, kwargs)

    def say_once(self, words: str) -> None:
        """Tell the log what the user should know once."""
        if words not in self.said:
            self.said.add(words)
            log.info(words)

    def _train(self, variant: Variant, tensors: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        params = fed(self.watch.parameters, variant.graded if self.updater is None else None)
        iteration = Iteration(frozenset(params))
        anchor = torch.zeros((), requires_grad=True)
        with self.whole():
            flat = Replay.apply(self, variant, iteration, tensors, tuple(params), anchor, *params.values())
            self.turn, self.iteration, self.cleared_early = Turn.BACKWARD, iteration, False
        self.preparer.user_code.begins(variant)
        outputs = dict(zip(variant.output_nodes, flat))
        read = [outputs[n] for n in outputs if n in variant.read_by_backward]
        used = variant.named({n: out for n, out in outputs.items() if n in variant.used_inside})
        iteration.returns(variant.named(outputs), read, used)
        iteration.reads({name: self.truth.host.buffers[name] for name in variant.prepared.binding.buffers})
        return outputs

    def _drop_forward(self) -> None:
        """Give up the forward that waits for its backward; the sums of earlier micro-batches stay."""
        assert self.iteration is not None
        self.iteration.dropped = True
        self.iteration.ends()
        self.dropped = [*alive(self.dropped), self.iteration]
        self.preparer.user_code.forget()
        self.bring_home()
        self.turn, self.iteration = Turn.FORWARD, None

    # -- backward and step --------------------------------------------------------------------------------------------

    def forward(self, variant: Variant, tensors: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        """The forwards, on behalf of autograd."""
        self.truth.current = self.updater is None
        outputs = variant.executor.forward(tensors, self.micro_batches)
        # Tensors of their own, since autograd ties what it is given to the graph, and the executor keeps its outputs.
        return tuple(on_storage(outputs[name], outputs[name]) for name in variant.output_nodes)

    @alone
    @outside_inference
    def backward(
        self,
        variant: Variant,
        iteration: Iteration,
        grads: tuple[torch.Tensor | None, ...],
        wanted: frozenset[str] | None,
    ) -> dict[str, torch.Tensor]:
        """The backwards, on behalf of autograd; `wanted` are the parameters that backward(inputs=...) names.

        Returns: by parameter the gradients that are autograd's to hand out; none with a planned optimizer.
        """
        self.process.check()
        self.preparer.user_code.ends()
        check_backward(self, iteration)
        self._renew_states()
        if self.updater is not None:
            check_groups(self.updater)
            check_inputs(wanted, variant.updates)
            check_zeroed(self.zeroed, variant.updates)
            self.graded |= variant.updates
            self.outside.backward_begins(self.micro_batches)
        into = self.request.config.gradients_into
        gradients = take_in(variant.prepared, grads, self.device.torch_device, into)
        iteration.ends()
        handed: dict[str, torch.Tensor] = {}
        with self.whole():
            if self.updater is None:
                variant.executor.backward(gradients)
                variant.executor.turn_around()
                handed = variant.executor.take_host_grads()
                self.turn = Turn.FORWARD
            else:
                self.truth.current = False
                if not self.request.gate:
                    self.updater.snapshot()
                variant.executor.backward(gradients, self.micro_batches)
                self.micro_batches += 1
                whole = self.micro_batches == self.request.micro_batches
                self.turn, self.uncleared, self.read_early = Turn.STEP if whole else Turn.FORWARD, True, False
            self.iteration = None
        if self.updater is None:
            self.pace.step_done(variant.prepared.plan)
        return handed

    @alone
    @outside_inference
    def step(self) -> None:
        """The user's optimizer.step()."""
        self.process.check()
        check_step(self)
        if self.turn is Turn.BACKWARD:
            self._drop_forward()
        assert self.updater is not None
        check_groups(self.updater)
        if self.request.gate:
            self.updater.snapshot()
        else:
            self.updater.check_unchanged()
        edited = self.truth.trained(self.truth.check_edits()) + self.truth.take_states()
        self.preparer.account_for_user_code()
        outside = ending.take_outside(self)
        if self.request.gate and (edited or outside or not ending.plan_ends_it(self)):
            ending.finish_on_host(self, outside)
            return
        self.micro_batches = 0
        refuse_late_edits(self, edited)
        assert self.active is not None
        self._renew_states()
        with self.whole():
            self.truth.current = False
            self.active.executor.turn_around()
            self.turn = Turn.FORWARD
        self.pace.step_done(self.active.prepared.plan)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global norm of the last iteration's gradients, before clipping."""
        return self.training.executor.gate.norm if self.training is not None else None

    @alone
    @outside_inference
    def zero_grad(self, set_to_none: bool = True) -> None:
        """The user's zero_grad(); with a planned optimizer the gradients are consumed already."""
        if self.updater is None:
            return
        self.zeroed = set() if set_to_none else self.zeroed | self.graded
        self.graded = set()
        self.process.check()
        self.assigned.clear()
        check_clearing(self)
        self.outside.clear()
        if self.micro_batches and self.request.gate:
            log.info(
                "zero_grad() before optimizer.step(): the gradients of %d backward() are dropped", self.micro_batches
            )
            self.give_up()
            self.cleared_early = True
        self.uncleared = False

    # -- the device and the truth -------------------------------------------------------------------------------------

    def _activate(self, variant: Variant, edited: tuple[str, ...]) -> None:
        """Make the device hold this variant's tensors, as they are now."""
        stale = edited if self.updater is not None else self.truth.frozen(edited)
        if stale and self.active is variant:
            log.info("%d parameters were edited (%s, ...); all are sent to the device again", len(stale), stale[0])
        if stale or self.active is not variant or self._is_worn(variant):
            self.bring_home()
            if variant.place is not None and self.device.arena is not None:
                self.device.arena.take(variant.place.segment_bytes)
            self.active, self.replays = variant, 0
        if give_buffer_classes(self, variant.prepared.binding.written_buffers):
            self.truth.adopt_buffers()
        self.replays += not self.micro_batches
        self.truth.accept()

    def _is_worn(self, variant: Variant) -> bool:
        """Whether the device's memory has to be laid out anew before the next iteration."""
        if variant.place is None or self.replays < _LASTS or self.micro_batches:
            return False
        return torch.accelerator.memory_reserved(self.device.torch_device) > variant.place.reserved_bytes

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Run a part of the schedule; if it fails, bring everything to a state that can be read, and say which."""
        try:
            with interrupts.held(), self.pace.working():
                yield
        except BaseException as error:
            with interrupts.held():
                self.give_up()
            if isinstance(error, OffmateError) or not isinstance(error, Exception):
                if self.truth.torn:
                    log.warning("the iteration was interrupted: %s", self.truth.torn_words())
                raise
            where, budget_bytes = self.device.torch_device, self.request.budget_bytes
            raise described(error, where, budget_bytes, self.preparer.plan, self.truth) from error

    @alone
    @outside_inference
    def give_up(self) -> None:
        """End the iteration where it is; what was updated stays, and the host holds the truth."""
        self.turn, self.iteration, self.uncleared = Turn.FORWARD, None, False
        self.micro_batches = 0
        self.truth.host.totals.clear()
        variant, self.active = self.active, None
        if variant is None:
            return
        lost = variant.executor.abandon()
        self.truth.came_home()
        if lost:
            self.truth.note_lost(lost)
        elif self.updater is not None:
            self.truth.note_torn(variant.updates)

    @alone
    @outside_inference
    def sync(self) -> None:
        """Wait for what is under way; afterwards parameters and optimizer states read current."""
        if self.truth.current:
            return
        self.process.check_reading()
        try:
            self.truth.check_edits()
            self.truth.take_states()
        finally:
            self.bring_buffers()
            if self.active is not None:
                with self.whole():
                    self.active.executor.sync()
            self.truth.came_home()

    @alone
    def end_measuring(self) -> None:
        """Take what was seen of the user's code, if its iteration is over."""
        if self.turn is not Turn.BACKWARD:
            self.preparer.account_for_user_code()

    @alone
    def read(self, what: str) -> None:
        """Make `what` current for the user, and say so if it is not what plain PyTorch would show now."""
        if self.turn is Turn.STEP and not self.request.gate and not self.read_early:
            self.read_early = True
            log.warning(
                "%s between backward() and optimizer.step(): the update has been made already; plain PyTorch would "
                "show the values before it. Read before backward() or after step(), or compile with "
                "max_grad_norm=float('inf'), which makes updates wait",
                what,
            )
        self.sync()

    @alone
    def read_states(self) -> None:
        """The user reads the optimizer's states, perhaps to write there."""
        self.read("optimizer.state")
        assert self.truth.states is not None
        self.truth.states.read = True

    @alone
    def bring_buffers(self) -> None:
        """Have the host's buffers hold what the forwards so far have left."""
        if self.active is not None and self.active.executor.newer_buffers:
            self.process.check_reading()
            with self.whole():
                self.active.executor.bring_buffers()
            if self.iteration is not None:
                self.iteration.reads()

    def _renew_states(self) -> None:
        """See that the device has the optimizer's states as the user may have written them."""
        if self.truth.take_reads() and self.active is not None:
            with self.whole():
                self.active.executor.renew_states()

    @alone
    @outside_inference
    def end_iteration(self) -> None:
        """A state is about to be loaded: a forward under way is given up. Gradients that wait behind a gate stay."""
        self.process.check()
        if self.turn is Turn.BACKWARD:
            self._drop_forward()
        self.bring_home()
        if not self.request.gate:
            self.turn, self.uncleared, self.micro_batches = Turn.FORWARD, False, 0

    @alone
    @outside_inference
    def bring_home(self) -> None:
        """Take everything off the device; the host holds the truth."""
        self.process.check()
        if self.active is not None:
            with self.whole():
                self.active.executor.unload()
            self.active = None
        self.truth.came_home()
