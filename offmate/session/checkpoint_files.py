"""Frozen parameters that a compiled model reads from its checkpoint's files, where RAM is short of room for them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

from ..errors import LibraryError, StorageError
from ..lowering.frozen_files import FrozenFiles
from ..machines.devices import accelerator
from ..machines.mapped_files import MappedBytes, mapped_bytes
from ..planning.files import ram_is_short
from ..planning.request import Request
from ..runtime.devices.device import Device
from ..runtime.devices.from_files import BUFFERS_BYTES
from ..runtime.replay.binding import HostState
from ..runtime.storage.engine import Engine
from ..runtime.storage.file_bytes import FileBytes
from ..runtime.storage.measure import read_rate
from ..runtime.storage.read_only import ReadOnlyFile
from ..sizes import format_bytes
from ..solver import items
from ..solver.items import ItemKind
from ..solver.schedule import Kind, Schedule
from .host_state import Truth

log = logging.getLogger("offmate")

_PROBE_BYTES = 1 << 28  # read of a file to measure its rate


class CheckpointFiles:
    """The frozen parameters of a model that lie in files, mapped into memory as transformers and safetensors load them.

    State: `_engine` and `_files`, open from the first search on; `_rate`, of the largest file, measured once;
    `host.files`, the parameters that may be read from files; `_mapped`, of those that have memory of their own as well,
    the tensors that are mapped. Changed on the training thread.

    Parameters
    ----------
    host: the host's copy of the model. buffers_bytes: RAM that files pass on their way to the device, beside what
        reading takes. changed: the device's condition.
    """

    def __init__(self, host: HostState, buffers_bytes: int, changed: threading.Condition) -> None:
        self._host, self._own_bytes, self._changed = host, buffers_bytes, changed
        self._engine: Engine | None = None
        self._files: dict[Path, ReadOnlyFile] = {}
        self._rate: float | None = None
        self._mapped: dict[str, torch.Tensor] = {}

    def find(self, frozen: Collection[str]) -> None:
        """Find those of the frozen parameters that lie in files, unless they are known; no other is read from there."""
        self._drop(name for name in tuple(self._host.files) if name not in frozen)
        wanted = {name: self._host.params[name] for name in frozen if name not in self._host.files}
        for name, own in mapped_bytes(wanted).items():
            file = self._open(own)
            if file is not None:
                assert self._engine is not None
                self._host.files[name] = FileBytes(self._engine, file, own.start)

    def _open(self, own: MappedBytes) -> ReadOnlyFile | None:
        """Return a file, open; None if it cannot be read in the way that training needs."""
        if own.path in self._files:
            return self._files[own.path]
        try:
            self._engine = self._engine or Engine(changed=self._changed)
            self._files[own.path] = self._engine.open(own.path)
        except (StorageError, LibraryError) as error:
            log.info("parameters in %s stay in RAM: %s", own.path, error)
            return None
        return self._files[own.path]

    def request(self, host_budget_bytes: int) -> FrozenFiles | None:
        """Return what a plan has to know of the files; None if RAM has room for everything without them."""
        sizes = {name: param.nbytes for name, param in self._host.params.items()}
        if not self._host.files or not ram_is_short(sizes, self._host.files, host_budget_bytes):
            return None
        if self._rate is None:
            largest = max(self._files.values(), key=lambda file: file.size_bytes)
            self._rate = read_rate(largest.path, _PROBE_BYTES)
            log.info("%s is read at %s per second", largest.path, format_bytes(int(self._rate)))
        return FrozenFiles(frozenset(self._host.files), self._rate, self._buffers_bytes)

    @property
    def _buffers_bytes(self) -> int:
        assert self._engine is not None
        return self._own_bytes + self._engine.staging_bytes

    def check(self) -> None:
        """Look whether the files that are read are still those that were opened. Raises: StorageError if not."""
        for file in dict.fromkeys(own.file for own in self._host.files.values()):
            file.check()

    def forget(self, names: Iterable[str]) -> None:
        """Read no more of these parameters from files, since their values are other ones now."""
        gone = self._drop(names)
        if gone:
            log.warning(
                "%d frozen parameters were changed (%s, ...), so they come from RAM from now on, which they take in "
                "addition to the plan",
                len(gone), gone[0],
            )  # fmt: skip

    def _drop(self, names: Iterable[str]) -> list[str]:
        """Read parameters from files no more; return those that were."""
        gone = [name for name in names if self._host.files.pop(name, None) is not None]
        for name in gone:
            self._mapped.pop(name, None)
        return gone

    def settle(self, schedule: Schedule, truth: Truth, device: Device) -> None:
        """Give the parameters that a schedule copies from RAM memory of their own there, and no others.

        Such memory is let go of if a later plan reads the parameter from its file.
        """
        come = items.names_of((a.item for a in schedule.actions if a.kind is Kind.PREFETCH), ItemKind.PARAMETER)
        hosted = {n for n in self._host.files if n in come and items.parameter(n) not in schedule.homes}
        moved = {}
        for name in self._host.files:
            param, there = self._host.params[name], self._mapped.get(name)
            if name in hosted and there is None:
                self._mapped[name] = param
                moved[name] = device.empty_host_like(param).copy_(param)
            elif name not in hosted and there is not None:
                moved[name] = self._mapped.pop(name)
        truth.move(moved)

    def close(self) -> None:
        """Close all files."""
        if self._engine is not None:
            self._engine.close()


@contextlib.contextmanager
def files_here(model: torch.nn.Module, request: Request) -> Iterator[FrozenFiles | None]:
    """Find out what a plan for this machine has to know of a model's files, as a compiled model does."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    buffers_bytes = 0 if accelerator(request.device) is None else BUFFERS_BYTES
    files = CheckpointFiles(HostState(params, {}), buffers_bytes, threading.Condition())
    try:
        files.find(frozen)
        yield files.request(request.host_budget_bytes)
    finally:
        files.close()
