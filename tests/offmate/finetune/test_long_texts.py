"""Files of text: their tokens are those of the whole text, and what is held out joins no neighbours."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offmate.finetune import data
from offmate.finetune.forecast import glimpse
from offmate.finetune.long_texts import OVERLAP, tokens_in_windows
from offmate.finetune.packing import Batches, write_tokens
from offmate.finetune.preview import Work
from offmate.finetune.settings import make_settings

from .finetune_kit import (
    TEXT,
    make_blank_tokenizer,
    make_even_tokenizer,
    make_likely_tokenizer,
    make_lower_tokenizer,
    make_tokenizer,
)

TOKENIZERS = {
    "words": make_tokenizer,
    "blank": make_blank_tokenizer,
    "likely": make_likely_tokenizer,
    "lower": make_lower_tokenizer,
}


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE_CHARACTERS", OVERLAP + 1001)


def written(folder: Path, text: str, name: str = "a.txt") -> str:
    (folder / name).write_bytes(text.encode())
    return str(folder / name)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", [TEXT[:40_000], TEXT[:9_000].replace("\n", " "), "one", "é\r\n😀" * 4000])
def test_a_file_has_the_tokens_of_its_whole_text(tmp_path, short_pieces, name, text):
    tokenizer = TOKENIZERS[name]()
    packed = write_tokens(written(tmp_path, text), tokenizer, 0.0, tmp_path / "tokens")
    whole = tokenizer(text)["input_ids"]
    assert packed.train.tolist() == whole + [tokenizer.eos_token_id] * (whole[-1] != tokenizer.eos_token_id)
    assert packed.tally == {"text": 1}


@pytest.mark.parametrize("text", ["a" * 30_000, " " * 30_000, "ab" * 15_000 + TEXT[:9_000] + "b" * 9_001])
def test_where_windows_do_not_agree_they_grow(text):
    tokenizer = make_blank_tokenizer()
    parts = (text[begin : begin + OVERLAP + 1] for begin in range(0, len(text), OVERLAP + 1))
    found = [i for ids in tokens_in_windows(parts, tokenizer) for i in ids]
    assert found == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("blanks", [1, 30])
def test_equally_likely_tokens_are_chosen_as_in_the_whole_text(words, blanks):
    draw, tokenizer = random.Random(0), make_even_tokenizer(words=words)
    pieces = ["***", "c", "*****", *["b ", "bc "] * blanks]
    text = "".join(draw.choice(pieces) for _ in range(12_000))
    parts = (text[begin : begin + OVERLAP + 1] for begin in range(0, len(text), OVERLAP + 1))
    found = [i for ids in tokens_in_windows(parts, tokenizer) for i in ids]
    assert found == tokenizer(text, add_special_tokens=False)["input_ids"]


def _tokenizer(model: Any, words: Any = None, normalizer: Any = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    if words is not None:
        tokenizer.pre_tokenizer = words
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _pieces_of_one_character() -> tuple[PreTrainedTokenizerFast, str]:
    """A character that becomes three tokens, of which the first belongs to the word before it."""
    draw = random.Random(1)
    scores = [("<unk>", 0.0), *((letter, -2.0) for letter in "abcxyz/")]
    tokenizer = _tokenizer(models.Unigram(scores, 0), pre_tokenizers.Punctuation(), normalizers.NFKC())
    words = (draw.choice(["x" * draw.randint(1, 700) + "\u2100", "y" * draw.randint(1, 1400)]) for _ in range(60))
    return tokenizer, "".join(words)


def _digits_in_threes() -> tuple[PreTrainedTokenizerFast, str]:
    """A number that is longer than a window, whose digits belong together in threes from its first one on."""
    ranks = {letter: number for number, letter in enumerate("012 ")} | {"12": 4}
    words = pre_tokenizers.Split(Regex(r"\d{1,3}| "), "isolated")
    numbers = ("0" * digits + "1212 " + "0 " * 9000 for digits in range(9000, 9006))
    return _tokenizer(models.BPE(ranks, [("1", "2")]), words), "".join(numbers)


def _a_quotation() -> tuple[PreTrainedTokenizerFast, str]:
    """A quotation is one word, however long it is, and from its middle on the rest looks quoted."""
    ranks = {letter: number for number, letter in enumerate('ab" ')} | {"a b": 4, "a ": 5}
    words = pre_tokenizers.Split(Regex(r'"[^"]*"|[ ]|[^" ]+'), "isolated")
    text = '"' + "b" * 9000 + " a b" * 3 + '" a b' + "b" * 9000
    return _tokenizer(models.BPE(ranks, [("a", " "), ("a ", "b")]), words), text


def _characters_left_out() -> tuple[PreTrainedTokenizerFast, str]:
    """The places of the tokens behind an unknown character are wrong, since it has no token."""
    ranks = {letter: number for number, letter in enumerate("abcdefgh")}
    return _tokenizer(models.BPE(ranks, [])), "a" * 2000 + "z" + "a" * 12000 + "b" * 5


@pytest.mark.parametrize("case", [_pieces_of_one_character, _digits_in_threes, _a_quotation, _characters_left_out])
@pytest.mark.parametrize("size", [1, 700, 1500, 3000])
def test_windows_are_joined_between_words(case, size):
    tokenizer, text = case()
    parts = (text[begin : begin + OVERLAP + size] for begin in range(0, len(text), OVERLAP + size))
    found = [i for ids in tokens_in_windows(parts, tokenizer) for i in ids]
    assert found == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_long_text_is_never_in_memory_as_a_whole(monkeypatch):
    tokenizer, given, seen = make_tokenizer(), 0, 0

    def parts():
        nonlocal given
        for begin in range(0, 80_000, 8_000):
            given += 1
            yield TEXT[begin : begin + 8_000]

    for ids in islice(tokens_in_windows(parts(), tokenizer), 9):
        seen += len(tokenizer.decode(ids))
        assert seen > 8_000 * (given - 2)


def test_a_tokenizer_that_does_not_tell_characters_gets_the_text_at_once():
    class Slow:
        is_fast = False

        def __call__(self, text, **kwargs):
            return {"input_ids": [ord(character) for character in text]}

    assert list(tokens_in_windows(iter(["ab", "c"]), Slow())) == [[97, 98, 99]]


def test_of_a_single_text_the_end_is_held_out(tmp_path, short_pieces):
    tokenizer = make_blank_tokenizer()
    packed = write_tokens(written(tmp_path, TEXT[:20_000]), tokenizer, 0.1, tmp_path / "tokens")
    whole = [*tokenizer(TEXT[:20_000])["input_ids"], tokenizer.eos_token_id]
    held = int(len(whole) * 0.1)
    assert packed.train.tolist() == whole[:-held] and packed.eval.tolist() == whole[-held:]


@pytest.mark.parametrize(
    ("rows", "held"),
    [
        ([{"text": "one two"}, {"text": "three four five six"}], "</s>"),
        ([{"text": "one"}] * 20, "one</s>"),
        ([{"text": "one"}, {"prompt": "a", "completion": " b"}], ""),
        ([{"prompt": "a", "completion": " b"}, {"text": "one two three four " * 9}], "end"),
    ],
)
def test_documents_are_held_out_whole_or_at_the_end_of_texts(tmp_path, rows, held):
    tokenizer = make_tokenizer()
    source = written(tmp_path, "\n".join(map(json.dumps, rows)), "a.jsonl")
    packed = write_tokens(source, tokenizer, 0.05, tmp_path / "tokens")
    found = tokenizer.decode(packed.eval)
    everything = [i for row in rows for i in [*tokenizer("".join(row.values()))["input_ids"], tokenizer.eos_token_id]]
    assert found == held if held != "end" else found.endswith("</s>") and len(found) > 5
    assert sorted([*packed.train, *packed.eval]) == sorted(everything)
    assert held == "one</s>" or [*packed.train, *packed.eval] == everything


def test_the_example_of_a_long_text_is_its_beginning(tmp_path, short_pieces):
    settings = make_settings({"model": "m", "data": written(tmp_path, TEXT[:30_000]), "output": "o"})
    (shown,) = glimpse(settings, make_tokenizer())
    assert shown.place.endswith("a.txt, line 1, the beginning") and shown.text.startswith("⟦" + TEXT[:20])
    assert "</s>" not in shown.text


def test_what_fills_no_sequence_and_no_step_is_said(tmp_path):
    settings = make_settings({"model": "m", "data": written(tmp_path, TEXT[:900]), "output": "o", "learning_rate": 1})
    packed = write_tokens(settings.data, make_tokenizer(), 0.0, tmp_path / "tokens")
    whole = len(packed.train) // 9
    line, _ = Work(packed, Batches(packed.train, 9, 5, 1, 0), 9).lines(settings)
    assert len(packed.train) % 9 and whole % 5
    assert f" {len(packed.train) % 9} token" in line and "at the end left out, too few for a sequence; " in line
    assert f" {whole % 5} sequence" in line and " left out of each epoch at random, too few for a step; " in line
    packed = replace(packed, train=packed.train[:90])
    assert "left out" not in Work(packed, Batches(packed.train, 9, 5, 1, 0), 9).lines(settings)[0]


def test_a_held_out_document_that_is_most_of_the_data_is_a_doubt(tmp_path):
    rows = [{"text": "one"}] * 19 + [{"text": TEXT[:900]}, {"text": "one"}]
    settings = make_settings({"model": "m", "data": "d", "output": "o", "warmup_steps": 0})
    source = written(tmp_path, "\n".join(map(json.dumps, rows)), "a.jsonl")
    packed = write_tokens(source, make_tokenizer(), 0.05, tmp_path / "tokens")
    (doubt,) = Work(packed, Batches(packed.train, 7, 1, 1, 0), 9).doubts(settings)
    assert "% of all tokens are held out, although eval_fraction is 0.05" in doubt and "split long ones" in doubt
    packed = write_tokens(written(tmp_path, TEXT[:900]), make_tokenizer(), 0.05, tmp_path / "tokens")
    assert Work(packed, Batches(packed.train, 7, 1, 1, 0), 9).doubts(settings) == []
