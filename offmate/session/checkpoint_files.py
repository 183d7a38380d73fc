"""Frozen parameters that a compiled model reads from its checkpoint's files, where RAM is short of room for them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import LibraryError, ProtocolError, StorageError
from ..lowering.frozen_files import FrozenFiles
from ..machines.devices import accelerator
from ..machines.mapped_files import MappedBytes, is_unchanged, mapped_bytes
from ..planning.files import ram_is_short
from ..planning.request import Request
from ..runtime.devices.device import Device
from ..runtime.devices.ring import BUFFERS_BYTES
from ..runtime.replay.binding import HostState
from ..runtime.storage.engine import Engine
from ..runtime.storage.file_bytes import FileBytes
from ..runtime.storage.measure import read_rate
from ..runtime.storage.read_only import ReadOnlyFile
from ..runtime.torch_names.autograd import without_torch_function
from ..runtime.torch_names.tensors import version_of
from ..sizes import format_bytes
from ..solver import items
from ..solver.items import ItemKind
from ..solver.schedule import Kind, Schedule
from .host_state import Truth

log = logging.getLogger("offmate")

_PROBE_BYTES = 1 << 28  # read of a file to measure its rate


class _Seen(NamedTuple):
    """A parameter as it was last known to have the values of its file."""

    param: torch.nn.Parameter
    version: int
    address: int


class CheckpointFiles:
    """The frozen parameters of a model that lie in files, mapped into memory as transformers and safetensors load them.

    State: `_engine` and `_files`, open from the first search on; `_rate`, of the largest file, measured once;
    `host.files`, the parameters that may be read from files; `_seen`, these as they were last known to be the files';
    `_mapped`, of those that have memory of their own as well, the tensors that are mapped and their bytes. Changed on
    the training thread.

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
        self._seen: dict[str, _Seen] = {}
        self._bytes: dict[str, MappedBytes] = {}
        self._mapped: dict[str, torch.Tensor] = {}

    def find(self, params: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Find those of a model's frozen parameters that lie in files, unless they are known.

        Those whose memory another parameter has as well are left out: a change of one would be none of the other.
        """
        self.follow(params)
        with without_torch_function():
            shared = sharing(params)
            wanted = {n: p for n, p in params if not p.requires_grad and n not in self._host.files and n not in shared}
            for name, own in mapped_bytes({name: param.detach() for name, param in wanted.items()}).items():
                file = self._open(own)
                if file is not None:
                    assert self._engine is not None
                    self._host.files[name], self._bytes[name] = FileBytes(self._engine, file, own.start), own
                    self._see(name, wanted[name])

    def follow(self, params: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Read no more from files what may have other values now: parameters that were written to, replaced or trained.

        Raises: ProtocolError if one was changed through memory that it had before it moved to RAM of its own.
        """
        if not self._host.files:
            return
        with without_torch_function():
            now, written = dict(params), []
            for name in tuple(self._host.files):
                seen, param = self._seen[name], now.get(name)
                if param is None or param is not seen.param or param.requires_grad:
                    self._drop(name, written=False)
                elif (version_of(param), param.data_ptr()) != seen[1:]:
                    written.append(name)
                    self._drop(name, written=True)
        if written:
            log.warning(
                "%d frozen parameters were changed (%s, ...), so they come from RAM from now on, in addition to what "
                "is planned",
                len(written), written[0],
            )  # fmt: skip

    def _see(self, name: str, param: torch.nn.Parameter) -> None:
        self._seen[name] = _Seen(param, version_of(param), param.data_ptr())

    def _drop(self, name: str, written: bool) -> None:
        """Read a parameter from its file no more; `written` says that it is still the same one, with other values.

        Raises: ProtocolError if it was changed through memory that it had before.
        """
        del self._host.files[name], self._seen[name]
        mapped, own = self._mapped.pop(name, None), self._bytes.pop(name)
        if written and mapped is not None and not is_unchanged(mapped, own):
            raise ProtocolError(
                f"{name} was changed through an older reference to its memory, but since the model was compiled it has "
                "had memory of its own in RAM, so the change is lost. Change the parameter itself: read it from the "
                "model again"
            )

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
        for name in moved:
            self._see(name, self._seen[name].param)

    def close(self) -> None:
        """Close all files."""
        if self._engine is not None:
            self._engine.close()


@contextlib.contextmanager
def files_here(model: torch.nn.Module, request: Request) -> Iterator[FrozenFiles | None]:
    """Find out what a plan for this machine has to know of a model's files, as a compiled model does."""
    named = tuple(model.named_parameters())
    buffers_bytes = 0 if accelerator(request.device) is None else BUFFERS_BYTES
    files = CheckpointFiles(
        HostState({name: param.detach() for name, param in named}, {}), buffers_bytes, threading.Condition()
    )
    try:
        files.find(named)
        yield files.request(request.host_budget_bytes)
    finally:
        files.close()


def sharing(params: Sequence[tuple[str, torch.nn.Parameter]]) -> set[str]:
    """Return the parameters whose memory overlaps with that of another one."""
    spans = []
    for name, param in params:
        if param.layout == torch.strided and param.numel() and param.is_cpu:  # `device` is where it is used
            size = 1 + sum((n - 1) * stride for n, stride in zip(param.shape, param.stride()))
            spans.append((param.data_ptr(), param.data_ptr() + size * param.element_size(), name))
    found: set[str] = set()
    furthest = (0, "")
    for first, end, name in sorted(spans):
        if first < furthest[0]:
            found |= {name, furthest[1]}
        furthest = max(furthest, (end, name))
    return found
