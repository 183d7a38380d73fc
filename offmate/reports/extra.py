"""What the extra `viz` brings, imported when it is needed."""

from __future__ import annotations

import importlib
from types import ModuleType


def viz(module: str) -> ModuleType:
    """A module of the extra `viz`.

    Raises: ImportError that says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if error.name != package:
            raise
        raise ImportError(f'this needs {package}: pip install "offmate[viz]"') from error
