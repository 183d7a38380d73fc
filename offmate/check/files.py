"""A user's own model, from the functions of a Python file."""

from __future__ import annotations

import runpy
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import OffmateError
from .subject import Batch, Subject, adamw, called, own_loss

_KNOWN = ("model", "batch", "call", "loss", "optimizer")
_RETURNS: dict[str, type] = {"model": torch.nn.Module, "loss": torch.Tensor, "optimizer": torch.optim.Optimizer}


def subject_in(path: Path) -> Subject:
    """Read a subject from a Python file, which is run.

    It defines `model()` and `batch()`, which return the model and one batch, as keyword arguments (dict), as positional
    ones (tuple) or as the one tensor that the model takes. It may define `call(model, batch)`, if the model takes not
    all of the batch, `loss(output, batch)`, if the model returns no loss, and `optimizer(model)`, if AdamW will not do.
    Torch's random numbers are seeded before `model()` and `batch()`.

    Raises: OffmateError if the file or a function fails, is missing, or returns something else.
    """
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # an exit's status would be taken for the verdict's
        raise OffmateError(f"{path} failed: {type(error).__name__}: {error}") from error
    functions = {name: names[name] for name in _KNOWN if callable(names.get(name))}
    objects = [name for name in _KNOWN if isinstance(names.get(name), torch.nn.Module | torch.optim.Optimizer)]
    if objects:
        kind = type(names[objects[0]]).__name__
        raise OffmateError(
            f"{objects[0]} in {path} is a {kind}; define a function that returns it, since every run needs a new one: "
            f"def {objects[0]}({'model' if objects[0] == 'optimizer' else ''}): return ..."
        )
    missing = [name for name in ("model", "batch") if name not in functions]
    if missing:
        raise OffmateError(
            f"{path} defines no function {' and no function '.join(f'{name}()' for name in missing)}. It needs "
            "model(), which returns the model, and batch(), which returns a dict of keyword arguments or a tuple of "
            "positional ones; call(model, batch), loss(output, batch) and optimizer(model) are optional"
        )
    made = {name: _checked(path, name, function) for name, function in functions.items()}
    subject = Subject(
        path.stem,
        made["model"],
        _batches(path, made["batch"]),
        made.get("loss", own_loss),
        made.get("optimizer", adamw),
        made.get("call", called),
    )
    if "optimizer" in made:
        subject.optimizer(subject.built())
    return subject


def _checked(path: Path, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which now says by name what fails in it, and what it returns that it should not."""

    before: Any = None

    def make(*given: Any) -> Any:
        nonlocal before
        try:
            made = function(*given)
        except OffmateError:
            raise
        except (Exception, SystemExit) as error:
            if name == "call" and isinstance(error, Exception):
                raise  # what the model says is looked at by what compares
            raise OffmateError(f"{name}() in {path}{_line(path, error)}: {type(error).__name__}: {error}") from error
        expected = _RETURNS.get(name)
        if expected is not None and not isinstance(made, expected):
            raise OffmateError(
                f"{name}() in {path} returns a {type(made).__name__}; it must return a {_full(expected)}"
            )
        if name == "model":
            if before is not None and made is before():
                raise OffmateError(f"model() in {path} returns the same module again; every run needs a new one")
            before = weakref.ref(made)
        return made

    return make


def _line(path: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" failed, line {lines[-1]}" if lines else " failed"


def _full(kind: type) -> str:
    module = {"torch.optim.optimizer": "torch.optim", "torch.nn.modules.module": "torch.nn"}
    return f"{module.get(kind.__module__, kind.__module__)}.{kind.__name__}"


def _batches(path: Path, batch: Callable[[], Any]) -> Callable[[int], Batch]:
    def make(step: int) -> Batch:
        made = batch()
        if isinstance(made, list | torch.Tensor):
            return tuple(made) if isinstance(made, list) else (made,)
        if not isinstance(made, tuple | Mapping):
            raise OffmateError(
                f"batch() in {path} returns a {type(made).__name__}; it must return a dict of keyword arguments or a "
                "tuple of positional ones"
            )
        return made if isinstance(made, tuple) else dict(made)

    return make
