"""Documents from text files, JSON lines and data sets, read one at a time, each with its place of origin."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentValueError, OffmateError

_TEXT = (".txt", ".md", ".text")
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_DATASET = "hf:"
# Text files are cut at line ends into pieces of about this size, so that no file has to fit into memory.
_PIECE_CHARACTERS = 1024


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one.

    Parameters
    ----------
    content: text, or the messages of a chat. place: file and line, or data set and row, for error messages.
    first, last: whether it is the first, and the last, piece of its document.
    """

    content: str | list[dict[str, Any]]
    place: str
    first: bool = True
    last: bool = True


def check_source(data: str) -> None:
    """Check a source without reading it.

    Raises: OffmateError if it is missing, empty, of an unknown kind, or needs a library that is not installed.
    """
    if data.startswith(_DATASET):
        if importlib.util.find_spec("datasets") is None:
            raise OffmateError(f"data {data!r} needs Hugging Face datasets: pip install datasets")
        return
    if sum(file.stat().st_size for file in source_files(data)) == 0:
        raise ArgumentValueError(f"data {data!r} is empty")


def source_files(data: str) -> list[Path]:
    """List the files of a source: the file itself, or a folder's files with text or JSON lines, sorted by name.

    Raises: OffmateError if there are no such files.
    """
    path = Path(data)
    if not path.exists():
        raise ArgumentValueError(
            f"data {data!r}: no such file; write a data set of the Hub as hf:NAME or hf:NAME:SPLIT"
        )
    if path.is_file():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in _TEXT + _JSON_LINES)
    if not files:
        raise ArgumentValueError(f"data {data!r}: the folder holds no {', '.join(_TEXT + _JSON_LINES)} file")
    return files


def pieces(data: str) -> Iterator[Piece]:
    """Yield all documents of a source in order, with at most one line or piece in memory.

    Raises: OffmateError with the file and line of an entry that cannot be used.
    """
    if data.startswith(_DATASET):
        yield from _rows(data)
        return
    for file in source_files(data):
        try:
            yield from _json_lines(file) if file.suffix.lower() in _JSON_LINES else _text(file)
        except UnicodeDecodeError as error:
            raise OffmateError(f"{file}: not UTF-8 text: {error.reason} near byte {error.start}") from None
        except OSError as error:
            raise OffmateError(f"{file}: cannot be read: {error.strerror}") from None


def _text(file: Path) -> Iterator[Piece]:
    held: list[str] = []
    size, first, number = 0, True, 0
    with file.open(encoding="utf-8", newline="") as lines:
        # A single line may be the whole file; the argument of readline bounds it.
        while line := lines.readline(_PIECE_CHARACTERS):
            number += line.endswith("\n")
            if held and size >= _PIECE_CHARACTERS:
                yield Piece("".join(held), f"{file}, line {number}", first, last=False)
                held, size, first = [], 0, False
            held.append(line)
            size += len(line)
    if held:
        yield Piece("".join(held), f"{file}, line {number}", first, last=True)


def _json_lines(file: Path) -> Iterator[Piece]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise OffmateError(f"{place}: broken JSON: {error}") from None
            piece = _document(row, place)
            if piece is not None:
                yield piece


def _rows(data: str) -> Iterator[Piece]:
    import datasets

    name, _, split = data.removeprefix(_DATASET).partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:
        raise OffmateError(f"data {data!r} cannot be loaded: {error}") from error
    for number, row in enumerate(rows, start=1):
        piece = _document(row, f"{data}, row {number}")
        if piece is not None:
            yield piece


def _document(row: Any, place: str) -> Piece | None:
    """Return a row's document; None if its text is empty."""
    if not isinstance(row, dict):
        raise OffmateError(f"{place}: a {type(row).__name__} instead of an object with 'text' or 'messages'")
    if isinstance(row.get("text"), str):
        _check_characters(row["text"], place)
        return Piece(row["text"], place) if row["text"] else None
    messages = row.get("messages")
    if isinstance(messages, list) and messages:
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise OffmateError(f"{place}: a message without 'role' and 'content': {str(message)[:80]}")
        _check_characters(json.dumps(messages, ensure_ascii=False, default=str), place)
        return Piece(messages, place)
    raise OffmateError(f"{place}: no usable 'text' or 'messages' (keys: {', '.join(map(str, row))})")


def _check_characters(text: str, place: str) -> None:
    """Raise OffmateError for half of a character that UTF-16 writes as two, which is no text in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        near = ascii(text[max(0, error.start - 20) : error.start])
        raise OffmateError(
            f"{place}: {half} is half of a character, such as an emoji that was cut in two (after {near}); mend or "
            "remove the line"
        ) from None
