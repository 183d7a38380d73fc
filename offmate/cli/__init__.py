"""The command line: `offmate COMMAND ...`. Nothing heavy is loaded before the arguments are known to be valid."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    InfeasibleBudget,
    LibraryError,
    OffmateError,
    PlanFileError,
)
from ..files import reason
from ..libraries import check_installed, library_errors
from ..progress import quiet, working
from . import cards, check, doctor, fits, init, plan, profile, show
from .arguments import Help, OptionNames, count, device, output_file, refuse_unknown, size, with_options
from .finetune import add_parser as add_finetune

log = logging.getLogger("offmate")

_FAILED = 1
_CANNOT_START = 2
_INTERRUPTED = 130
_FIRST_STEPS = """first steps:
  offmate doctor                   which GPU is found, and what is missing
  offmate demo                     train a small model, without a GPU too
  offmate fits --card rtx3060      which models can be trained on a card
  offmate plan --help              options and examples of one command
"""
_NOT_STARTED = (ArgumentValueError, ArgumentTypeError, LibraryError, PlanFileError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv: the arguments; those of the process by default.

    Returns: the exit status: 0 success, 1 failure, 2 it could not start (bad arguments, a missing extra),
    130 interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    events = _says_events(argv)
    names = OptionNames()
    log.addFilter(names)
    try:
        return _run(argv, events)
    except KeyboardInterrupt as interrupt:
        _say_failed(str(interrupt) or "interrupted", events)
        return _INTERRUPTED
    finally:
        log.removeFilter(names)


def _run(argv: Sequence[str], events: bool) -> int:
    parser = _parser(events)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse_unknown(getattr(arguments, "parser", parser), unknown)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return _CANNOT_START
    # Before torch is loaded: its profiler warns of memory from before it began, which is no fault and no news.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    silent = getattr(arguments, "quiet", False) or getattr(arguments, "mode", "") == "quiet"
    try:
        with library_errors(), quiet(silent), working("working"):
            return arguments.run(arguments)
    except InfeasibleBudget as error:
        _say_failed(with_options(str(error)), events)
        return _FAILED
    except OffmateError as error:
        notes = getattr(error, "__notes__", ())
        _say_failed(with_options(". ".join((str(error), *notes))), events)
        return _CANNOT_START if isinstance(error, _NOT_STARTED) else _FAILED
    except BrokenPipeError:
        # The reader of the output has gone, as with `| head`; Python must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say_failed(
            f"{where}{reason(error)}; check the path, that you may read and write there, and that the disk has room",
            events,
        )
        return _FAILED
    except Exception as error:
        if events:  # whoever reads them learns that the run is over; the traceback follows on stderr
            _say_event(f"unexpected {type(error).__name__}: {error}")
        raise


def _says_events(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for events on stdout, of which the last one tells of a failure."""
    flag = "--json"
    return argv[:1] == ["finetune"] and any(len(word) > 2 and flag.startswith(word) for word in argv)


def _say_failed(words: str, events: bool) -> None:
    if events:
        _say_event(words)
    print(f"offmate: {words}", file=sys.stderr)


def _say_event(words: str) -> None:
    with contextlib.suppress(OSError):  # the reader may have gone
        print(json.dumps({"event": "error", "message": words}), flush=True)


class _EventParser(argparse.ArgumentParser):
    """A parser whose refusals are events, too; so are those of its subcommands' parsers, which are of its class."""

    def error(self, message: str) -> NoReturn:
        _say_event(message)
        super().error(message)


def _parser(events: bool = False) -> argparse.ArgumentParser:
    kind = _EventParser if events else argparse.ArgumentParser
    parser = kind(
        prog="offmate",
        description="Train within a GPU memory budget, with plain PyTorch's numbers.",
        epilog=_FIRST_STEPS,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"offmate {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")

    demo = verbs.add_parser(
        "demo",
        help="fine-tune a small model within a budget and compare it with plain PyTorch",
        description="Fine-tune a Llama-architecture model of 23.9 M parameters on Python's help text within a GPU "
        "memory budget, then do the same with plain PyTorch and compare losses, memory and time. Exits with 1 if a "
        "loss or a parameter differs or the budget was exceeded.",
        epilog="examples:\n  offmate demo\n  offmate demo --gpu-budget 60MiB --steps 5 --json demo.json",
        formatter_class=Help,
    )
    demo.add_argument(
        "--gpu-budget",
        type=size,
        metavar="SIZE",
        help="GPU memory budget, such as 150MiB (default: 15 %% of what plain PyTorch needs)",
    )
    demo.add_argument("--steps", type=count, default=20, metavar="N", help="steps of each run (default: 20)")
    demo.add_argument(
        "--device",
        type=device,
        default="emulated",
        help='"cuda", "cuda:1", or "emulated", which runs on any machine (default: emulated)',
    )
    demo.add_argument("--json", type=output_file, metavar="FILE", help="also write the comparison to FILE")
    demo.add_argument("--quiet", action="store_true", help="print nothing but errors")
    demo.set_defaults(run=_demo)
    plan.add_parser(verbs)
    fits.add_parser(verbs)
    cards.add_parser(verbs)
    show.add_parser(verbs)
    check.add_parser(verbs)
    profile.add_parser(verbs)
    doctor.add_parser(verbs)
    init.add_parser(verbs)
    add_finetune(verbs)
    for verb in verbs.choices.values():
        verb.set_defaults(parser=verb)  # whose usage an unknown option prints
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    check_installed("transformers")
    from .demo import run_demo
    from .screen import console

    comparison = run_demo(arguments.gpu_budget, arguments.steps, arguments.device, console(arguments.quiet))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(comparison.to_json(), indent=2) + "\n")
    return 0 if comparison.holds else _FAILED
