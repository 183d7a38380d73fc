"""Files that fail as a test asks, and what tests of storage share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.folders import StoragePath
from offmate.runtime.storage.throttle import Throttle
from safetensors.torch import save_file

PAGE = 4096
CHUNK = 2 * PAGE
FAST = 1e12

Call = Callable[..., int]


class Faulty(SystemFiles):
    """The system's calls, through a function for those that a test names.

    Parameters
    ----------
    faults: by name of the method, a function of the real call and its arguments.
    """

    def __init__(self, **faults: Callable[..., Any]) -> None:
        super().__init__()
        self.calls: list[str] = []
        for name in ("open", "close", "preadv", "pwritev", "fallocate", "fdatasync", "drop_cached", "unlink", "disk",
                     "free_bytes", "lock", "truncate", "stat", "map", "link", "make_folder", "sync_folder",
                     "remove_folder"):  # fmt: skip
            setattr(self, name, self._through(name, getattr(self, name)))
        self.faults = faults

    def _through(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            fault = self.faults.get(name)
            return real(*args) if fault is None else fault(real, *args)

        return call


def once(fault: Callable[..., Any], skip: int = 0) -> Callable[..., Any]:
    """A fault of one call, after as many that go well."""
    left = [skip, 1]

    def perhaps(real: Callable[..., Any], *args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            return real(*args)
        if left[1]:
            left[1] -= 1
            return fault(real, *args)
        return real(*args)

    return perhaps


def refused(code: int) -> Callable[..., Any]:
    """A call that the system refuses."""

    def fail(real: Call, *args: Any) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def interrupted(real: Call, *args: Any) -> int:
    raise InterruptedError


def at_most(n_bytes: int) -> Callable[..., Any]:
    """A transfer that does only its beginning."""

    def short(real: Call, handle: int, buffers: Sequence[Any], offset: int) -> int:
        (buffer,) = buffers
        whole_pages = min(-(-n_bytes // PAGE) * PAGE, len(buffer))
        part = (ctypes.c_char * whole_pages).from_buffer(buffer)
        return min(n_bytes, real(handle, [part], offset)) if n_bytes else 0

    return short


def flipped(real: Call, handle: int, buffers: Sequence[Any], offset: int) -> int:
    """A read of which one bit is wrong."""
    count = real(handle, buffers, offset)
    buffers[0][count // 2] = bytes([buffers[0][count // 2][0] ^ 1])
    return count


def without_direct(real: Call, path: Path, flags: int) -> int:
    """A file system that has no O_DIRECT."""
    if flags & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    return real(path, flags)


def random_bytes(n_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def checkpoint(path: Path, n_bytes: int = 200_000, seed: int = 0) -> Path:
    """A safetensors file of random bytes."""
    save_file({"weight": random_bytes(n_bytes, seed)}, path)
    return path


def content(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def engine_on(*folders, files=None, **given):
    """An engine whose paths count as disks of their own."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
    throttles = given.pop("throttles", [Throttle(FAST, FAST, shared=False) for _ in folders])
    paths = [StoragePath(folder) for folder in folders]
    return Engine(paths, throttles=throttles, files=files, **{"n_threads": 2, "request_bytes": CHUNK, **given})


def read(running, stored, start=0, n_bytes=None):
    target = torch.zeros(stored.n_bytes - start if n_bytes is None else n_bytes, dtype=torch.uint8)
    running.read(stored, target, start=start).synchronize()
    return target
