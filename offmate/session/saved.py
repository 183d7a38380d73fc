"""Checkpoints of a model and its optimizer for a loop of the user's own; states that lie in files are linked."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePath

import torch

from ..errors import ArgumentValueError, OffmateError, StorageError
from ..files import as_path, reason
from ..runtime.storage.files import SystemFiles
from ..runtime.storage.links import remove_files
from .linked_states import (
    BELOW,
    STATES,
    LinkedStates,
    find_linked,
    handing_out_none,
    make_room,
    session_of,
    taken_out,
)

_MODEL, _OPTIMIZER = "model.pt", "optimizer.pt"


def save_checkpoint(folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint of a model and its optimizer, which appears whole or not at all.

    Optimizer states that lie in files on storage paths are not copied. Their files get a second name in the folder
    `offmate-checkpoints` of each path, and are never written again. `remove_checkpoint` removes these too.

    Parameters
    ----------
    folder: of the checkpoint; it must not exist. model, optimizer: compiled by offmate, or plain.

    Raises: ArgumentValueError if the folder exists. OffmateError if the checkpoint cannot be written, or if a storage
    path has too little space for what training writes next; the checkpoint is complete then.
    """
    target, session = as_path(folder), session_of(model)
    if os.path.lexists(target):
        raise ArgumentValueError(
            f"{target} exists; name a new folder for the checkpoint, or remove that one with offmate.remove_checkpoint"
        )
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with handing_out_none(session):
        whole = optimizer.state_dict()
    linked = LinkedStates()
    try:
        aside.mkdir(parents=True)
        torch.save(model.state_dict(), aside / _MODEL)
        state, linked = taken_out(session, whole, PurePath(BELOW, secrets.token_hex(8), target.name))
        torch.save(state, aside / _OPTIMIZER)
        if linked.tensors:
            linked.save(aside / STATES)
        _sync(aside)
        os.rename(aside, target)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        _remove_links(linked)
        if isinstance(error, OSError):
            raise OffmateError(f"the checkpoint {target} could not be written: {reason(error)}") from error
        raise
    SystemFiles().sync_folder(target.parent)
    make_room(session)


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    storage: Sequence[str | os.PathLike[str]] = (),
) -> None:
    """Load what `save_checkpoint` wrote into a model and its optimizer, compiled by offmate or plain.

    States that were linked are mapped from their files, and compared with their checksums before anything is loaded.

    Parameters
    ----------
    storage: where `offmate-checkpoints` of a storage path is now, if it is no longer where it was.

    Raises: OffmateError for a folder or a file that is missing, or that is not as it was written; it is named.
    """
    path = as_path(folder)
    linked = _linked(path, storage)
    linked.check()
    try:
        weights = torch.load(path / _MODEL, weights_only=True, mmap=True)
        state = torch.load(path / _OPTIMIZER, weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise OffmateError(f"{path} does not hold a checkpoint of offmate.save_checkpoint: {error}") from error
    linked.put_into(state)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


def remove_checkpoint(folder: str | os.PathLike[str], storage: Sequence[str | os.PathLike[str]] = ()) -> None:
    """Remove a checkpoint with its files on storage paths; `storage` is as in `load_checkpoint`.

    Raises: OffmateError if it is none, or if it cannot be removed.
    """
    path = as_path(folder)
    if not (path / _OPTIMIZER).is_file():
        raise ArgumentValueError(f"{path} is no checkpoint of offmate.save_checkpoint: it has no {_OPTIMIZER}")
    linked = _linked(path, storage)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        os.rename(path, aside)
        shutil.rmtree(aside)
        for one in linked.folders:
            remove_files(SystemFiles(), one, n_above=2)
    except OSError as error:
        raise OffmateError(f"the checkpoint {path} cannot be removed: {reason(error)}") from error


def _linked(path: Path, storage: Sequence[str | os.PathLike[str]]) -> LinkedStates:
    try:
        return find_linked(path, [os.fspath(one) for one in storage])
    except (OSError, ValueError) as error:
        raise StorageError(f"{path / STATES} does not say where optimizer states are: {error}") from error


def _remove_links(linked: LinkedStates) -> None:
    for folder in linked.folders:
        with contextlib.suppress(OSError):
            remove_files(SystemFiles(), folder, n_above=2)


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
    SystemFiles().sync_folder(folder)
