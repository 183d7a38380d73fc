"""Files of text: their tokens are those of the whole text, and what is held out joins no neighbours."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

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
