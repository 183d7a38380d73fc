"""Documents from files of text, JSON, CSV and Parquet and from data sets, read one at a time, each with its place."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ArgumentValueError, LibraryError, OffmateError
from ..libraries import is_installed, missing
from .row_errors import EXAMPLES
from .rows import Piece, read_row
from .source_files import CSV, JSON, PARQUET, source_files
from .unique_keys import RepeatedKey, read_json, unique

_DATASET = "hf:"
# Text files are read in pieces of this size, so that no file has to fit into memory.
PIECE_CHARACTERS = 2**18
_BLOCK_CHARACTERS = 1024
# The most characters of a field of CSV; Python's own limit of 131,072 is short for a chat.
_MOST_FIELD_CHARACTERS = 2**31 - 1


def is_of_hub(data: str) -> bool:
    """Return whether a source is a data set of the Hub, and not of files."""
    return data.startswith(_DATASET)


def check_source(data: str) -> None:
    """Check a source, and read files up to the first text.

    Raises: OffmateError if it is missing, empty, of an unknown kind, or needs a library that is not installed, and for
        an entry before the first text that cannot be used.
    """
    if is_of_hub(data):
        if not data.removeprefix(_DATASET).partition(":")[0].strip():
            raise ArgumentValueError(f"data {data!r} names no data set; name one, such as hf:tatsu-lab/alpaca")
        _check_datasets(data)
        return
    if any(file.suffix.lower() == PARQUET for file in source_files(data).read):
        _check_datasets(data)
    if all(_is_blank(piece) for piece in pieces(data)):
        raise _empty(data)


def pieces(data: str) -> Iterator[Piece]:
    """Yield all documents of a source in order, with at most one line or piece in memory.

    Raises: OffmateError with the file and line of an entry that cannot be used.
    """
    if is_of_hub(data):
        yield from _rows(data)
        return
    for file in source_files(data).read:
        try:
            yield from _of_file(file)
        except UnicodeDecodeError as error:
            raise OffmateError(f"{file}: not UTF-8 text: {error.reason} near byte {error.start}") from None
        except OSError as error:
            raise OffmateError(f"{file}: cannot be read: {error.strerror}") from None


def _empty(data: str) -> ArgumentValueError:
    return ArgumentValueError(f"data {data!r} is empty: it holds no text to train on; add some, or name other data")


def _is_blank(piece: Piece) -> bool:
    return not piece.content.strip() if isinstance(piece.content, str) else piece.is_empty


def _check_datasets(data: str) -> None:
    if not is_installed("datasets"):
        raise LibraryError(f"data {data!r} cannot be read: {missing('datasets')}")


def _of_file(file: Path) -> Iterator[Piece]:
    suffix = file.suffix.lower()
    if suffix in JSON:
        return _json_list(file) if suffix == ".json" and _is_list(file) else _json_lines(file)
    if suffix == CSV:
        return _csv(file)
    return _parquet(file) if suffix == PARQUET else _text(file)


def _text(file: Path) -> Iterator[Piece]:
    number = 1
    with file.open(encoding="utf-8-sig", newline="") as text:
        piece = text.read(PIECE_CHARACTERS)
        first = True
        while piece:
            after = text.read(PIECE_CHARACTERS)
            yield Piece(piece, f"{file}, line {number}", first, last=not after)
            number += piece.count("\n")
            piece, first = after, False


def _json_lines(file: Path) -> Iterator[Piece]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                row = read_json(line)
            except (ValueError, RecursionError) as error:
                raise _broken(place, error) from None
            yield read_row(row, place)


def _is_list(file: Path) -> bool:
    """Return whether a file's JSON is a list of rows; a list on its first line alone may also be a line of its own."""
    with file.open(encoding="utf-8-sig") as text:
        while block := text.read(_BLOCK_CHARACTERS):
            if block.strip():
                return block.lstrip().startswith("[")
    return False


