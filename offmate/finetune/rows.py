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

# Who speaks in chat templates. Most of them leave out a message of any other role without a word.
_TOOL_ROLES = ("tool", "function", "ipython", "observation")
_ROLES = ("system", "user", "assistant", "developer", *_TOOL_ROLES)

# The types of the parts of a message that is not only text.
_MEDIA = ("image", "image_url", "input_image", "audio", "input_audio", "video", "file")

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
        _check_values(row, place)
        keys = ", ".join(map(str, row)) or "none"
        raise OffmateError(
            f"{place}: none of the known formats (keys: {keys[:200]}). A line has one of these forms:\n  "
            + "\n  ".join(f"{kind}: {line}" for kind, line in EXAMPLES.items())
        )
    used = [row.get(key) for key in (*_KEYS[kind], *_MORE_KEYS)]
    _check_characters(json.dumps(used, ensure_ascii=False, default=str), place)
    return _READERS[kind](row, place)


def _check_values(row: Mapping[str, Any], place: str) -> None:
    """Raise OffmateError if a row of no format has some of the keys of one: for the values that it lacks."""
    begun = [kind for kind, keys in _KEYS.items() if any(key in row for key in keys)]
    if not begun:
        return
    # A format of which a value is there is more likely meant than one of which there are only nulls.
    kind = next((k for k in begun if any(row.get(key) is not None for key in _KEYS[k])), begun[0])
    faults = [f"{key!r} is {'null' if key in row else 'missing'}" for key in _KEYS[kind] if row.get(key) is None]
    if not faults:
        faults = [f"'text' is a {type(row['text']).__name__}, not text"]
    raise _unusable(place, f"{' and '.join(faults)} (keys: {', '.join(map(str, row))[:200]})", kind)


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
    own = turns[0]["content"] if turns and turns[0]["role"] == "system" else None
    if system and own is not None and own != system:
        raise _unusable(
            place,
            f"'system' says {system[:80]!r}, but the chat's own system turn says {own[:80]!r}; keep one",
            "ShareGPT",
        )
    if system and turns and own is None:
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
    return [_message(turn, number, place, kind) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int, place: str, kind: str) -> Message:
    named = isinstance(turn, Mapping)
    if named and isinstance(turn.get("role"), str) and "content" in turn:
        role = turn["role"]
        if role not in _ROLES:
            raise _unusable(place, f"message {number} has the role {role!r}; write one of {', '.join(_ROLES)}", kind)
        calls = role == "assistant" and bool(turn.get("tool_calls") or turn.get("function_call"))
        return {**turn, "content": _content(turn["content"], role, calls, f"{place}: message {number} ({role})")}
    if named and "from" in turn and "value" in turn and kind == "ShareGPT":
        role = _SPEAKERS.get(str(turn["from"]).lower())
        if role is None:
            raise _unusable(place, f"the speaker {turn['from']!r} is not one of {', '.join(_SPEAKERS)}", kind)
        return {"role": role, "content": _content(turn["value"], role, False, f"{place}: message {number} ({role})")}
    words = "'from' and 'value'" if kind == "ShareGPT" else "'role' and 'content'"
    raise _unusable(place, f"a message without {words}: {str(turn)[:80]}", kind)


def _content(content: Any, role: str, calls: bool, place: str) -> Any:
    """Return what a message says, with the parts of a text joined.

    A call of tools may say nothing, and a tool may answer with any JSON: templates that know tools write these.

    Parameters
    ----------
    calls: whether the message calls tools. place: file, line and message, for errors.

    Raises: OffmateError if a template would write it as Python writes it.
    """
    if isinstance(content, str) or (content is None and calls):
        return content
    if isinstance(content, list) and (role not in _TOOL_ROLES or all(map(_is_part, content))):
        return "".join(_part(part, number, place) for number, part in enumerate(content, start=1))
    if content is None:
        raise OffmateError(
            f'{place} has the content null; write its text, write "" if it says nothing, or remove the message'
        )
    if role not in _TOOL_ROLES:
        raise OffmateError(
            f"{place} has the content {str(content)[:80]} ({type(content).__name__}), which is not text; "
            'put it in double quotes, such as "42"'
        )
    return content


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("text", *_MEDIA)


def _part(part: Any, number: int, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    what = f"is of the type {kind!r}" if kind not in (None, "text") else f"holds no text: {str(part)[:80]}"
    raise OffmateError(
        f"{place}, part {number} {what}. Only text can be trained on, such as "
        '{"type": "text", "text": "Hello!"}; remove the part or the row'
    )


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
