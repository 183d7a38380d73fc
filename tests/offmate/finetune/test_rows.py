"""Data in the formats that people have, from every kind of file, and what bad rows are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offmate.errors import OffmateError
from offmate.finetune.data import check_source, pieces
from offmate.finetune.rows import EXAMPLES, Pair, read_row

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


def test_every_example_line_is_of_its_own_format():
    for kind, line in EXAMPLES.items():
        piece = read_row(json.loads(line), "p")
        assert piece is not None and piece.kind == kind


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}, CHAT),
        ({"conversations": CHAT}, CHAT),
        ({"conversations": CHAT, "system": "s"}, [{"role": "system", "content": "s"}, *CHAT]),
        ({"messages": json.dumps(CHAT)}, CHAT),
        ({"messages": CHAT, "text": 3, "prompt": "p", "completion": "c"}, CHAT),
        ({"prompt": "a", "completion": "b", "instruction": "i", "output": "o"}, Pair("a", "b")),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
        ({"instruction": "Say", "input": "Hi", "output": "Hello!", "system": ""},
         Pair("Say\n\nHi\n\n", "Hello!", ({"role": "user", "content": "Say\n\nHi"}, CHAT[1]))),
    ],
)  # fmt: skip
def test_rows_become_documents(row, content):
    piece = read_row(row, "p")
    assert piece is not None and piece.content == content
    assert piece.trained_from == (1 if isinstance(row.get("prompt"), list) else 0)


@pytest.mark.parametrize("row", [{"text": ""}, {"conversations": []}, {"instruction": "i", "output": ""}])
def test_rows_without_anything_to_learn_are_skipped(row):
    assert read_row(row, "p") is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q"}, ["none of the known formats (keys: question)", *EXAMPLES.values()]),
        (3, ["a int instead of an object", EXAMPLES["text"]]),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, ["the speaker 'narrator'", EXAMPLES["ShareGPT"]]),
        ({"conversations": [{"value": "x"}]}, ["a message without 'from' and 'value'", EXAMPLES["ShareGPT"]]),
        ({"messages": "hello"}, ["'hello' is not a list of messages", EXAMPLES["messages"]]),
        ({"messages": "[{"}, ["a chat that is broken JSON", EXAMPLES["messages"]]),
        ({"instruction": 3, "output": "x"}, ["'instruction' is a int, not text", EXAMPLES["Alpaca"]]),
        ({"prompt": "x", "completion": 4}, ["'completion' is a int, not text", EXAMPLES["prompt/completion"]]),
    ],
)
def test_a_refusal_has_the_place_the_reason_and_an_example_line(row, said):
    with pytest.raises(OffmateError) as caught:
        read_row(row, "a.jsonl, line 7")
    assert str(caught.value).startswith("a.jsonl, line 7: ")
    assert all(words in str(caught.value) for words in said)


def written(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


def test_json_is_a_list_or_lines(tmp_path):
    rows = [{"text": "one"}, {"text": "[two]"}]
    for name, content in (
        ("list.json", json.dumps(rows, indent=2)),
        ("bom.json", "\ufeff " + json.dumps(rows)),
        ("lines.json", "\n".join(map(json.dumps, rows))),
    ):
        assert [piece.content for piece in pieces(written(tmp_path, name, content))] == ["one", "[two]"]
    assert list(pieces(written(tmp_path, "none.json", "[]"))) == []
    for content in ('[{"text": "one"}, {"text": ', '[{"text": "one"} {"text"'):
        with pytest.raises(OffmateError, match=r"item 2: broken JSON: .*A good line is"):
            list(pieces(written(tmp_path, "bad.json", content)))


def test_fields_of_csv_stay_text(tmp_path):
    table = written(tmp_path, "a.csv", '\ufeffprompt,completion,more\nanswer?,42,x\n"a, ""b""\nc",NA\n')
    assert [piece.content for piece in pieces(table)] == [Pair("answer?", "42"), Pair('a, "b"\nc', "NA")]
    with pytest.raises(OffmateError, match=r"a.csv, line 2: none of the known formats \(keys: x\)"):
        list(pieces(written(tmp_path, "a.csv", "x\n1\n")))
    with pytest.raises(OffmateError, match=r"broken CSV: .* the first line names the columns"):
        list(pieces(written(tmp_path, "a.csv", 'text\n"open')))


def test_parquet_is_read_through_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": CHAT, "id": 1}, {"messages": CHAT[:1], "id": 2}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert [piece.content for piece in pieces(str(tmp_path / "a.parquet"))] == [CHAT, CHAT[:1]]
    assert next(iter(pieces(str(tmp_path / "a.parquet")))).place.endswith("a.parquet, row 1")
    (tmp_path / "a.parquet").write_bytes(b"no")
    with pytest.raises(OffmateError, match="cannot be read as Parquet"):
        list(pieces(str(tmp_path / "a.parquet")))


def test_a_folder_with_parquet_needs_datasets_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OffmateError, match=r"datasets is not installed; .* pip install datasets"):
        check_source(str(tmp_path))
