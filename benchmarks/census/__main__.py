"""`python -m benchmarks.census`: checks the models of public lists, and writes a table of what was found.

Every model of a list is trained a few steps with plain PyTorch, and by offmate within an ample and within the least
budget (`offmate check`), each list in forked processes, so that a crash or a model that takes too long costs one row.
Results are kept in a JSON file as they come. `--resume` goes on where a run was stopped, `--again` repeats rows that
were not equal, and `--only` takes some names.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import time
from pathlib import Path
from typing import Any

from .lists import LISTS
from .processes import Row, checked
from .table import markdown

RESULTS = Path(__file__).parents[1] / "results" / "census.json"
TABLE = Path(__file__).parents[2] / "docs" / "census.md"
_PACKAGES = ("torch", "transformers", "timm", "torchvision", "diffusers")


def main() -> None:
    """Check what the arguments name, and write results and table."""
    arguments = _arguments()
    rows = _known(arguments.json) if arguments.resume or arguments.again else {}
    done = {key for key, row in rows.items() if not arguments.again or row["outcome"] == "equal"}
    for name in arguments.lists:
        wanted = [case for case in LISTS[name].names() if not arguments.only or case in arguments.only]
        todo = [case for case in wanted if (name, case) not in done]
        print(f"{name}: {len(todo)} of {len(wanted)} to check", flush=True)
        start_s = time.perf_counter()
        for row in checked(name, todo, arguments.processes, arguments.seconds):
            rows[name, row.name] = _as_json(name, row)
            print(f"{row.outcome:<12} {name} {row.name} {row.seconds:.0f} s {row.words[:100]}", flush=True)
            _write(arguments, rows)
        print(f"{name}: {time.perf_counter() - start_s:.0f} s", flush=True)
    _write(arguments, rows)
    if arguments.table is not None:
        arguments.table.write_text(markdown(_all(arguments.json)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS), help="which lists (all of them)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these names of the lists")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=240, help="the most that one model may take")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, help=f"write the table here, {TABLE.name} in docs for instance")
    parser.add_argument("--resume", action="store_true", help="leave out what the JSON file has already")
    parser.add_argument("--again", action="store_true", help="the same, but check again what was not equal")
    return parser.parse_args()


def _as_json(list_name: str, row: Row) -> dict[str, Any]:
    return {"list": list_name, "name": row.name, "outcome": row.outcome, "words": row.words, "seconds": row.seconds}


def _known(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["list"], row["name"]): row for row in _all(path)["rows"]} if path.is_file() else {}


def _all(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _write(arguments: argparse.Namespace, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    kept = [rows[key] for key in sorted(rows)]
    found = {"python": platform.python_version(), "versions": versions, "rows": kept}
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
