"""A user's own model, from the functions of a Python file."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import OffmateError
from .subject import Batch, Subject, adamw, own_loss

_KNOWN = ("model", "batch", "loss", "optimizer")


def subject_in(path: Path) -> Subject:
    """Read a subject from a Python file, which is run.

    It defines `model()` and `batch()`, which return the model and one batch, as keyword arguments (dict), as positional
    ones (tuple) or as the one tensor that the model takes. It may define `loss(output, batch)`, if the model returns
    no loss, and `optimizer(model)`, if AdamW will not do. Torch's random numbers are seeded before each call.

    Raises: OffmateError if the file fails, or lacks a function.
    """
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise OffmateError(f"{path} failed: {type(error).__name__}: {error}") from error
    found = {name: names[name] for name in _KNOWN if callable(names.get(name))}
    missing = [name for name in ("model", "batch") if name not in found]
    if missing:
        raise OffmateError(
            f"{path} defines no function {' and no function '.join(f'{name}()' for name in missing)}. It needs "
            "model(), which returns the model, and batch(), which returns a dict of keyword arguments or a tuple of "
            "positional ones; loss(output, batch) and optimizer(model) are optional"
        )
    model, batch = found["model"], found["batch"]
    if not isinstance(model(), torch.nn.Module):
        raise OffmateError(f"model() in {path} returns a {type(model()).__name__}; it must return a torch.nn.Module")
    return Subject(
        path.stem,
        model,
        _batches(batch),
        found.get("loss", own_loss),
        found.get("optimizer", adamw),
    )


def _batches(batch: Callable[[], Any]) -> Callable[[int], Batch]:
    def make(step: int) -> Batch:
        made = batch()
        if isinstance(made, list | torch.Tensor):
            return tuple(made) if isinstance(made, list) else (made,)
        return made if isinstance(made, tuple) else dict(made)

    return make
