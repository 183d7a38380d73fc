"""The tokens of a text that is too long to be tokenized at once, as they would be at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
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

    Each part is tokenized with the last `OVERLAP` characters before it. Both sides are joined between two words, where
    their tokens and their words agree over half of these characters. Where they do not agree, or have one word alone
    there, the window grows. A tokenizer that does not tell which characters a token covers (a slow one of
    transformers) gets the whole text at once.

    One that takes any text for a single word has no such places. If it joins pairs of tokens by rank (BPE), as Llama
    2's does, both sides are joined anywhere. Others get the whole text at once: equally likely divisions of a word
    (Unigram) are told apart by sums of floats over all characters before them.

    Parameters
    ----------
    parts: the text in order, each part but the last one longer than `OVERLAP` characters.
    """
    fast = getattr(tokenizer, "is_fast", False)
    in_words = fast and _takes_apart(tokenizer)
    if not fast or not (in_words or _joins_by_rank(tokenizer)):
        yield tokenizer("".join(parts), add_special_tokens=False, verbose=False)["input_ids"]
        return
    window, begin, further = _window(next(parts), tokenizer, in_words), 0, 1
    for part in parts:
        shift = len(window.text) - OVERLAP
        after = _window(window.text[shift:] + part, tokenizer, in_words)
        shared = window.checked(shift)
        first = next((number for number, (*_, cut) in enumerate(shared) if cut), None)
        if first is not None and shared == after.checked(0):
            yield window.ids[begin : window.first_from(shift + _CHECKED[0]) + first]
            window, begin, further = after, after.first_from(_CHECKED[0]) + first, 1
        else:  # by twice as much each time, so that a long word is not tokenized over and over
            character = window.spans[begin][0] if begin else 0
            text = "".join((window.text, part, *islice(parts, further - 1)))
            window, further = _window(text, tokenizer, in_words), 2 * further
            begin = window.first_from(character) if begin else 0
    yield window.ids[begin:]


def special_around(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer puts before and behind a text."""
    found = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids, added = found["input_ids"], found["special_tokens_mask"]
    own = [number for number, is_added in enumerate(added) if not is_added]
    return (ids[: own[0]], ids[own[-1] + 1 :]) if own else (ids, [])


def _takes_apart(tokenizer: Any) -> bool:
    """Return whether a tokenizer divides a text into words, each of which gets its tokens on its own."""
    return len(set(tokenizer("one two, 3\nfour", add_special_tokens=False).word_ids())) > 1


def _joins_by_rank(tokenizer: Any) -> bool:
    """Return whether tokens far from each other do not matter to each other, and none is left out."""
    model = tokenizer.backend_tokenizer.model
    return type(model).__name__ == "BPE" and model.unk_token is not None


def _window(text: str, tokenizer: Any, in_words: bool) -> _Window:
    found = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    ids, spans = found["input_ids"], found["offset_mapping"]
    # Several tokens of one character begin at the same place.
    cuts = [a[0] != b[0] for a, b in zip([*spans[:1], *spans], spans)]
    if in_words:
        words = found.word_ids()
        cuts = [cut and before != word for cut, before, word in zip(cuts, [*words[:1], *words], words)]
    return _Window(text, ids, spans, cuts)
