"""A class's options as saved in a plan file; the programs follow from them and the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredOption:
    """A class's option as it is saved: which storages stay and which leave."""

    name: str
    kept: tuple[int, ...]
    offloaded: tuple[int, ...]


@dataclass(frozen=True)
class StoredClass:
    """A class's options, and per node name the kernel's workspace, then what its results reserve if that differs.

    All in bytes; nodes without either are left out.
    """

    options: tuple[StoredOption, ...]
    kernel_bytes: dict[str, tuple[int, ...]]