def _json_list(file: Path) -> Iterator[Piece]:
    """Yield the rows of a JSON list, of which the text is in memory, but one row at a time."""
    text, decoder = file.read_text(encoding="utf-8-sig"), json.JSONDecoder(object_pairs_hook=unique)
    at, number = _skip(text, text.index("[") + 1), 0
    while text[at : at + 1] != "]":
        place = f"{file}, item {number + 1}"
        try:
            if number:
                at = _behind_comma(text, at)
                if text[at : at + 1] == "]":  # a comma behind the last item loses nothing
                    break
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _broken(place, error) from None
        number += 1
        yield read_row(row, place)
        at = _skip(text, at)
    end = _skip(text, at + 1)
    if end < len(text):
        fault = json.JSONDecodeError("the file goes on behind the end of its list", text, end)
        remedy = "put all rows into one list, or write one row per line without a list"
        raise OffmateError(f"{file}: broken JSON: {fault}: {text[end : end + 40]!r}; {remedy}")


def _behind_comma(text: str, at: int) -> int:
    if text[at : at + 1] != ",":
        raise json.JSONDecodeError("Expecting ',' between items, or ']' after the last one", text, at)
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    """Return the position of what follows blanks."""
    while text[at : at + 1].isspace():
        at += 1
    return at


def _csv(file: Path) -> Iterator[Piece]:
    """Yield the rows of a table; every field stays the text that it is, "42" and "NA" too."""
    csv.field_size_limit(_MOST_FIELD_CHARACTERS)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        table = csv.reader(lines, strict=True)
        names: list[str] = []
        begin = 1
        try:
            for fields in table:
                place = f"{file}, line {begin}"
                begin = table.line_num + 1
                if names and fields:
                    yield read_row(_table_row(names, fields, place), place)
                elif fields:
                    names = _column_names(fields, place)
        except csv.Error as error:
            raise OffmateError(
                f"{file}, line {table.line_num}: broken CSV: {error}; the first line names the columns, such as "
                "prompt,completion, and a field with a comma, quote or line break needs double quotes"
            ) from None


def _column_names(fields: list[str], place: str) -> list[str]:
    twice = [repr(name) for name, count in Counter(fields).items() if count > 1 and name]
    if twice:
        raise OffmateError(
            f"{place}: the column name {', '.join(twice)} occurs more than once in {','.join(fields)[:200]!r}; give "
            "every column its own name, or remove the columns that are not needed"
        )
    return fields


def _table_row(names: list[str], fields: list[str], place: str) -> dict[str, str]:
    if len(fields) > len(names):
        raise OffmateError(
            f"{place}: {len(fields)} fields, but the first line names {len(names)} columns "
            f"({', '.join(names)[:200]}). Left over: {str(fields[len(names) :])[:200]}. Put double quotes around "
            'a field that holds commas, such as "yes, of course"'
        )
    return dict(zip(names, fields))


def _parquet(file: Path) -> Iterator[Piece]:
    import datasets

    if file.stat().st_size == 0:
        raise OffmateError(
            f"{file}: the file is empty (0 bytes), so it is no Parquet file; write it again, or remove it"
        )
    try:
        rows = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
    except Exception as error:
        raise OffmateError(f"{file}: cannot be read as Parquet: {error}") from error
    yield from _numbered(rows, str(file), "cannot be read as Parquet")


def _broken(place: str, error: Exception) -> OffmateError:
    if isinstance(error, RepeatedKey):
        return OffmateError(f"{place}: {error}")
    return OffmateError(f"{place}: broken JSON: {error}. A good line is {EXAMPLES['messages']}")


def _rows(data: str) -> Iterator[Piece]:
    import datasets

    name, _, split = data.removeprefix(_DATASET).partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:
        raise OffmateError(f"data {data!r} cannot be loaded: {error}") from error
    some = False
    for piece in _numbered(rows, data, "cannot be loaded"):
        some = some or not _is_blank(piece)
        yield piece
    if not some:
        raise _empty(data)


def _numbered(rows: Any, name: str, fault: str) -> Iterator[Piece]:
    numbered = enumerate(rows, start=1)
    while True:
        try:
            number, row = next(numbered)
        except StopIteration:
            return
        except Exception as error:  # the library's own, while it reads on
            raise OffmateError(f"data {name!r} {fault}: {type(error).__name__}: {error}") from error
        yield read_row(row, f"{name}, row {number}")
