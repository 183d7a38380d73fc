"""A plan's file: what it holds as JSON's own types, and what is checked of it before anybody relies on it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import PlanFileError
from ..lowering.stored import StoredClass, StoredOption
from ..solver.accumulation import AccumulationTrial
from ..solver.files import problem_from_dict, read_record
from ..solver.files import to_dict as problem_to_dict
from ..solver.items import gradient, parameter
from ..solver.problem import Problem
from ..solver.schedule import Schedule
from ..solver.text import from_dict, to_dict
from .about import UNKNOWN, About
from .break_even import BreakEven
from .orders import OtherOrder
from .table import BlockRow

FORMAT = 4


@dataclass(frozen=True)
class Figures:
    """The fields of a plan that stand in its file as they are; see `Plan`.

    Raises: ValueError if a number is negative or not finite.
    """

    fingerprint: str
    budget_bytes: int
    fixed_bytes: int
    least_budget_bytes: int
    lower_bound_s: float
    gap: float
    status: str
    user_bytes: int
    plan_s: float
    blocks: tuple[BlockRow, ...]
    allocator_bytes: int = 0
    low: dict[str, str] = field(default_factory=dict)
    low_gradients: dict[str, str] = field(default_factory=dict)
    about: About = UNKNOWN
    accumulation: tuple[AccumulationTrial, ...] = ()
    other_order: OtherOrder | None = None
    break_even: BreakEven | None = None

    def __post_init__(self) -> None:
        compared = [one for one in (self.other_order, self.break_even) if one is not None]
        for record in (self, *compared, self.about, *self.about.storage, *self.blocks, *self.accumulation):
            for name, value in vars(record).items():
                if isinstance(value, int | float) and not 0 <= value < math.inf:
                    raise ValueError(f"{name} is {value}; it must be finite and not negative")


def to_text(plan: Any) -> str:
    """Write a plan, which has all fields that `read` returns, as JSON."""
    data: dict[str, Any] = {"format": FORMAT, **{one.name: getattr(plan, one.name) for one in fields(Figures)}}
    data |= {
        "schedule": to_dict(plan.schedule),
        "problem": None if plan.problem is None else problem_to_dict(plan.problem),
        "blocks": [asdict(row) for row in plan.blocks],
        "about": _about(plan.about),
        "classes": {
            key: {
                "options": [[o.name, list(o.kept), list(o.offloaded)] for o in stored.options],
                "kernel_bytes": stored.kernel_bytes,
            }
            for key, stored in plan.classes.items()
        },
    }
    trials, other, compared = (data.pop(name) for name in ("accumulation", "other_order", "break_even"))
    data |= {"accumulation": [_without(trial, "per_pass") for trial in trials]} if trials else {}
    if other is not None:
        data["other_order"] = _without(other, "per_pass")
    data |= {"break_even": compared.to_dict()} if compared is not None else {}
    for name in ("low", "low_gradients"):
        if not data[name]:
            del data[name]
    return json.dumps(data)


def _about(about: About) -> dict[str, Any]:
    """Return what a plan is of as JSON's own types, without storage paths and tokens where there are none."""
    return _without(about, "storage", "tokens")


def _without(record: Any, *names: str) -> dict[str, Any]:
    """Return a record's fields as JSON's own types, those of these names only where they say something."""
    return {name: value for name, value in asdict(record).items() if name not in names or value}


def read(path: Path) -> dict[str, Any]:
    """Read the fields of a plan from its file.

    Raises: PlanFileError if the file is not a plan, is damaged, contradicts itself, or is of another version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise PlanFileError(f"{path}: not a plan file: {error}") from None
    except RecursionError:
        raise PlanFileError(f"{path}: not a plan file: its brackets are nested too deeply") from None
    if isinstance(data, dict) and "points" in data and "endless_s" in data:
        raise PlanFileError(
            f"{path}: the curve that `offmate plan --sweep` wrote, not a plan. Make a plan for one of its budgets: "
            "offmate plan MODEL --gpu-budget SIZE --json FILE"
        )
    if not isinstance(data, dict) or "format" not in data:
        found = "an object without a format" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise PlanFileError(f"{path}: not a plan file: it holds {found}; plan.save or `offmate plan --json` writes one")
    if data["format"] != FORMAT:
        raise PlanFileError(
            f"{path}: plan format {str(data['format'])[:40]}; this version reads format {FORMAT}. Plan again"
        )
    try:
        return _fields(data)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{path}: a damaged plan file: {error}. Plan again") from error


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    """Read everything; raises ValueError naming the place of what is wrong."""
    read_apart: dict[str, Callable[[Any], Any]] = {"schedule": from_dict, "problem": _problem, "classes": _classes}
    for name in read_apart.keys() - data.keys():
        raise ValueError(f"the plan lacks {name!r}")
    rest = {key: value for key, value in data.items() if key != "format" and key not in read_apart}
    if isinstance(compared := rest.get("break_even"), dict):  # its share follows from its other figures
        rest["break_even"] = {key: value for key, value in compared.items() if key != "share"}
    figures: Figures = read_record(rest, Figures, "plan")
    found = vars(figures) | {name: read_one(data[name]) for name, read_one in read_apart.items()}
    _check_options(found["schedule"], found["problem"], figures)
    for name in figures.low | figures.low_gradients:
        if not {parameter(name), gradient(name)} <= found["schedule"].item_bytes.keys():
            raise ValueError(
                f"the schedule has no parameter {name!r} with a gradient, which moves in a lower precision"
            )
    return found


def _problem(data: Any) -> Problem | None:
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"problem: expected an object, found a {type(data).__name__}")
    return None if data is None else problem_from_dict(data)


def _classes(data: Any) -> dict[str, StoredClass]:
    if not isinstance(data, dict):
        raise ValueError(f"classes: expected an object, found a {type(data).__name__}")
    return {key: _class(one, f"classes[{key!r}]") for key, one in data.items()}


def _class(data: Any, place: str) -> StoredClass:
    if not isinstance(data, dict) or not isinstance(data.get("options"), list):
        raise ValueError(f"{place}: expected an object with 'options' and 'kernel_bytes'")
    options = tuple(_option(one, f"{place}.options[{number}]") for number, one in enumerate(data["options"]))
    stored: StoredClass = read_record({**data, "options": []}, StoredClass, place)
    for node, sizes in stored.kernel_bytes.items():
        if not sizes or min(sizes) < 0:
            raise ValueError(f"{place}: kernel_bytes of {node!r} are {list(sizes)}; they must not be negative or none")
    return StoredClass(options, stored.kernel_bytes)


def _option(data: Any, place: str) -> StoredOption:
    if not isinstance(data, list) or len(data) != len(fields(StoredOption)):
        raise ValueError(f"{place}: expected a name, and the numbers of what is kept and of what is offloaded")
    named = {one.name: value for one, value in zip(fields(StoredOption), data)}
    option: StoredOption = read_record(named, StoredOption, place)
    return option


def _check_options(schedule: Schedule, problem: Problem | None, figures: Figures) -> None:
    """Raise ValueError unless the schedule chooses an option that exists for every block."""
    counts = [len(block.options) for block in problem.blocks] if problem is not None else []
    chosen = schedule.options
    if problem is not None and not len(counts) == len(chosen) == len(figures.blocks):
        raise ValueError(
            f"the schedule chooses options of {len(chosen)} blocks; the problem has {len(counts)} blocks, the table "
            f"{len(figures.blocks)}"
        )
    for block, (option, count) in enumerate(zip(chosen, counts)):
        if not 0 <= option < count:
            raise ValueError(f"the schedule chooses option {option} for block {block}, which has {count}")
