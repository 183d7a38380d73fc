"""What a run is made from, its base model and its data, so that a resumed run notices that they have changed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..errors import ArgumentValueError, OffmateError
from ..files import reason, write_whole
from .data import is_of_hub
from .names import SOURCES
from .settings import Settings
from .source_files import source_files

log = logging.getLogger("offmate")

# What a run reads of a model beside its weights.
_DESCRIPTION = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """A file as it was: its size in bytes, the time of its last change in ns, and the SHA-256 digest of its content."""

    size: int
    changed_ns: int
    digest: str


Marks = Mapping[str, Mark]


@dataclass(frozen=True)
class Sources:
    """The base model and the data of a run when it began; empty where nothing is known, as of older versions' runs.

    Parameters
    ----------
    revision: the commit of a model of the Hub. model: the files of the model by name. data: the files of the data.
    """

    revision: str | None = None
    model: Marks = field(default_factory=dict)
    data: Marks = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the record into a run's folder."""
        write_whole(folder / SOURCES, json.dumps(asdict(self), indent=1) + "\n")


def read_sources(folder: Path) -> Sources:
    """Read the record in a run's folder; an empty one if there is none.

    Raises: OffmateError if it is damaged.
    """
    path = folder / SOURCES
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        marks = {part: {str(n): Mark(**mark) for n, mark in known[part].items()} for part in ("model", "data")}
        return Sources(known["revision"], **marks)
    except FileNotFoundError:
        return Sources()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OffmateError(
            f"{path} is damaged ({type(error).__name__}: {error}); restore it. Without this file, a resumed run cannot "
            "notice that its base model or its data have changed"
        ) from None


def hub_revision(model: str, folder: Path) -> str | None:
    """Return the commit of a model of the Hub, which is the name of its folder; None for a folder of the user's."""
    return None if Path(model).is_dir() else folder.name


def model_marks(folder: Path, digests: Mapping[str, str]) -> dict[str, Mark]:
    """Return the marks of a model's files: of its description, and of the weights.

    Parameters
    ----------
    digests: of the weights by file name, as they were when they were read.
    """
    described = {name: mark_of(folder / name) for name in _DESCRIPTION if (folder / name).is_file()}
    weights = {}
    for name, digest in digests.items():
        state = (folder / name).stat()
        weights[name] = Mark(state.st_size, state.st_mtime_ns, digest)
    return described | weights


def check_description(sources: Sources, folder: Path, *, weights: bool) -> None:
    """Compare a base model with a run's record as far as its weights need not be read.

    Parameters
    ----------
    weights: whether the run reads the base model's weights, whose sizes are compared then.

    Raises: OffmateError with the file that has changed.
    """
    if not sources.model:
        return
    names = dict.fromkeys((*sources.model, *_DESCRIPTION))
    for name in names if weights else _DESCRIPTION:
        path, before = folder / name, sources.model.get(name)
        if before is None and not path.is_file():
            continue
        if before is None or not path.is_file() or path.stat().st_size != before.size:
            raise _changed(path, before is None)
        if name in _DESCRIPTION and mark_of(path).digest != before.digest:
            raise _changed(path)


def check_weights(sources: Sources, folder: Path, digests: Mapping[str, str]) -> None:
    """Compare the weights that were read with a run's record. Raises: OffmateError with the file that has changed."""
    if not sources.model:
        return
    for name, digest in digests.items():
        before = sources.model.get(name)
        if before is None or before.digest != digest:
            raise _changed(folder / name, before is None)


def warn_if_unknown(sources: Sources, folder: Path) -> None:
    """Warn if a run has no record of its base model, which could have changed without being noticed."""
    if not sources.model:
        log.warning(
            "an older version began the run and kept no record of its base model; whether %s has changed since is not "
            "known", folder,
        )  # fmt: skip


def _changed(path: Path, new: bool = False) -> OffmateError:
    what = "is new" if new else "has changed" if path.is_file() else "is missing"
    return OffmateError(
        f"{path} {what} since the run began, so the run would go on with another base model; restore the model as it "
        "was, or start a new run in another folder"
    )


def data_marks(data: str) -> dict[str, Mark]:
    """Return the marks of a source's files by their place below it; none for a data set of the Hub."""
    if is_of_hub(data):
        return {}
    return {_place(data, file): mark_of(file) for file in source_files(data).read}


def changes_of_data(sources: Sources, data: str) -> list[str]:
    """Say which files of a run's data have changed since it began; a file's content is read if its time has changed."""
    if not sources.data:
        return []
    try:
        files = {_place(data, file): file for file in source_files(data).read}
    except ArgumentValueError:
        files = {}
    found = [f"{name} is new" for name in files if name not in sources.data]
    for name, before in sources.data.items():
        if name not in files:
            found.append(f"{name} is missing")
            continue
        state = files[name].stat()
        if (state.st_size, state.st_mtime_ns) == (before.size, before.changed_ns):
            continue
        if state.st_size != before.size or mark_of(files[name]).digest != before.digest:
            found.append(f"{name} has changed")
    return found


def with_model(sources: Sources, settings: Settings, folder: Path, digests: Mapping[str, str]) -> Sources:
    """Return the record with the base model of a run as it is now."""
    return replace(sources, revision=hub_revision(settings.model, folder), model=model_marks(folder, digests))


def mark_of(file: Path) -> Mark:
    """Return the mark of a file. Raises: OffmateError if it cannot be read."""
    try:
        with file.open("rb") as opened:
            state = file.stat()
            return Mark(state.st_size, state.st_mtime_ns, hashlib.file_digest(opened, "sha256").hexdigest())
    except OSError as error:
        raise OffmateError(f"{file}: cannot be read: {reason(error)}") from None


def _place(data: str, file: Path) -> str:
    root = Path(data)
    return file.name if file == root else file.relative_to(root).as_posix()
