"""What is said of a row that cannot be used."""

from __future__ import annotations

from ..errors import OffmateError

# An example line of each format, by its name.
EXAMPLES = {
    "text": '{"text": "Once upon a time ..."}',
    "messages": '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}',
    "ShareGPT": '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}',
    "Alpaca": '{"instruction": "Translate to French", "input": "Hi", "output": "Salut"}',
    "prompt/completion": '{"prompt": "2 + 2 =", "completion": " 4"}',
}


def unusable(place: str, what: str, kind: str) -> OffmateError:
    """Return the error for a row: its place, what is wrong there, and an example line of its format."""
    return OffmateError(f"{place}: {what}. A line in the format {kind!r} is {EXAMPLES[kind]}")
