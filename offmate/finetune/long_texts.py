"""The tokens of a text that is too long to be tokenized at once, as they would be at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Characters that two windows share, and those of them whose tokens have to be equal in both. Near its ends, a window
# may have other tokens than the whole text, such as the blank that some tokenizers put before a text.
OVERLAP = 4096
_CHECKED = (OVERLAP // 4, 3 * OVERLAP // 4)


@dataclass(frozen=True)
class _Window:
    """A part of the text with its tokens, the characters of each, and whether the text may be cut before it."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]
    cuts: list[bool]

    def first_from(self, character: int) -> int:
        """Return the number of the first token that begins at a character or behind it."""
        return bisect_left(self.spans, (character, 0))

    def checked(self, shift: int) -> list[tuple[int, int, int, bool]]:
        """Return the tokens that the windows must share, with their characters counted from `shift`."""
        begin, end = (self.first_from(shift + edge) for edge in _CHECKED)
        shared = zip(self.ids[begin:end], self.spans[begin:end], self.cuts[begin:end])
        return [(i, a - shift, b - shift, cut) for i, (a, b), cut in shared]


def tokens_in_windows(parts: Iterator[str], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of a text, without special ones, with about one part of it in memory.

    Each part is tokenized with the last `OVERLAP` characters before it. Both sides are joined where their tokens agree
    over half of these characters. Where they do not agree, the window grows by the part. A tokenizer that does not
    tell which characters a token covers (a slow one of transformers) gets the whole text at once. So does one that
    takes the whole text for one word and compares the likelihoods of its divisions: they are sums of floats, so that
    equally likely divisions of a word are told apart by all characters before them.

    Parameters
    ----------
    parts: the text in order, each part but the last one longer than `OVERLAP` characters.
    """
    if not getattr(tokenizer, "is_fast", False):
        yield tokenizer("".join(parts), add_special_tokens=False, verbose=False)["input_ids"]
        return
    window, begin = _window(next(parts), tokenizer), 0
    if window.ids and not any(window.cuts):
        window = _window("".join((window.text, *parts)), tokenizer)
    for part in parts:
        shift = len(window.text) - OVERLAP
        after = _window(window.text[shift:] + part, tokenizer)
        shared = window.checked(shift)
        first = next((number for number, (*_, cut) in enumerate(shared) if cut), None)
        if first is not None and shared == after.checked(0):
            yield window.ids[begin : window.first_from(shift + _CHECKED[0]) + first]
            window, begin = after, after.first_from(_CHECKED[0]) + first
        else:
            character = window.spans[begin][0] if begin else 0
            window = _window(window.text + part, tokenizer)
            begin = window.first_from(character) if begin else 0
    yield window.ids[begin:]


def special_around(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer puts before and behind a text."""
    found = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids, added = found["input_ids"], found["special_tokens_mask"]
    own = [number for number, is_added in enumerate(added) if not is_added]
    return (ids[: own[0]], ids[own[-1] + 1 :]) if own else (ids, [])


def _window(text: str, tokenizer: Any) -> _Window:
    found = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    ids = found["input_ids"]
    cuts = [True] * len(ids)
    if type(tokenizer.backend_tokenizer.model).__name__ == "Unigram":  # words are divided one by one
        words = found.word_ids()
        cuts = [before != word for before, word in zip([*words[:1], *words], words)]
    return _Window(text, ids, found["offset_mapping"], cuts)
