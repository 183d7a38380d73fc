"""Logs of the bytes that an allocator hands out while something runs, on the host or a device."""

from __future__ import annotations

import abc
import atexit
import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..errors import ProtocolError
from ..runtime.torch_names.autograd import backward_under_way, profiler_is_on

_MARK = "offmate::"


def allocation_log(device: torch.device) -> AllocationLog | DeviceAllocationLog:
    """Return a log that watches the allocator of a device."""
    return AllocationLog() if device.type == "cpu" else DeviceAllocationLog(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence libkineto, which otherwise writes two lines to stderr for every session."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before


@functools.cache
def _let_children_end() -> None:
    """Make sure that a process forked from this one ends when it exits.

    Once the profiler has run, libkineto waits at exit for its own thread, which no forked child has. So a child skips
    the exit handlers of libraries; Python has finished its own by then.
    """
    libc = ctypes.CDLL(None)
    if hasattr(os, "register_at_fork") and hasattr(libc, "on_exit"):
        os.register_at_fork(after_in_child=lambda: libc.on_exit(libc._exit, None))


class _OneAtATime(abc.ABC):
    """A log of allocations, one at a time per process: a log that begins ends the one under way in its thread.

    State: `cut_short`, whether another log began before this one ended, or another thread asked it to end, so that it
    saw only a part.
    """

    _under_way: ClassVar[_OneAtATime | None] = None

    def __init__(self) -> None:
        self.cut_short = False
        self._thread, self._process = threading.current_thread(), os.getpid()

    def _begin(self) -> None:
        """Become the log under way. Raises: ProtocolError if another thread's is, or this one's inside a backward."""
        before = _OneAtATime._under_way
        if before is not None and before.can_end:
            before.cut_short = True
            before._stop()
        elif before is not None and before.is_alive:
            if before.is_here:
                raise ProtocolError(
                    "a compiled model is called inside the backward() of the first iteration of its kind, while that "
                    "iteration is measured; call it after backward(), or inside it only from the second iteration on"
                )
            raise ProtocolError(
                f"the first iteration of a model in thread {before._thread.name!r} is being measured, and a process "
                "measures one at a time. Finish it there with optimizer.step() or model.offmate.sync() before thread "
                f"{threading.current_thread().name!r} calls a model for the first time"
            )
        self._thread, self._process = threading.current_thread(), os.getpid()
        _OneAtATime._under_way = self

    @property
    def is_here(self) -> bool:
        """Return whether this thread began the log; a thread of a forked process did not."""
        return self._thread is threading.current_thread() and self._process == os.getpid()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread that began the log can still end it."""
        return self._process == os.getpid() and self._thread.is_alive()

    @property
    def can_end(self) -> bool:
        """Return whether it can be ended now: by its own thread, and not in a backward, which restores the profiler."""
        return self.is_here and backward_under_way() == -1

    def __exit__(self, *error: object) -> None:
        if _OneAtATime._under_way is self and self.can_end:
            _OneAtATime._under_way = None
            self._stop()
        else:  # Another log has ended it, or the next one will, or the end of the process.
            self.cut_short = True

    @abc.abstractmethod
    def _stop(self) -> None:
        """End the log."""


@atexit.register
def _end_with_the_process() -> None:
    """End the log under way, since the process would crash at exit otherwise."""
    log = _OneAtATime._under_way
    if log is not None:
        log.__exit__()


def profiler_is_taken() -> bool:
    """Return whether the user profiles this thread, or another thread is measured, so that this one cannot be."""
    own = _OneAtATime._under_way
    if own is not None and not own.can_end:
        return own.is_alive
    return profiler_is_on() and own is None


class AllocationLog(_OneAtATime):
    """A log of allocations and frees on the host, in order, by the named stretches in which they happened.

    Frees of memory that was allocated before the log began do not count: they would hide as many bytes of its peak.
    Use as a context manager around the work; name stretches with `stretch`. Raises: ProtocolError if the user profiles.
    """

    def __enter__(self) -> AllocationLog:
        if profiler_is_on() and self._under_way is None:
            raise ProtocolError(
                "a profiler is running in this thread, but offmate measures the first call of each kind with PyTorch's "
                "profiler, and a thread can run only one. Train one iteration first, and start your profiler after it"
            )
        self._begin()
        _let_children_end()
        try:
            with _quiet():
                self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
                self._profile.__enter__()
        except BaseException:
            _OneAtATime._under_way = None
            raise
        return self

    def _stop(self) -> None:
        with _quiet():
            self._profile.__exit__(None, None, None)
        profiler: Any = self._profile.profiler
        results = profiler.kineto_results
        self._changes = list(_of_own_memory(results.experimental_event_tree()))
        self._stretches = sorted(
            (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
            for e in results.events()
            if e.name().startswith(_MARK)
        )

    @staticmethod
    def stretch(name: str, work: Callable[[], object]) -> object:
        """Run `work` as a named stretch and return what it returns."""
        with record_function(_MARK + name):
            return work()

    def peak_bytes(self, until: str | None = None) -> int:
        """Return the peak of all allocations above their level at the start, up to the stretch named `until`."""
        ends = [start for start, _, name in self._stretches if name == f"{_MARK}{until}"]
        last = min(ends, default=None)
        return _peak(nbytes for at, nbytes in self._changes if last is None or at <= last)[0]

    def rise_bytes(self, name: str) -> int:
        """Return the peak of all allocations during a stretch, above their level at its start."""
        ((start, end),) = ((start, end) for start, end, own in self._stretches if own == _MARK + name)
        return _peak(nbytes for at, nbytes in self._changes if start <= at <= end)[0]

    def workspace_bytes(self) -> dict[str, int]:
        """Return per stretch the most bytes that were held beyond those still held at its end."""
        found: dict[str, int] = {}
        changes = iter(self._changes)
        change = next(changes, None)
        for start, end, name in self._stretches:
            inside = []
            while change is not None and change[0] <= end:
                if change[0] >= start:
                    inside.append(change[1])
                change = next(changes, None)
            peak, net = _peak(inside)
            found[name[len(_MARK) :]] = max(0, peak - net)
        return found


def _of_own_memory(roots: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield when memory was allocated or freed (ns), and the bytes (frees: below zero), in order.

    The profiler reports a free where it saw the allocation, be it in an earlier log of this process. When that memory
    goes may hang on Python's garbage collector.
    """
    found, open_nodes = [], list(roots)
    while open_nodes:
        node = open_nodes.pop()
        open_nodes += node.children
        if node.name == "[memory]":
            found.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr))
    own = set()
    for at, nbytes, address in sorted(found):
        if nbytes > 0:
            own.add(address)
        elif address in own:
            own.remove(address)
        else:
            continue
        yield at, nbytes


