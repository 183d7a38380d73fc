"""The compiled model: the same object, of a class that runs as planned; and its handle, `model.offmate`."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from ..errors import PlanFileError
from ..files import as_path, write_whole
from ..plans.about import UNKNOWN
from ..plans.plan import Plan, load_plan
from ..plans.trace import Trace
from ..runtime.clocks import clock_of
from ..runtime.torch_names.modules import conversion
from ..runtime.trace import Recorder
from ..split import Split
from .announced import Announced
from .generation import generated
from .parameters import give_classes
from .state_storage import PathInUse

log = logging.getLogger("offmate")

_SPLIT = "split.json"

Batch = TypeVar("Batch")


class Handle:
    """`model.offmate`: the plan, what was measured, and `sync()`."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._recorder: Recorder | None = None

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record the iterations that run inside the `with` block; `trace` is then the last whole one."""
        device = self._session.device
        self._recorder = device.recorder = Recorder(device.ledger, clock_of(device.torch_device))
        try:
            yield
        finally:
            device.recorder = None

    @property
    def trace(self) -> Trace | None:
        """The last iteration that ran completely inside `record()`; None if there is none."""
        if self._recorder is None:
            return None
        device = self._session.device
        self._session.process.check()
        device.drain()
        recording = self._recorder.recording()
        if recording is None:
            return None
        about = self.plan.about if self.plan is not None else UNKNOWN
        return Trace(recording, device.ledger.limit_bytes, about)

    @property
    def plan(self) -> Plan | None:
        """The plan of the training iteration; None before the first batch unless one was given."""
        return self._session.preparer.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that are kept for training, one per kind of batch; the most recently used one is last."""
        return self._session.preparer.plans

    @property
    def split(self) -> Split:
        """The side that updates each parameter, for `Config(updates=...)` of a resumed run.

        This is the split of the plans so far. For parameters that they do not update, and before the first batch, it is
        that of loaded plans, a given plan or `Config(updates=...)`.
        """
        return self._session.preparer.maker.split

    def save_plans(self, folder: str | os.PathLike[str]) -> None:
        """Write the plans for training and the split of updates into a folder, for `load_plans` in a later run."""
        for plan in self.plans:
            plan.save(Path(as_path(folder), f"{plan.fingerprint}.json"))
        write_whole(Path(as_path(folder), _SPLIT), json.dumps(self.split.to_dict()))

    def load_plans(self, folder: str | os.PathLike[str]) -> None:
        """Use the plans in a folder for batches that they fit, instead of searching; damaged plans are skipped.

        New plans, such as one for another budget, update each parameter on the same side as that run, unless
        `Config(updates=...)` says otherwise. If that does not fit, the emulated device uses another split, which
        changes no bits there. On other devices, InfeasibleBudget is raised.

        Raises: PlanFileError if the split is damaged.
        """
        files = sorted(as_path(folder).glob("*.json"))
        if not files:
            log.warning("%s contains no plans and no split of updates, so everything is planned again", folder)
        split = _load_split(Path(as_path(folder), _SPLIT))
        for file in files:
            if file.name == _SPLIT:
                continue
            try:
                plan = load_plan(file)
            except PlanFileError as error:
                log.warning("an earlier plan is ignored: %s", error)
                continue
            self._session.preparer.maker.use_earlier(plan)
        self._session.preparer.maker.keep_split(split)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Go through a loader's batches, and let the plan know those of an update before its first forward.

        With `accumulation_steps=`, the micro-batches of an update can then run block by block: each block's parameters
        are copied to the GPU once per update. The body of the loop stays as it is: `for batch in
        model.offmate.batches(loader):`. Each call's arguments must be parts of its batch, or the same in all calls. The
        batches of an update may have different shapes. A group with fewer batches than an update takes runs in the
        usual order.

        Raises: ArgumentTypeError if `loader` cannot be gone through.
        """
        announced: Announced = self._session.orders.announced
        return announced.each(loader)

    def announce(self, batches: Iterable[Any]) -> None:
        """Let the plan know the batches of the next update, for a loop that has them in hand; see `batches`."""
        self._session.orders.announced.announce(batches)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that have been on the device since the last `reset_peak`."""
        return self._session.device.ledger.peak_bytes

    def reset_peak(self) -> None:
        """Start counting the peak again."""
        self._session.device.ledger.reset_peak()

    @property
    def storage(self) -> tuple[PathInUse, ...]:
        """The storage paths of `offmate.compile(storage=)`, with the bytes on them and their rates while training."""
        found: tuple[PathInUse, ...] = self._session.storage.paths
        return found

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last iteration, unscaled, before clipping; None if none is taken."""
        return self._session.grad_norm

    def sync(self) -> None:
        """Wait for running updates and copies; parameters and optimizer states are then up to date."""
        self._session.residence.sync()
        self._session.end_measuring()

    def __repr__(self) -> str:
        plan = self.plan
        return f"<offmate: {plan!r}>" if plan is not None else "<offmate: planned at the first batch>"


def _load_split(path: Path) -> Split:
    """Read the split that `save_plans` wrote; return an empty one if there is none."""
    try:
        return Split.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return Split()
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise PlanFileError(
            f"{path}: the split of updates cannot be read ({error!r}), but on a GPU the last bits depend on it. Remove "
            "the file to plan a new split"
        ) from None


class PlannedModule:
    """Mixin for the model's own class; `offmate` is the handle, `_offmate_session` the session behind it."""

    offmate: Handle
    # transformers.Trainer assumes that a model with a device map places itself: it neither moves it nor wraps it in
    # DataParallel if several GPUs are visible.
    hf_device_map: ClassVar[dict[str, str]] = {"": "meta"}

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the dtype; a device is ignored, since the plan decides where tensors are."""
        session = self.__dict__["_offmate_session"]
        _, dtype, non_blocking, memory_format = conversion(args, kwargs)
        if dtype is None and memory_format is None:
            session.say_once("to(device) is ignored: the plan decides where tensors are")
            return self
        session.read("to()")
        return super().to(dtype=dtype, non_blocking=non_blocking, memory_format=memory_format)  # type: ignore[misc]

    def cuda(self, device: Any = None) -> Any:
        """Do nothing; see `to`."""
        return self.to("cuda")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; with a planned optimizer, there are then none."""
        updates = self.__dict__["_offmate_session"].updates
        if updates is None:
            super().zero_grad(set_to_none)  # type: ignore[misc]
        else:
            updates.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's current state."""
        session = self.__dict__["_offmate_session"]
        session.read("state_dict()")
        session.truth.warn_if_torn()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state, which is used from the next forward on; an iteration under way ends."""
        session = self.__dict__["_offmate_session"]
        session.end_iteration()
        result = super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        session.truth.reloaded("model")
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the plain model with current values, for copies and pickles."""
        session = self.__dict__["_offmate_session"]
        session.read("a copy of the model")
        with session.plain() as model:
            _, _, state, *_ = model.__reduce_ex__(protocol)
            kept = {k: v for k, v in state.items() if k not in _OWN}
        # Pickle refuses the usual way, since this object is not of the plain class.
        return copyreg._reconstructor, (session.plain_class, object, None), kept  # type: ignore[attr-defined]


_OWN = ("_offmate_session", "offmate")


def take_over(model: torch.nn.Module, session: Any) -> None:
    """Turn the model, in place, into one that runs as planned; it stays an instance of its own class."""
    base = type(model)
    own_forward = model.__dict__.pop("forward", base.forward)

    @torch.compiler.disable
    @functools.wraps(getattr(own_forward, "__func__", own_forward))
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_offmate_session"].call(args, kwargs)

    def save_pretrained(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        session = self.__dict__["_offmate_session"]
        # transformers writes the name of the model's class into its configuration.
        session.read("save_pretrained()")
        session.truth.warn_if_torn()
        with session.plain() as model:
            return model.save_pretrained(*args, **kwargs)

    def generate(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        session = self.__dict__["_offmate_session"]
        session.read("generate()")
        with session.plain() as model:
            return generated(session, model, args, kwargs)

    members: dict[str, Any] = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    for own in (save_pretrained, generate):
        if hasattr(base, own.__name__):
            members[own.__name__] = functools.wraps(getattr(base, own.__name__))(own)
    model.__class__ = type(f"Offmate{base.__name__}", (PlannedModule, base), members)
    model.__dict__["_offmate_session"] = session
    model.__dict__["offmate"] = Handle(session)
    give_classes(session)
