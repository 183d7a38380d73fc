"""Which tokens of a chat are the assistant's, and the examples that show it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from offmate.errors import OffmateError
from offmate.finetune.rows import Pair, Piece
from offmate.finetune.tokenizing import LEFT_OUT, examples, tokenized

from .finetune_kit import make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 does: only the last answer is written with its thoughts.
LOOKS_AHEAD = CHATML.replace(
    "{{ m['content'] }}", "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
)
INST = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "again"},
]


def tokenizer_with(template: str):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<end_of_turn>"]})
    tokenizer.chat_template = template
    return tokenizer


def learned(template: str, turns: list[dict[str, str]], trained_from: int = 0) -> str:
    """What of a chat is trained on."""
    tokenizer = tokenizer_with(template)
    piece = Piece(turns, "a.jsonl, line 1", trained_from=trained_from)
    (ids,) = (found.ids for found in tokenized(iter([piece]), tokenizer, assistant_only=True))
    (everything,) = (found.ids for found in tokenized(iter([piece]), tokenizer))
    assert [i if i >= 0 else ~i for i in ids] == everything
    return "|".join(tokenizer.decode([i]) for i in ids if i >= 0).replace("|", "")


@pytest.mark.parametrize(
    ("template", "turns", "said"),
    [
        # The end of the turn is learned, the template's line break behind it is not.
        (CHATML, TURNS, "answer<im_end>again<im_end>"),
        (CHATML, TURNS[:3], "answer<im_end>"),
        # A template without a generation prompt, and without line breaks.
        (INST, TURNS[1:], " answer</s> again</s>"),
        # Nothing is cut where no special token ends the turn.
        (CHATML.replace("<|im_end|>", ""), TURNS[:3], "answer\n"),
    ],
)
def test_what_the_assistant_says_is_known_by_prefixes(template, turns, said):
    assert learned(template, turns) == said


# As Qwen2.5 does: the first message decides whether there are words before it.
OPENS = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}{{ messages[0].role[:0] }}"
    + CHATML
)
THINKS = CHATML.replace(
    "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
)


@pytest.mark.parametrize(
    ("template", "turns", "said"),
    [
        (CHATML, TURNS[2:], "answer<im_end>again<im_end>"),
        (OPENS, TURNS[2:], "answer<im_end>again<im_end>"),
        (OPENS, [TURNS[0], *TURNS[2:]], "answer<im_end>again<im_end>"),
        (INST, TURNS[2:], " answer</s> again</s>"),
        (THINKS, TURNS[2:], "<think></think>answer<im_end><think></think>again<im_end>"),
        ("{% if messages|length < 1 %}{{ raise_exception('none') }}{% endif %}" + CHATML, TURNS[2:3], "answer<im_end>"),
    ],
)
def test_an_assistant_may_speak_first(template, turns, said):
    assert learned(template, turns) == said


def test_where_a_first_answer_cannot_be_told_the_line_is_refused():
    template = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>bot\n{% endif")
    with pytest.raises(OffmateError, match=r"the assistant speaks first, .*\(--train-on all\), remove the row"):
        learned(template, TURNS[2:])


def test_what_a_template_would_change_in_silence_is_refused():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "now"}]}
    with pytest.raises(OffmateError, match=r"line 1: .* leaves out 'tool_calls': now; use the tokenizer"):
        learned(CHATML, [TURNS[1], call])
    with pytest.raises(OffmateError, match=r"""writes content {"a": true} as Python does: {'a': True}"""):
        learned(CHATML, [*TURNS[1:3], {"role": "tool", "content": {"a": True}}])
    knows_tools = CHATML.replace("{{ m['content'] }}", "{{ m['content'] or m['tool_calls'] | tojson }}")
    assert learned(knows_tools, [TURNS[1], call]) == '[{"name": "now"}]<im_end>'
    for_images = CHATML.replace("{{ m['content'] }}", "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}")
    with pytest.raises(OffmateError, match="writes nothing of what the messages say, such as 'ask'"):
        learned(for_images, TURNS[1:3])


def test_only_the_completion_of_a_chat_is_learned():
    assert learned(CHATML, TURNS, trained_from=3) == "again<im_end>"


@pytest.mark.parametrize(
    ("template", "turns", "said"),
    [
        (LOOKS_AHEAD, TURNS, "writes the first 3 of 5 messages differently when others follow"),
        (CHATML, [TURNS[1], {"role": "assistant", "content": " " * 40 + "x"}], None),
        (
            "{% if messages|length < 2 %}{{ raise_exception('too few') }}{% endif %}" + CHATML,
            TURNS[1:3],
            "its first 1 messages alone cannot be written",
        ),
    ],
)
def test_where_prefixes_cannot_tell_the_line_is_refused(template, turns, said):
    if said is None:
        assert learned(template, turns).strip() == "x<im_end>"
        return
    with pytest.raises(OffmateError, match=r"line 1: cannot tell which tokens are the assistant's") as caught:
        learned(template, turns)
    assert said in str(caught.value) and "--train-on all" in str(caught.value)


def test_a_template_that_looks_ahead_serves_chats_with_one_answer():
    assert learned(LOOKS_AHEAD, TURNS[:3]) == "<think></think>answer<im_end>"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "gemma", "phi3", "deepseekv3", "gptoss"])
def test_templates_that_people_have(name):
    """The answer and what ends its turn are learned, and nothing of the user's."""
    trl = pytest.importorskip("trl.chat_template_utils")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    found = learned(template, TURNS[1:3])
    assert "answer" in found and "ask" not in found
    assert not found.endswith(("\n", "user"))


def test_a_token_across_the_edge_of_an_answer_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    words = next(w for w in tokenizer.get_vocab() if len(w) > 2 and w.isalpha() and len(tokenizer(w)["input_ids"]) == 1)
    turns = [{"role": "user", "content": words[:1]}, {"role": "assistant", "content": words[1:]}]
    with pytest.raises(OffmateError, match="one token covers the place where message 2 begins; remove spaces"):
        list(tokenized(iter([Piece(turns, "p")]), tokenizer, assistant_only=True))


def test_of_a_pair_the_completion_and_its_end_are_learned():
    tokenizer = make_tokenizer()
    pair = Piece(Pair("2 + 2 =", " 4"), "p")
    (ids,) = (found.ids for found in tokenized(iter([pair]), tokenizer, assistant_only=True))
    assert tokenizer.decode([i for i in ids if i >= 0]) == " 4</s>"
    assert tokenizer.decode([~i for i in ids if i < 0]) == "2 + 2 ="


def test_an_instruction_is_a_chat_where_the_tokenizer_has_a_template():
    chat = ({"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "Hi"})
    piece = Piece(Pair("Say hi\n\n", "Hi", chat), "p", kind="Alpaca")
    plain, templated = make_tokenizer(), tokenizer_with(CHATML)
    shown = [next(examples(iter([piece]), tokenizer, True)) for tokenizer in (plain, templated)]
    assert [example.text for example in shown] == [
        "Say hi\n\n⟦Hi</s>⟧",
        "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n⟦Hi<|im_end|>⟧\n",
    ]
    assert all(example.kind == "Alpaca" and 0 < example.n_trained < example.n_tokens for example in shown)


def test_a_chat_without_an_answer_is_left_out_and_counted():
    tally: Counter[str] = Counter()
    source = [Piece(TURNS[:2], "p", kind="messages"), Piece(TURNS[:3], "q", kind="messages"), Piece("text", "r")]
    assert len(list(tokenized(iter(source), tokenizer_with(CHATML), True, tally))) == 2
    assert tally == {LEFT_OUT: 1, "messages": 1, "text": 1}
