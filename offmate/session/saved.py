"""Checkpoints of a model and its optimizer for a loop of the user's own; states that lie in files are linked."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import torch

from ..errors import ArgumentValueError, OffmateError, StorageError
from ..files import as_path, reason
from ..planning.storage import Folder, storage_paths
from ..runtime.storage.files import SystemFiles
from ..runtime.storage.links import remove_files
from ..sizes import format_bytes
from .linked_states import (
    BELOW,
    STATES,
    LinkedStates,
    all_taken_out,
    alone_with,
    check_whole,
    find_linked,
    folders_of,
    handing_out_none,
    linked_folders,
    make_room,
    session_of,
)
from .saved_files import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    check_fits,
    check_own,
    check_pair,
    digest_of,
    load_saved,
    missing,
    original_of,
    removal_began,
    saved_as,
)
from .unfinished import aside_of, noted, sweep

log = logging.getLogger("offmate")

_STATES_DIGEST = "offmate_states_sha256"  # a key of the optimizer's file in checkpoints without a manifest
_MANIFEST = "offmate_manifest"  # a key of the optimizer's file in all others


def save_checkpoint(folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint of a model and its optimizer, which appears whole or not at all.

    Optimizer states and weights that lie in files on storage paths are not copied. Their files get a second name in the
    folder `offmate-checkpoints` of each path, and are never written again. `remove_checkpoint` removes these too.

    Parameters
    ----------
    folder: of the checkpoint; it must not exist. model, optimizer: compiled by offmate, or plain.

    Raises: ArgumentValueError if the folder exists, or if the optimizer has parameters that the model does not have.
    ArgumentTypeError if they are not a model and an optimizer. OffmateError if the checkpoint cannot be written, if an
    earlier failure has left tensors of different updates, or if a storage path has too little space for what training
    writes next; the checkpoint is complete then.
    """
    target, session = as_path(folder), session_of(model)
    check_pair(model, optimizer)
    if os.path.lexists(target):
        raise ArgumentValueError(
            f"{target} exists; name a new folder for the checkpoint, or remove that one with offmate.remove_checkpoint"
        )
    with alone_with(session):
        _save(target, session, model, optimizer)


def _save(target: Path, session: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    check_whole(session)
    sweep(target.parent)
    aside, below = aside_of(target), PurePath(BELOW, secrets.token_hex(8), target.name)
    with handing_out_none(session):
        whole = optimizer.state_dict()
    linked = LinkedStates()
    try:
        aside.mkdir(parents=True)
        with noted(aside, [path / below for path in folders_of(session)]):
            state, weights, linked = all_taken_out(session, whole, model.state_dict(), below)
            _write(weights, aside / MODEL)
            if linked.tensors:
                linked.save(aside / STATES)
            _write({**state, _MANIFEST: MANIFEST}, aside / OPTIMIZER)
            saved_as(aside, target, model, optimizer).save(aside)
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
    try:
        make_room(session)
    except StorageError as error:
        raise StorageError(f"the checkpoint {target} is complete, but training cannot go on: {error}") from error


def _write(content: dict[str, Any], file: Path) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        if "enforce fail" not in str(error):  # as PyTorch reports a disk that is full
            raise
        free = format_bytes(shutil.disk_usage(file.parent).free)
        raise OffmateError(
            f"{file} could not be written, and {free} are free on its disk. Make room there, or name a folder on "
            "another disk"
        ) from error


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    storage: Folder | Sequence[Folder] = (),
) -> None:
    """Load what `save_checkpoint` wrote into a model and its optimizer, compiled by offmate or plain.

    All files are compared with their checksums before anything is loaded. States that were linked are mapped from
    theirs.

    Parameters
    ----------
    storage: where `offmate-checkpoints` of a storage path is now, if it is no longer where it was: a folder or several.

    Raises: OffmateError for a folder or a file that is missing, or that is not as it was written; it is named.
    ArgumentValueError if the checkpoint is one of another model or of another kind of optimizer.
    """
    path = as_path(folder)
    check_pair(model, optimizer)
    if not path.is_dir():
        raise OffmateError(f"there is no checkpoint {path}: it is not a folder")
    there = [name for name in (MODEL, OPTIMIZER) if (path / name).exists()]
    if not there and not (path / MANIFEST).exists():
        raise OffmateError(f"{path} is no checkpoint of offmate.save_checkpoint: it has no {MANIFEST} and no {MODEL}")
    for name in (MODEL, OPTIMIZER):
        if name not in there:
            raise missing(path / name)
    saved = load_saved(path)
    if saved is not None:
        saved.check_files(path)
    linked = _linked(path, _folders(storage))
    linked.check()
    try:
        weights = torch.load(path / MODEL, weights_only=True, mmap=True)
        state = torch.load(path / OPTIMIZER, weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise OffmateError(f"{path} does not hold a checkpoint of offmate.save_checkpoint: {error}") from error
    if state.pop(_MANIFEST, None) and saved is None:
        raise missing(path / MANIFEST)
    if saved is None:
        _check_states(path, state.pop(_STATES_DIGEST, None))
    linked.put_into_weights(weights)
    check_fits(path, saved, weights, state, model, optimizer)
    linked.put_into(state)
    with alone_with(session_of(model)):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)


def remove_checkpoint(folder: str | os.PathLike[str], storage: Folder | Sequence[Folder] = ()) -> None:
    """Remove the files of a checkpoint, those on storage paths too, and its folder if nothing else is in it.

    Parameters
    ----------
    storage: as in `load_checkpoint`.

    Raises: ArgumentValueError for a folder that `save_checkpoint` did not make, OffmateError for a symbolic link and
    for a folder on a storage path that is missing. Nothing was removed then. OffmateError if the system refuses.
    """
    path = as_path(folder)
    check_own(path)
    try:
        linked = linked_folders(path, _folders(storage), began=removal_began(path))
        if linked and (original := original_of(path)):
            log.warning("%s is a copy of %s, which keeps the files on storage paths", path, original)
            linked = []
        # The optimizer's file goes first, as the sign of a removal that has begun, and last of all the records of what
        # is left to remove: after a failure, it can be repeated.
        (path / OPTIMIZER).unlink(missing_ok=True)
        for one in linked:
            remove_files(SystemFiles(), one, n_above=2)
        for name in (STATES, MODEL, MANIFEST):
            (path / name).unlink(missing_ok=True)
        left = sorted(os.listdir(path))
        if not left:
            path.rmdir()
    except ValueError as error:
        raise StorageError(f"{path / STATES} does not say where optimizer states are: {error}") from error
    except OSError as error:
        raise OffmateError(f"the checkpoint {path} cannot be removed: {reason(error)}. Try it again") from error
    if left:
        log.warning("the checkpoint is removed, but %s stays, with what is not a checkpoint's: %s", path, left[0])


def _folders(storage: Folder | Sequence[Folder]) -> list[str]:
    """Return the folders that `storage=` names, as text."""
    named = None if isinstance(storage, Sequence) and not isinstance(storage, str) and not storage else storage
    return [os.fspath(one.folder) for one in storage_paths(named)]


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


def _linked(path: Path, storage: Sequence[str]) -> LinkedStates:
    try:
        return find_linked(path, storage)
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
