"""Watches who reads and writes which memory, and whether something orders them: a race detector for the runtime.

Every stream and every thread of the host is a line of work with a vector clock. Launching, recording and waiting for
events, handing a job to a worker and waiting for it carry clocks from line to line; of two uses of the same memory of
which one writes, one has to come after the other by them. What goes well only because one line happens to be faster
than another is found all the same. Source: Flanagan and Freund, FastTrack, PLDI 2009, section 3.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from offmate.runtime.devices import stream_events, streams
from offmate.runtime.devices.lanes import Lane
from offmate.runtime.events import LaneEvent
from offmate.runtime.replay.executor import Executor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from offmate.machines.links import LinkRates
from offmate.profile import figures

CELL_BYTES = 64  # what is watched as one piece of memory; allocations begin at multiples of it
HOST, COMPUTE = "host", "compute"

VectorClock = dict[str, int]

_aten = torch.ops.aten
_ASKS_THE_HOST = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)
_TOUCHES_NOTHING = ("set_", "resize_", "is_pinned", "record_stream")


@dataclass
class Cell:
    """A piece of memory: who wrote it last, and who has read that since, with the line's time and in words."""

    written: tuple[str, int, str] | None = None
    read: dict[str, tuple[int, str]] = field(default_factory=dict)
    empty: bool = False


