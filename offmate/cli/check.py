"""`offmate check MODEL_OR_FILE`: whether a model trains under offmate with plain PyTorch's numbers."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..libraries import is_installed, missing
from .arguments import Help, count, device, output_file

if TYPE_CHECKING:
    from ..check.compare import Verdict
    from ..check.subject import Subject

_NOT_EQUAL = 1
_CANNOT_START = 2
_EXAMPLES = """examples:
  offmate check llama3-8b
  offmate check ./my-model
  offmate check my_model.py
A Python file defines model(), which returns the model, and batch(), which returns a dict of keyword arguments or a \
tuple of positional ones. It may define call(model, batch), loss(output, batch) and optimizer(model).
exit status: 0 the numbers are equal, 1 they are not, or offmate refuses the model, 2 nothing could be compared
"""


def add_parser(verbs: Any) -> None:
    """Add the command `check` to the command line's subparsers; its `run` is `run`."""
    parser = verbs.add_parser(
        "check",
        help="train a model some steps beside plain PyTorch, and compare all numbers",
        description="Train a model a few steps on random data with plain PyTorch, and with offmate within an ample and "
        "within the least GPU memory budget. Say whether losses, parameters, buffers and optimizer states are equal "
        "bit for bit, or why offmate refuses the model. An architecture of transformers is built in a tiny size, with "
        "random weights.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument(
        "model", metavar="MODEL_OR_FILE", help="a built-in shape (llama2-7b, ...), a folder, a Hub id, or a Python file"
    )
    parser.add_argument("--full", action="store_true", help="build an architecture in its own size, not in a tiny one")
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="steps of each run (default: %(default)s)")
    parser.add_argument("--device", type=device, default="emulated", help="where to train (default: %(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the result to FILE")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check a model and print the verdict.

    Returns: the exit status. Raises: OffmateError if there is nothing to check.
    """
    from ..check.compare import Outcome, check
    from ..errors import OffmateError
    from ..machines.devices import device_kind
    from .screen import console

    screen = console(arguments.quiet)
    try:
        device_kind(arguments.device)
        subject = _subject(arguments)
        verdict = check(subject, arguments.steps, arguments.device, lambda words: screen.print(f"{words} ..."))
    except OffmateError as error:
        console().print(f"offmate: {error}", markup=False)
        return _CANNOT_START
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_as_json(subject, verdict), indent=2) + "\n")
    _print(screen, subject, verdict)
    if verdict.outcome in (Outcome.PLAIN_FAILS, Outcome.UNSTABLE):
        return _CANNOT_START
    return 0 if verdict.outcome is Outcome.EQUAL else _NOT_EQUAL


def _subject(arguments: argparse.Namespace) -> Subject:
    from ..errors import ArgumentValueError, LibraryError

    path = Path(arguments.model).expanduser()
    if path.suffix == ".py":
        from ..check.files import subject_in

        if not path.is_file():
            raise ArgumentValueError(f"{arguments.model!r}: no such file")
        return subject_in(path)
    if not is_installed("transformers"):
        raise LibraryError(f"{missing('transformers')}. A Python file instead of an architecture does not need it")
    from ..check.hugging_face import subject_of
    from .shapes import configuration

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return subject_of(arguments.model, configuration(arguments.model), tiny=not arguments.full)


def _as_json(subject: Subject, verdict: Verdict) -> dict[str, Any]:
    return {
        "name": subject.name,
        "outcome": verdict.outcome.name.lower(),
        "words": verdict.words,
        "budget": verdict.budget,
        "n_parameters": verdict.n_parameters,
        "ample_peak_bytes": verdict.ample_peak_bytes,
        "least_budget_bytes": verdict.least_budget_bytes,
        "trace": verdict.trace,
    }


def _print(screen: Any, subject: Subject, verdict: Verdict) -> None:
    from rich.text import Text

    from ..check.compare import Outcome
    from ..sizes import format_bytes, format_least_bytes
    from .screen import pairs

    colour = "green" if verdict.outcome is Outcome.EQUAL else "yellow" if verdict.outcome is Outcome.REFUSED else "red"
    word, _, sentence = verdict.outcome.value.partition(": ")
    rows: list[tuple[str, Any]] = [("result", Text.assemble((word, colour), f": {sentence}"))]
    if verdict.words:
        # Whatever is refused with an ample budget is refused with any.
        somewhere = verdict.budget and (verdict.outcome is not Outcome.REFUSED or verdict.budget == "least")
        where = f"within the {verdict.budget} budget: " if somewhere else ""
        rows.append(("why", Text(where + verdict.words)))
    if verdict.n_parameters is not None:
        rows.append(("parameters", f"{verdict.n_parameters:,}"))
    if verdict.ample_peak_bytes is not None and verdict.least_budget_bytes is not None:
        least, ample = format_least_bytes(verdict.least_budget_bytes), format_bytes(verdict.ample_peak_bytes)
        rows.append(("GPU memory", f"{ample} at an ample budget; the least budget is {least}"))
    screen.print(subject.name, markup=False)
    screen.print(pairs(rows))
    if verdict.trace:
        screen.print(verdict.trace, markup=False, highlight=False, soft_wrap=True)
