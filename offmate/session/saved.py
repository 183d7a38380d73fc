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
    check_whole,
    digest_of,
    find_linked,
    handing_out_none,
    linked_folders,
    make_room,
    session_of,
    taken_out,
)

_MODEL, _OPTIMIZER = "model.pt", "optimizer.pt"
_STATES_DIGEST = "offmate_states_sha256"  # a key of the optimizer's file


def save_checkpoint(folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint of a model and its optimizer, which appears whole or not at all.

    Optimizer states that lie in files on storage paths are not copied. Their files get a second name in the folder
    `offmate-checkpoints` of each path, and are never written again. `remove_checkpoint` removes these too.

    Parameters
    ----------
    folder: of the checkpoint; it must not exist. model, optimizer: compiled by offmate, or plain.

    Raises: ArgumentValueError if the folder exists. OffmateError if the checkpoint cannot be written, if an earlier
    failure has left tensors of different updates, or if a storage path has too little space for what training writes
    next; the checkpoint is complete then.
    """
    target, session = as_path(folder), session_of(model)
    if os.path.lexists(target):
        raise ArgumentValueError(
            f"{target} exists; name a new folder for the checkpoint, or remove that one with offmate.remove_checkpoint"
        )
    check_whole(session)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with handing_out_none(session):
        whole = optimizer.state_dict()
    linked = LinkedStates()
    try:
        aside.mkdir(parents=True)
        torch.save(model.state_dict(), aside / _MODEL)
        state, linked = taken_out(session, whole, PurePath(BELOW, secrets.token_hex(8), target.name))
        if linked.tensors:
            linked.save(aside / STATES)
            state = {**state, _STATES_DIGEST: digest_of(aside / STATES)}
        torch.save(state, aside / _OPTIMIZER)
        _sync(aside)
        os.rename(aside, target)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        _remove_links(linked)
        if isinstance(error, OSError):
            raise OffmateError(f"the checkpoint {target} could not be written: {reason(error)}") from error
        raise
    try:
        SystemFiles().sync_folder(target.parent)
    except OSError as error:
        raise OffmateError(
            f"the checkpoint {target} is written, but may not survive a loss of power: {reason(error)}"
        ) from error
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
    _check_states(path, state.pop(_STATES_DIGEST, None))
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
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # Last of all the record of what is left to remove: after a failure, it can be removed again.
        for one in linked_folders(path, [os.fspath(folder) for folder in storage]):
            remove_files(SystemFiles(), one, n_above=2)
        os.rename(path, aside)
        shutil.rmtree(aside)
    except ValueError as error:
        raise StorageError(f"{path / STATES} does not say where optimizer states are: {error}") from error
    except OSError as error:
        raise OffmateError(f"the checkpoint {path} cannot be removed: {reason(error)}. Try it again") from error


def _check_states(path: Path, expected: str | None) -> None:
    """Raise StorageError if the file that describes the states on storage paths is missing or another one."""
    file = path / STATES
    if expected is None and not file.exists():
        return
    if expected is None or not file.exists() or digest_of(file) != expected:
        raise StorageError(
            f"{file} {'is not as it was written' if file.exists() else 'is missing'}, so that optimizer states of this "
            "checkpoint cannot be found. Copy it from where the checkpoint was written, or load another checkpoint"
        )


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
