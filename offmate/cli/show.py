"""`offmate show PLAN.json`: show a saved plan, or two, in the terminal, as a picture, as a trace, or as text."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_whole
from .arguments import Help

if TYPE_CHECKING:
    from rich.console import Console

    from ..plans.plan import Plan

_EXAMPLES = """examples:
  offmate show plan.json                     a summary, and a table per class
  offmate show plan.json --blocks --what-if  block by block, and what would help
  offmate show plan.json --html plan.html    a picture for the browser
  offmate show plan.json --trace trace.json  a trace for https://ui.perfetto.dev
  offmate show plan.json --text              every action of an iteration
  offmate show a.json b.json                 both plans' numbers in a table
  offmate show a.json b.json --html ab.html  both pictures on one time axis
"""
_MOST = 2


def add_parser(verbs: Any) -> argparse.ArgumentParser:
    """Add the command `show` to the command line's subparsers; its `run` is `run`."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "show",
        help="show a saved plan, or two beside each other, as a summary, a table, a picture or a trace",
        description="Show a plan that was saved with plan.save or `offmate plan --json`, or compare two.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN.json", help="the file of a plan, or of two")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page with the picture")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--text", action="store_true", help="print every action with its bytes")
    parser.add_argument("--blocks", action="store_true", help="rows per block, not per class; equal blocks share one")
    parser.add_argument("--what-if", action="store_true", help="also say what more memory or a faster link would gain")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan's figures")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Show one plan, or compare two.

    Parameters
    ----------
    arguments: `plans`; `html`, `trace` and `json` (paths or None); `text`, `blocks`, `what_if` and `quiet`.

    Returns: the exit status, 0.

    Raises: PlanFileError if a file is not a plan of this version; ArgumentValueError if more than two are named, or two
        where one is shown; OffmateError if an output file cannot be written.
    """
    from ..plans.plan import load_plan

    _check(arguments)
    plans = [load_plan(path) for path in arguments.plans]
    files = _files(arguments, plans)
    for path, write in files.items():
        write(path)
    if arguments.quiet:
        return 0
    from .screen import console

    screen = console()
    if arguments.text:
        from .actions import print_actions

        about = plans[0].about.words()
        if about:
            screen.print(f"{about}\n", markup=False)
        print_actions(screen, plans[0])
    elif files:
        screen.print("\n".join(f"wrote {path}" for path in files), markup=False, soft_wrap=True)
    elif len(plans) == _MOST:
        _compare(screen, plans)
    else:
        from .summary import print_plan

        about = plans[0].about.words()
        headline = f"{about}\n" if about else ""
        print_plan(screen, plans[0], offers=arguments.what_if, every_block=arguments.blocks, headline=headline)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ArgumentValueError if there are too many plans for what is asked."""
    from ..errors import ArgumentValueError

    count = len(arguments.plans)
    if count > _MOST:
        raise ArgumentValueError(f"{count} plans are named; one can be shown, or {_MOST} compared")
    for option, path in (("--html", arguments.html), ("--trace", arguments.trace), ("--json", arguments.json)):
        if path is not None and any(os.path.realpath(path) == os.path.realpath(plan) for plan in arguments.plans):
            raise ArgumentValueError(f"{option} {path} would overwrite the plan that is shown; name another file")
    given = {
        "--text": arguments.text, "--blocks": arguments.blocks, "--what-if": arguments.what_if, "--json": arguments.json
    }  # fmt: skip
    of_one = [option for option, value in given.items() if value]
    if count == _MOST and of_one:
        raise ArgumentValueError(f"{' and '.join(of_one)} can be used with one plan only, and {count} are named")


def _compare(screen: Console, plans: list[Plan]) -> None:
    """Print what two plans are of, their numbers, and what else differs."""
    from .screen import pairs

    first, second = plans
    found = first.diff(second)
    screen.print(pairs((word, plan.about.words() or plan.title) for word, plan in zip(("before", "after"), plans)))
    screen.print()
    screen.print(found.table())
    if not found.same_model:
        screen.print("The plans are for different models or shapes, so only totals are compared.")


def _files(arguments: argparse.Namespace, plans: list[Plan]) -> dict[Path, Callable[[Path], None]]:
    """Map each output path to the function that writes it."""
    from ..plans.plan import pair_document
    from ..reports.chrome_trace import save_trace
    from .summary import figures

    names = [path.name for path in arguments.plans]
    if len(set(names)) < len(names):
        names = [str(path) for path in arguments.plans]

    def page() -> str:
        return plans[0].to_html() if len(plans) == 1 else pair_document(plans[0], plans[1], (names[0], names[1]))

    def trace(path: Path) -> None:
        one = ["predicted"] if len(plans) == 1 else names
        save_trace([plan.timeline(name) for plan, name in zip(plans, one)], path)

    return {
        path: write
        for path, write in (
            (arguments.html, lambda path: write_whole(path, page())),
            (arguments.trace, trace),
            (arguments.json, lambda path: write_whole(path, json.dumps(figures(plans[0]), indent=2) + "\n")),
        )
        if path is not None
    }
