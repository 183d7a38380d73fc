"""Documents become tokens, of which each is trained on or only read; and examples that show which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .chats import assistants, rendered
from .long_texts import special_around, tokens_in_windows
from .rows import Pair, Piece

# Pieces that are tokenized at a time, and characters of text.
_BATCH_PIECES, _BATCH_CHARACTERS = 1024, 2**20
BEGIN, END = "⟦", "⟧"  # around what is trained on, in an example
_SHOWN_CHARACTERS = 600
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Tokens:
    """The tokens of a document, or of a part of a long text.

    Parameters
    ----------
    ids: complements of those that are not trained on. first: whether a document begins with them. is_text: whether
        they are of a text, which can be cut anywhere.
    """

    ids: list[int]
    first: bool
    is_text: bool


@dataclass(frozen=True)
class Example:
    """A document as the model sees it.

    Parameters
    ----------
    text: its tokens as text, what is trained on between `BEGIN` and `END`; the middle of a long one is cut out.
    """

    place: str
    kind: str
    n_tokens: int
    n_trained: int
    text: str


def tokenized(
    source: Iterator[Piece], tokenizer: Any, assistant_only: bool = False, tally: Counter[str] | None = None
) -> Iterator[Tokens]:
    """Yield the tokens of every document, tokenizing many documents at a time, and those of a long text in parts.

    Parameters
    ----------
    assistant_only: store tokens that are not trained on as their complements: in a chat all but the assistant's, and
        the prompt of a pair. A document without a token to train on is left out.
    tally: counts the documents by format, and those that are left out.

    Raises: OffmateError if the tokenizer has no chat template, or if it does not show what the assistant says.
    """
    for piece, ids in _with_ids(source, tokenizer, assistant_only):
        learns = any(number >= 0 for number in ids) or (isinstance(piece.content, str) and not piece.is_empty)
        if tally is not None and piece.first:
            tally[piece.kind if learns else LEFT_OUT] += 1
        if learns:
            yield Tokens(ids, piece.first, isinstance(piece.content, str))


def examples(source: Iterator[Piece], tokenizer: Any, assistant_only: bool) -> Iterator[Example]:
    """Yield every document with a token to train on as the model sees it. Raises: as `tokenized`."""
    for piece, ids in _with_ids(source, tokenizer, assistant_only):
        trained = sum(number >= 0 for number in ids)
        if trained:
            place = piece.place if piece.last else f"{piece.place}, the beginning"
            yield Example(place, piece.kind, len(ids), trained, _shown(ids, tokenizer))


def _with_ids(source: Iterator[Piece], tokenizer: Any, assistant_only: bool) -> Iterator[tuple[Piece, list[int]]]:
    templated = bool(getattr(tokenizer, "chat_template", None))

    def held() -> Iterator[tuple[Piece, list[int]]]:
        for piece, ids in zip(some, _ids(some, tokenizer)):
            yield piece, _marked(piece, ids, tokenizer) if assistant_only else ids

    some: list[Piece] = []
    n_characters = 0
    for piece in source:
        if not piece.last:
            yield from held()
            some, n_characters = [], 0
            yield from _long_text(piece, source, tokenizer)
            continue
        if piece.is_empty:
            yield piece, []
            continue
        some.append(_as_chat(piece) if templated else piece)
        n_characters += len(piece.content) if isinstance(piece.content, str) else 0
        if len(some) == _BATCH_PIECES or n_characters >= _BATCH_CHARACTERS:
            yield from held()
            some, n_characters = [], 0
    yield from held()


def _long_text(first: Piece, source: Iterator[Piece], tokenizer: Any) -> Iterator[tuple[Piece, list[int]]]:
    """Yield the tokens of a text of several pieces, of which the source holds the others, as far as it has them."""
    ended = False

    def parts() -> Iterator[str]:
        nonlocal ended
        yield str(first.content)
        for piece in source:
            yield str(piece.content)
            if piece.last:
                ended = True
                return

    before, behind = special_around(str(first.content), tokenizer)
    piece, newest = first, -1
    for ids in tokens_in_windows(parts(), tokenizer):
        ids = [*before, *ids] if piece.first else ids
        newest = ids[-1] if ids else newest
        yield piece, ids
        piece = replace(first, first=False)
    if ended:
        yield piece, _closed(behind, newest, tokenizer)


def _closed(ids: list[int], newest: int, tokenizer: Any) -> list[int]:
    """Return the last tokens of a document, with the tokenizer's end-of-sequence token, if it has one and lacks it."""
    end = tokenizer.eos_token_id
    return ids if end is None or (ids[-1] if ids else newest) == end else [*ids, end]


def _as_chat(piece: Piece) -> Piece:
    """Return a pair that may be a chat as one."""
    if not isinstance(piece.content, Pair) or not piece.content.chat:
        return piece
    return replace(piece, content=list(piece.content.chat))


def _marked(piece: Piece, ids: list[int], tokenizer: Any) -> list[int]:
    """Return the ids with the complements of those that are not trained on."""
    if isinstance(piece.content, str):
        return ids
    if isinstance(piece.content, list):
        return [i if own else ~i for i, own in zip(ids, assistants(piece, ids, tokenizer))]
    if not piece.content.completion:  # the end-of-sequence token alone is nothing to learn
        return [~i for i in ids]
    prompt = _encode(tokenizer, [piece.content.prompt], special=True)[0]
    # The tokens of the prompt may differ at its end once the completion follows; one that reaches across is learned.
    begin = next((n for n, (a, b) in enumerate(zip(prompt, ids)) if a != b), min(len(prompt), len(ids)))
    return [~i if number < begin else i for number, i in enumerate(ids)]


def _ids(some: list[Piece], tokenizer: Any) -> Iterator[list[int]]:
    texts = [_text(piece, tokenizer) for piece in some]
    # A chat template writes the special tokens itself.
    chats = [isinstance(piece.content, list) for piece in some]
    without = iter(_encode(tokenizer, [text for text, chat in zip(texts, chats) if chat], special=False))
    with_special = iter(_encode(tokenizer, [text for text, chat in zip(texts, chats) if not chat], special=True))
    for chat in chats:
        yield next(without) if chat else _closed(next(with_special), -1, tokenizer)


def _encode(tokenizer: Any, texts: list[str], special: bool) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=special, verbose=False, return_attention_mask=False)["input_ids"]


def _text(piece: Piece, tokenizer: Any) -> str:
    if isinstance(piece.content, Pair):
        return piece.content.prompt + piece.content.completion
    return (
        piece.content
        if isinstance(piece.content, str)
        else rendered(piece.content, piece.place, tokenizer, tools=piece.tools)
    )


def _shown(ids: list[int], tokenizer: Any) -> str:
    """Return tokens as text, with marks around each run of those that are trained on."""
    parts: list[str] = []
    begin = 0
    for position in range(1, len(ids) + 1):
        if position == len(ids) or (ids[position] < 0) != (ids[begin] < 0):
            run = [i if i >= 0 else ~i for i in ids[begin:position]]
            words = _cut(tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            parts.append(words if ids[begin] < 0 else f"{BEGIN}{words}{END}")
            begin = position
    return "".join(parts)


def _cut(words: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return words if len(words) <= _SHOWN_CHARACTERS else f"{words[:half]} ... {words[-half:]}"
