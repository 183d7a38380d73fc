"""The walls of the project: imports run down, the solver needs no torch, what is public is documented."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from unittest.mock import MagicMock, Mock

import pytest
from offmate.runtime.replay.handlers import Handlers
from offmate.runtime.replay.world import World
from offmate.solver.effects import EFFECTS
from offmate.solver.items import ItemKind
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.state import HANDLERS

import offmate
from offmate.reports.items import ACTION_WORDS, KINDS
from offmate.reports.timeline import BAR_WORDS

from .house.imports import ROOT, imported, modules
from .house.order import ROOMS, circles, room_of, upward
from .solver.tiny_schedule import tiny_schedule

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


def test_every_kind_of_action_is_known_everywhere() -> None:
    moving = set(Kind) - {Kind.COMPUTE}
    assert set(EFFECTS) == set(HANDLERS) == set(Kind)
    assert set(ACTION_WORDS) == moving and set(BAR_WORDS) == moving - {Kind.FREE}


def test_every_kind_of_item_is_known_everywhere() -> None:
    world = World(tiny_schedule(), MagicMock(), Mock(), Mock())
    assert set(Handlers(world, Mock(), Mock(), frozenset()).of) == set(ItemKind.all())
    assert {kind.bytes_kind for kind in ItemKind.all()} <= set(KINDS)


def test_what_contributing_says_of_a_first_change(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    exec(compile(code, "CONTRIBUTING.md", "exec", dont_inherit=True), {"__name__": __name__})
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()][:2] == ["algorithm 1", "improve"]


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
