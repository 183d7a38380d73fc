"""What a row of data says, in the formats that people have: text, chats, instructions, prompts with completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OffmateError

Message = dict[str, Any]


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
    first, last: whether it is the first, and the last, piece of its document. kind: the name of the row's format.
    trained_from: the number of the chat's message from which on the assistant's are trained on.
    """

    content: str | list[Message] | Pair
    place: str
    first: bool = True
    last: bool = True
    kind: str = "text"
    trained_from: int = 0


# Who speaks, in ShareGPT's words and in those of chat templates.
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip

# An example line of each format, by its name.
EXAMPLES = {
    "text": '{"text": "Once upon a time ..."}',
    "messages": '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}',
    "ShareGPT": '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}',
    "Alpaca": '{"instruction": "Translate to French", "input": "Hi", "output": "Salut"}',
    "prompt/completion": '{"prompt": "2 + 2 =", "completion": " 4"}',
}

# The keys by which a row's format is known, in the order in which they are looked for.
_KEYS = {
    "text": ("text",),
    "messages": ("messages",),
    "ShareGPT": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "Alpaca": ("instruction", "output"),
}


_MORE_KEYS = ("system", "input")  # that some formats read, too


def read_row(row: Any, place: str) -> Piece | None:
    """Return a row's document; None if it is empty, or if there is nothing to learn in it.

    Raises: OffmateError with the place, what is wrong there, and an example line.
    """
    if not isinstance(row, Mapping):
        raise _unusable(place, f"a {type(row).__name__} instead of an object", "text")
    kind = next((kind for kind, keys in _KEYS.items() if _has(row, kind, keys)), None)
    if kind is None:
        keys = ", ".join(map(str, row)) or "none"
        raise OffmateError(
            f"{place}: none of the known formats (keys: {keys[:200]}). A line has one of these forms:\n  "
            + "\n  ".join(f"{kind}: {line}" for kind, line in EXAMPLES.items())
        )
    used = [row.get(key) for key in (*_KEYS[kind], *_MORE_KEYS)]
    _check_characters(json.dumps(used, ensure_ascii=False, default=str), place)
    return _READERS[kind](row, place)


def _has(row: Mapping[str, Any], kind: str, keys: tuple[str, ...]) -> bool:
    # Beside messages there may be a column of another kind that is called text.
    return all(row.get(key) is not None for key in keys) and (kind != "text" or isinstance(row["text"], str))


def _text(row: Mapping[str, Any], place: str) -> Piece | None:
    return Piece(row["text"], place) if row["text"] else None


def _messages(row: Mapping[str, Any], place: str) -> Piece | None:
    turns = _chat(row["messages"], place, "messages")
    return Piece(turns, place, kind="messages") if turns else None


def _share_gpt(row: Mapping[str, Any], place: str) -> Piece | None:
    turns = _chat(row["conversations"], place, "ShareGPT")
    system = _string(row.get("system") or "", "'system'", place, "ShareGPT")
    if system and turns and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
    return Piece(turns, place, kind="ShareGPT") if turns else None


def _alpaca(row: Mapping[str, Any], place: str) -> Piece | None:
    instruction = _string(row["instruction"], "'instruction'", place, "Alpaca")
    more = _string(row.get("input") or "", "'input'", place, "Alpaca")
    output = _string(row["output"], "'output'", place, "Alpaca")
    system = _string(row.get("system") or "", "'system'", place, "Alpaca")
    asked = "\n\n".join(part for part in (instruction, more) if part)
    chat = [{"role": "system", "content": system}] if system else []
    chat += [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    prompt = "".join(f"{part}\n\n" for part in (system, asked) if part)
    return Piece(Pair(prompt, output, tuple(chat)), place, kind="Alpaca") if output else None


def _prompted(row: Mapping[str, Any], place: str) -> Piece | None:
    kind = "prompt/completion"
    if isinstance(row["prompt"], str):
        completion = _string(row["completion"], "'completion'", place, kind)
        return Piece(Pair(row["prompt"], completion), place, kind=kind) if completion else None
    asked, answered = (_chat(row[key], place, kind) for key in ("prompt", "completion"))
    return Piece(asked + answered, place, kind=kind, trained_from=len(asked)) if answered else None


_READERS: dict[str, Callable[[Mapping[str, Any], str], Piece | None]] = {
    "text": _text,
    "messages": _messages,
    "ShareGPT": _share_gpt,
    "Alpaca": _alpaca,
    "prompt/completion": _prompted,
}


def _chat(turns: Any, place: str, kind: str) -> list[Message]:
    """Return the messages of a chat with roles that templates know."""
    if isinstance(turns, str) and turns.lstrip().startswith("["):  # in a table, a cell holds text
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise _unusable(place, f"a chat that is broken JSON ({error})", kind) from None
    if not isinstance(turns, list):
        raise _unusable(place, f"{str(turns)[:80]!r} is not a list of messages", kind)
    return [_message(turn, place, kind) for turn in turns]


def _message(turn: Any, place: str, kind: str) -> Message:
    named = isinstance(turn, Mapping)
    if named and isinstance(turn.get("role"), str) and "content" in turn:
        return dict(turn)
    if named and "from" in turn and "value" in turn and kind == "ShareGPT":
        role = _SPEAKERS.get(str(turn["from"]).lower())
        if role is None:
            raise _unusable(place, f"the speaker {turn['from']!r} is not one of {', '.join(_SPEAKERS)}", kind)
        return {"role": role, "content": turn["value"]}
    words = "'from' and 'value'" if kind == "ShareGPT" else "'role' and 'content'"
    raise _unusable(place, f"a message without {words}: {str(turn)[:80]}", kind)


def _string(value: Any, name: str, place: str, kind: str) -> str:
    if not isinstance(value, str):
        raise _unusable(place, f"{name} is a {type(value).__name__}, not text", kind)
    return value


def _unusable(place: str, what: str, kind: str) -> OffmateError:
    return OffmateError(f"{place}: {what}. A line in the format {kind!r} is {EXAMPLES[kind]}")


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
