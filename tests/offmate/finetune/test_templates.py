"""What a chat template would leave out of a chat is refused, with the message and the role."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from offmate.errors import OffmateError
from offmate.finetune.chats import rendered
from offmate.finetune.rows import Pair, Piece, read_row
from offmate.finetune.tokenizing import LEFT_OUT, examples, tokenized

from .finetune_kit import make_tokenizer
from .test_chats import CHATML, INST, learned, tokenizer_with

SYSTEM, ASK = {"role": "system", "content": "be brief"}, {"role": "user", "content": "ask"}
ANSWER = {"role": "assistant", "content": "answer"}
CALL = {
    **ANSWER,
    "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "utc"}}}],
}
TOLD = {"role": "tool", "name": "clock", "content": "noon"}
TOOLS = ({"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},)
THOUGHT = {**ANSWER, "reasoning_content": "hmm"}


def of_trl(name: str) -> str:
    trl = pytest.importorskip("trl.chat_template_utils")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def refusal(template: str, messages: list[dict], tools: tuple[dict, ...] = ()) -> str:
    with pytest.raises(OffmateError) as caught:
        rendered(messages, "a.jsonl, line 1", tokenizer_with(template), tools=tools)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "messages", "said"),
    [
        ("qwen3", [{"role": "developer", "content": "dd"}, ASK, ANSWER],
         "message 1 (developer): the tokenizer's chat template leaves out 'content': 'dd'; use a role that"),
        ("qwen2_5", [ASK, ANSWER, {"role": "function", "content": "noon"}, ANSWER], "message 3 (function)"),
        ("phi3", [ASK, {"role": "ipython", "content": "noon"}, ANSWER], "message 2 (ipython)"),
        ("glm4moe", [ASK, {"role": "observation", "content": "noon"}, ANSWER], "message 2 (observation)"),
        ("qwen3_vl", [ASK, ANSWER, SYSTEM, ASK, ANSWER], "message 3 (system)"),
        ("gptoss", [SYSTEM, {**SYSTEM, "content": "be kind"}, ASK, ANSWER], "message 2 (system)"),
        # The words of the first system message stand in the second one.
        ("deepseek_r1_distill", [SYSTEM, {**SYSTEM, "content": "be brief and kind"}, ASK, ANSWER],
         "message 1 (system)"),
        ("llama3_1", [ASK, CALL, TOLD, ANSWER],
         "message 2 (assistant): the tokenizer's chat template leaves out 'content'"),
        ("llama3", [ASK, {**ANSWER, "content": "", "function_call": {"name": "clock", "arguments": "{}"}}],
         "leaves out 'function_call': clock; write it as 'tool_calls'"),
        ("llama3", [ASK, THOUGHT], "leaves out 'reasoning_content': 'hmm'; most templates write thoughts only before"),
        ("qwen3", [ASK, THOUGHT, ASK, ANSWER], "message 2 (assistant): the tokenizer's chat template leaves out 'reas"),
        ("qwen3", [ASK, {**ANSWER, "content": "<think>hmm</think>yes"}, ASK, ANSWER], "make a row of its own for each"),
        ("lfm2", [ASK, CALL, TOLD, ANSWER], "leaves out 'tool_calls'"),
    ],
)  # fmt: skip
def test_what_templates_of_others_leave_out_is_refused(name, messages, said):
    found = refusal(of_trl(name), messages, TOOLS if "tool" in str(messages) else ())
    assert found.startswith("a.jsonl, line 1: ") and said in found


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "glm4moe", "lfm2_v2"])
def test_what_templates_of_others_write_is_taken(name):
    tokenizer = tokenizer_with(of_trl(name))
    for messages in ([SYSTEM, ASK, ANSWER], [ASK, CALL, TOLD, ANSWER]):
        text = rendered(messages, "p", tokenizer, tools=TOOLS)
        assert '"clock"' in text or "clock" in text


def test_thoughts_before_the_last_answer_are_taken():
    assert "hmm" in learned(of_trl("qwen3"), [ASK, THOUGHT])


def test_thoughts_between_tools_whose_answers_users_write_are_taken():
    """Qwen3's template knows these answers by how they begin and end."""
    told = {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    assert "hmm" in rendered([ASK, THOUGHT, told, ANSWER], "p", tokenizer_with(of_trl("qwen3")))


def test_words_that_stand_elsewhere_do_not_hide_what_is_left_out():
    """ "user" is also what this template writes before every message of the user."""
    no_system = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    found = refusal(no_system, [{"role": "system", "content": "user"}, ASK, ANSWER])
    assert "message 1 (system): the tokenizer's chat template leaves out 'content': 'user'; join it with" in found


def test_every_shape_of_a_chat_is_checked_once(monkeypatch):
    tokenizer, writes = tokenizer_with(CHATML), []
    write = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: writes.append(a) or write(*a, **k))
    for number in range(5):
        rendered([{**ASK, "content": f"ask {number}"}, ANSWER], "p", tokenizer)
    assert len(writes) == 6
    with pytest.raises(OffmateError, match="leaves out 'reasoning_content'"):
        rendered([ASK, THOUGHT], "p", tokenizer)


