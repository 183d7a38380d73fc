"""Which module imports which, read from the sources: every import at any depth, those for type checkers included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_PARTS = {"offmate": "offmate", "offmate.solver": "solver", "offmate.runtime": "runtime"}


@cache
def modules() -> dict[str, Path]:
    """The project's modules by dotted name; a package goes by its own name."""
    found = {}
    for package, folder in _PARTS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            inner = inner[:-1] if inner[-1] == "__init__" else inner
            found[".".join((package, *inner))] = path
    return found


def imported(name: str) -> set[str]:
    """Absolute dotted names that a module imports, of any library; what is imported from a module counts as in it."""
    path = modules()[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *node.module.split(".")] if node.module else base
            names |= {".".join((*module, alias.name)) for alias in node.names}
    return names


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """Pairs of modules of which the first imports the second."""
    return frozenset(
        (name, target) for name in modules() for found in imported(name) for target in _targets(found) if target != name
    )


def _targets(found: str) -> Iterator[str]:
    """The module that an imported name lies in."""
    parts = found.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in modules():
            yield ".".join(parts[:end])
            return


def folder_of(module: str) -> str:
    """The folder that a module lies in, as a dotted name; a package lies in itself."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
