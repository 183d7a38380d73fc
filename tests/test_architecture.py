"""The walls of the project: imports go one way, the solver needs no torch, what is public is documented."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import offmate

ROOT = Path(__file__).parent.parent
BACKENDS = ROOT / "solver" / "backends"
SOLVERS = {"pulp", "highspy", "ortools"}

_WITHOUT_TORCH = """
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None
import offmate.solver
import offmate.solver.problem, offmate.solver.schedule, offmate.solver.simulate, offmate.solver.validate
assert not {"pulp", "ortools", "rich"} & set(sys.modules), sorted(sys.modules)
"""


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def imported(path: Path) -> set[str]:
    """Absolute dotted names that a file imports, at any depth; `solver` and `runtime` lie within `offmate`."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] == "offmate" else ("offmate", *relative.parts)
    package = parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module or "").split(".")) if node.module else base
            names |= {".".join((*module, alias.name)) for alias in node.names}
    return names


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", sources("solver"), ids=lambda path: path.name)
def test_solver_imports_neither_torch_nor_the_rest(path: Path) -> None:
    names = imported(path)
    assert "torch" not in roots(names)
    ours = {name for name in names if name.split(".")[0] == "offmate"}
    assert all(name.startswith("offmate.solver") for name in ours), ours


@pytest.mark.parametrize("path", sources("runtime"), ids=lambda path: path.name)
def test_runtime_imports_only_the_solver(path: Path) -> None:
    ours = {name for name in imported(path) if name.split(".")[0] == "offmate"}
    assert all(name.startswith(("offmate.solver", "offmate.runtime")) for name in ours), ours


@pytest.mark.parametrize("folder", ["offmate", "solver", "runtime"])
def test_optimisation_libraries_stay_behind_the_backends(folder: str) -> None:
    for path in sources(folder):
        if BACKENDS not in path.parents:
            assert not SOLVERS & roots(imported(path)), path


def test_solver_loads_where_torch_is_absent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in offmate.__all__ if name != "__version__"])
def test_what_is_public_is_documented(name: str) -> None:
    public = getattr(offmate, name)
    assert public.__doc__ and public.__doc__.strip()
    for member, value in vars(public).items() if inspect.isclass(public) else ():
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert value.__doc__, f"{name}.{member}"


def test_nothing_else_is_public() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = offmate.no_such_name
