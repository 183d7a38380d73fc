"""A class's options as a plan file keeps them: programs follow from them and the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredOption:
    """A class's option as it is saved: which storages stay and which leave; programs follow from it."""

    name: str
    kept: tuple[int, ...]
    offloaded: tuple[int, ...]


@dataclass(frozen=True)
class StoredClass:
    """A class's options, and by node name its kernel's workspace, followed by what its results reserve if that is more.

    All in bytes; nodes without either are left out.
    """

    options: tuple[StoredOption, ...]
    kernel_bytes: dict[str, tuple[int, ...]]
