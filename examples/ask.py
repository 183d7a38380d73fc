"""Ask a chat model in a folder one question, with plain transformers.

python examples/ask.py tuned/merged "What is the capital of France?"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Print the most likely answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("question")
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args()
    if not Path(given.folder, "config.json").is_file():
        parser.error(f"{given.folder} holds no model: it has no config.json")
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    chat = [{"role": "user", "content": given.question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, do_sample=False, max_new_tokens=given.tokens)
    print(tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip())


if __name__ == "__main__":
    main()
