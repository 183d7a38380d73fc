"""Contexts in which the user may call offmate: inference mode, several threads, a forked process, streams."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from ..errors import ProtocolError
from ..runtime.current import entered_on, stream_on
from ..runtime.layouts import on_storage

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="_Shared")


class _Shared(Protocol):
    """An object whose methods several threads may call at the same time."""

    process: Process
    lock: threading.RLock


def outside_inference(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method so that, called under `torch.inference_mode`, it runs under `torch.no_grad` instead.

    Tensors made under inference mode cannot be written outside of it, but some are kept until after it ends.
    """

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        # Leaving inference mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


def alone(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Decorate a session's method so that one thread at a time runs it: state and device serve one loop at a time."""

    @functools.wraps(method)
    def run(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self.process.is_forked:  # The thread that held the lock may not exist in the child.
            return method(self, *args, **kwargs)
        with self.lock:
            return method(self, *args, **kwargs)

    return run


def ordinary(leaf: Any) -> Any:
    """Turn a tensor made under inference mode into an ordinary one on the same memory; return others unchanged."""
    if isinstance(leaf, torch.Tensor) and leaf.is_inference() and leaf.layout is torch.strided:
        return on_storage(leaf, leaf)
    return leaf


class Process:
    """The process in which a model was compiled; its threads do not exist in a child that was forked from it."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Return whether the current process is a forked child of that process."""
        return os.getpid() != self._id

    def check(self) -> None:
        """Raise ProtocolError in a child."""
        if self.is_forked:
            raise ProtocolError(
                "the model was compiled before this process was forked, and a fork lacks the threads that copy and "
                "update. To train in this process, compile the model here. Otherwise, call model.offmate.sync() before "
                "forking: you can then read the model here, and run a plain copy, copy.deepcopy(model), after "
                "torch.set_num_threads(1), since PyTorch's own threads are missing, too"
            )

    def check_reading(self) -> None:
        """Raise ProtocolError in a child, which cannot get values that are newer than the host's."""
        if self.is_forked:
            raise ProtocolError(
                "this process was forked while the newest parameters were on the device or being computed, and only "
                "the parent process can wait for them. Call model.offmate.sync() in the parent before forking"
            )

    def check_reading_files(self) -> None:
        """Raise ProtocolError in a child, which would see files change while its parent trains."""
        if self.is_forked:
            raise ProtocolError(
                "this process was forked from one that has parameters or optimizer states in files (storage=), which "
                "change while that one trains. Save a checkpoint in the parent (offmate.save_checkpoint), and load it "
                "here"
            )


class ComputingStream:
    """The stream on which a model was planned: an allocator keeps memory apart by stream, and a plan is laid out in it.

    State: `_planned`, that stream, once there is a plan.

    Parameters
    ----------
    device: where the model computes; a CPU has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._planned: torch.Stream | None = None

    def take(self) -> None:
        """Note that the model was planned on the current stream, if it is the first plan."""
        if self._planned is None and self._device.type != "cpu":
            self._planned = stream_on(self._device)

    def check(self) -> None:
        """Raise ProtocolError if the current stream is another one."""
        if self._planned is None or stream_on(self._device) == self._planned:
            return
        raise ProtocolError(
            f"the model was planned on stream {self._planned.stream_id} of {self._device}, but the current one is "
            f"stream {stream_on(self._device).stream_id}, and nothing synchronizes the two. Call the model, backward() "
            "and optimizer.step() on the stream of the first call: leave the block that changes the stream, or make "
            "the first call inside it, too"
        )

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Make the device and that stream the current ones inside, whatever the user's are."""
        return entered_on(self._device, self._planned)
