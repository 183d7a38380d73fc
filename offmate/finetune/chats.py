"""Chats as the model reads them, and which of their tokens are the assistant's."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from ..errors import OffmateError
from .messages import SYSTEM_ROLES, Message
from .rows import Piece
from .templates import Writer, check_written

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "Train on all tokens (--train-on all), remove the row, or mark the assistant's part in the tokenizer's chat "
    "template with {% generation %} and {% endgeneration %}"
)
_MARKER = "\ue000"  # a character that no text uses


def rendered(
    messages: list[Message],
    place: str,
    tokenizer: Any,
    *,
    asks: bool = False,
    tools: tuple[dict[str, Any], ...] = (),
) -> str:
    """Return a chat as the tokenizer's template writes it.

    Parameters
    ----------
    asks: end with the words after which the assistant speaks (the generation prompt). tools: those that the chat
        describes to the model.

    Raises: OffmateError if the tokenizer has no template, or if the template refuses the messages, leaves out
        something that they say, or writes what is not text as Python writes it.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise OffmateError(
            f"{place}: chat messages, but the tokenizer has no chat template; use the tokenizer of a chat model, or "
            'write each conversation as text, such as {"text": "Question: ... Answer: ..."}'
        )
    writer = Writer(tokenizer, place, tools)
    text = writer.write(messages, asks)
    check_written(writer, messages, text, asks)
    return text


def assistants(piece: Piece, ids: list[int], tokenizer: Any) -> list[bool]:
    """Return for every token of a chat whether it is one that the assistant says and learns.

    The template's own marks count if it has some. Otherwise the tokens up to each answer, and those up to its end, must
    be the beginning of the whole chat's: what lies between them is the answer. If the template writes earlier messages
    in another way once later ones follow, TRL's template for training decides, if it writes the same text.

    Parameters
    ----------
    ids: the whole chat's tokens.

    Raises: OffmateError with the place if none of these ways can tell.
    """
    messages, writer = _messages(piece), Writer(tokenizer, piece.place, piece.tools)
    if _MARK.search(_template(writer)):
        mask = _by_marks(messages, ids, writer, None)
        if mask is None:
            raise AssertionError("a chat template must yield the same tokens every time")
    else:
        spans, fault = _by_prefixes(messages, ids, writer)
        mask = _mask(spans, len(ids)) if not fault else _by_marks(messages, ids, writer, _training(tokenizer))
        if mask is None:
            raise OffmateError(f"{piece.place}: cannot tell which tokens are the assistant's: {fault}. {_REMEDY}")
    return _weighed(piece, mask, ids, writer)


