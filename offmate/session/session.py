"""The session of a compiled model: the turns of the training loop, and the tensors on the device for them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..capture.byproducts import deliver
from ..capture.checks import check_hooks, hooked
from ..capture.kv_caches import has_cache, without_cache
from ..capture.plain import Plainness
from ..errors import ProtocolError, StorageError
from ..guards.watch import Watch
from ..machines.devices import make_device
from ..optim.updater import Updater
from ..planning.request import Request
from ..plans.orders import one_by_one
from ..plans.plan import Plan
from ..progress import Progress
from ..runtime.layouts import on_storage
from ..runtime.replay.unscaling import Unscaling
from ..runtime.storage.folders import StoragePath
from ..runtime.torch_names import trees as pytree
from .aside import aside
from .autograd import Iteration, Replay, in_order
from .checkpoint_files import CheckpointFiles
from .choice import Choice
from .contexts import alone, ordinary, outside_inference
from .edits import check_unchanged
from .gradients import fed, take_in
from .host_state import Truth
from .left_out import leave_out
from .maker import Maker
from .orders import Orders
from .pace import Pace
from .parameters import give_buffer_classes, give_classes
from .preparer import Preparer
from .replanning import Replanning
from .residence import Residence
from .scaling import Scaling
from .state_storage import StateStorage
from .together import Together
from .turns import Turn, Turns
from .updates import Updates
from .user_code import UserCode
from .variants import Call, Variant

log = logging.getLogger("offmate")


class Session:
    """Runs a compiled model.

    State: `turns`, the position in the loop; `residence`, what is on the device; `updates`, of the planned optimizer;
    `truth`, what the host holds; `preparer`, the variants; `pace`, how long steps take; `_said`, messages that were
    logged and are not repeated.
    Changed by one thread at a time.

    Parameters
    ----------
    request: the requirements of plans. max_grad_norm: for all gradients together; None clips nothing.
    optimizer: the one whose updates are planned, and the names of its parameters. given: a plan to use.
    scaler: an enabled one that scales the losses; None if they are not scaled.
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
        scaler: torch.amp.GradScaler | None = None,
        storage: Sequence[StoragePath] = (),
    ) -> None:
        self._model = weakref.ref(model)
        self._plainness = Plainness(type(model), model.__dict__.get("forward"))
        self.updater = Updater(optimizer, names, request.device) if optimizer is not None else None
        if self.updater is not None:
            self.updater.say_form()
        self.device = make_device(request.device, request.budget_bytes)
        self.watch = Watch(model)
        self.truth = Truth(model, self.updater, self.watch, in_files=bool(storage))
        self.storage = StateStorage(storage, self.truth.host, self.device)
        request = replace(request, storage=self.storage.files_for_plans(self.watch.parameters))
        self.files = CheckpointFiles(self.truth.host, self.device.file_buffers_bytes, self.device.changed)
        user_code = UserCode(self.device.torch_device)
        maker = Maker(
            request, self._plainness, self.watch, self.truth, self.device, self.updater, user_code, max_grad_norm,
            given, progress, self.files, self.storage,
        )  # fmt: skip
        self.preparer = Preparer(maker, self.watch, self.truth, self.updater, user_code)
        again = "compile" if given is None else "plan again"
        self.pace = Pace(compiled=request.config.backend != "eager")
        instead = f"{again} with config=offmate.{one_by_one(request.config)}"
        self.turns = Turns(request.micro_batches, request.gate, instead)
        self.residence = Residence(self.device, self.updater, self.turns, self.truth, self.preparer, self.pace)
        self.choice = Choice(self.preparer)
        self.replanning = Replanning(self.preparer, self.storage, given is not None)
        self.orders = Orders(request, self.choice, self.residence, given)
        self.process, self.lock = self.residence.process, self.residence.lock
        scaling: Scaling | None = None
        if scaler is not None and optimizer is not None:
            scaling = Scaling(scaler, optimizer, request.clips)
            self.truth.host.unscaling = Unscaling(self.device)
        self.updates: Updates | None = None
        if self.updater is not None:
            self.updates = Updates(
                self.residence, self.updater, names, scaling, self.storage, self.orders, self.choice, self.replanning
            )  # fmt: skip
        self._said: set[str] = set()

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
        """Make the model plain, as before it was compiled, inside the body."""
        return self._plainness.of(self.model)

    @property
    def request(self) -> Request:
        """The requirements of plans."""
        return self.preparer.request

    @property
    def training(self) -> Variant | None:
        """The variant that trained last."""
        return self.preparer.training

    # -- a call -------------------------------------------------------------------------------------------------------

    @alone
    @outside_inference
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model as planned."""
        self.process.check()
        self.residence.stream.check()
        args, kwargs = pytree.tree_map(ordinary, (args, kwargs))
        call = self.preparer.call_of(self.model, args, self._without_cache(kwargs), torch.is_grad_enabled())
        if call.trains:
            self.truth.check_whole()
            self.storage.make_room()
        self.turns.check_call(call)
        if call.trains and self.updates is not None:
            self.updates.forward_begins()
        under_way = self._continued(call)
        if under_way is not None:
            self.turns.check_next(call)
            self._check_parameters(under_way)
            self._follow_buffers(under_way)
            tensors = under_way.called(call)
            return self._handed_over(under_way.variant, self._train(under_way.variant, tensors))
        check_hooks(self.watch.parameters, self.updater is not None)
        if self.turns.turn is Turn.BACKWARD:
            if not call.trains and not self.truth.edited() and not self.truth.has_other_parameters(False):
                self.truth.adopt_buffers()
                return self._handed_over(*self._aside(call))
            self.residence.drop_forward()
        self._follow_parameters(call.trains)
        self.preparer.account_for_user_code()
        edited = self.truth.check_edits()
        self.files.follow(self.watch.parameters)
        self.files.check()
        if self.truth.take_states():
            self.residence.bring_home()
        self.truth.adopt_tensors()
        self.truth.copies.doubt(edited)  # before anything that may fail, and after which edits no longer show
        variant, tensors = self._active_for(call, edited)
        if call.trains:
            outputs = self._train(variant, tensors)
        else:
            with self.residence.whole():
                outputs = variant.executor.forward(tensors, shape=variant.shape)
        return self._handed_over(variant, outputs)

    def _check_parameters(self, under_way: Together) -> None:
        """Raise ProtocolError, and drop the update, if a parameter was edited between two of its passes."""
        edited = self.truth.edited() if under_way.begins_pass else ()
        if edited:
            self.residence.give_up()
            raise ProtocolError(
                f"{edited[0]} was edited between two passes of one update. The gradients of the earlier passes were "
                "dropped, no update was made, and the edit counts from the next forward on. Edit parameters after "
                "optimizer.step()"
            )

    def _follow_buffers(self, under_way: Together) -> None:
        """Adopt buffers that the user has replaced before a pass of an update.

        Raises: ProtocolError if the forward of the next call has run already, with the old ones.
        """
        replaced = self.truth.replaced_buffers()
        if not replaced:
            return
        under_way.check_begins_pass(replaced[0])
        self.truth.adopt_buffers()
        written = under_way.variant.prepared.binding.written_buffers
        if give_buffer_classes(self.model, self.residence, written):
            self.truth.adopt_buffers()

    def _continued(self, call: Call) -> Together | None:
        """Return the update whose micro-batches run together and that goes on with this call.

        If the loop has left out backward() of the micro-batch before, that one adds nothing. If none has come yet and
        the call is another one, the forward is dropped as usual.
        """
        under_way = self.orders.under_way
        if under_way is None or self.turns.turn is Turn.STEP:
            return None
        if self.turns.turn is not Turn.BACKWARD:
            return under_way
        if call.trains and under_way.expects(call):
            assert self.updates is not None
            leave_out(self.residence, self.orders, self.updates.speculates)
        elif not self.turns.backwards and (call.trains or under_way.ends_update):
            ahead = under_way.drop()
            if ahead:
                log.warning(
                    "a forward is dropped without backward(). It had run together with those of the other "
                    "micro-batches of its pass, so that %s are ahead of plain PyTorch's", ahead,
                )  # fmt: skip
            self.residence.drop_forward()
            return None
        return under_way

    def _active_for(self, call: Call, edited: tuple[str, ...]) -> tuple[Variant, list[torch.Tensor | None]]:
        """Return the variant for a call, with its tensors on the device, and the leaves as its executor takes them."""
        found: tuple[Variant, list[torch.Tensor | None]] | None = None
        try:
            found = self._variant_for(call)
            self.residence.renew()
            self.residence.activate(self.model, found[0], edited)
        except StorageError as error:
            variant = found[0] if found is not None else None
            if self.truth.torn or not (self.replanning.goes_back(error) or self.choice.waits_again(variant, error)):
                raise
            found = self._variant_for(call)
            self.residence.renew()
            self.residence.activate(self.model, found[0], edited)
        return found

    def _variant_for(self, call: Call) -> tuple[Variant, list[torch.Tensor | None]]:
        """Return the variant for a call, and the call's leaves as its executor takes them."""
        if call.trains and not self.turns.in_update:
            self.replanning.begin(self.model, call, self.residence.bring_home)
            variant = self.orders.begin(self.model, call)
            if variant is not None:
                assert self.orders.together is not None
                tensors = self.orders.together.called(call)
                return self.orders.together.variant, tensors
        return self.choice.variant_for(self.model, call, make_room=self.residence.bring_home)

    def _aside(self, call: Call) -> tuple[Variant, dict[str, torch.Tensor]]:
        """Run a forward without gradients before the backward; its writes into buffers do not count as user's edits."""
        iteration = self.turns.iteration
        assert iteration is not None
        edited = iteration.edited_buffers()
        result = aside(self.residence, self.model, iteration, call)
        if not edited:
            iteration.reads()
        return result

    def _handed_over(self, variant: Variant, outputs: dict[str, torch.Tensor]) -> Any:
        """Deliver the by-products of the forward, and return what the model returns."""
        result, by_products = variant.returned(outputs)
        try:
            deliver(by_products, self.watch)
        except BaseException:  # Ctrl-C, too
            log.warning(
                "a forward hook raised an error after the whole forward had run. Plain PyTorch stops at the hook, but "
                "here the forward has drawn all its random numbers and written all its buffers"
            )
            raise
        return result

    def _follow_parameters(self, trains: bool) -> None:
        """Adopt the model's parameters, and which of them are trained, if that has changed."""
        if self.truth.has_other_parameters(trains):
            self.residence.bring_home()
            self.truth.follow()
            give_classes(self)

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with the cache switched off where it has no effect on numbers; see `without_cache`."""
        if has_cache(self.model, kwargs):
            self.say_once("use_cache has no effect: the cache is dropped from the model's outputs")
        return without_cache(self.model, kwargs)

    def say_once(self, words: str) -> None:
        """Log a message that the user should see only once."""
        if words not in self._said:
            self._said.add(words)
            log.info(words)

    def _train(self, variant: Variant, tensors: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        planned = self.updater is not None
        params = fed(self.watch.parameters, None if planned else variant.graded)
        ordered = not planned and len(hooked(params)) > 1
        iteration = Iteration(params, ordered)
        known: dict[str, torch.Tensor] = {**params}
        if ordered:
            known = in_order(params, variant.prepared.arrivals.order)
        anchor = torch.zeros((), requires_grad=True)
        with self.residence.whole():
            flat = Replay.apply(self, variant, iteration, tensors, tuple(known), anchor, *known.values())
            self.turns.forward_done(iteration)
            self.orders.announced.called += 1
        self.preparer.user_code.begins(variant)
        outputs = dict(zip(variant.output_nodes, flat))
        read = [outputs[n] for n in outputs if n in variant.read_by_backward]
        used = variant.named({n: out for n, out in outputs.items() if n in variant.used_inside})
        iteration.returns(variant.named(outputs), read, used)
        iteration.reads({name: self.truth.host.buffers[name] for name in variant.prepared.binding.buffers})
        return outputs

    # -- backward --------------------------------------------------------------------------------------------

    def forward(self, variant: Variant, tensors: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        """Run the forwards on behalf of autograd."""
        self.truth.current = self.updater is None
        together = self.orders.together if self.turns.together else None
        if together is not None:
            outputs = together.outputs()
        else:
            outputs = variant.executor.forward(tensors, self.turns.micro_batches, variant.shape)
        # New tensors, since autograd ties its tensors to the graph, and the executor keeps its outputs.
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
        """Run the backwards on behalf of autograd; `wanted` are the parameters that backward(inputs=...) names.

        Returns: by parameter, the gradients that autograd delivers; none with a planned optimizer.
        """
        self.process.check()
        self.residence.stream.check()
        self.preparer.user_code.ends()
        self.turns.check_backward(iteration)
        try:
            check_unchanged(iteration, self.truth, planned=self.updater is not None)
        except ProtocolError:
            self.residence.give_up()
            raise
        self.residence.renew()
        if self.updates is not None:
            self.updates.backward_begins(variant, wanted)
        into = self.request.config.gradients_into
        gradients = take_in(variant.prepared, grads, self.device.torch_device, into)
        together = self.orders.under_way
        if together is not None and not together.is_last:
            together.keep(gradients, iteration)
            self.turns.backward_done(planned=True)
            return {}
        if together is not None:
            try:
                together.check_outputs()
            except ProtocolError:
                self.residence.give_up()
                raise
        iteration.ends()
        handed: dict[str, torch.Tensor] = {}
        with self.residence.whole():
            if self.updater is None:
                variant.executor.backward(gradients)
                variant.executor.turn_around()
                handed = variant.executor.take_host_grads()
            else:
                self._backwards(variant, gradients)
            self.turns.backward_done(planned=self.updater is not None)
        if self.updater is None:
            self.pace.step_done(variant.prepared.plan)
        return handed

    def _backwards(self, variant: Variant, gradients: dict[str, torch.Tensor]) -> None:
        """Run the backwards of the pass that ends with this backward()."""
        together = self.orders.under_way
        self.truth.current = False
        if not self.turns.gate:
            assert self.updater is not None
            self.updater.snapshot()
        speculates = self.updates is not None and self.updates.speculates(variant)
        if together is not None:
            together.run(gradients, speculates)
        else:
            variant.executor.backward(gradients, self.turns.micro_batches, speculates)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """A copy of the global norm of the last iteration's gradients, before clipping, which updates still read."""
        norm = self.truth.host.norm
        return None if norm is None else norm.clone()

    # -- reading and loading ------------------------------------------------------------------------------------------

    @alone
    def end_measuring(self) -> None:
        """Account for the user's code that was measured, if its iteration is over."""
        if self.turns.turn is not Turn.BACKWARD:
            self.preparer.account_for_user_code()

    @alone
    def read(self, what: str) -> None:
        """Make `what` current for the user, and warn if plain PyTorch would show other values now."""
        together = self.orders.under_way
        ahead = together is not None and together.is_ahead
        written = together.variant.prepared.binding.written_buffers if together is not None and ahead else None
        if written and self.turns.is_together and "ahead" not in self._said:
            self._said.add("ahead")
            log.warning(
                "%s between the micro-batches of an update that run together: buffers such as %s have the values after "
                "later ones. Plain PyTorch would show earlier ones. Read them after optimizer.step()",
                what, min(written),
            )  # fmt: skip
        if self.turns.reads_early():
            log.warning(
                "%s between backward() and optimizer.step(), but the update is already made. Plain PyTorch would show "
                "the values before it. Read before backward() or after step(), or compile with "
                "max_grad_norm=float('inf'), which makes updates wait",
                what,
            )
        self.residence.sync()

    @alone
    def read_states(self) -> None:
        """Make the optimizer's states current for the user, who may also write there."""
        self.read("optimizer.state")
        assert self.truth.states is not None
        self.truth.states.read = self.truth.states.handed_out = True

    @alone
    @outside_inference
    def end_iteration(self) -> None:
        """Give up a forward under way, since a state is about to be loaded; gradients that wait behind a gate stay."""
        self.process.check()
        self.turns.check_loading()
        if self.turns.turn is Turn.BACKWARD:
            self.residence.drop_forward()
        self.residence.bring_home()
        if not self.turns.gate:
            self.turns.given_up()
