"""The libraries that offmate uses: what each does here, how pip installs it, and what to say if it does not load."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from .errors import LibraryError


@dataclass(frozen=True)
class Library:
    """A library, by the name that it is imported by.

    Parameters
    ----------
    does: what it does in offmate, as the end of a sentence. extra: the extra of `pyproject.toml` that installs it;
        empty for what every installation has. pip: its name for pip, if that is another one.
    """

    does: str
    extra: str = ""
    pip: str = ""


LIBRARIES = {
    "torch": Library("runs the model and captures it as a graph"),
    "pulp": Library("states the program of a plan for CBC, a solver that it brings", pip="'pulp<4'"),
    "highspy": Library("is HiGHS, which solves the program of a plan", pip="'highspy<1.16'"),
    "networkx": Library("finds what depends on the parameters, so that the model can be cut into blocks"),
    "ortools": Library("has CP-SAT, which chooses what a block may keep, recompute or offload"),
    "rich": Library("prints tables and progress bars"),
    "numpy": Library("holds the program of a plan for HiGHS, and the tokens of fine-tuning"),
    "transformers": Library("builds and loads the language models of the command line", "hf"),
    "tokenizers": Library("cuts texts into tokens for fine-tuning", "finetune"),
    "peft": Library("makes LoRA adapters", "finetune"),
    "safetensors": Library("reads and writes weights for fine-tuning", "finetune"),
    "yaml": Library("reads and writes the settings of fine-tuning", "finetune", pip="pyyaml"),
    "xxhash": Library("makes the checksums of what is on a storage path", "storage"),
    "datasets": Library("reads Parquet files and data sets of the Hub", "trl"),
    "trl": Library("has trainers that offmate can plan for", "trl"),
    "matplotlib": Library("draws the plots of plans", "viz"),
    "pandas": Library("makes data frames of plans", "viz"),
    "tensorboard": Library("writes the event files of --report tensorboard", "tensorboard"),
    "wandb": Library("sends the figures of --report wandb", "wandb"),
}


def load(module: str) -> ModuleType:
    """Import a library, or a module of it.

    Raises: LibraryError if it is not installed or does not load; what it does here, and the line for pip.
    """
    with library_errors():
        return importlib.import_module(module)


def check_installed(*names: str) -> None:
    """Look for libraries without loading them.

    Raises: LibraryError for the first one that is not installed.
    """
    for name in names:
        if not is_installed(name):
            raise LibraryError(missing(name))


def is_installed(name: str) -> bool:
    """Return whether a library is installed; whether it loads is not tried."""
    return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Raise LibraryError if one of `LIBRARIES` does not load in the body; other errors stay as they are."""
    try:
        yield
    except (ImportError, OSError) as error:
        words = explained(error)
        if words is None:
            raise
        raise LibraryError(words) from error


def explained(error: BaseException) -> str | None:
    """Return a sentence about the library that raised an error while it was imported; None if none did."""
    if isinstance(error, LibraryError):
        return None
    found: BaseException | None = error
    while found is not None:
        absent = found.name if isinstance(found, ModuleNotFoundError) and found.name in LIBRARIES else None
        if absent is not None:
            return missing(absent)
        if name := _importing(found):
            return broken(name, found)
        found = found.__cause__
    return None


def missing(name: str) -> str:
    """Say that a library is not installed, what it does here and how to get it."""
    library = LIBRARIES[name]
    line = f"pip install {library.pip or name}"
    if library.extra:
        line += f', or, in the folder of offmate\'s repository, pip install -e ".[{library.extra}]"'
    return f"{name} is not installed; it {library.does}. Try: {line}"


def broken(name: str, error: BaseException | str) -> str:
    """Say that a library is installed but cannot be loaded, with its error."""
    library = LIBRARIES[name]
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    first = said.strip().splitlines()[0] if said.strip() else "no message"
    line = f"pip install --force-reinstall --no-deps {library.pip or name}"
    system = ", or install the shared library that the error names" if ".so" in first else ""
    return f"{name} is installed, but it cannot be loaded ({first}); it {library.does}. Try: {line}{system}"


def _importing(error: BaseException) -> str | None:
    """Return the innermost library whose module was being imported when the error was raised."""
    names = [
        str(frame.f_globals.get("__name__", "")).split(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    named = str(getattr(error, "name", None) or "").split(".")[0]  # an extension that the system cannot load
    return next((name for name in (named, *reversed(names)) if name in LIBRARIES), None)
