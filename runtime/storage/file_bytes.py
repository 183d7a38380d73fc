"""A tensor's bytes in a file that is only read, or in files that are also written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..events import Event
from .engine import Engine
from .read_only import ReadOnlyFile
from .stored import Stored


@dataclass(frozen=True)
class FileBytes:
    """The bytes of a dense tensor in a file.

    Parameters
    ----------
    engine: reads it. file: the open file. start: offset in bytes of the tensor's first one.
    """

    engine: Engine
    file: ReadOnlyFile
    start: int

    @property
    def path(self) -> Path:
        """Return the file."""
        return self.file.path

    def read(self, target: torch.Tensor, offset: int, after: Sequence[Event] = ()) -> Event:
        """Start to read bytes into the host's memory.

        Parameters
        ----------
        target: a contiguous tensor of torch.uint8. offset: in bytes, of its first one in the tensor. after: events
            before it.

        Returns: the event of all bytes being there.
        """
        return self.engine.read(self.file, target, after, self.start + offset)


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of a dense tensor that is stored, or that is a part of one that is.

    Parameters
    ----------
    engine: reads and writes it. stored: where the bytes lie. start: offset in bytes of the tensor's first one there.
    """

    engine: Engine
    stored: Stored
    start: int

    @property
    def path(self) -> Path:
        """Return the first file that it lies in."""
        return self.stored.files[0]

    def read(self, target: torch.Tensor, offset: int, after: Sequence[Event] = ()) -> Event:
        """Start to read bytes into the host's memory.

        Parameters
        ----------
        target: a contiguous tensor of torch.uint8. offset: in bytes, of its first one in the tensor. after: events
            before it.

        Returns: the event of all bytes being there.
        """
        return self.engine.read(self.stored, target, after, self.start + offset)

    def write(self, source: torch.Tensor, offset: int, after: Sequence[Event] = ()) -> Event:
        """Start to write bytes from the host's memory.

        Parameters
        ----------
        source: a contiguous tensor of torch.uint8, which nobody changes until the event has happened. offset: in bytes,
            of its first one in the tensor. after: events before it.

        Returns: the event of all bytes being written.
        """
        return self.engine.write(self.stored, source, after, self.start + offset)
