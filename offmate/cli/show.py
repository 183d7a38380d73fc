"""`offmate show PLAN.json`: show a saved plan in the terminal, as a picture, as a trace, or as text."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_whole
from .arguments import Help

if TYPE_CHECKING:
    from ..plans.plan import Plan

_EXAMPLES = """examples:
  offmate show plan.json                     a summary, and a table per class
  offmate show plan.json --blocks --what-if  block by block, and what would help
  offmate show plan.json --html plan.html    a picture for the browser
  offmate show plan.json --trace trace.json  a trace for https://ui.perfetto.dev
  offmate show plan.json --text              every action of an iteration
"""


def add_parser(verbs: Any) -> argparse.ArgumentParser:
    """Add the command `show` to the command line's subparsers; its `run` is `run`."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "show",
        help="show a saved plan as a summary, a table, a picture or a trace",
        description="Show a plan that was saved with plan.save or `offmate plan --json`.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="the plan's file")
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
    """Show one plan.

    Parameters
    ----------
    arguments: `plan`; `html`, `trace` and `json` (paths or None); `text`, `blocks`, `what_if` and `quiet`.

    Returns: the exit status, 0.

    Raises: PlanFileError if the file is not a plan of this version; OffmateError if an output file cannot be written.
    """
    from ..plans.plan import load_plan

    plan = load_plan(arguments.plan)
    files = _files(arguments, plan)
    for path, write in files.items():
        write(path)
    if arguments.quiet:
        return 0
    if arguments.text:
        from ..solver.text import to_text

        sys.stdout.write(to_text(plan.schedule))
    elif files:
        print("\n".join(f"wrote {path}" for path in files))
    else:
        from .screen import console
        from .summary import print_plan

        print_plan(console(), plan, offers=arguments.what_if, every_block=arguments.blocks)
    return 0


def _files(arguments: argparse.Namespace, plan: Plan) -> dict[Path, Callable[[Path], None]]:
    """Map each output path to the function that writes it."""
    from .summary import figures

    return {
        path: write
        for path, write in (
            (arguments.html, lambda path: write_whole(path, plan.to_html())),
            (arguments.trace, plan.save_trace),
            (arguments.json, lambda path: write_whole(path, json.dumps(figures(plan), indent=2) + "\n")),
        )
        if path is not None
    }
