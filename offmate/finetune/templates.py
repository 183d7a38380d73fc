"""Messages as a tokenizer's chat template writes them, and the check that it writes all that they say."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import OffmateError
from .messages import Message

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = ("tool_calls", "function_call")
_ROLES_OF_MOST = ("system", "user", "assistant")
_SHOWN_CHARACTERS = 80
_SHAPE_DEPTH = 7  # from the list of messages down to the values of a call's arguments

# The shapes of chats of which each tokenizer's template has been seen to write all.
_complete: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Writer:
    """Writes messages as a tokenizer's chat template does.

    Parameters
    ----------
    place: of the chat, for errors. tools: those that the chat describes to the model.
    """

    tokenizer: Any
    place: str
    tools: tuple[dict[str, Any], ...] = ()

    def write(self, messages: list[Message], asks: bool = False) -> str:
        """Return the messages as text.

        Parameters
        ----------
        asks: end with the words after which the assistant speaks (the generation prompt).

        Raises: OffmateError if the template refuses the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=list(self.tools) or None, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:
            raise OffmateError(
                f"{self.place}: the tokenizer's chat template refuses the messages: {error}. Change or remove the row"
            ) from error

    def if_taken(self, messages: list[Message], asks: bool = False) -> str | None:
        """Return the messages as text; None if the template refuses them."""
        try:
            return self.write(messages, asks)
        except OffmateError:
            return None