def _weighed(piece: Piece, whole: list[bool], ids: list[int], writer: Writer) -> list[bool]:
    """Return the mask without what is only read: what comes before the answers of a pair, and messages of weight 0."""
    messages, mask = _messages(piece), list(whole)
    if piece.trained_from:
        begin = len(_encode(writer.write(messages[: piece.trained_from]), writer.tokenizer))
        mask = [own and number >= begin for number, own in enumerate(mask)]
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    unweighted = [number for number in answers if messages[number].get("weight") == 0]
    if not unweighted:
        return mask
    spans, fault = _by_prefixes(messages, ids, writer, unweighted)
    if fault:
        # Where each answer is one run of tokens, the runs tell which is which.
        runs = _runs(whole)
        if len(runs) != len(answers):
            raise OffmateError(
                f"{piece.place}: cannot tell which tokens are those of message {unweighted[0] + 1}, whose weight is 0: "
                f"{fault}. Remove its weight or the row"
            )
        spans = [run for run, number in zip(runs, answers) if number in unweighted]
    for begin, end in spans:
        mask[begin:end] = [False] * (end - begin)
    return mask


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return where each run of tokens that are trained on begins and ends."""
    edges = [n for n in range(len(mask) + 1) if (n > 0 and mask[n - 1]) != (n < len(mask) and mask[n])]
    return list(zip(edges[::2], edges[1::2]))


def _template(writer: Writer) -> str:
    return writer.tokenizer.get_chat_template(tools=list(writer.tools) or None)


def _messages(piece: Piece) -> list[Message]:
    assert isinstance(piece.content, list)
    return piece.content


def _by_prefixes(
    messages: list[Message], ids: list[int], writer: Writer, numbers: list[int] | None = None
) -> tuple[list[tuple[int, int]], str]:
    """Return where each answer begins and ends among the tokens, and what keeps that from being told.

    Parameters
    ----------
    numbers: those of the messages that are looked for; None looks for all of the assistant's.
    """
    whole, tokenizer = writer.write(messages), writer.tokenizer
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or (numbers is not None and number not in numbers):
            continue
        edges = []
        speaks_first = all(earlier["role"] in SYSTEM_ROLES for earlier in messages[:number])
        for count, asks in ((number, True), (number + 1, False)):
            try:
                if asks and speaks_first:
                    text = _opening(messages, number, whole, writer)
                else:
                    text = writer.write(messages[:count], asks)
            except OffmateError as error:
                return [], f"its first {count} messages alone cannot be written ({error})"
            if text is None:
                return [], "the assistant speaks first, and the chat template does not show where its answer begins"
            tokens = _encode(text, tokenizer)
            if not whole.startswith(text):
                return [], (
                    f"the chat template writes the first {count} of {len(messages)} messages differently when others "
                    "follow"
                )
            if ids[: len(tokens)] != tokens:
                words = "begins" if asks else "ends"
                return [], (
                    f"one token covers the place where message {number + 1} {words}; remove spaces and line breaks at "
                    "both ends of that message"
                )
            edges.append(len(tokens))
        begin, end = edges
        spans.append((begin, _end_of_turn(ids, begin, end, tokenizer)))
    return spans, ""


def _opening(messages: list[Message], number: int, whole: str, writer: Writer) -> str | None:
    """Return what a template writes before an answer that nobody asked for; None if that cannot be told.

    Templates seldom write a chat without a message of the user, so the answer's own place in the text is found.
    """
    marker = _MARKER
    while marker in whole:
        marker += _MARKER
    answer = messages[number]
    marked = [*messages[:number], {**answer, "content": marker}, *messages[number + 1 :]]
    before, found, _ = writer.write(marked).partition(marker)
    # The words after which the assistant speaks are those that a template writes behind the user's next message.
    later = [*messages[: number + 1], {"role": "user", "content": marker}]
    told, asked = (writer.write(later, asks) for asks in (False, True))
    if not found or not whole.startswith(before) or not asked.startswith(told):
        return None
    words = asked[len(told) :]
    if not words:
        own = answer["content"]
        shown = isinstance(own, str) and whole[len(before) :].startswith((own, own.strip()))
        # A blank before the answer may be one token with its first word, and is learned wherever a user spoke before.
        return before.rstrip() if shown else None
    # The assistant's thoughts may stand between the words after which it speaks and the answer.
    at = before.rfind(words)
    return before[: at + len(words)] if at >= 0 else None


def _end_of_turn(ids: list[int], begin: int, end: int, tokenizer: Any) -> int:
    """Return where an answer ends: behind its last special token, if nothing but blanks of the template follow it."""
    special = set(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    for position in range(end - 1, begin - 1, -1):
        if ids[position] in special:
            return position + 1
        if tokenizer.decode([ids[position]]).strip():
            break
    return end


def _mask(spans: list[tuple[int, int]], length: int) -> list[bool]:
    mask = [False] * length
    for begin, end in spans:
        mask[begin:end] = [True] * (end - begin)
    return mask


def _by_marks(messages: list[Message], ids: list[int], writer: Writer, template: str | None) -> list[bool] | None:
    """Return the tokens that a template marks; None if its tokens are not these, or if there is no such template."""
    if template is None and not _MARK.search(_template(writer)):
        return None
    marked = writer.tokenizer.apply_chat_template(
        messages,
        tools=list(writer.tools) or None,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return [bool(own) for own in marked["assistant_masks"]] if list(marked["input_ids"]) == ids else None


def _training(tokenizer: Any) -> str | None:
    """Return TRL's template for training that belongs to the tokenizer's; None without TRL, or if it has none."""
    if importlib.util.find_spec("trl") is None:
        return None
    try:
        from trl.chat_template_utils import get_training_chat_template

        return get_training_chat_template(tokenizer)
    except (ImportError, ValueError):  # another version, or a template that it does not know
        return None


def _encode(text: str, tokenizer: Any) -> list[int]:
    # A chat template writes the special tokens itself.
    return tokenizer(text, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
