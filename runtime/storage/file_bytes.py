"""A tensor's bytes in a file that is only read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..events import Event
from .engine import Engine
from .read_only import ReadOnlyFile


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

    def read(self, target: torch.Tensor, offset: int) -> Event:
        """Start to read bytes into the host's memory.

        Parameters
        ----------
        target: a contiguous tensor of torch.uint8. offset: of its first byte in the tensor.
        """
        return self.engine.read(self.file, target, start=self.start + offset)
