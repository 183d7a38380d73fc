"""Samples: texts that the model writes after each evaluation, and what they will take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentValueError
from ..machines.devices import EMULATED
from ..machines.hardware import load
from ..reports.units import format_seconds
from ..session.generation_fit import Asked, Elsewhere, fit
from ..sizes import format_bytes
from .chats import rendered
from .settings import Settings


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model wrote after it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run as token ids.

    Parameters
    ----------
    ids: of each prompt, shape [1, tokens].
    """

    texts: tuple[str, ...]
    ids: tuple[torch.Tensor, ...]


def read_prompts(settings: Settings, tokenizer: Any, n_positions: int | None) -> Prompts:
    """Tokenize the prompts of a run: as what a user says in a chat if the tokenizer has a chat template.

    Parameters
    ----------
    n_positions: tokens that the model takes at most; None if its configuration does not say.

    Raises: ArgumentValueError for a prompt without tokens, or one that leaves no room for `sample_tokens`.
    """
    found = []
    for number, prompt in enumerate(settings.sample, start=1):
        ids = _ids(prompt, f"sample {number}", tokenizer)
        if not ids:
            raise ArgumentValueError(f"sample {prompt!r} has no tokens; write at least one word")
        if n_positions is not None and len(ids) + settings.sample_tokens > n_positions:
            raise ArgumentValueError(
                f"sample {number} has {len(ids):,} tokens, and sample_tokens is {settings.sample_tokens:,}, but the "
                f"model takes at most {n_positions:,} in all; shorten one of them"
            )
        found.append(torch.tensor([ids]))
    return Prompts(settings.sample, tuple(found))


def write_samples(model: Any, tokenizer: Any, prompts: Prompts, n_tokens: int) -> list[Sample]:
    """Let a model continue each prompt by its most likely tokens; it is in training mode again afterwards.

    Parameters
    ----------
    n_tokens: new tokens of each sample at most.
    """
    found = []
    was_training = model.training
    model.eval()
    try:
        for prompt, ids in zip(prompts.texts, prompts.ids):
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, do_sample=False,
                num_beams=1, use_cache=True,
            )  # fmt: skip
            text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            found.append(Sample(prompt, text.strip()))
    finally:
        model.train(was_training)
    return found


def sample_lines(
    settings: Settings,
    prompts: Prompts,
    model: torch.nn.Module,
    budget_bytes: int,
    kind: str,
    machine: str,
    files: tuple[float, int] | None = None,
) -> list[str]:
    """Write what the samples of a run take; nothing if it has none.

    Parameters
    ----------
    model: may be on the meta device. kind: the device, as `device_kind` returns it. machine: name of its rates.
    files: where a base lies in files, their rate in bytes per second and the most bytes of it that RAM keeps.
    """
    if not prompts.ids:
        return []
    tokens = settings.sample_tokens
    what = f"samples: {len(prompts.ids)} of up to {tokens:,} tokens after each evaluation"
    longest = max(ids.shape[1] for ids in prompts.ids) + tokens
    try:
        found = fit(model, budget_bytes, Asked(1, longest), emulated=kind == EMULATED)
    except Elsewhere as reason:
        return [f"{what}, written by the CPU: {reason}"]
    rates = load(machine)
    token_s = found.least_token_s(rates.in_bytes_per_s, rates.memory_bytes_per_s, shared_cores=rates.shared_cores)
    if files is not None:
        token_s = max(token_s, (found.streamed_bytes - files[1]) / files[0])
    where = (
        f"{format_bytes(found.streamed_bytes)} of parameters are copied to the device for every token"
        if found.streamed_bytes
        else "all parameters stay on the device during this"
    )
    times = f"at least {format_seconds(token_s)} per token, {format_seconds(tokens * token_s)} each"
    return [f"{what}; {where}: {times}"]


def _ids(prompt: str, place: str, tokenizer: Any) -> list[int]:
    chat = bool(getattr(tokenizer, "chat_template", None))
    text = rendered([{"role": "user", "content": prompt}], place, tokenizer, asks=True) if chat else prompt
    # A chat template writes the special tokens itself.
    return tokenizer(text, add_special_tokens=not chat, return_attention_mask=False)["input_ids"]