@dataclass(frozen=True)
class _Said:
    """Words that a template must write: the number of their message, 0 for tools, and the key that holds them."""

    number: int
    key: str
    words: str

    def is_in(self, text: str) -> bool:
        """Return whether a text holds the words, as they are, in JSON, or with other blanks."""
        if self.words.strip() in text:
            return True
        escaped = (json.dumps(self.words, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        return any(form in text for form in escaped) or "".join(self.words.split()) in "".join(text.split())


def check_written(writer: Writer, messages: list[Message], text: str, asks: bool = False) -> None:
    """Check that a template writes every message, thought, tool and call of tools, and none as Python would.

    The words of every chat are looked for. Since words such as "ok" may also stand elsewhere, a chat with marks
    in them is written once for every shape of a chat: its roles, and the keys of its messages.

    Parameters
    ----------
    text: what the template wrote for the messages. asks: whether it ends with the generation prompt.

    Raises: OffmateError with the message and what of it is left out.
    """
    said = _said(messages, writer.tools)
    lost = [some for some in said if not some.is_in(text)]
    contents = [some for some in said if some.key == "content"]
    if contents and all(some in lost for some in contents):
        raise OffmateError(
            f"{writer.place}: the tokenizer's chat template writes nothing of what the messages say, such as "
            f"{contents[0].words[:_SHOWN_CHARACTERS]!r}; use the tokenizer of a model for text chats, or write each "
            "conversation as text"
        )
    if lost:
        raise _left_out(lost[0], lost[0].words, messages, writer.place)
    _check_values(writer, messages, text, asks)
    shape = (str(writer.tokenizer.chat_template), asks, _shape(messages), _shape(writer.tools))
    seen = _complete.setdefault(writer.tokenizer, set())
    if shape not in seen:
        _check_marks(writer, messages, text, asks)
        seen.add(shape)


def _check_marks(writer: Writer, messages: list[Message], text: str, asks: bool) -> None:
    marks: list[_Said] = []
    marked = [_marked_message(message, number, text, marks) for number, message in enumerate(messages, start=1)]
    tools = tuple(_marked_call(tool, 0, "tools", text, marks) for tool in writer.tools)
    found = replace(writer, tools=tools).if_taken(marked, asks)
    # A template that refuses marks is known by the words of every chat alone.
    lost = next((mark for mark in marks if found is not None and not mark.is_in(found)), None)
    if lost is not None:
        value = writer.tools if lost.number == 0 else messages[lost.number - 1][lost.key]
        raise _left_out(lost, value if isinstance(value, str) else _as_json(value), messages, writer.place)


def _left_out(lost: _Said, words: str, messages: list[Message], place: str) -> OffmateError:
    shown = repr(words[:_SHOWN_CHARACTERS]) if lost.key in ("content", *_REASONING) else words[:_SHOWN_CHARACTERS]
    if lost.number == 0:
        return OffmateError(
            f"{place}: the tokenizer's chat template leaves out 'tools': {shown}; use the tokenizer of a model that "
            "knows tools, describe the tools in a system message, or remove 'tools'"
        )
    role = messages[lost.number - 1]["role"]
    if lost.key in _CALLS:
        remedy = (
            "use the tokenizer of a model that knows tools, write the calls into 'content', or remove the row"
            if lost.key == "tool_calls"
            else "write it as 'tool_calls', or into 'content'"
        )
    elif lost.key in _REASONING or "</think>" in words:
        remedy = (
            "most templates write thoughts only before the last answer: make a row of its own for each answer, use "
            "another template, or remove the thoughts"
        )
    elif role not in _ROLES_OF_MOST:
        remedy = "use a role that the template knows, such as 'system' or 'user', or a tokenizer with another template"
    else:
        remedy = "join it with a message that the template writes, or use a tokenizer with another template"
    return OffmateError(
        f"{place}: message {lost.number} ({role}): the tokenizer's chat template leaves out {lost.key!r}: {shown}; "
        f"{remedy}"
    )


def _said(messages: list[Message], tools: tuple[dict[str, Any], ...]) -> list[_Said]:
    """List all words of a chat that have to be written."""
    found = []
    for number, message in enumerate(messages, start=1):
        words = [(key, message.get(key)) for key in ("content", *_REASONING)]
        words += [(key, _function(call).get("name")) for key in _CALLS for call in _calls(message, key)]
        found += [_Said(number, key, value) for key, value in words if isinstance(value, str) and value.strip()]
    names = [_function(tool).get("name") for tool in tools]
    return found + [_Said(0, "tools", name) for name in names if isinstance(name, str) and name.strip()]


def _marked_message(message: Message, number: int, text: str, marks: list[_Said]) -> Message:
    """Return a message with marks in what it says, which it adds to the list."""
    marked = dict(message)
    for key in ("content", *_REASONING):
        if message.get(key) not in (None, "") and str(message[key]).strip():
            marked[key] = _marked(message[key], number, key, text, marks)
    for key in _CALLS:
        calls = [_marked_call(call, number, key, text, marks) for call in _calls(message, key)]
        if calls:
            marked[key] = calls if isinstance(message[key], list) else calls[0]
    return marked


def _marked_call(call: Any, number: int, key: str, text: str, marks: list[_Said]) -> Any:
    """Return a tool, or the call of one, with marks in its name and arguments."""
    function = dict(_function(call))
    named = [name for name in ("name", "arguments") if function.get(name)]
    if not named:
        return _marked(call, number, key, text, marks)
    for name in named:
        function[name] = _marked(function[name], number, key, text, marks)
    return {**call, "function": function} if isinstance(call.get("function"), dict) else {**call, **function}


def _marked(value: Any, number: int, key: str, text: str, marks: list[_Said]) -> Any:
    mark = f"zq{len(marks)}qz"
    while mark in text:
        mark = f"z{mark}z"
    marks.append(_Said(number, key, mark))
    if isinstance(value, dict):
        return {mark: mark}
    if isinstance(value, list):
        return [mark]
    if not isinstance(value, str):
        return mark
    if key in _CALLS and value.lstrip().startswith("{"):  # arguments as JSON
        return json.dumps({mark: mark})
    # Some templates look at how a text begins and ends.
    return f"{value[: len(value) // 2]}{mark}{value[len(value) // 2 :]}"


def _calls(message: Message, key: str) -> list[Any]:
    value = message.get(key)
    return (value if isinstance(value, list) else [value]) if value else []


def _function(call: Any) -> dict[str, Any]:
    """Return the name and the arguments of a call, or of a tool, in the form of OpenAI or without its outer part."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    return function if isinstance(function, dict) else {}


def _shape(value: Any, depth: int = _SHAPE_DEPTH) -> Any:
    """Return what of a chat decides how a template writes it: roles and keys, and of the others what kind they are."""
    if isinstance(value, dict) and depth:
        there = [(key, own) for key, own in value.items() if own not in (None, "", [], {})]
        return tuple(
            (key, own if key == "role" and isinstance(own, str) else _shape(own, depth - 1)) for key, own in there
        )
    if isinstance(value, (list, tuple)) and depth:
        return tuple(_shape(own, depth - 1) for own in value)
    return type(value).__name__ if not isinstance(value, str) or value.strip() else "blank"


def _check_values(writer: Writer, messages: list[Message], text: str, asks: bool) -> None:
    """Raise OffmateError if a template writes content that is not text as Python does."""
    others = [m["content"] for m in messages if not isinstance(m["content"], str)]
    if not others:
        return
    without = [m if isinstance(m["content"], str) else {**m, "content": ""} for m in messages]
    silent = writer.if_taken(without, asks) or ""
    for value in others:
        words, as_json = str(value), _as_json(value)
        if words != as_json and text.count(words) > silent.count(words):
            raise OffmateError(
                f"{writer.place}: the tokenizer's chat template writes content {as_json[:_SHOWN_CHARACTERS]} as Python "
                f'does: {words[:_SHOWN_CHARACTERS]}; write that content as text, or as "" if it says nothing'
            )


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