class DeviceAllocationLog(_OneAtATime):
    """The same for an accelerator's caching allocator, which keeps count itself. Stretches may not overlap."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._workspace: dict[str, int] = {}
        self._rise: dict[str, int] = {}
        self._marks: dict[str, int] = {}

    def __enter__(self) -> DeviceAllocationLog:
        self._begin()
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._start = torch.accelerator.memory_allocated(self._device)
        return self

    def _stop(self) -> None:
        self._end = torch.accelerator.max_memory_allocated(self._device) - self._start

    def stretch(self, name: str, work: Callable[[], object]) -> object:
        """Run `work` as a named stretch and return what it returns."""
        self._marks[name] = torch.accelerator.max_memory_allocated(self._device) - self._start
        torch.accelerator.reset_peak_memory_stats(self._device)
        before = torch.accelerator.memory_allocated(self._device)
        result = work()
        peak = torch.accelerator.max_memory_allocated(self._device)
        self._rise[name] = peak - before
        self._workspace[name] = max(0, peak - torch.accelerator.memory_allocated(self._device))
        return result

    def peak_bytes(self, until: str | None = None) -> int:
        """Return the peak of allocated bytes above their level at the start, up to the stretch named `until`."""
        return self._end if until is None else self._marks.get(until, self._end)

    def rise_bytes(self, name: str) -> int:
        """Return the peak of allocated bytes during a stretch, above their level at its start."""
        return self._rise[name]

    def workspace_bytes(self) -> dict[str, int]:
        """Return per stretch the most bytes that were held beyond those still held at its end."""
        return self._workspace


def _peak(changes: Iterable[int]) -> tuple[int, int]:
    level = peak = 0
    for nbytes in changes:
        level += nbytes
        peak = max(peak, level)
    return peak, level
