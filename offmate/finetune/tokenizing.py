"""Documents become tokens, of which each is trained on or only read; and examples that show which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .chats import assistants, rendered
from .rows import Pair, Piece

_BATCH_PIECES = 1024
BEGIN, END = "⟦", "⟧"  # around what is trained on, in an example
_SHOWN_CHARACTERS = 600
LEFT_OUT = "left out"


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
) -> Iterator[list[int]]:
    """Yield the token ids of every piece, tokenizing many pieces at a time.

    Parameters
    ----------
    assistant_only: store tokens that are not trained on as their complements: in a chat all but the assistant's, and
        the prompt of a pair. A document without a token to train on is left out.
    tally: counts the documents by format, and those that are left out.

    Raises: OffmateError if the tokenizer has no chat template, or if it does not show what the assistant says.
    """
    for piece, ids in _with_ids(source, tokenizer, assistant_only):
        learns = any(number >= 0 for number in ids) or isinstance(piece.content, str)
        if tally is not None and piece.first:
            tally[piece.kind if learns else LEFT_OUT] += 1
        if learns:
            yield ids


def examples(source: Iterator[Piece], tokenizer: Any, assistant_only: bool) -> Iterator[Example]:
    """Yield every document with a token to train on as the model sees it. Raises: as `tokenized`."""
    for piece, ids in _with_ids(source, tokenizer, assistant_only):
        trained = sum(number >= 0 for number in ids)
        if trained:
            yield Example(piece.place, piece.kind, len(ids), trained, _shown(ids, tokenizer))


def _with_ids(source: Iterator[Piece], tokenizer: Any, assistant_only: bool) -> Iterator[tuple[Piece, list[int]]]:
    templated = bool(getattr(tokenizer, "chat_template", None))
    while some := [_as_chat(piece) if templated else piece for piece in islice(source, _BATCH_PIECES)]:
        for piece, ids in zip(some, _ids(some, tokenizer)):
            yield piece, _marked(piece, ids, tokenizer) if assistant_only else ids


def _as_chat(piece: Piece) -> Piece:
    """Return a pair that may be a chat as one."""
    if not isinstance(piece.content, Pair) or not piece.content.chat:
        return piece
    return Piece(list(piece.content.chat), piece.place, kind=piece.kind)


def _marked(piece: Piece, ids: list[int], tokenizer: Any) -> list[int]:
    """Return the ids with the complements of those that are not trained on."""
    if isinstance(piece.content, str):
        return ids
    if isinstance(piece.content, list):
        return [i if own else ~i for i, own in zip(ids, assistants(piece, ids, tokenizer))]
    prompt = _encode(tokenizer, [piece.content.prompt], special=True)[0]
    # The tokens of the prompt may differ at its end once the completion follows; one that reaches across is learned.
    begin = next((n for n, (a, b) in enumerate(zip(prompt, ids)) if a != b), min(len(prompt), len(ids)))
    return [~i if number < begin else i for number, i in enumerate(ids)]


def _ids(some: list[Piece], tokenizer: Any) -> Iterator[list[int]]:
    texts = [_text(piece, tokenizer) for piece in some]
    # A chat template writes the special tokens itself, and a later piece continues its document.
    opens = [piece.first and not isinstance(piece.content, list) for piece in some]
    with_special = iter(_encode(tokenizer, [t for t, o in zip(texts, opens) if o], special=True))
    without = iter(_encode(tokenizer, [t for t, o in zip(texts, opens) if not o], special=False))
    end = tokenizer.eos_token_id
    for piece, own in zip(some, opens):
        ids = next(with_special if own else without)
        if ids and ids[-1] == end and not piece.last:
            ids = ids[:-1]
        elif not isinstance(piece.content, list) and piece.last and end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        yield ids


def _encode(tokenizer: Any, texts: list[str], special: bool) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=special, verbose=False, return_attention_mask=False)["input_ids"]


def _text(piece: Piece, tokenizer: Any) -> str:
    if isinstance(piece.content, Pair):
        return piece.content.prompt + piece.content.completion
    return piece.content if isinstance(piece.content, str) else rendered(piece.content, piece.place, tokenizer)


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
