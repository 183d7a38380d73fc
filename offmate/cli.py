"""The command line: `offmate VERB ...`. Nothing heavy is loaded before the arguments are known to be good."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import OffmateError
from .finetune.command import add_parser as add_finetune
from .reports.show import add_parser as add_show
from .sizes import parse_bytes

_FAILED = 1
_CANNOT_START = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv: the arguments, those of the process by default.

    Returns: the exit status: 0 all well, 1 it failed, 2 it could not start (bad arguments, a missing extra),
    130 interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except OffmateError as error:
        print(f"offmate: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("offmate: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offmate", description="Train inside a device-memory budget, with plain PyTorch's numbers."
    )
    parser.add_argument("--version", action="version", version=f"offmate {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    demo = verbs.add_parser(
        "demo",
        help="fine-tune a small model inside a budget and compare it with plain PyTorch",
        description="Fine-tune a Llama-architecture model of 23.9 M parameters on Python's help text inside a device "
        "budget, then do the same with plain PyTorch and compare losses, memory and time. Exits with 1 if a loss or a "
        "parameter differs or the budget was passed.",
    )
    demo.add_argument(
        "--gpu-budget",
        type=_size,
        metavar="SIZE",
        help="device budget such as 150MiB (default: 15 %% of what plain PyTorch needs)",
    )
    demo.add_argument("--steps", type=_count, default=20, metavar="N", help="steps of each run (default: 20)")
    demo.add_argument(
        "--device",
        choices=("emulated", "cuda"),
        default="emulated",
        help="where to train; the emulated device runs on any machine (default: emulated)",
    )
    demo.add_argument("--json", type=_output_file, metavar="FILE", help="also write the comparison to FILE")
    demo.set_defaults(run=_demo)
    add_show(verbs)
    add_finetune(verbs)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("transformers") is None:
        print('offmate: the demo needs transformers: pip install "offmate[hf]"', file=sys.stderr)
        return _CANNOT_START
    from rich.console import Console

    from .demo import run_demo

    # Without a terminal there is no width to ask for, and rich's 80 columns would fold the tables.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    comparison = run_demo(arguments.gpu_budget, arguments.steps, arguments.device, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(comparison.to_json(), indent=2) + "\n")
    return 0 if comparison.holds else _FAILED


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _output_file(text: str) -> Path:
    """Refuses a file that cannot be written before the run, not minutes later; the file exists from here on."""
    path = Path(text)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return path


if __name__ == "__main__":
    sys.exit(main())
