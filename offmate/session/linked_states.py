"""States and weights of a checkpoint that lie in files: linked and not copied, and described by one file."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import torch

from ..errors import OffmateError
from ..runtime.storage.files import SystemFiles
from ..runtime.storage.pieces import Piece, check_pieces, tensor_of

STATES = "states.json"
"""The file of a checkpoint that says where the states are that lie in files."""
BELOW = "offmate-checkpoints"
"""The folder on a storage path below which checkpoints keep states."""
IN_PYTHON = "name the one that contains {below} now as storage= of offmate.load_checkpoint"
"""How a loop of the user's own says that a folder with states has another path now."""
_FORMAT = "offmate states 1"


@dataclass(frozen=True)
class LinkedTensor:
    """A part of the state of one parameter, or its values.

    Parameters
    ----------
    parameter: its number in the optimizer's `state_dict`; its name in the model's for its values.
    key: of the part; empty for the values. dtype: its name in torch.
    shape, stride: in elements. pieces: all of its bytes, in order.
    """

    parameter: int | str
    key: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def tensor(self) -> torch.Tensor:
        """Map it from its files, which stay as they are. Raises: StorageError if that fails."""
        like = torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype), device="meta")
        return tensor_of(SystemFiles(), f"{self.key or 'values'} of parameter {self.parameter}", self.pieces, like)


