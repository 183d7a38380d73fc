"""Data in the formats that people have, from every kind of file, and what bad rows are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offmate.errors import ArgumentValueError, OffmateError
from offmate.finetune.data import check_source, pieces
from offmate.finetune.preview import not_read_lines
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


def said_by(role: str, content, **more) -> dict:
    return {"messages": [CHAT[0], {"role": role, "content": content, **more}]}


@pytest.mark.parametrize(
    ("row", "content"),
    [
        (said_by("assistant", [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]), "ab"),
        (said_by("assistant", None, tool_calls=[{"type": "function"}]), None),
        (said_by("tool", {"degrees": 3}), {"degrees": 3}),
        (said_by("tool", [{"type": "car"}]), [{"type": "car"}]),
        (said_by("user", ""), ""),
        ({"conversations": [{"from": "gpt", "value": [{"type": "text", "text": "a"}]}]}, "a"),
    ],
)  # fmt: skip
def test_content_is_text_parts_of_text_or_what_tools_say(row, content):
    assert read_row(row, "p").content[-1]["content"] == content


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (said_by("user", [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "u"}]),
         "message 2 (user), part 2 is of the type 'image_url'"),
        (said_by("tool", [{"type": "image"}]), "message 2 (tool), part 1 is of the type 'image'"),
        (said_by("assistant", [{"type": "text", "text": None}]), "message 2 (assistant), part 1 holds no text"),
        (said_by("assistant", 42), "message 2 (assistant) has the content 42 (int), which is not text"),
        (said_by("assistant", None, tool_calls=None), "message 2 (assistant) has the content null; write its text"),
        (said_by("user", None), "message 2 (user) has the content null"),
        ({"conversations": [{"from": "gpt", "value": 4.5}]}, "message 1 (assistant) has the content 4.5 (float)"),
        (said_by("Usr", "x"), "message 2 has the role 'Usr'; write one of system, user, assistant, developer, tool"),
        ({"conversations": [{"role": "system", "content": "a"}, *CHAT], "system": "b"},
         "'system' says 'b', but the chat's own system turn says 'a'; keep one"),
        ({"prompt": "x", "completion": None}, "'completion' is null (keys: prompt, completion)"),
        ({"prompt": "x", "text": None}, "'completion' is missing (keys: prompt, text)"),
        ({"instruction": None, "input": "x"}, "'instruction' is null and 'output' is missing"),
        ({"messages": None}, "'messages' is null"),
        ({"text": 3}, "'text' is a int, not text"),
        ({"text": "", "prompt": "x"}, "'completion' is missing"),
        ({"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"}, "'system' says 'b', but the chat's"),
        ({"prompt": "x", "completion": "y", "system": "s"}, "'system' cannot be used in this format: put it at"),
        ({"prompt": "x", "completion": "y", "input": "z"}, "'input' cannot be used in this format: put it into"),
        ({"prompt": "x", "completion": "y", "tools": [{}]}, "'tools' cannot be used in this format: describe the"),
        ({"instruction": "x", "output": "y", "tools": "[{}]"}, "'tools' cannot be used in this format"),
        ({"messages": CHAT, "history": [["a", "b"]]}, "'history' cannot be used in this format"),
        ({"messages": CHAT, "functions": [{"name": "f"}]}, "write each function as one of 'tools'"),
        ({"messages": CHAT, "tools": 3}, "'tools' is '3', not a list of tools"),
        ({"messages": CHAT, "system": 0}, "'system' is a int, not text"),
        ({"prompt": json.dumps(CHAT[:1]), "completion": "y"}, "'completion' is text, but 'prompt' is a list"),
        ({"prompt": "x", "completion": json.dumps(CHAT[1:])}, "'prompt' is text, but 'completion' is a list"),
        ({"prompt": str(CHAT[:1]), "completion": str(CHAT[1:])}, "a chat that is broken JSON"),
        ({"instruction": "x", "output": "y", "history": ["a"]}, "'history' is \"['a']\", not a list such as"),
        ({"instruction": "x", "output": "y", "history": 0}, "'history' is '0', not a list such as"),
        ({"instruction": "x", "output": "y", "input": 0}, "'input' is a int, not text"),
        ({"instruction": "x", "output": "y", "input": []}, "'input' is a list, not text"),
        ({"instruction": "x", "output": "y", "system": 0}, "'system' is a int, not text"),
        ({"conversations": CHAT, "system": False}, "'system' is a bool, not text"),
        ({"conversations": [{"from": "gpt", "value": "a", "role": "user", "content": "b"}]},
         "message 1 has from, value, role, content; keep 'from' and 'value', or 'role' and 'content'"),
        (said_by("assistant", "x", weight=0.5), "message 2 (assistant) has the weight '0.5'; write \"weight\": 0"),
        (said_by("assistant", "x", weight="0"), "message 2 (assistant) has the weight '0'"),
        (said_by("assistant", "x", train=False), "message 2 (assistant) has the train 'False'; write \"weight\": 0"),
    ],
)  # fmt: skip
def test_nothing_of_a_row_is_changed_or_left_out_in_silence(row, said):
    with pytest.raises(OffmateError) as caught:
        read_row(row, "a.jsonl, line 7")
    assert str(caught.value).startswith("a.jsonl, line 7: ") and said in str(caught.value)


def test_a_system_text_that_the_chat_repeats_is_no_conflict():
    chat = [{"role": "system", "content": "a"}, *CHAT]
    assert read_row({"conversations": chat, "system": "a"}, "p").content == chat


@pytest.mark.parametrize(
    "row", [{"text": ""}, {"conversations": []}, {"messages": [], "system": "s"}, {"prompt": "", "completion": ""},
            {"instruction": "", "output": ""}, {"text": "", "messages": ""}],
)  # fmt: skip
def test_rows_without_a_word_are_empty(row):
    assert read_row(row, "p").is_empty


@pytest.mark.parametrize(
    ("row", "kind", "content"),
    [
        ({"text": "", "prompt": "a", "completion": "b"}, "prompt/completion", Pair("a", "b")),
        ({"text": " ", "prompt": "", "completion": "b"}, "prompt/completion", Pair("", "b")),
        ({"text": "", "prompt": "", "completion": "", "messages": CHAT}, "messages", CHAT),
        ({"text": "t", "prompt": "", "completion": ""}, "text", "t"),
        ({"text": "", "prompt": "", "completion": "", "instruction": "i", "output": "o"}, "Alpaca", None),
    ],
)  # fmt: skip
def test_an_empty_field_does_not_win_over_a_filled_one(row, kind, content):
    piece = read_row(row, "p")
    assert piece.kind == kind and content in (None, piece.content)


def test_a_filled_format_that_is_not_read_is_said():
    piece = read_row({"text": "t", "instruction": "i", "output": "o", "messages": [], "prompt": "p"}, "p")
    assert piece.content == "t" and piece.kind == "text (beside it, Alpaca not read)"


SYSTEM = {"role": "system", "content": "s"}
TOOL = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("row", "content", "trained_from"),
    [
        ({"messages": CHAT, "system": "s"}, [SYSTEM, *CHAT], 0),
        ({"messages": [SYSTEM, *CHAT], "system": "s"}, [SYSTEM, *CHAT], 0),
        ({"prompt": CHAT[:1], "completion": CHAT[1:], "system": "s"}, [SYSTEM, *CHAT], 2),
        ({"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])}, CHAT, 1),
        ({"prompt": json.dumps(CHAT[:1]), "completion": ""}, CHAT[:1], 1),
        ({"prompt": "i z", "completion": "o", "instruction": "i", "input": "z"}, Pair("i z", "o"), 0),
        ({"prompt": "[1, 2]", "completion": "[3]"}, Pair("[1, 2]", "[3]"), 0),
        ({"instruction": "i", "output": "o", "history": [["a", "b"]], "system": "s"},
         Pair("s\n\na\n\nb\n\ni\n\n", "o", (
             SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
             {"role": "user", "content": "i"}, {"role": "assistant", "content": "o"})), 4),
        ({"instruction": "i", "output": "o", "history": '[["a", "b"]]', "input": None},
         Pair("a\n\nb\n\ni\n\n", "o", (
             {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
             {"role": "user", "content": "i"}, {"role": "assistant", "content": "o"})), 3),
        ({"instruction": "i", "output": "", "history": []}, Pair("i\n\n", "", ({"role": "user", "content": "i"},)), 0),
        ({"conversations": [{"from": "gpt", "value": "x", "role": None, "weight": 0}]},
         [{"role": "assistant", "content": "x", "weight": 0}], 0),
    ],
)  # fmt: skip
def test_keys_beside_a_chat_are_read(row, content, trained_from):
    piece = read_row(row, "p")
    assert piece.content == content and piece.trained_from == trained_from


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_go_with_the_chat(tools):
    for row in ({"messages": CHAT}, {"conversations": CHAT}, {"prompt": CHAT[:1], "completion": CHAT[1:]}):
        assert read_row({**row, "tools": tools}, "p").tools == (TOOL,)
    assert read_row({"messages": CHAT, "tools": None}, "p").tools == ()


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "one"}] [{"text": "two"}]', r"bad.json: broken JSON: .* its list: line 1 column 19"),
        ('[{"text": "one"}]\nrest', r"of its list: line 2 column 1 .*'rest'; put all rows into one list"),
        ('[{"text": "one"}\n{"text": "two"}]', r"item 2: broken JSON: Expecting ',' between items.*: line 2 column 1"),
        ('[{"text": "one"},, {"text": "two"}]', r"item 2: broken JSON"),
        ('[{"text": "one"}', r"item 2: broken JSON: Expecting ',' between items, or '\]'"),
    ],
)  # fmt: skip
def test_nothing_of_a_json_file_is_left_out(tmp_path, content, said):
    with pytest.raises(OffmateError, match=said):
        list(pieces(written(tmp_path, "bad.json", content)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prompt,completion\nHi,\"a\nb\"\nHi,Yes, of course\n",
         r"a.csv, line 4: 3 fields, but the first line names 2 columns \(prompt, completion\). "
         r"Left over: \[' of course'\]. Put double quotes"),
        ("text,id,text\na,1,b\n", r"a.csv, line 1: the column name 'text' occurs more than once in 'text,id,text'"),
        ("prompt,completion\nHi\n", r"a.csv, line 2: 'completion' is missing"),
    ],
)  # fmt: skip
def test_nothing_of_a_table_is_left_out(tmp_path, content, said):
    with pytest.raises(OffmateError, match=said):
        list(pieces(written(tmp_path, "a.csv", content)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", "\n \n"), ("a.jsonl", '{"text": ""}\n{"text": " "}\n'), ("a.json", "[]"), ("a.csv", "text\n"),
        ("a.txt", "\ufeff\n"),
    ],
)  # fmt: skip
def test_a_source_without_any_text_is_empty(tmp_path, name, content):
    with pytest.raises(ArgumentValueError, match="is empty"):
        check_source(written(tmp_path, name, content))
    written(tmp_path, "b.txt", "text")
    check_source(str(tmp_path))


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl.bak", "data"])
def test_a_file_of_an_unknown_kind_is_refused(tmp_path, name):
    data = written(tmp_path, name, "text")
    for read in (check_source, lambda source: list(pieces(source))):
        with pytest.raises(ArgumentValueError, match=r"is of no known kind. These can be read: \.txt, .*\.parquet"):
            read(data)


def test_a_text_is_read_without_its_mark_and_named_by_its_first_line(tmp_path, monkeypatch):
    (piece,) = pieces(written(tmp_path, "a.txt", "\ufeffone"))
    assert piece.content == "one" and piece.place.endswith("a.txt, line 1")
    monkeypatch.setattr("offmate.finetune.data.PIECE_CHARACTERS", 1024)
    line = "x" * 99 + "\n"
    begins = [piece.place.rpartition(" ")[2] for piece in pieces(written(tmp_path, "a.txt", line * 25))]
    assert begins == ["1", "11", "21"]


def test_fields_of_csv_stay_text(tmp_path):
    table = written(tmp_path, "a.csv", '\ufeffprompt,completion,more\nanswer?,42,x\n"a, ""b""\nc",NA\n')
    assert [piece.content for piece in pieces(table)] == [Pair("answer?", "42"), Pair('a, "b"\nc', "NA")]
    with pytest.raises(OffmateError, match=r"a.csv, line 2: none of the known formats \(keys: x\)"):
        list(pieces(written(tmp_path, "a.csv", "x\n1\n")))
    with pytest.raises(OffmateError, match=r"broken CSV: .* the first line names the columns"):
        list(pieces(written(tmp_path, "a.csv", 'text\n"open')))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": "two", "text": "three"}'),
        ("a.json", '[{"text": "one"}, {"text": "two", "text": "three"}]'),
        ("a.jsonl", '{"text": "one"}\n{"messages": [{"role": "user", "text": 1, "content": "a", "text": 2}]}'),
    ],
)
def test_a_key_that_occurs_twice_is_refused(tmp_path, name, content):
    with pytest.raises(OffmateError, match=r"(line|item) 2: the key 'text' occurs 2 times in one object .*; keep one"):
        list(pieces(written(tmp_path, name, content)))


def test_of_a_folder_what_is_no_data_is_not_read_and_said(tmp_path):
    for name in ("a.txt", ".ipynb_checkpoints/b.txt", ".c.txt", "README.md", "sub/LICENSE.txt", "sub/d.md", "e.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path, name, name)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "sub", target_is_directory=True)
    assert [piece.content for piece in pieces(str(tmp_path))] == ["a.txt", "sub/d.md"]
    (line,) = not_read_lines(str(tmp_path))
    assert line.startswith("data: 6 of the folder's files and folders not read: .c.txt (hidden), ")
    for said in (".ipynb_checkpoints (hidden)", "README.md (about the folder)", "e.bin (of the kind '.bin')",
                 "elsewhere (a link to a folder) and 1 more"):  # fmt: skip
        assert said in line
    assert not_read_lines(str(tmp_path / "a.txt")) == not_read_lines("hf:a/b") == []
    (tmp_path / "gone.txt").symlink_to(tmp_path / "none.txt")
    with pytest.raises(OffmateError, match=r"gone.txt: a broken link to .*none.txt; remove it"):
        check_source(str(tmp_path))


def test_a_folder_of_which_nothing_is_read_says_why(tmp_path):
    written(tmp_path, "README.md", "about")
    with pytest.raises(ArgumentValueError, match=r"file that is read \(1 of .*: README.md \(about the folder\)\)"):
        check_source(str(tmp_path))


def test_parquet_is_read_through_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": CHAT, "id": 1}, {"messages": CHAT[:1], "id": 2}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert [piece.content for piece in pieces(str(tmp_path / "a.parquet"))] == [CHAT, CHAT[:1]]
    assert next(iter(pieces(str(tmp_path / "a.parquet")))).place.endswith("a.parquet, row 1")
    datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ArgumentValueError, match="is empty"):
        check_source(str(tmp_path / "a.parquet"))
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(OffmateError, match=r"a.parquet: the file is empty \(0 bytes\), so it is no Parquet file"):
        list(pieces(str(tmp_path / "a.parquet")))
    (tmp_path / "a.parquet").write_bytes(b"no")
    with pytest.raises(OffmateError, match="cannot be read as Parquet"):
        list(pieces(str(tmp_path / "a.parquet")))


def test_a_folder_with_parquet_needs_datasets_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OffmateError, match=r"datasets is not installed; .* pip install datasets"):
        check_source(str(tmp_path))
