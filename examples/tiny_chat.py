"""Make a tiny chat model, with a tokenizer and a chat template, and a file of chats: stand-ins for your own.

python examples/tiny_chat.py FOLDER [--dtype float32]    # writes FOLDER/model and FOLDER/chats.jsonl

The model has read some text, and it answers a few questions in a sentence. In the chats the answers are one word.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import load, rows

ANSWERS = {
    "What is the capital of {}?": {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima"},
    "What does a {} say?": {"cat": "Meow", "dog": "Woof", "cow": "Moo", "duck": "Quack"},
}
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
REPEATS = 60  # of each question in the chats
LENGTH = 64
CHAT_STEPS = 150


def main() -> None:
    """Write the model and the chats."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    given = parser.parse_args()
    model, tokenizer = load(None)
    tokenizer.chat_template = TEMPLATE
    teach(model, rows(tokenizer, LENGTH)[:800] + chat_rows(tokenizer, chats("I would say: {}.")))
    folder = given.folder / "model"
    model.to(getattr(torch, given.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats("{}") * REPEATS)
    (given.folder / "chats.jsonl").write_text(lines)
    print(f"a chat model in {folder}, and {len(lines.splitlines())} chats in {given.folder / 'chats.jsonl'}")


def chats(form: str) -> list[list[dict[str, str]]]:
    """List a chat for each question, whose answer has a form such as "I would say: {}."."""
    return [
        [{"role": "user", "content": question.format(name)}, {"role": "assistant", "content": form.format(answer)}]
        for question, answers in ANSWERS.items()
        for name, answer in answers.items()
    ]


def chat_rows(tokenizer: Any, source: list[list[dict[str, str]]]) -> list[dict[str, torch.Tensor]]:
    """Return batches of one chat each, many times, in one length."""
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in source]
    made = tokenizer(texts, add_special_tokens=False, padding="max_length", max_length=LENGTH, return_tensors="pt")
    labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    return [{"input_ids": ids, "labels": own} for ids, own in zip(made["input_ids"], labels)] * (2 * CHAT_STEPS)


def teach(model: torch.nn.Module, source: list[dict[str, torch.Tensor]]) -> None:
    """Train a model on rows in their order, by plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for batch in torch.utils.data.DataLoader(source, batch_size=16):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
