"""Where a source uses what is private in other libraries."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .private_names import NAMES, private, private_segments

LIBRARIES = frozenset(("torch", "transformers", "accelerate", "peft", "trl"))

# Python's own that are spelt as private ones, and what the project puts on objects of others.
_FINE = frozenset(("_replace", "_getframe", "_exit", "_reconstructor", "_fill_text", "_offmate", "_offmate_session"))
_LISTED = frozenset[str]().union(*map(private_segments, NAMES))


def private_uses(source: str) -> list[str]:
    """What a source imports, reads, defines or spells out of what is private elsewhere, with the lines.

    A name counts if it is private in a name that is listed, on whatever object; any other one counts if the source
    itself gives nothing that name, so that it is somebody else's.
    """
    tree = ast.parse(source)
    own = set(_defined(tree)) | _FINE
    found = [(line, name) for line, name in _names(tree) if name in _LISTED or name not in own]
    return [f"line {line}: {name}" for line, name in sorted(set(found))]


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every private name that is imported from a library, an attribute or a method, or a text of its own if listed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            yield from ((node.lineno, part) for module in modules for part in _of_libraries(module))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, part) for name in names for part in _of_libraries(name))
        elif isinstance(node, ast.Attribute) and private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            yield from ((method.lineno, method.name) for method in methods if method.name in _LISTED)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, part) for part in _spelt(node.value))


def _of_libraries(name: str) -> list[str]:
    parts = name.split(".")
    return [part for part in parts if private(part)] if parts[0] in LIBRARIES else []


def _spelt(text: str) -> list[str]:
    """A private name that a text is, or private parts of a dotted name that it is, as `getattr` and mocks take them."""
    if text in _LISTED:
        return [text]
    dotted = all(part.isidentifier() for part in text.split("."))
    return _of_libraries(text) if dotted else []


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that a source gives to something itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
