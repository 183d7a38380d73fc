"""The libraries of the extra `viz`, imported on first use."""

from __future__ import annotations

from types import ModuleType

from ..libraries import load


def viz(module: str) -> ModuleType:
    """Import a module of the extra `viz`.

    Raises: LibraryError, which is an ImportError, with the command that installs it.
    """
    return load(module)
