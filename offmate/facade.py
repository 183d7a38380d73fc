"""What a compiled model and its parameters become: the same objects, of a class that knows the plan."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from .errors import PlanFileError, ProtocolError
from .plans import Plan, load_plan
from .runtime.clocks import clock_of
from .runtime.trace import Recorder
from .trace import Trace

log = logging.getLogger("offmate")


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
        """What happened in the last iteration that ran whole inside `record()`; None if there is none."""
        if self._recorder is None:
            return None
        device = self._session.device
        device.drain()
        recording = self._recorder.recording()
        return None if recording is None else Trace(recording, device.ledger.limit_bytes)

    @property
    def plan(self) -> Plan | None:
        """The plan of the training iteration; None before the first batch unless one was given."""
        return self._session.preparer.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that are kept for training, one per kind of batch; the one used last at the end."""
        return self._session.preparer.plans

    def save_plans(self, folder: str | os.PathLike[str]) -> None:
        """Write the plans kept for training into a folder, one file each, for `load_plans` of a later run."""
        for plan in self.plans:
            plan.save(Path(folder, f"{plan.fingerprint}.json"))

    def load_plans(self, folder: str | os.PathLike[str]) -> None:
        """Have the plans in a folder used where they fit a batch, instead of searching; damaged ones are left out."""
        for file in sorted(Path(folder).glob("*.json")):
            try:
                plan = load_plan(file)
            except PlanFileError as error:
                log.warning("an earlier plan is ignored: %s", error)
                continue
            self._session.preparer.use_earlier(plan)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that have been on the device since the last `reset_peak`."""
        return self._session.device.ledger.peak_bytes

    def reset_peak(self) -> None:
        """Start counting the peak anew."""
        self._session.device.ledger.reset_peak()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global norm of all gradients of the last iteration, before clipping; None without `max_grad_norm`."""
        return self._session.grad_norm

    def sync(self) -> None:
        """Wait for updates and copies under way; afterwards parameters and optimizer states read current."""
        self._session.sync()

    def __repr__(self) -> str:
        plan = self.plan
        return f"<offmate: {plan!r}>" if plan is not None else "<offmate: planned at the first batch>"


def _shows_no_values() -> frozenset[Any]:
    """Functions of a parameter that tell nothing of its values, so that nothing need be waited for."""
    properties = (
        "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim", "nbytes",
        "itemsize", "_version", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested",
    )  # fmt: skip
    methods = (
        "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
        "storage_offset", "is_contiguous", "get_device", "requires_grad_", "register_hook", "__len__",
    )  # fmt: skip
    found: set[Any] = {getattr(torch.Tensor, name) for name in methods}
    for name in properties:
        descriptor = getattr(torch.Tensor, name)
        found |= {descriptor.__get__, getattr(descriptor, "__set__", None)}
    return frozenset(found)


_SHOWS_NO_VALUES = _shows_no_values()
_TENSOR: Any = torch.Tensor
_DATA = _TENSOR.data.__get__


class PlannedParameter(torch.nn.Parameter):
    """A parameter that the plan updates: its values are made current before they are read or written.

    Reading a gradient that the plan has consumed raises.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SHOWS_NO_VALUES:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, PlannedParameter):
                    leaf.__dict__["_offmate"].read("a parameter is used")
        with torch._C.DisableTorchFunctionSubclass():
            # Unlike `data`, `detach` shares the version counter: edits through it are noticed.
            return args[0].detach() if func == _DATA else func(*args, **(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it is computed with; its memory is the host's, or nowhere yet."""
        own: torch.device = _TENSOR.device.__get__(self)
        return self.__dict__["_offmate"].device.torch_device if own.type == "cpu" else own

    @property
    def grad(self) -> torch.Tensor | None:
        session = self.__dict__["_offmate"]
        if session.uncleared:
            raise ProtocolError(
                "the planned optimizer has taken this gradient in backward(); to clip by global norm pass "
                "max_grad_norm= to offmate.compile; to work on .grad yourself (torch.amp.GradScaler does) compile "
                "without optimizer=, or train in bfloat16, which needs no scaling"
            )
        return _TENSOR.grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            self.__dict__["_offmate"].assigned.take(self, value)
            return
        self.__dict__["_offmate"].zero_grad()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        copy = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class PlannedModule:
    """Mixed into the model's own class; `offmate` is the handle, `_offmate_session` what stands behind it."""

    offmate: Handle
    # transformers.Trainer takes a model with a map of other devices for one that places itself: it neither moves it nor
    # puts it into DataParallel where several GPUs are visible.
    hf_device_map: ClassVar[dict[str, str]] = {"": "meta"}

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the dtype; a device is ignored, since the plan says what is where."""
        session = self.__dict__["_offmate_session"]
        _, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None and memory_format is None:
            session.say_once("to(device) is ignored: the plan says what is on which device")
            return self
        session.read("to()")
        return super().to(dtype=dtype, non_blocking=non_blocking, memory_format=memory_format)  # type: ignore[misc]

    def cuda(self, device: Any = None) -> Any:
        """Ignored, as `to(device)` is."""
        return self.to("cuda")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; with a planned optimizer none is left."""
        session = self.__dict__["_offmate_session"]
        session.zero_grad()
        if session.updater is None:
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state, current."""
        session = self.__dict__["_offmate_session"]
        session.read("state_dict()")
        session.truth.warn_if_torn()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state; it is used from the next forward on. An iteration under way ends."""
        session = self.__dict__["_offmate_session"]
        session.end_iteration()
        result = super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        session.truth.reloaded("model")
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the plain model, current."""
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
        session.say_once(
            "generate() runs on the host as plain PyTorch does, cache included, outside of any plan; to generate on a "
            "device save the model with save_pretrained() and load it there"
        )
        with session.plain() as model:
            return model.generate(*args, **kwargs)

    members: dict[str, Any] = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    for own in (save_pretrained, generate):
        if hasattr(base, own.__name__):
            members[own.__name__] = functools.wraps(getattr(base, own.__name__))(own)
    model.__class__ = type(f"Offmate{base.__name__}", (PlannedModule, base), members)
    model.__dict__["_offmate_session"] = session
    model.__dict__["offmate"] = Handle(session)
    if session.updater is not None:
        for param in session.updater.names:
            param.__dict__["_offmate"] = session
            param.__class__ = PlannedParameter
