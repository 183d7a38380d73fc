"""Tensors in files, for tests of devices that read and write them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from offmate.runtime.devices.device import Device
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.file_bytes import StoredBytes
from offmate.runtime.storage.folders import StoragePath
from offmate.runtime.storage.throttle import Throttle
from offmate.solver.resources import Resource

from ..storage.faulty import PAGE, Faulty

CHUNK = 2 * PAGE
INTO, OUT_OF = Resource("copy in from files"), Resource("copy out to files")
LONG_S = 30


class Drive:
    """A folder of files and the engine that stores tensors there; a context that closes the engine.

    Parameters
    ----------
    device: reads and writes them. faults: of the system's calls, by name.
    """

    def __init__(self, device: Device, folder: Path, **faults: Any) -> None:
        self.device, files = device, Faulty()
        throttle = Throttle(1e12, 1e12, shared=False)
        self.engine = Engine(
            [StoragePath(folder)],
            throttles=[throttle],
            files=files,
            request_bytes=CHUNK,
            changed=device.changed,
        )
        files.faults.update(faults)  # not before: the folder itself is marked by a write
        self._number = 0

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *error: object) -> None:
        self.device.drain()
        self.engine.close()

    def place(self, n_bytes: int, start: int = 0) -> StoredBytes:
        """Room for a tensor, so many bytes after the beginning of its file."""
        self._number += 1
        return StoredBytes(self.engine, self.engine.store(f"tensor {self._number}", start + n_bytes), start)

    def content(self, place: StoredBytes) -> torch.Tensor:
        """The bytes that a file has at last."""
        found = torch.zeros(place.stored.n_bytes - place.start, dtype=torch.uint8)
        place.read(found, 0).synchronize()
        return found

    def write(self, place: StoredBytes, source: torch.Tensor, after: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        return self.device.write_out(place, source, after, OUT_OF)

    def read(self, place: StoredBytes, like: torch.Tensor, after: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        """New memory on the device, and the event of a tensor being there."""
        target = self.device.empty_like(like)
        return target, self.device.read_in(target, place, INTO, after)

    def wait_until(self, happened: Any) -> None:
        with self.device.changed:
            assert self.device.changed.wait_for(happened, LONG_S)


class Gate:
    """A fault that keeps calls of the system from beginning until it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, real: Any, *args: Any) -> Any:
        assert self.open.wait(LONG_S)
        return real(*args)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's bytes on the host, in the order of its memory."""
    host = tensor.cpu()
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8)
