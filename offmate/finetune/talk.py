"""How a run speaks with its user before it trains: lines or events, and questions."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from ..errors import OffmateError
from ..progress import hidden

_WIDTH, _LEAST_WIDTH = 120, 40  # of a terminal: where it is unknown, and at the least
_INDENT = "  "


@dataclass(frozen=True)
class Talk:
    """What is said and asked.

    Parameters
    ----------
    mode: "normal", "quiet" or "json". yes: continue without asking. dry_run: nothing follows that could be stopped.
    """

    mode: str
    yes: bool
    dry_run: bool

    def say(self, lines: list[str], /, **event: Any) -> None:
        """Print lines, or, in mode "json", an event."""
        if self.mode == "json":
            _show(json.dumps(event))
        elif self.mode == "normal" and lines:
            _show(folded(lines))

    def agree(self, doubts: list[str]) -> None:
        """Ask whether to continue if something looks wrong; refuse if nobody can answer. A dry run only prints it."""
        if not doubts:
            return
        if self.dry_run:
            if self.mode == "normal":
                _show(folded([f"DOUBT: {doubt}" for doubt in doubts]))
            return
        if self.yes:
            return
        words = "something looks wrong:\n  " + "\n  ".join(doubts)
        if self.mode != "normal" or not sys.stdin.isatty():
            raise OffmateError(f"{words}\nAdd --yes to continue anyway")
        with hidden():
            try:
                answer = input(f"{folded(words.splitlines())}\nContinue anyway? [y/N] ")
            except EOFError:  # Ctrl-D
                answer = "no"
        if answer.strip().lower() not in ("y", "yes"):
            raise OffmateError("stopped before training")


def _show(text: str) -> None:
    with hidden():
        print(text, flush=True)


def folded(lines: list[str]) -> str:
    """Fold lines to the width of the terminal, or of COLUMNS."""
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    kept = []
    for line in lines:
        indent = _INDENT * (2 if line.startswith(_INDENT) else 1)
        kept += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(kept)
