"""What a program is: a script, the lines that are added to it, and what it is called with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_LINES = 3


@dataclass(frozen=True)
class Line:
    """A line that is added to a script.

    Parameters
    ----------
    after: the text of the line that it follows, without its indentation; the first such line counts.
    text: the line itself, which is indented as that one.
    """

    after: str
    text: str


@dataclass(frozen=True)
class Program:
    """A training program.

    Parameters
    ----------
    script: its path in the package, the repository or this folder, whose name `source` is.
    source: an installed package, a repository's name, or "here".
    lines: what is added so that offmate trains; at most three.
    arguments: its command line, in a folder that `inputs` has filled.
    needs: modules that must be installed. beside: files of the script's folder that it reads.
    """

    name: str
    source: str
    script: str
    lines: tuple[Line, ...]
    arguments: str
    inputs: Callable[[Path], None]
    needs: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.lines) > MOST_LINES:
            raise ValueError(f"{self.name} has {len(self.lines)} added lines; at most {MOST_LINES} are meant to do")


def find(program: Program, scripts: Path | None) -> Path:
    """Find a program's script.

    Parameters
    ----------
    scripts: the folder with the repositories that scripts come from, each under its name; None if there is none.

    Raises: FileNotFoundError with what to do if it is not there.
    """
    if program.source == "here":
        return Path(__file__).parent / program.script
    roots = [scripts / program.source] if scripts is not None else []
    installed = importlib.util.find_spec(program.source)
    if installed is not None:
        roots += map(Path, installed.submodule_search_locations or ())
    for root in roots:
        if (root / program.script).is_file():
            return root / program.script
    raise FileNotFoundError(
        f"{program.script} of {program.source} is not there: install the package, or clone the repository into a "
        f"folder and name that folder: --scripts FOLDER (it then holds FOLDER/{program.source}/{program.script})"
    )


def with_lines(script: str, lines: tuple[Line, ...]) -> str:
    """Add lines to a script's text.

    Raises: ValueError if a line to follow is not there.
    """
    found = script.splitlines()
    for line in lines:
        places = [index for index, text in enumerate(found) if text.strip() == line.after]
        if not places:
            raise ValueError(f"the script has no line {line.after!r}, after which {line.text!r} is to be added")
        before = found[places[0]]
        found.insert(places[0] + 1, before[: len(before) - len(before.lstrip())] + line.text)
    return "\n".join(found) + "\n"
