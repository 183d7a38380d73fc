"""The libraries of the extra `viz`, imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType


def viz(module: str) -> ModuleType:
    """Import a module of the extra `viz`.

    Raises: ImportError with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if error.name != package:
            raise
        raise ImportError(f'this needs {package}: pip install "offmate[viz]"') from error
