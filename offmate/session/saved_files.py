"""The files of a checkpoint of `save_checkpoint`, with their digests, and what can be loaded from them into what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, OffmateError, StorageError
from ..files import reason
from ..optim.masters import name_of
from .linked_states import STATES
from .module import PlannedModule
from .optimizer import plain_class

MODEL, OPTIMIZER, MANIFEST = "model.pt", "optimizer.pt", "checkpoint.json"
_FORMAT = "offmate checkpoint 1"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint is of, and its files.

    Parameters
    ----------
    optimizer: the name of its class. parameters: their names in the model, in the optimizer's order.
    files: by name, the bytes and the SHA-256 of each. path: where it was written; "" if that is not known.
    """

    optimizer: str
    parameters: tuple[str, ...]
    files: Mapping[str, tuple[int, str]]
    path: str = ""

    def save(self, folder: Path) -> None:
        """Write the manifest of a checkpoint."""
        (folder / MANIFEST).write_text(json.dumps({"format": _FORMAT, **asdict(self)}))

    def check_files(self, folder: Path) -> None:
        """Compare all files with their digests. Raises: StorageError for one that is not as it was written."""
        for name, (n_bytes, digest) in self.files.items():
            file = folder / name
            try:
                same = file.stat().st_size == n_bytes and digest_of(file) == digest
            except FileNotFoundError:
                raise missing(file) from None
            except OSError as error:
                raise StorageError(f"{file} cannot be read: {reason(error)}. Check the disk") from error
            if not same:
                raise StorageError(f"{file} is not as it was written; {_REMEDY}")


_REMEDY = "copy it from where the checkpoint was written, or load another checkpoint"


def missing(file: Path) -> StorageError:
    """Return what to raise if a file of a checkpoint is missing."""
    return StorageError(f"{file} is missing, and the checkpoint {file.parent} needs it; {_REMEDY}")


def saved_as(folder: Path, target: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    """Describe a checkpoint whose files are written in a folder that will be `target`.

    Raises: OSError if they cannot be read.
    """
    files = {file.name: (file.stat().st_size, digest_of(file)) for file in sorted(folder.iterdir())}
    return Saved(_class_of(optimizer), _names(model, optimizer), files, str(target.resolve()))


def load_saved(folder: Path) -> Saved | None:
    """Read the manifest of a checkpoint; None if it has none, as those of earlier versions.

    Raises: StorageError for a file that is no manifest.
    """
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
        files = {Path(str(name)).name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        names = tuple(map(str, content["parameters"]))
        return Saved(str(content["optimizer"]), names, files, str(content.get("path", "")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{file} does not describe a checkpoint of offmate.save_checkpoint: {type(error).__name__}: {error}"
        ) from None


def check_pair(model: Any, optimizer: Any) -> None:
    """Look whether a checkpoint of a model and an optimizer has all that the optimizer updates.

    Raises: ArgumentTypeError if they are not a model and an optimizer. ArgumentValueError if the optimizer has
    parameters that the model does not have.
    """
    for name, value, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise ArgumentTypeError(
                f"{name}= is a {type(value).__name__} and has to be a torch {kind.__name__}; a checkpoint is one of a "
                "model and its optimizer, in this order"
            )
    _names(model, optimizer)


def check_fits(
    folder: Path, saved: Saved | None, weights: Any, state: Any, model: torch.nn.Module, optimizer: Any
) -> None:
    """Look whether a checkpoint fits a model and its optimizer, before anything is loaded.

    Parameters
    ----------
    saved: its manifest, if it has one. weights, state: what its files hold.

    Raises: ArgumentValueError, which names what does not fit.
    """
    different = _different_weights(weights, _own_weights(model)) or _different_groups(state, optimizer)
    if different is None and saved is not None:
        different = _different_optimizer(saved, model, optimizer)
    if different is not None:
        raise ArgumentValueError(f"{folder} does not fit, and nothing of it is loaded: {different}")


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file. Raises: OSError if it cannot be read."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def original_of(folder: Path) -> Path | None:
    """Return the checkpoint that a folder is a copy of, if that is still where it was written; else None.

    A copy names the same files on storage paths.
    """
    saved = load_saved(folder)
    if saved is None or not saved.path:
        return None
    original = Path(saved.path)
    try:
        same = (original / STATES).read_bytes() == (folder / STATES).read_bytes()
        return original if same and not original.samefile(folder) else None
    except OSError:
        return None


def check_own(folder: Path) -> None:
    """Look whether `save_checkpoint` made a folder. Raises: ArgumentValueError if not; OffmateError for a link."""
    if folder.is_symlink():
        raise OffmateError(f"{folder} is a symbolic link to {folder.resolve()}; name that folder to remove it")
    if not folder.is_dir():
        raise ArgumentValueError(f"{folder} is no checkpoint of offmate.save_checkpoint: there is no such folder")
    saved = load_saved(folder)
    # Checkpoints of earlier versions have no manifest, and only those with linked states can be told from others.
    if saved is None and not all((folder / name).is_file() for name in (MODEL, STATES)):
        raise ArgumentValueError(
            f"{folder} is no checkpoint of offmate.save_checkpoint: it has no {MANIFEST}. Nothing was removed. If it "
            "is one of an earlier version without states on storage paths, remove it as any folder"
        )
    if saved is not None and STATES in saved.files and not (folder / STATES).exists() and not removal_began(folder):
        raise StorageError(
            f"{folder / STATES} is missing, so that the checkpoint's files on storage paths cannot be found. Nothing "
            "was removed. Copy it from where the checkpoint was written, and remove the checkpoint then"
        )


def removal_began(folder: Path) -> bool:
    """Return whether an earlier call has begun to remove a checkpoint, whose links may be gone."""
    return not (folder / OPTIMIZER).exists()


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    inner = getattr(optimizer, "optimizer", None)  # Accelerate wraps them
    if isinstance(inner, torch.optim.Optimizer):
        return _class_of(inner)
    return name_of(plain_class(optimizer))


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of an optimizer's parameters. Raises: ArgumentValueError for one that is not the model's."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ArgumentValueError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(param.shape)} that the model "
                    "does not have, so that a checkpoint of both would lack it; make the optimizer from "
                    "model.parameters(), or put all that it updates into one model"
                )
            found.append(names[id(param)])
    return tuple(found)


def _own_weights(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return a model's state for its names and shapes, which need not be current, or of one update."""
    return super(PlannedModule, model).state_dict() if isinstance(model, PlannedModule) else model.state_dict()  # type: ignore[misc]


def _different_weights(weights: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    for name in own:
        if name not in weights:
            return f"the model has {name}, which the checkpoint lacks"
    for name, value in weights.items():
        if name not in own:
            return f"the checkpoint has {name}, which the model lacks"
        mine = own[name]
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and value.shape != mine.shape:
            return f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(mine.shape)} in the model"
    return None


def _different_groups(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> str | None:
    theirs, own = ([len(g["params"]) for g in groups] for groups in (state["param_groups"], optimizer.param_groups))
    if theirs == own:
        return None
    return f"its optimizer has groups of {theirs} parameters, and the one that is given has groups of {own}"


def _different_optimizer(saved: Saved, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    own = _class_of(optimizer)
    if saved.optimizer != own:
        return f"its optimizer is {saved.optimizer}, and the one that is given is {own}"
    for number, (theirs, name) in enumerate(zip(saved.parameters, _names(model, optimizer))):
        if theirs != name:
            return f"parameter {number} of its optimizer is {theirs}, and that of the one that is given is {name}"
    return None
