"""The arguments of `offmate finetune`. Nothing heavy is loaded before they are known to be valid."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..libraries import check_installed
from .arguments import Help

_EXAMPLES = """examples:
  offmate init --model chat --data chats.jsonl --output tuned > run.yaml
  offmate finetune --model chat --data chats.jsonl --output tuned --dry-run
  offmate finetune --config run.yaml --gpu-budget 11GiB --lora 16
  offmate finetune --config run.yaml --resume
"""
_NEEDED = ("transformers", "tokenizers", "safetensors", "yaml")

# The options that are also settings: name, type, placeholder of its value, help.
_SETTINGS: tuple[tuple[str, Any, str, str], ...] = (
    ("model", str, "DIR_OR_ID", "folder of a transformers model, or its id on the Hub"),
    (
        "data",
        str,
        "FILE",
        "text, JSON, JSON lines, CSV or Parquet, a folder of those, or hf:NAME[:SPLIT]; rows are text, messages, "
        "ShareGPT, Alpaca or prompt/completion",
    ),
    ("output", str, "DIR", "folder of the result and its checkpoints; must not exist"),
    ("gpu-budget", str, "SIZE", "GPU memory, such as 11GiB (default: what is free, less a margin)"),
    ("cpu-budget", str, "SIZE", "RAM (default: what is available, less a margin)"),
    ("device", str, "DEVICE", "cuda, cuda:1, ..., or emulated (default: a GPU; without one, the run asks)"),
    ("sequence-length", int, "N", "tokens per sequence (default: 1024, or the model's limit if that is less)"),
    ("batch-size", int, "N", "sequences per micro-batch (default: 4)"),
    (
        "accumulation",
        str,
        "N|auto",
        "micro-batches per step; auto: the fewest after which one more adds less than 1 %% of tokens/s, chosen when "
        "the run begins (default: 1)",
    ),
    ("epochs", int, "N", "passes over the data (default: 1)"),
    ("steps", int, "N", "number of steps, instead of epochs"),
    ("learning-rate", float, "RATE", "learning rate after warm-up (default: 2e-5, with LoRA 2e-4)"),
    ("schedule", str, "NAME", "cosine, linear or constant (default: cosine)"),
    ("warmup-steps", int, "N", "steps of linear warm-up (default: 3 %% of all steps)"),
    ("optimizer", str, "NAME", "adamw, adam, sgd or adafactor (default: adamw)"),
    ("weight-decay", float, "RATE", "the optimizer's weight decay (default: 0)"),
    ("max-grad-norm", str, "NORM", "clip gradients to this global norm, or none (default: 1)"),
    (
        "precision",
        str,
        "NAME",
        "fp32, bf16, bf16-master (bf16 with fp32 copies that are updated), or auto: fp32 for a float32 checkpoint; for "
        "a 16-bit one bf16-master, with LoRA bf16 (default: auto)",
    ),
    (
        "lora",
        str,
        "SPEC",
        "low-rank adapter: its rank (16), or r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj (default of targets: "
        "all-linear); none trains all parameters",
    ),
    ("seed", int, "N", "seed of data order, dropout and adapters (default: 0)"),
    (
        "train-on",
        str,
        "WHAT",
        "all tokens, or assistant: only what the assistant says in chats, and completions (default: assistant)",
    ),
    ("eval-fraction", float, "SHARE", "share of the documents held out for evaluation (default: 0.05)"),
    ("eval-every", int, "N", "steps between evaluations (default: with every checkpoint)"),
    ("checkpoint-every", int, "N", "steps between checkpoints (default: 500)"),
    ("keep-checkpoints", int, "N", "number of newest checkpoints to keep (default: 2)"),
    ("sample-tokens", int, "N", "new tokens of each sample at most (default: 64)"),
    (
        "push",
        str,
        "REPOSITORY",
        "the Hub's repository for the result, such as me/tuned; a new one is private",
    ),
)


def settings_options() -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """Return a parser of the options that are settings, for the `parents` of a command, and what each setting means."""
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    options: list[argparse.Action] = [
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=words)
        for name, kind, metavar, words in _SETTINGS
    ]
    options += [
        parser.add_argument(
            "--storage",
            nargs="+",
            action="extend",
            metavar="DIR",
            help="a folder on an NVMe drive for what RAM has no room for: optimizer states, and a frozen base's "
            "parameters in another dtype; several ones, each on a drive of its own, share the states; none names none "
            "(default: none)",
        ),
        parser.add_argument(
            "--storage-parameters",
            action=argparse.BooleanOptionalAction,
            help="trained parameters may lie in the folders of --storage, too, where RAM has no room for their values; "
            "weights are then mapped from their files and not read into RAM (default: no)",
        ),
        parser.add_argument("--report", nargs="+", metavar="NAME", help="where else to report: tensorboard, wandb"),
        parser.add_argument(
            "--sample", nargs="+", metavar="PROMPT", help="let the model continue these prompts after each evaluation"
        ),
        parser.add_argument("--no-speculate", dest="speculate", action="store_false", help=argparse.SUPPRESS),
        parser.add_argument(
            "--speculate",
            nargs="?",
            const=True,
            choices=("auto",),
            metavar="auto",
            help="let the CPU update before it is known whether gradients are clipped, and undo what turns out to be "
            "wrong: steps that clip nothing are faster then, and the others slower; auto: as long as few steps clip; "
            "--no-speculate: never (default)",
        ),
        parser.add_argument(
            "--merge",
            action=argparse.BooleanOptionalAction,
            help="with --lora, also write the merged model, in DIR/merged",
        ),
    ]
    return parser, {option.dest: (option.help or "").replace("%%", "%") for option in options}


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a command line gives, by name."""
    _, known = settings_options()
    return {name: value for name, value in vars(arguments).items() if name in known}


