"""The messages of a chat, with roles that templates know and content that is text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import OffmateError
from .row_errors import unusable
from .unique_keys import read_json

Message = dict[str, Any]

# Who speaks, in ShareGPT's words and in those of chat templates.
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip

# Who speaks in chat templates.
_TOOL_ROLES = ("tool", "function", "ipython", "observation")
SYSTEM_ROLES = ("system", "developer")
_ROLES = ("system", "user", "assistant", "developer", *_TOOL_ROLES)

# The types of the parts of a message that is not only text.
_MEDIA = ("image", "image_url", "input_image", "audio", "input_audio", "video", "file")

# The beginning of a list of messages as text, as JSON or as Python writes it.
_LISTED = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")


def is_listed(value: Any) -> bool:
    """Return whether a value is a list of messages, or text that begins as one."""
    return isinstance(value, list) or (isinstance(value, str) and _LISTED.match(value) is not None)


def from_cell(value: Any, what: str, place: str, kind: str) -> Any:
    """Return a value of JSON that the cell of a table holds as text; other values as they are.

    Raises: OffmateError if it is text that begins as a list, but is broken.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return read_json(value)
    except (ValueError, RecursionError) as error:
        raise unusable(place, f"{what} that is broken JSON ({error})", kind) from None


def read_messages(turns: Any, place: str, kind: str) -> list[Message]:
    """Return the messages of a chat, each with `role`, `content` and its other keys.

    Raises: OffmateError for a list that is none, an unknown role, and content that would not stay what it is.
    """
    turns = [] if turns == "" else from_cell(turns, "a chat", place, kind)
    if not isinstance(turns, list):
        raise unusable(place, f"{str(turns)[:80]!r} is not a list of messages", kind)
    return [_message(turn, number, place, kind) for number, turn in enumerate(turns, start=1)]


def with_system(turns: list[Message], system: str, place: str, kind: str) -> list[Message]:
    """Return a chat with a system text as its first message. Raises: OffmateError if it begins with another one."""
    if not system or not turns:
        return turns
    own = turns[0]["content"] if turns[0]["role"] in SYSTEM_ROLES else None
    if own is None:
        return [{"role": "system", "content": system}, *turns]
    if own != system:
        raise unusable(
            place,
            f"'system' says {system[:80]!r}, but the chat's own system turn says {str(own)[:80]!r}; keep one",
            kind,
        )
    return turns


def _message(turn: Any, number: int, place: str, kind: str) -> Message:
    there = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, Mapping) else {}
    if ("from" in there or "value" in there) and ("role" in there or "content" in there):
        keys = ", ".join(key for key in ("from", "value", "role", "content") if key in there)
        raise unusable(place, f"message {number} has {keys}; keep 'from' and 'value', or 'role' and 'content'", kind)
    if isinstance(there.get("role"), str) and "content" in turn:
        role = there["role"]
        if role not in _ROLES:
            raise unusable(place, f"message {number} has the role {role!r}; write one of {', '.join(_ROLES)}", kind)
        said = turn["content"]
    elif "from" in there and "value" in turn and kind == "ShareGPT":
        speaker = _SPEAKERS.get(str(there["from"]).lower())
        if speaker is None:
            raise unusable(place, f"the speaker {turn['from']!r} is not one of {', '.join(_SPEAKERS)}", kind)
        role, said = speaker, turn["value"]
    else:
        words = "'from' and 'value'" if kind == "ShareGPT" else "'role' and 'content'"
        raise unusable(place, f"a message without {words}: {str(turn)[:80]}", kind)
    where = f"{place}: message {number} ({role})"
    _check_weight(there, where)
    calls = role == "assistant" and bool(there.get("tool_calls") or there.get("function_call"))
    more = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**more, "role": role, "content": _content(said, role, calls, where)}


def _check_weight(turn: Mapping[str, Any], place: str) -> None:
    """Raise OffmateError for a weight that is neither 0, which is not trained on, nor 1."""
    for key in ("weight", "train", "loss"):
        value = turn.get(key)
        if value is None or (key == "weight" and isinstance(value, (int, float)) and value in (0, 1)):
            continue
        raise OffmateError(
            f'{place} has the {key} {str(value)[:80]!r}; write "weight": 0 for a message of the assistant that is '
            'not trained on, "weight": 1 for the others, or remove the key'
        )


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