class Order:
    """What was seen.

    State: `races`, in words; `waits`, action and reason of every wait of the training thread inside an action;
    `synchronized`, waits for the whole device, and uses of record_stream; `label`, the action under way.
    """

    def __init__(self, workers_are_late: bool) -> None:
        self.workers_are_late = workers_are_late
        self.races: list[str] = []
        self.waits: list[tuple[str, str]] = []
        self.synchronized: list[str] = []
        self.label = ""
        self.names = {0: COMPUTE}
        self._clocks: dict[str, VectorClock] = {}
        self._cells: dict[int, Cell] = {}
        self._known: set[int] = set()
        self._safe: set[int] = set()
        self._lock = threading.RLock()

    # -- lines --------------------------------------------------------------------------------------------------------

    def line_of(self, stream: torch.Stream) -> str:
        return self.names.get(stream.stream_id, f"stream {stream.stream_id}")

    def current_stream(self) -> str:
        return self.line_of(torch.accelerator.current_stream())

    def clock(self, line: str) -> VectorClock:
        return self._clocks.setdefault(line, {line: 1})

    def fork(self, line: str | None = None) -> VectorClock:
        """What has been done before now on a line; the thread's own by default. What follows on it is later."""
        with self._lock:
            own = here()
            clock = self.clock(line or own)
            if line is not None:
                _join(clock, self.clock(own))
            token = dict(clock)
            clock[line or own] = clock.get(line or own, 0) + 1
            return token

    def join(self, token: VectorClock | None, line: str | None = None) -> None:
        """What follows on a line comes after what a token stands for."""
        if token is not None:
            with self._lock:
                _join(self.clock(line or here()), token)

    def wait(self, token: VectorClock | None, why: str) -> None:
        """The thread waits until what a token stands for has been done."""
        if here() == HOST and self.label:
            self.waits.append((self.label, why))
        self.know(token)

    def know(self, token: VectorClock | None, why: str = "") -> None:
        """The thread has seen that it has been done."""
        self.join(token)

    # -- memory -------------------------------------------------------------------------------------------------------

    def use(self, line: str, reads: list[torch.Tensor], writes: list[torch.Tensor], label: str) -> None:
        """An operation on a line that reads and writes tensors; it comes after what its thread has done and awaited."""
        with self._lock:
            clock = self.clock(line)
            _join(clock, self.clock(here()))
            clock[line] = now = clock.get(line, 0) + 1
            for tensor in reads:
                for cell in self._cells_of(tensor):
                    if cell.empty:
                        self.races.append(f"{label} reads on {line} what nobody has written")
                        cell.empty = False
                    self._check_written(cell, clock, f"{label} reads on {line}")
                    cell.read[line] = (now, label)
            for tensor in writes:
                for cell in self._cells_of(tensor):
                    self._check_written(cell, clock, f"{label} writes on {line}")
                    self._check_read(cell, clock, f"{label} overwrites on {line}")
                    cell.written, cell.read, cell.empty = (line, now, label), {}, False

    def made(self, tensors: list[torch.Tensor]) -> None:
        """Memory was taken and not written yet."""
        with self._lock:
            for tensor in tensors:
                for cell in self._cells_of(tensor):
                    cell.empty = True

    def lives_until_it_is_used(self, tensors: list[torch.Tensor]) -> None:
        """Memory that torch pinned is given out again only after the copies from it."""
        self._safe |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _cells_of(self, tensor: torch.Tensor) -> list[Cell]:
        if not tensor.numel() or tensor.device.type == "meta":
            return []
        storage = tensor.untyped_storage()
        first = storage.data_ptr() // CELL_BYTES
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            count = -(-storage.nbytes() // CELL_BYTES)
            on_device, key = tensor.device.type != "cpu", storage._cdata
            weakref.finalize(storage, self._dies, key, first, count, on_device).atexit = False
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
        start = tensor.data_ptr() // CELL_BYTES
        end = -(-(tensor.data_ptr() + span * tensor.element_size()) // CELL_BYTES)
        return [self._cells.setdefault(place, Cell()) for place in range(start, end)]

    def _dies(self, key: int, first: int, count: int, on_device: bool) -> None:
        """Memory is given back: to the computing stream if it is the device's, else to whoever takes it next."""
        with self._lock:
            self._known.discard(key)
            safe = key in self._safe
            self._safe.discard(key)
            clock = dict(self.clock(here()))
            if on_device:
                _join(clock, self.clock(COMPUTE))
            for place in range(first, first + count):
                cell = self._cells.pop(place, None)
                if cell is not None and not safe:
                    self._check_written(cell, clock, f"{self.label or 'the end'} lets go of")
                    self._check_read(cell, clock, f"{self.label or 'the end'} lets go of")

    def _check_written(self, cell: Cell, clock: VectorClock, what: str) -> None:
        if cell.written is not None:
            line, time, label = cell.written
            if clock.get(line, 0) < time:
                self.races.append(f"{what} what {label} writes on {line}")

    def _check_read(self, cell: Cell, clock: VectorClock, what: str) -> None:
        for line, (time, label) in cell.read.items():
            if clock.get(line, 0) < time:
                self.races.append(f"{what} what {label} reads on {line}")


def here() -> str:
    """The line that is this thread: one for every worker, one for those that train."""
    name = threading.current_thread().name
    return name if name.startswith("offmate-") else HOST


def _join(clock: VectorClock, other: VectorClock) -> None:
    for line, time in other.items():
        if time > clock.get(line, 0):
            clock[line] = time


# -- operations -------------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Sees every operation of its thread."""

    def __init__(self, order: Order, label: str | None = None) -> None:
        super().__init__()
        self._order, self._label = order, label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        order, kwargs = self._order, kwargs or {}
        label = self._label or order.label
        if func is _aten.record_stream.default:
            order.synchronized.append(f"{label}: record_stream")
        reads, writes = _arguments(func, args, kwargs)
        result = func(*args, **kwargs)
        name, returns = func.overloadpacket.__name__, func._schema.returns
        if name in _TOUCHES_NOTHING or any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return result
        results = _tensors(result)
        if name.startswith(("empty", "new_empty")):
            order.made(results)
            return result
        if name == "_pin_memory":
            order.lives_until_it_is_used(results)
        on_device = any(t.device.type == "sim" for t in (*reads, *writes, *results))
        line = order.current_stream() if on_device else here()
        written = {id(tensor): tensor for tensor in (*writes, *results)}
        order.use(line, reads, list(written.values()), label)
        if on_device and _is_waited_for(func, args, kwargs, reads, results):
            order.wait(order.fork(line), f"for {name}")
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that an operator reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    fills = func.overloadpacket.__name__ in ("copy_", "fill_", "zero_", "_foreach_copy_")
    for declared, value in [
        *zip(func._schema.arguments, args),
        *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
    ]:
        changed = declared.alias_info is not None and declared.alias_info.is_write
        if changed:
            writes += _tensors(value)
        if not changed or not (fills or declared.kwarg_only):
            reads += _tensors(value)
    return reads, writes


def _is_waited_for(func: Any, args: Any, kwargs: Any, reads: list[Any], results: list[Any]) -> bool:
    """Whether the thread that calls an operator of the device waits for its result."""
    if func in _ASKS_THE_HOST:
        return True
    if func is _aten.copy_.default:
        host = [t for t in args[:2] if t.device.type == "cpu"]
        free = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return any(not free or not t.is_pinned() for t in host)
    if func is _aten._to_copy.default:
        return {t.device.type for t in (*reads, *results)} == {"cpu", "sim"}
    return False


# -- streams and threads ----------------------------------------------------------------------------------------------


class _Stream:
    """A stream whose events carry clocks."""

    def __init__(self, order: Order, own: torch.Stream) -> None:
        self._order, self.own = order, own

    @property
    def device(self) -> torch.device:
        return self.own.device

    def record_event(self) -> _Event:
        return _Event(self._order, self.own.record_event(), self._order.fork(self._order.line_of(self.own)))

    def synchronize(self) -> None:
        self.own.synchronize()
        self._order.wait(self._order.fork(self._order.line_of(self.own)), "for a stream")

    def __enter__(self) -> None:
        self.own.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.own.__exit__(*error)


class _Event:
    def __init__(self, order: Order, own: torch.Event, token: VectorClock) -> None:
        self._order, self._own, self._token = order, own, token

    def record(self, stream: _Stream) -> None:
        self._own.record(stream.own)
        self._token = self._order.fork(self._order.line_of(stream.own))

    def wait(self, stream: _Stream) -> None:
        self._own.wait(stream.own)
        self._order.join(self._token, self._order.line_of(stream.own))

    def synchronize(self) -> None:
        self._own.synchronize()
        self._order.wait(self._token, "for an event")

    def query(self) -> bool:
        happened = self._own.query()
        if happened:
            self._order.join(self._token)
        return happened


class _Torch:
    """`torch` for the module under test: the real one, but for streams."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def Stream(self, device: torch.device) -> _Stream:
        return _Stream(self._order, torch.Stream(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _watch_threads(order: Order, stack: contextlib.ExitStack) -> None:
    submit, synchronize, done = Lane.submit, LaneEvent.synchronize, LaneEvent.done
    finished: weakref.WeakKeyDictionary[LaneEvent, dict[str, VectorClock]] = weakref.WeakKeyDictionary()

    def watched_submit(lane: Lane, work: Callable[[], None], after: Any) -> LaneEvent:
        token, label, box = order.fork(), order.label, {}

        def watched() -> None:
            order.join(token)
            with _Operations(order, label):
                work()
            box[""] = order.fork()

        event = submit(lane, watched, after)
        finished[event] = box
        return event

    def watched_synchronize(event: LaneEvent) -> None:
        waits = order.workers_are_late or not done(event)
        synchronize(event)
        (order.wait if waits else order.know)(finished[event][""], "for a worker")

    def watched_ready(event: LaneEvent) -> bool:
        return not (order.workers_are_late and here() == HOST) and watched_done(event)

    def watched_done(event: LaneEvent) -> bool:
        happened = done(event)
        if happened and event in finished:
            order.join(finished[event].get(""))
        return happened

    stack.enter_context(mock.patch.object(Lane, "submit", watched_submit))
    stack.enter_context(mock.patch.object(LaneEvent, "synchronize", watched_synchronize))
    stack.enter_context(mock.patch.object(LaneEvent, "done", watched_done))
    stack.enter_context(mock.patch.object(LaneEvent, "ready", watched_ready))


def _watch_executor(order: Order, stack: contextlib.ExitStack) -> None:
    take, inside = Executor._take, threading.local()

    def watched_take(executor: Executor, action: Any) -> None:
        order.label = str(action)
        try:
            take(executor, action)
        finally:
            order.label = ""

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "yes", False):
                return method(*args, **kwargs)
            inside.yes = True
            try:
                with _Operations(order):
                    return method(*args, **kwargs)
            finally:
                inside.yes = False

        return call

    stack.enter_context(mock.patch.object(Executor, "_take", watched_take))
    for name in ("forward", "backward", "turn_around", "take_host_grads", "sync", "unload", "finish"):
        stack.enter_context(mock.patch.object(Executor, name, watched(getattr(Executor, name))))


@contextlib.contextmanager
def watched(sim: Any, workers_are_late: bool = False) -> Iterator[Order]:
    """Stream devices that are made inside, and the executors on them, are watched."""
    order = Order(workers_are_late)

    def synchronize(*given: Any) -> None:
        order.synchronized.append(f"{order.label}: synchronize()")

    def stream_on(device: torch.device, stream: _Stream | None = None) -> _Stream:
        return stream or _Stream(order, torch.accelerator.current_stream(device))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(streams, "torch", _Torch(order)))
        for module in (streams, stream_events):
            stack.enter_context(mock.patch.object(module, "stream_on", stream_on))
        # Copies that are only timed have events of their own.
        stack.enter_context(mock.patch.object(figures, "measure_link", lambda device: LinkRates(1e9, 1e9, 1.6e9)))
        _watch_threads(order, stack)
        _watch_executor(order, stack)
        for module in (torch.accelerator, sim):
            stack.enter_context(mock.patch.object(module, "synchronize", synchronize))
        yield order