def add_parser(subparsers: Any) -> None:
    """Add the command `finetune` to a command line.

    Parameters
    ----------
    subparsers: what `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "finetune",
        help="fine-tune a language model on your text or chats within a GPU memory budget",
        description="Fine-tune a causal language model on your text or chats within a GPU memory budget. The result is "
        "a folder that plain transformers (or peft) loads. A YAML file can give every setting, too, with _ for -.",
        argument_default=argparse.SUPPRESS,
        parents=[settings_options()[0]],
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", default=None, help="settings in YAML; options override")
    parser.add_argument("--resume", action="store_true", default=False, help="continue the run in --output")
    parser.add_argument("--dry-run", action="store_true", default=False, help="say what the run takes; read no weights")
    parser.add_argument("--yes", action="store_true", default=False, help="continue even if something looks wrong")
    loud = parser.add_mutually_exclusive_group()
    loud.add_argument("--quiet", dest="mode", action="store_const", const="quiet", help="print nothing but errors")
    loud.add_argument("--json", dest="mode", action="store_const", const="json", help="JSON lines on stdout")
    parser.set_defaults(run=run, mode="normal")


def run(arguments: argparse.Namespace) -> int:
    """Fine-tune as the arguments say.

    Returns: the exit status, as in `offmate.cli.main`. Raises: OffmateError for everything that cannot work.
    """
    with _terminable():
        check_installed(*_NEEDED)
        from ..progress import working

        with working("loading PyTorch"):
            from ..finetune.job import finetune
            from ..finetune.settings import read_yaml

        in_file = read_yaml(arguments.config) if arguments.config else {}
        left_empty = [name for name, value in in_file.items() if value is None]
        given = {name: value for name, value in in_file.items() if name not in left_empty} | given_settings(arguments)
        finetune(given, resume=arguments.resume, dry_run=arguments.dry_run, yes=arguments.yes, mode=arguments.mode)
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM interrupt like Ctrl-C, so that what is not to stay is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
