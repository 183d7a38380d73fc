"""A tensor's bytes in a file: in one that is only read, or in those of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from ..events import Event
from .earlier import Earlier
from .engine import Engine
from .read_only import ReadOnlyFile
from .stored import Stored


class BytesInFile(Protocol):
    """The bytes of a dense tensor in a file."""

    @property
    def in_ram(self) -> bool:
        """Whether reads usually find them in RAM, so that they need not wait for those of files."""
        ...

    @property
    def start(self) -> int:
        """The offset in bytes of the first one in the file, as far as alignment depends on it."""
        ...

    @property
    def path(self) -> Path:
        """The file, or the first of several, for messages."""
        ...

    def read(self, target: torch.Tensor, offset: int, after: Sequence[Event] = ()) -> Event:
        """Start to read bytes into the host's memory, after some events.

        Parameters
        ----------
        target: a contiguous tensor of torch.uint8. offset: of its first byte in the tensor.
        """
        ...


class WritableBytes(BytesInFile, Protocol):
    """The bytes of a dense tensor in a file, which may be written as well."""

    def write(self, source: torch.Tensor, offset: int, after: Sequence[Event] = ()) -> Event:
        """Start to write bytes from the host's memory, after some events.

        Parameters
        ----------
        source: a contiguous tensor of torch.uint8, which nobody changes until the event that is returned has happened.
        offset: of its first byte in the tensor.
        """
        ...


@dataclass(frozen=True)
class FileBytes:
    """The bytes of a dense tensor in a file that is only read.

    Parameters
    ----------
    engine: reads it. file: the open file. start: offset in bytes of the tensor's first one.
    """

    engine: Engine
    file: ReadOnlyFile
    start: int
    in_ram: ClassVar[bool] = False

    @property
    def path(self) -> Path:
        return self.file.path

    def read(self, target: torch.Tensor, offset: int, after: Sequence[Event] = ()) -> Event:
        return self.engine.read(self.file, target, after, self.start + offset)


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of a dense tensor among those that the engine stores.

    Parameters
    ----------
    engine: reads and writes them. stored: has them. start: offset in bytes of the tensor's first one in `stored`.
    """

    engine: Engine
    stored: Stored
    start: int
    in_ram: ClassVar[bool] = False

    @property
    def path(self) -> Path:
        return self.stored.files[0]

    def read(self, target: torch.Tensor, offset: int, after: Sequence[Event] = ()) -> Event:
        return self.engine.read(self.stored, target, after, self.start + offset)

    def write(
        self, source: torch.Tensor, offset: int, after: Sequence[Event] = (), keeping: Earlier | None = None
    ) -> Event:
        """Start to write bytes, as `WritableBytes.write`; what is written over stays for `keeping`."""
        return self.engine.write(self.stored, source, after, self.start + offset, keeping)
