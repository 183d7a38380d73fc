"""The result of a run: its model card, and the adapter merged into the base model."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import OffmateError
from ..version import VERSION
from .folders import MANIFEST, MISSING, faults, move_in, read_manifest, sync_folder, write_aside
from .lora import Lora
from .report import StepRow
from .samples import Sample
from .settings import Settings
from .sources import Sources, check_description, check_weights, warn_if_unknown
from .weights import DTYPES, load_model, load_tokenizer, with_saved_adapter

MERGED = "merged"
_ELSEWHERE = (  # of the machine, not of the result
    "device", "gpu_budget", "cpu_budget", "storage", "storage_parameters", "push", "report",
)  # fmt: skip


@dataclass
class LastFigures:
    """A reporter that remembers a run's last losses and samples for its card; None for losses it has not seen."""

    loss: float | None = None
    held_out_loss: float | None = None
    samples: dict[str, str] = field(default_factory=dict)

    def start(self, step: int, n_steps: int) -> None:
        """Do nothing."""

    def step(self, row: StepRow) -> None:
        """Remember the loss of a step."""
        self.loss = row.loss

    def evaluation(self, step: int, loss: float) -> None:
        """Remember the held-out loss."""
        self.held_out_loss = loss

    def sample(self, step: int, sample: Sample) -> None:
        """Remember what the model wrote last after a prompt."""
        self.samples[sample.prompt] = sample.text

    def checkpoint(self, step: int, path: Path) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def card(settings: Settings, n_steps: int, figures: LastFigures) -> str:
    """Write a model card: base model, data, steps, losses, command, and how to load the result."""
    tokens = settings.batch_size * settings.micro_batches * (settings.sequence_length or 0)
    what = f"a LoRA adapter of rank {settings.lora.r}" if settings.lora else "all parameters"
    trained_on = "the assistant's tokens of chats" if settings.assistant_only else "all tokens"
    losses = [
        f"{name} {value:.4f}"
        for name, value in (("last step's loss", figures.loss), ("held-out loss", figures.held_out_loss))
        if value is not None
    ]
    given = " ".join(["offmate finetune", *_options(settings)])
    rows = [
        f"- Base model: `{settings.model}`",
        f"- Trained: {what}, in {settings.precision}, on the data `{settings.data}` ({trained_on})",
        f"- Steps: {n_steps:,}, of {tokens:,} tokens each; {settings.optimizer}, learning rate "
        f"{settings.learning_rate or 0:g}, seed {settings.seed}",
        *([f"- Losses: {', '.join(losses)}"] if losses else []),
        f"- Made with offmate {VERSION}: `{given}`; `finetune.yaml` lists all settings",
    ]
    head = [
        "---",
        f"base_model: {_quoted(settings.model)}",
        "library_name: " + ("peft" if settings.lora else "transformers"),
    ]
    title = f"# {Path(settings.output).name}"
    written = [
        line
        for prompt, text in figures.samples.items()
        for line in ("", f"After {prompt!r} the model wrote:", "", textwrap.indent(text, "    ") or "    (nothing)")
    ]
    code = ["```python", *_loading(settings), "```"]
    return "\n".join([*head, "---", "", title, "", *rows, "", *code, *written, ""])


def _quoted(text: str) -> str:
    """Return a text as both YAML and Python write it, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _options(settings: Settings) -> list[str]:
    """Return the options of a command that begins the same run."""
    found = []
    for setting in fields(Settings):
        value = getattr(settings, setting.name)
        if setting.name in _ELSEWHERE or value == setting.default or value in (None, (), False):
            continue
        option = f"--{setting.name.replace('_', '-')}"
        if isinstance(value, Lora):
            value = f"r={value.r},alpha={value.alpha},dropout={value.dropout:g},targets={'+'.join(value.targets)}"
        words = value if isinstance(value, tuple) else (value,)
        found.append(option if value is True else f"{option} {' '.join(shlex.quote(str(word)) for word in words)}")
    return found


def _loading(settings: Settings) -> list[str]:
    kind = "AutoPeftModelForCausalLM" if settings.lora else "AutoModelForCausalLM"
    return [
        f"from {'peft' if settings.lora else 'transformers'} import {kind}",
        "from transformers import AutoTokenizer",
        "",
        f'model = {kind}.from_pretrained({_quoted(settings.output)}, dtype="auto")',
        f"tokenizer = AutoTokenizer.from_pretrained({_quoted(settings.output)})",
    ]


def is_merged(output: Path) -> bool:
    """Return whether the result in a folder is merged: false if there is no merged model, or if it lacks files.

    Raises: OffmateError if merging would overwrite what somebody else has written or changed.
    """
    folder = output / MERGED
    if not os.path.lexists(folder):
        return False
    remedy = f"move it away, then merge with: offmate finetune --output {output} --resume --merge"
    try:
        files = read_manifest(folder)
    except ValueError:
        raise OffmateError(f"{folder} is there, but holds no merged model of this run; {remedy}") from None
    found = list(faults(folder, files))
    for name, fault in found:
        if fault != MISSING:
            raise OffmateError(f"{folder / name} {fault} since the model was merged, so it is not replaced; {remedy}")
    return not found


def merge(settings: Settings, folder: Path, sources: Sources) -> Path:
    """Merge a run's adapter into its base model, and write the whole model, as peft's `merge_and_unload` makes it.

    Parameters
    ----------
    folder: that of the base model. sources: what the run was made from.

    Returns: the folder with the merged model, which plain transformers loads.
    Raises: OffmateError if the base has changed or cannot be read, or the disk is full.
    """
    output = Path(settings.output)
    check_description(sources, folder, weights=True)
    digests: dict[str, str] = {}
    base = load_model(folder, DTYPES[settings.precision], digests)
    check_weights(sources, folder, digests)
    warn_if_unknown(sources, folder)
    model = with_saved_adapter(base, output)
    return _save_merged(output / MERGED, model.merge_and_unload(), load_tokenizer(folder))


def _save_merged(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Write a merged model as a folder that transformers loads; other files in the folder stay."""

    def write(aside: Path) -> None:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)

    aside = folder.with_name(f".{folder.name}")
    write_aside(aside, write, "the merged model")
    if folder.exists():
        # First, so that files which are not yet moved count as missing if the process ends here.
        os.replace(aside / MANIFEST, folder / MANIFEST)
        move_in(aside, folder)
    else:
        os.replace(aside, folder)
        sync_folder(folder.parent)
    return folder
