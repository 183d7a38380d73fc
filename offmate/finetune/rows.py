"""What a row of data says, in the formats that people have: text, chats, instructions, prompts with completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OffmateError
from .messages import Message, from_cell, is_listed, read_messages, with_system
from .row_errors import EXAMPLES, unusable


@dataclass(frozen=True)
class Pair:
    """A prompt, and the completion that the model learns.

    Parameters
    ----------
    chat: the same as a chat, for a tokenizer that has a chat template; empty if the prompt is to stay as it is written.
    """

    prompt: str
    completion: str
    chat: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one.

    Parameters
    ----------
    content: text, the messages of a chat, or a pair. place: file and line, or data set and row, for error messages.
    first, last: whether it is the first, and the last, piece of its document.
    kind: the name of the row's format, and of others in it that are not read.
    trained_from: the number of the chat's message from which on the assistant's are trained on.
    tools: the tools that a chat describes to the model.
    """

    content: str | list[Message] | Pair
    place: str
    first: bool = True
    last: bool = True
    kind: str = "text"
    trained_from: int = 0
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is written there."""
        return not (self.content.prompt or self.content.completion if isinstance(self.content, Pair) else self.content)


# The keys by which a row's format is known, in the order in which they are looked for.
_KEYS = {
    "text": ("text",),
    "messages": ("messages",),
    "ShareGPT": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "Alpaca": ("instruction", "output"),
}
# Others that some formats read, and those that would change what a chat says, with what to write instead.
_MORE_KEYS = ("system", "input", "tools", "history")
_INSTEAD = {
    "system": "put it at the beginning of the prompt, or write the row as messages",
    "tools": "describe the tools in the prompt, or write the row as messages",
    "input": "put it into the prompt, or write the row as an Alpaca row with 'instruction' and 'output'",
    "history": "write the earlier turns as messages, or as an Alpaca row with 'history'",
    "functions": 'write each function as one of \'tools\', such as {"type": "function", "function": {...}}',
    "chat_template_kwargs": "set these in the tokenizer's chat template",
}


def read_row(row: Any, place: str) -> Piece:
    """Return a row's document, which may be empty.

    Raises: OffmateError with the place, what is wrong there, and an example line.
    """
    if not isinstance(row, Mapping):
        raise unusable(place, f"a {type(row).__name__} instead of an object", "text")
    kind, *others = _kinds(row, place)
    used = [row.get(key) for key in (*_KEYS[kind], *_MORE_KEYS)]
    _check_characters(json.dumps(used, ensure_ascii=False, default=str), place)
    piece = _READERS[kind](row, place)
    return replace(piece, kind=f"{kind} (beside it, {' and '.join(others)} not read)") if others else piece


def _kinds(row: Mapping[str, Any], place: str) -> list[str]:
    """Return the formats of which a row has the keys, and a value that is not empty if any format has one."""
    there = [kind for kind, keys in _KEYS.items() if _has(row, kind, keys)]
    filled = [kind for kind in there if any(_is_filled(row[key]) for key in _KEYS[kind])]
    if not filled:
        _check_values({key: value for key, value in row.items() if not there or _is_filled(value)}, row, place)
    if not there:
        keys = ", ".join(map(str, row)) or "none"
        raise OffmateError(
            f"{place}: none of the known formats (keys: {keys[:200]}). A line has one of these forms:\n  "
            + "\n  ".join(f"{kind}: {line}" for kind, line in EXAMPLES.items())
        )
    return filled or there[:1]


def _check_values(values: Mapping[str, Any], row: Mapping[str, Any], place: str) -> None:
    """Raise OffmateError if a row of no format has some of the values of one: for those that it lacks."""
    begun = [kind for kind, keys in _KEYS.items() if any(key in values for key in keys)]
    if not begun:
        return
    # A format of which a value is there is more likely meant than one of which there are only nulls.
    kind = next((k for k in begun if any(values.get(key) is not None for key in _KEYS[k])), begun[0])
    faults = [f"{key!r} is {'null' if key in row else 'missing'}" for key in _KEYS[kind] if row.get(key) is None]
    if not faults:
        faults = [f"'text' is a {type(row['text']).__name__}, not text"]
    raise unusable(place, f"{' and '.join(faults)} (keys: {', '.join(map(str, row))[:200]})", kind)


def _has(row: Mapping[str, Any], kind: str, keys: tuple[str, ...]) -> bool:
    # Beside messages there may be a column of another kind that is called text.
    return all(row.get(key) is not None for key in keys) and (kind != "text" or isinstance(row["text"], str))


def _is_filled(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value is not None and value != []


def _text(row: Mapping[str, Any], place: str) -> Piece:
    return Piece(row["text"], place)


def _messages(row: Mapping[str, Any], place: str) -> Piece:
    return _of_chat(read_messages(row["messages"], place, "messages"), row, place, "messages")


def _share_gpt(row: Mapping[str, Any], place: str) -> Piece:
    return _of_chat(read_messages(row["conversations"], place, "ShareGPT"), row, place, "ShareGPT")


def _of_chat(
    turns: list[Message], row: Mapping[str, Any], place: str, kind: str, n_answered: int | None = None
) -> Piece:
    """Return a chat with the system text and the tools that stand beside it.

    Parameters
    ----------
    n_answered: how many messages at its end are trained on alone; None trains on all of the assistant's.
    """
    _refuse(row, ("history", "functions", "chat_template_kwargs"), place, kind)
    turns = with_system(turns, _optional(row, "system", place, kind), place, kind)
    trained_from = 0 if n_answered is None else len(turns) - n_answered
    return Piece(turns, place, kind=kind, trained_from=trained_from, tools=_tools(row, place, kind))


def _alpaca(row: Mapping[str, Any], place: str) -> Piece:
    kind = "Alpaca"
    _refuse(row, ("tools", "functions", "chat_template_kwargs"), place, kind)
    instruction, output = (_string(row[key], f"{key!r}", place, kind) for key in ("instruction", "output"))
    more, system = (_optional(row, key, place, kind) for key in ("input", "system"))
    asked = "\n\n".join(part for part in (instruction, more) if part)
    earlier = _history(row, place)
    chat = [{"role": "system", "content": system}] if system else []
    for question, answer in earlier:
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    chat += [{"role": "user", "content": asked}]
    # Only the output is learned, as it is without a chat template.
    trained_from = len(chat) if earlier else 0
    chat += [{"role": "assistant", "content": output}] if output else []
    prompt = "".join(f"{part}\n\n" for part in (system, *sum(earlier, ()), asked) if part)
    return Piece(Pair(prompt, output, tuple(chat)), place, kind=kind, trained_from=trained_from)


def _history(row: Mapping[str, Any], place: str) -> list[tuple[str, ...]]:
    """Return the earlier turns of an Alpaca row: what was asked, and what was answered."""
    history = row.get("history")
    if history is None or history == "":
        return []
    history = from_cell(history, "'history'", place, "Alpaca")
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(words, str) for words in turn) for turn in history
    ):
        raise unusable(
            place, f'\'history\' is {str(history)[:80]!r}, not a list such as [["question", "answer"]]', "Alpaca"
        )
    return [tuple(turn) for turn in history]


def _prompted(row: Mapping[str, Any], place: str) -> Piece:
    kind = "prompt/completion"
    listed = [key for key in _KEYS[kind] if is_listed(row[key])]
    if not listed:
        # A prompt beside an instruction is made of it and its input.
        made = "instruction" in row
        _refuse(row, [key for key in _INSTEAD if key != "input" or not made], place, kind)
        prompt, completion = (_string(row[key], f"{key!r}", place, kind) for key in _KEYS[kind])
        return Piece(Pair(prompt, completion), place, kind=kind)
    for key in _KEYS[kind]:
        if key not in listed and row[key] not in ("", "[]"):
            raise unusable(place, f"{key!r} is text, but {listed[0]!r} is a list of messages; write both alike", kind)
    asked, answered = (read_messages(row[key], place, kind) for key in _KEYS[kind])
    return _of_chat(asked + answered, row, place, kind, len(answered))


_READERS: dict[str, Callable[[Mapping[str, Any], str], Piece]] = {
    "text": _text,
    "messages": _messages,
    "ShareGPT": _share_gpt,
    "Alpaca": _alpaca,
    "prompt/completion": _prompted,
}


def _tools(row: Mapping[str, Any], place: str, kind: str) -> tuple[dict[str, Any], ...]:
    tools = row.get("tools")
    if tools is None or tools == "":
        return ()
    tools = from_cell(tools, "'tools'", place, kind)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise unusable(
            place,
            f"'tools' is {str(tools)[:80]!r}, not a list of tools such as "
            '[{"type": "function", "function": {"name": "now", "description": "...", "parameters": {}}}]',
            kind,
        )
    return tuple(dict(tool) for tool in tools)


def _refuse(row: Mapping[str, Any], keys: Iterable[str], place: str, kind: str) -> None:
    """Raise OffmateError for a key that would change what a row says, and that its format does not read."""
    for key in keys:
        if _is_filled(row.get(key)) and row[key] not in ({}, "[]", "{}"):
            raise unusable(place, f"{key!r} cannot be used in this format: {_INSTEAD[key]}, or remove the key", kind)


def _optional(row: Mapping[str, Any], key: str, place: str, kind: str) -> str:
    value = row.get(key)
    return "" if value is None else _string(value, f"{key!r}", place, kind)


def _string(value: Any, name: str, place: str, kind: str) -> str:
    if not isinstance(value, str):
        raise unusable(place, f"{name} is a {type(value).__name__}, not text", kind)
    return value


def _check_characters(text: str, place: str) -> None:
    """Raise OffmateError for half of a character that UTF-16 writes as two, which is no text in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        near = ascii(text[max(0, error.start - 20) : error.start])
        raise OffmateError(
            f"{place}: {half} is half of a character, such as an emoji that was cut in two (after {near}); fix or "
            f"remove the line. A good one is {EXAMPLES['text']}"
        ) from None