@dataclass(frozen=True)
class LinkedStates:
    """The states of a checkpoint that lie in files.

    Parameters
    ----------
    tensors: none if all states are in the checkpoint itself.
    """

    tensors: tuple[LinkedTensor, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Return all files."""
        return tuple(dict.fromkeys(piece.path for one in self.tensors for piece in one.pieces))

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return their folders, one for each path."""
        return tuple(dict.fromkeys(file.parent for file in self.files))

    def check(self) -> None:
        """Compare all files with their checksums. Raises: StorageError for one that is not as it was written."""
        check_pieces(SystemFiles(), [piece for one in self.tensors for piece in one.pieces])

    def moved(self, found: Mapping[Path, Path]) -> LinkedStates:
        """Return the same states in other folders.

        Parameters
        ----------
        found: by folder, where it is now.
        """

        def there(one: LinkedTensor) -> LinkedTensor:
            pieces = (piece._replace(path=found[piece.path.parent] / piece.path.name) for piece in one.pieces)
            return replace(one, pieces=tuple(pieces))

        return LinkedStates(tuple(map(there, self.tensors)))

    def put_into(self, state: dict[str, Any]) -> None:
        """Complete a `state_dict` that `taken_out` has left. Raises: StorageError if a file cannot be mapped."""
        for one in self.tensors:
            if not isinstance(one.parameter, str):
                state["state"][one.parameter][one.key] = one.tensor()

    def put_into_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Complete a model's `state_dict` likewise. Raises: StorageError if a file cannot be mapped."""
        for one in self.tensors:
            if isinstance(one.parameter, str):
                weights[one.parameter] = one.tensor()

    def save(self, path: Path) -> None:
        """Write the file that describes them."""
        folders, files = self.folders, self.files
        tensors = [
            {
                "parameter": one.parameter, "key": one.key, "dtype": one.dtype, "shape": one.shape,
                "stride": one.stride,
                "pieces": [[files.index(p.path), p.offset, p.first, p.n_bytes, p.checksum] for p in one.pieces],
            }
            for one in self.tensors
        ]  # fmt: skip
        named = [[folders.index(file.parent), file.name] for file in files]
        content = {"format": _FORMAT, "folders": list(map(str, folders)), "files": named, "tensors": tensors}
        path.write_text(json.dumps(content))


def load_linked(path: Path) -> LinkedStates:
    """Read the file that describes states. Raises: OSError, ValueError if it does not."""
    content = json.loads(path.read_text())
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
        folders = list(map(Path, content["folders"]))
        files = [folders[number] / PurePath(name).name for number, name in content["files"]]
        return LinkedStates(
            tuple(
                LinkedTensor(
                    one["parameter"], one["key"], one["dtype"], tuple(one["shape"]), tuple(one["stride"]),
                    tuple(Piece(files[number], *rest) for number, *rest in one["pieces"]),
                )
                for one in content["tensors"]
            )
        )  # fmt: skip
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def taken_out(session: Any, state: dict[str, Any], below: PurePath) -> tuple[dict[str, Any], LinkedStates]:
    """Link the states that lie in files, which nobody writes to again.

    Parameters
    ----------
    session: of the compiled model; None for a model that is not compiled. state: the optimizer's `state_dict`.
    below: the folder that gets the links, below each storage path's; it must be new.

    Returns: the `state_dict` without them, and what was linked.
    Raises: StorageError if they cannot be linked or copied.
    """
    rest, _, linked = all_taken_out(session, state, {}, below)
    return rest, linked


def all_taken_out(
    session: Any, state: dict[str, Any], weights: dict[str, Any], below: PurePath
) -> tuple[dict[str, Any], dict[str, Any], LinkedStates]:
    """Link the states and the weights that lie in files; see `taken_out`.

    Parameters
    ----------
    weights: the model's `state_dict`.

    Returns: both without them, and what was linked.
    """
    store = None if session is None else session.truth.host.store
    if store is None:
        return state, weights, LinkedStates()
    session.truth.note_writes()
    own = [(number, key, value) for number, entry in state["state"].items() for key, value in entry.items()]
    own += [(name, "", value) for name, value in weights.items()]
    places = [one for one in own if isinstance(one[2], torch.Tensor) and store.holds_all_of(one[2])]
    if not places:
        return state, weights, LinkedStates()
    linked = store.link([value for _, _, value in places], below)
    gone = {(number, key) for number, key, _ in places}
    rest = {
        number: {key: value for key, value in entry.items() if (number, key) not in gone}
        for number, entry in state["state"].items()
    }
    tensors = (
        LinkedTensor(
            number, key, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.stride(), tuple(pieces)
        )
        for (number, key, value), pieces in zip(places, linked)
    )
    left = copy.copy(weights)  # with the versions of modules that a `state_dict` has
    for name in [name for name in weights if (name, "") in gone]:
        del left[name]
    return {**state, "state": rest}, left, LinkedStates(tuple(tensors))


@contextlib.contextmanager
def alone_with(session: Any) -> Iterator[None]:
    """Let no other thread train in the body.

    Parameters
    ----------
    session: of the compiled model; None for a model that is not compiled.
    """
    if session is None or session.process.is_forked:
        yield
        return
    with session.lock:
        yield


@contextlib.contextmanager
def handing_out_none(session: Any) -> Iterator[None]:
    """Read the optimizer's states in the body, which gives nobody a tensor that could be written to later.

    Parameters
    ----------
    session: of the compiled model; None for a model that is not compiled.
    """
    states = None if session is None else session.truth.states
    if states is None:
        yield
        return
    before = states.read, states.handed_out
    try:
        yield
    finally:
        states.read, states.handed_out = before


def check_whole(session: Any) -> None:
    """Raise OffmateError if a failure has left tensors of different updates, or has lost some.

    Parameters
    ----------
    session: of the compiled model; None for a model that is not compiled.
    """
    if session is not None and session.truth.torn:
        raise OffmateError(
            f"no checkpoint is written: after an earlier failure, {session.truth.torn_words()}. Load a checkpoint that "
            "was written before it into the model and the optimizer"
        )


def announce_checkpoints(session: Any, sets: int) -> None:
    """Let stored states move to another path only if it has room for them in all checkpoints.

    Parameters
    ----------
    session: of the compiled model. sets: how often checkpoints and training have the states at the most.
    """
    store = session.truth.host.store
    if store is not None:
        store.sets = sets


def make_room(session: Any) -> None:
    """Reserve the files that are written after a checkpoint. Raises: StorageError if a path has too little space."""
    store = None if session is None else session.truth.host.store
    if store is not None:
        store.make_room()


def folders_of(session: Any) -> list[Path]:
    """Return the storage paths of a compiled model; none for one that has none, or that is not compiled."""
    return [] if session is None else [path.folder for path in session.storage.paths]


def session_of(model: Any) -> Any:
    """Return the session of a compiled model; None for another one."""
    return getattr(model, "_offmate_session", None)


def linked_folders(checkpoint: Path, storage: Sequence[str] = (), began: bool = False) -> list[Path]:
    """Return the folders on storage paths that have states of a checkpoint.

    Parameters
    ----------
    storage: folders that may have them, if those that the checkpoint names are elsewhere now. began: whether an earlier
        removal may have got so far that some are gone; they are left out.

    Raises: OffmateError if a folder is missing. OSError, ValueError if the checkpoint does not say where they are.
    """
    if not (checkpoint / STATES).exists():
        return []
    linked = load_linked(checkpoint / STATES)
    there = [folder for folder in linked.folders if not (began and _is_gone(folder, storage))]
    advice = "name the one that contains {below} now as storage= of offmate.remove_checkpoint"
    return [_found(checkpoint, [] if began else linked.files, folder, storage, advice) for folder in there]


def find_linked(checkpoint: Path, storage: Sequence[str] = (), advice: str = IN_PYTHON) -> LinkedStates:
    """Return the states of a checkpoint that lie on storage paths.

    Parameters
    ----------
    storage: folders that may have them, if those that the checkpoint names are elsewhere now.
    advice: how another path of a folder is named; in it, {below} is what that path contains.

    Raises: OffmateError if a folder is missing. OSError, ValueError if the checkpoint does not say where they are.
    """
    if not (checkpoint / STATES).exists():
        return LinkedStates()
    linked = load_linked(checkpoint / STATES)
    found = {folder: _found(checkpoint, linked.files, folder, storage, advice) for folder in linked.folders}
    return linked.moved(found)


def _is_gone(folder: Path, storage: Sequence[str]) -> bool:
    """Return whether a folder is missing although the storage path that it was on is there."""
    places = [_home(folder), *map(Path, storage)]
    there = any((place / _below(folder)).is_dir() for place in places)
    return not there and any(place.is_dir() for place in places)


def _home(folder: Path) -> Path:
    """Return the storage path of a folder with states."""
    return Path(*folder.parts[:-3])


def _below(folder: Path) -> PurePath:
    """Return what a storage path contains of a folder with states."""
    return PurePath(*folder.parts[-3:])


def _found(checkpoint: Path, files: Sequence[Path], folder: Path, storage: Sequence[str], advice: str) -> Path:
    if folder.is_dir():
        return folder
    names = [file.name for file in files if file.parent == folder]
    below = _below(folder)
    for place in storage:
        there = Path(place) / below
        if there.is_dir() and all((there / name).is_file() for name in names):
            return there
    looked = f", and not in {' or '.join(str(Path(place)) for place in storage)} either" if storage else ""
    raise OffmateError(
        f"{checkpoint}: optimizer states of this checkpoint lie in {folder}, which is missing{looked}. Connect the "
        f"drive of {_home(folder)}. If that folder has another path now, {advice.replace('{below}', str(below))}"
    )
