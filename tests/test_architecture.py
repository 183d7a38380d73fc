"""The walls of the project: imports run down, the solver needs no torch, what is public is documented."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import offmate

from .house.imports import imported, modules
from .house.order import ROOMS, circles, room_of, upward

SOLVERS = {"pulp", "highspy", "ortools"}

_WITHOUT_TORCH = """
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None
import offmate.solver
import offmate.solver.problem, offmate.solver.schedule, offmate.solver.simulate, offmate.solver.text
assert not {"pulp", "ortools", "rich"} & set(sys.modules), sorted(sys.modules)
"""


def roots(module: str) -> set[str]:
    return {name.split(".")[0] for name in imported(module)}


def test_every_import_runs_down() -> None:
    assert not upward()


def test_there_are_no_circles() -> None:
    assert not circles()


def test_the_order_names_no_room_that_is_not_there() -> None:
    assert {room_of(module) for module in modules()} == set(ROOMS)


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("offmate.solver")])
def test_solver_imports_no_torch(module: str) -> None:
    assert "torch" not in roots(module)


def test_optimisation_libraries_stay_behind_the_backends() -> None:
    outside = [name for name in modules() if not name.startswith("offmate.solver.backends.")]
    assert [name for name in outside if SOLVERS & roots(name)] == []


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