def test_tools_that_a_template_does_not_write_are_refused():
    found = refusal(CHATML, [ASK, ANSWER], TOOLS)
    assert "leaves out 'tools': clock; use the tokenizer of a model that knows tools, describe the tools" in found


@pytest.mark.parametrize("name", [{}, {"name": "clock"}])
def test_calls_and_tools_of_any_form_are_looked_for(name):
    deep = {"role": ["x"]}
    for _ in range(300):
        deep = {"in": deep}
    call = {**ANSWER, "tool_calls": [{"type": "function", "function": {**name, "arguments": deep}}]}
    assert "message 2 (assistant): the tokenizer's chat template leaves out 'tool_calls'" in refusal(
        CHATML, [ASK, call]
    )
    assert "leaves out 'tools'" in refusal(CHATML, [ASK, ANSWER], ({"type": "function", **name},))
    assert "leaves out 'function_call'" in refusal(CHATML, [ASK, {**ANSWER, "function_call": "auto"}])
    writes = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ (m['tool_calls'] or '') | tojson }}")
    assert "in" in rendered([ASK, call], "p", tokenizer_with(writes))


def test_tools_are_what_the_template_writes():
    row = {"messages": [ASK, ANSWER], "tools": list(TOOLS)}
    template = "{% for t in tools %}<{{ t['function']['name'] }}>{% endfor %}" + CHATML
    (shown,) = examples(iter([read_row(row, "p")]), tokenizer_with(template), True)
    assert shown.text.startswith("<clock><|im_start|>user") and "⟦answer<|im_end|>⟧" in shown.text


MARKED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}",
)


@pytest.mark.parametrize("template", [CHATML, MARKED, INST])
def test_a_message_of_weight_0_is_only_read(template):
    again = {"role": "assistant", "content": "again"}
    for weights, said in (((0, 1), "again"), ((1, 0), "answer"), ((0, None), "again"), ((1, 1), "answeragain")):
        turns = [ASK, {**ANSWER, "weight": weights[0]}, ASK, {**again, "weight": weights[1]}]
        found = learned(template, turns)
        assert found.replace("<im_end>", "").replace("</s>", "").replace(" ", "") == said


# Prefixes do not tell the answers here, since the number of all messages comes first.
AHEAD = MARKED.replace("{% for m in messages %}", "{{ messages | length }}{% for m in messages %}")


def test_where_prefixes_do_not_tell_each_answer_is_a_run_of_marked_tokens():
    turns = [ASK, {**ANSWER, "weight": 0}, ASK, {"role": "assistant", "content": "again"}]
    assert learned(AHEAD, turns) == "again<im_end>"


def test_a_weight_of_0_that_cannot_be_kept_is_refused():
    twice = "{% generation %}{{ m['content'] }}{% endgeneration %}:{% generation %}<|im_end|>"
    template = AHEAD.replace("{% generation %}{{ m['content'] }}<|im_end|>", twice)
    with pytest.raises(OffmateError, match=r"which tokens are those of message 2, whose weight is 0: .* Remove its"):
        learned(template, [ASK, {**ANSWER, "weight": 0}, ASK, ANSWER])


@pytest.mark.parametrize("templated", [True, False])
def test_rows_without_an_answer_are_counted_and_trained_on_if_all_is(templated):
    tokenizer = tokenizer_with(CHATML) if templated else make_tokenizer()
    rows = [
        {"prompt": "ask", "completion": ""},
        {"instruction": "say", "output": ""},
        {"instruction": "say", "output": "", "history": [["a", "b"]]},
        {"text": ""},
        {"prompt": "ask", "completion": " it"},
    ]
    tally: Counter[str] = Counter()
    (only,) = tokenized((read_row(row, "p") for row in rows), tokenizer, True, tally)
    assert tokenizer.decode([i for i in only.ids if i >= 0]) == " it</s>"
    assert tally == {LEFT_OUT: 4, "prompt/completion": 1}
    tally.clear()
    found = [tokenizer.decode(t.ids) for t in tokenized((read_row(row, "p") for row in rows), tokenizer, False, tally)]
    assert tally == {LEFT_OUT: 1, "prompt/completion": 2, "Alpaca": 2}
    assert found[0] == "ask</s>" and found[1].startswith("<|im_start|>user\nsay" if templated else "say\n\n</s>")


def test_of_an_instruction_with_a_history_the_output_is_learned():
    row = {"instruction": "say", "output": "it", "history": [["a", "b"]]}
    for tokenizer in (tokenizer_with(CHATML), make_tokenizer()):
        (shown,) = examples(iter([read_row(row, "p")]), tokenizer, True)
        assert "b" in shown.text and shown.text.count("⟦") == 1 and "⟦it<" in shown.text


def test_a_pair_without_a_completion_has_no_example():
    assert list(examples(iter([Piece(Pair("ask", ""), "p")]), make_tokenizer(), True)) == []
