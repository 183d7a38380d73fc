"""A compiled model at work: which plan a call needs, what the loop may do next, and where the truth is."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import decisions
from .errors import BudgetExceeded, OffmateError, ProtocolError
from .evaluate import make_stream
from .measure import AllocationLog
from .optimizer import Updater
from .planner import Prepared, Request, make_plan
from .plans import Plan
from .progress import Progress
from .runtime.binding import HostState
from .runtime.emulated import EmulatedDevice
from .runtime.executor import Executor
from .runtime.ledger import LimitExceeded
from .sizes import format_bytes

log = logging.getLogger("offmate")

_BACKWARD = "backward"


class Turn(Enum):
    """Whose turn it is in the training loop."""

    FORWARD = "the model's forward"
    BACKWARD = "backward() on the loss of the last forward"
    STEP = "optimizer.step()"


@dataclass
class Variant:
    """A prepared graph for one kind of call, with its executor."""

    prepared: Prepared
    executor: Executor
    trains: bool

    @property
    def output_nodes(self) -> tuple[str, ...]:
        """Names of the output values, in the order in which autograd sees them."""
        return self.prepared.binding.outputs


class Session:
    """What stands behind a compiled model.

    State: `variants` by call key, `active` (the one whose tensors are on the device), `turn`, and the host's truth in
    `host`. Changed on the training thread only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        request: Request,
        optimizer: torch.optim.Optimizer | None,
        names: dict[torch.Tensor, str],
        given: Plan | None,
        progress: Callable[[], contextlib.AbstractContextManager[Progress]],
    ) -> None:
        self._model = weakref.ref(model)
        self.plain_class = type(model)
        self.request = request
        self.optimizer = optimizer
        self.updater = Updater(optimizer, names) if optimizer is not None else None
        self.given = given
        self.progress = progress
        self.device = EmulatedDevice(request.budget_bytes)
        self.variants: dict[Any, Variant] = {}
        self.kinds: dict[Any, tuple[decisions.Decision, ...]] = {}
        self.active: Variant | None = None
        self.training: Variant | None = None
        self.turn = Turn.FORWARD
        self.token: object | None = None
        self.torn: tuple[str, ...] = ()
        self.log: AllocationLog | None = None
        self.measured_user_bytes: int | None = None
        self.said_cache = False
        self.host = HostState(
            params={n: p.data for n, p in model.named_parameters()},
            buffers=dict(model.named_buffers(remove_duplicate=False)),
        )
        self.versions: dict[str, tuple[int, int]] = {}
        self.adopt_states()

    @property
    def model(self) -> torch.nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def plan(self) -> Plan | None:
        """The plan of the training iteration, once there is one."""
        return self.training.prepared.plan if self.training is not None else self.given

    @property
    def peak_bytes(self) -> int:
        """The most that has been on the device since the last reset."""
        return self.device.ledger.peak_bytes

    def reset_peak(self) -> None:
        """Start the peak anew."""
        self.device.ledger.reset_peak()

    # -- a call ---------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model as planned."""
        self._end_user_log()
        args, kwargs = self._without_cache(args, kwargs)
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        self._check_turn(trains)
        leaves = pytree.tree_leaves((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise ProtocolError(
                    "an input of the model requires a gradient; offmate gives gradients to parameters only. Detach the "
                    "input, or make it a parameter of the model"
                )
        variant = self._variant(args, kwargs, trains)
        self._activate(variant)
        batch = [leaf for leaf, name in zip(leaves, variant.prepared.captured.inputs)]
        tensors = [b if isinstance(b, torch.Tensor) else None for b in batch]
        if not trains:
            return self._rebuild(variant, self._guarded(lambda: variant.executor.forward(tensors)))
        return self._train(variant, tensors)

    def _check_turn(self, trains: bool) -> None:
        if self.torn:
            raise OffmateError(
                f"an earlier failure left {len(self.torn)} parameters one update ahead of the others "
                f"({', '.join(self.torn[:4])}, ...); load a checkpoint with load_state_dict before training goes on"
            )
        if not trains or self.turn is Turn.FORWARD:
            return
        if self.turn is Turn.BACKWARD:
            raise ProtocolError(
                "a second forward before backward(); the plan frees each forward's tensors in its backward. Call "
                "backward() first, or run the other forward under torch.no_grad()"
            )
        raise ProtocolError(
            "a forward after backward() without optimizer.step(); updates of this iteration have begun. Call "
            "optimizer.step() first; gradient accumulation is not supported with a planned optimizer yet"
        )

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A cache of keys and values does not export and training never reads it."""
        config = getattr(self.model, "config", None)
        if getattr(config, "use_cache", False) and kwargs.get("use_cache") is not False:
            if not self.said_cache:
                log.info("use_cache is ignored: the key-value cache is dropped from the model's outputs")
                self.said_cache = True
            kwargs = {**kwargs, "use_cache": False}
        return args, kwargs

    def _train(self, variant: Variant, tensors: list[torch.Tensor | None]) -> Any:
        self.turn = Turn.BACKWARD
        self.token = token = object()
        params = [p for p in self.model.parameters() if p.requires_grad]
        anchor = torch.zeros((), requires_grad=True)
        with self._failing_back_to(Turn.FORWARD):
            flat = Replay.apply(self, variant, token, tensors, anchor, *params)
        outputs = dict(zip(variant.output_nodes, flat))
        if self.measured_user_bytes is None and self._user_computes(variant):
            self.log = AllocationLog().__enter__()
        return self._rebuild(variant, outputs)

    @contextlib.contextmanager
    def _failing_back_to(self, turn: Turn) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.turn = turn
            raise

    def _rebuild(self, variant: Variant, outputs: dict[str, torch.Tensor]) -> Any:
        captured = variant.prepared.captured
        leaves = [outputs[o] if isinstance(o, str) else o[0] for o in captured.outputs]
        return pytree.tree_unflatten(leaves, captured.out_spec)

    # -- variants -------------------------------------------------------------------------------------------------

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Variant:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
        )
        autocast = tuple((k, torch.get_autocast_dtype(k)) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k))
        kind = (str(spec), shapes, trains, self.model.training, autocast)
        if kind in self.kinds:
            key = (kind, decisions.ask_again(self.kinds[kind], tensors))
            if key in self.variants:
                return self.variants[key]
        elif trains and any(k[2] for k in self.kinds):
            self._refuse_shape(kind)
        variant = self._prepare(args, kwargs, trains)
        taken = variant.prepared.captured.taken
        self.kinds.setdefault(kind, taken)
        self.variants[(kind, tuple(d.outcome for d in taken))] = variant
        return variant

    def _refuse_shape(self, kind: Any) -> None:
        known = next(k for k in self.kinds if k[2])
        changed = next(((a, b) for a, b in zip(known[1], kind[1]) if a != b), (known[0], kind[0]))
        raise ProtocolError(
            f"the batch differs from the one that was planned: {changed[1]} instead of {changed[0]}. Planning for "
            "several shapes is not supported yet; pad batches to one shape and drop the last short one "
            "(DataLoader(drop_last=True))"
        )

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Variant:
        meta = [n for n, p in self.model.named_parameters() if p.device.type == "meta"]
        if meta:
            raise OffmateError(
                f"{len(meta)} parameters are on the meta device ({meta[0]}, ...); a plan needs no weights, training "
                "does: load them, for example with from_pretrained, before the first batch"
            )
        self.bring_home()
        with self.plain() as model, self.progress() as say, self._undisturbed():
            if not trains:
                return self._bound(make_stream(model, args, kwargs, self.request, say), trains)
            request = self.request
            if self.measured_user_bytes is not None:
                request = replace(request, user_bytes=self.measured_user_bytes)
            prepared = make_plan(model, args, kwargs, request, self.updater, say, self.given)
        variant = self.training = self._bound(prepared, trains)
        log.info("plan ready:\n%s", prepared.plan.explain())
        return variant

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Planning leaves random state, gradients and buffers as they were."""
        with torch.random.fork_rng(devices=[]):
            yield

    @contextlib.contextmanager
    def plain(self) -> Iterator[torch.nn.Module]:
        """The model as it was before it was compiled."""
        model = self.model
        compiled = type(model)
        model.__class__ = self.plain_class
        try:
            yield model
        finally:
            model.__class__ = compiled

    def _bound(self, prepared: Prepared, trains: bool) -> Variant:
        executor = Executor(
            prepared.plan.schedule,
            prepared.binding,
            self.host,
            self.device,
            self.updater,
            prepared.plan.fixed_bytes,
        )
        return Variant(prepared, executor, trains)

    def _activate(self, variant: Variant) -> None:
        if self.active is not variant:
            self.bring_home()
            self.active = variant
        elif self._edited():
            log.info("parameters were edited; they are sent to the device again")
            self.bring_home()
            self.active = variant

    def _edited(self) -> bool:
        """Whether the user has written into a parameter since the plan last ran; those edits are honoured."""
        now = self._versions()
        edited = bool(self.versions) and now != self.versions
        self.versions = now
        return edited

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {n: (p._version, p.data_ptr()) for n, p in self.model.named_parameters()}

    # -- backward and step ----------------------------------------------------------------------------------------

    def forward(self, variant: Variant, tensors: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        """The forwards, on behalf of autograd."""
        outputs = self._guarded(lambda: variant.executor.forward(tensors))
        self.versions = self._versions()
        return tuple(outputs[name] for name in variant.output_nodes)

    def backward(self, variant: Variant, token: object, grads: tuple[torch.Tensor | None, ...]) -> None:
        """The backwards, on behalf of autograd."""
        if self.log is not None:
            # The profiler's state is restored when autograd returns, so it can only be marked here, not stopped.
            self.log.stretch(_BACKWARD, lambda: None)
        if self.turn is not Turn.BACKWARD or token is not self.token:
            raise ProtocolError(
                f"a second backward() through the same forward; next comes {self.turn.value}. The plan frees what a "
                "backward has read, so retain_graph cannot be honoured; sum the losses and call backward() once"
            )
        planned = [item[2:] for item in variant.prepared.plan.schedule.computes["user"].makes]
        gradients = {}
        for name, grad in zip(variant.output_nodes, grads):
            if name in planned:
                gradients[name] = self._user_gradient(variant, name, grad)
            elif grad is not None:
                raise ProtocolError(self._unplanned(variant, name))
        if self.updater is not None:
            self.updater.snapshot()
        with self._failing_back_to(Turn.FORWARD):
            self._guarded(lambda: variant.executor.backward(gradients))
            if self.updater is None:
                self._guarded(variant.executor.turn_around)
                self._hand_out_gradients(variant)
        self.turn = Turn.STEP if self.updater is not None else Turn.FORWARD
        self.token = None

    def _user_gradient(self, variant: Variant, name: str, grad: torch.Tensor | None) -> torch.Tensor:
        like = variant.prepared.gradient_like[name]
        if grad is None:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
        if grad.stride() != like.stride() or grad.dtype != like.dtype:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(grad)
        return grad

    def _unplanned(self, variant: Variant, node: str) -> str:
        captured = variant.prepared.captured
        names = [n for o, n in zip(captured.outputs, captured.output_names) if o == node]
        return (
            f"backward() hands a gradient into the output {names[0]!r}, which was planned without one (a scalar output "
            f"is taken for the loss). Compile with config=offmate.Config(gradients_into=({names[0]!r},))"
        )

    def _hand_out_gradients(self, variant: Variant) -> None:
        params = dict(self.model.named_parameters())
        executor = variant.executor
        for name, event in list(executor.grad_leaving.items()):
            event.wait()
            del executor.grad_leaving[name]
        for name, grad in executor.take_host_grads().items():
            param = params[name]
            if param.grad is None:
                param.grad = grad
            else:
                param.grad.add_(grad)

    @staticmethod
    def _user_computes(variant: Variant) -> bool:
        """Whether the loss is computed outside the model, from outputs of some size."""
        return any(like.numel() > 1 for like in variant.prepared.gradient_like.values())

    def _end_user_log(self) -> None:
        """Take what the user's code was seen to hold between forward and backward; plan anew if it was more."""
        if self.log is None or self.training is None:
            return
        self.log.__exit__(None, None, None)
        measured = self.log.peak_bytes(until=_BACKWARD)
        self.log = None
        reserved = self.training.prepared.plan.user_bytes
        self.measured_user_bytes = max(measured, reserved)
        log.info("your code holds %s between forward and backward", format_bytes(measured))
        if measured > reserved:
            log.info("that is more than the %s reserved; the next iteration is planned anew", format_bytes(reserved))
            self.variants = {key: v for key, v in self.variants.items() if not v.trains}
            self.kinds = {kind: taken for kind, taken in self.kinds.items() if not kind[2]}

    def step(self) -> None:
        """The user's optimizer.step()."""
        if self.turn is not Turn.STEP:
            raise ProtocolError(f"optimizer.step() without a backward(); next comes {self.turn.value}")
        self._end_user_log()
        assert self.updater is not None and self.active is not None
        self.updater.check_unchanged()
        with self._failing_back_to(Turn.FORWARD):
            self._guarded(self.active.executor.turn_around)
        self.turn = Turn.FORWARD

    def zero_grad(self) -> None:
        """The user's zero_grad(): with a planned optimizer no gradient is left to clear."""
        if self.updater is None:
            torch.nn.Module.zero_grad(self.model)

    def grads_consumed(self) -> bool:
        """Whether gradients existed in this iteration and are gone."""
        return self.turn is Turn.STEP

    # -- the truth ------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Run a part of the schedule; if it fails, bring everything to a state that can be read, and say which."""
        try:
            return work()
        except BaseException as error:
            self._abort()
            if isinstance(error, LimitExceeded):
                raise BudgetExceeded(f"the device's budget would be exceeded: {error}") from error
            if isinstance(error, (OffmateError, KeyboardInterrupt)):
                raise
            ahead = (
                f"; {len(self.torn)} parameters are one update ahead: {', '.join(self.torn[:8])}" if self.torn else ""
            )
            raise OffmateError(
                f"the iteration failed: {type(error).__name__}: {error}. Every parameter and its optimizer state are "
                f"of one update and can be read{ahead}"
            ) from error

    def _abort(self) -> None:
        self.turn, self.token = Turn.FORWARD, None
        if self.active is None:
            return
        self.active.executor.abandon()
        counts = {self.host.updates.get(n, 0) for n in self.host.updates}
        if counts and self.updater is not None:
            trained = [n for n, p in self.model.named_parameters() if n in self.updater.groups and p.requires_grad]
            most, least = max(counts), min(self.host.updates.get(n, 0) for n in trained)
            if most != least:
                self.torn = tuple(n for n in trained if self.host.updates.get(n, 0) == most)
        self.active = None

    def sync(self) -> None:
        """Wait for what is under way; afterwards parameters and optimizer states read current."""
        if self.active is not None:
            self._guarded(self.active.executor.sync)
        self._publish_states()

    def bring_home(self) -> None:
        """Take everything off the device; the host holds the truth."""
        if self.active is not None:
            self._guarded(self.active.executor.unload)
            self.active = None
        self._publish_states()
        self.versions = self._versions()

    def _publish_states(self) -> None:
        """Show the optimizer the states that the plan keeps."""
        if self.optimizer is None or self.updater is None:
            return
        for param, name in self.updater.names.items():
            if self.host.states.get(name):
                self.optimizer.state[param] = self.host.states[name]

    def adopt_states(self) -> None:
        """Take the optimizer's states as the truth."""
        if self.optimizer is None or self.updater is None:
            return
        for param, name in self.updater.names.items():
            self.host.states[name] = dict(self.optimizer.state.get(param, {}))
        self.host.updates.clear()
        self.torn = ()

    def warn_if_torn(self) -> None:
        """Tell the reader of a state_dict if it is of two updates."""
        if self.torn:
            log.warning(
                "state_dict() after a failure: %d parameters are one update ahead of the others (%s, ...)",
                len(self.torn),
                ", ".join(self.torn[:4]),
            )


class Replay(torch.autograd.Function):
    """Autograd's view of a planned iteration: one node from all trainable parameters to the outputs."""

    @staticmethod
    def forward(
        ctx: Any, session: Session, variant: Variant, token: object, tensors: Any, anchor: Any, *params: Any
    ) -> Any:
        outputs = session.forward(variant, tensors)
        ctx.session, ctx.variant, ctx.token = session, variant, token
        ctx.anchor = anchor
        ctx.n_params = len(params)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        node = torch.autograd.graph.get_gradient_edge(ctx.anchor).node
        if not torch._C._will_engine_execute_node(node):  # type: ignore[attr-defined]
            raise ProtocolError(
                "torch.autograd.grad was asked for the gradients of parameters; the plan hands them to the optimizer "
                "or to .grad in backward(). Call backward()"
            )
        if torch.is_grad_enabled():
            raise ProtocolError("backward(create_graph=True) cannot be planned: the backward's own graph is not kept")
        ctx.session.backward(ctx.variant, ctx.token, grads)
        return (None,) * (5 + ctx.n_params)
