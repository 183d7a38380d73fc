"""Train any exportable PyTorch model within a GPU memory budget, with bit-identical results."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .libraries import library_errors
from .version import VERSION

if TYPE_CHECKING:
    from .api import compile, plan
    from .casting import cast_weights
    from .config import Config
    from .errors import (
        BudgetExceeded,
        CaptureError,
        DeviceError,
        InfeasibleBudget,
        LeftOutError,
        OffmateError,
        PlanFileError,
        ProtocolError,
        SolverError,
        StorageError,
    )
    from .optim.masters import with_master_weights
    from .plans.plan import Plan, load_plan
    from .plans.sweep import SweepPoint, sweep
    from .plans.trace import Trace
    from .reports.plots import plot_sweep
    from .runtime.storage.folders import StoragePath
    from .session.module import Handle
    from .session.saved import load_checkpoint, remove_checkpoint, save_checkpoint
    from .split import Split

__version__ = VERSION

_HOME = {
    "compile": "api",
    "plan": "api",
    "cast_weights": "casting",
    "Config": "config",
    "Plan": "plans.plan",
    "load_plan": "plans.plan",
    "with_master_weights": "optim.masters",
    "plot_sweep": "reports.plots",
    "SweepPoint": "plans.sweep",
    "Split": "split",
    "Handle": "session.module",
    **dict.fromkeys(("load_checkpoint", "remove_checkpoint", "save_checkpoint"), "session.saved"),
    "StoragePath": "runtime.storage.folders",
    "sweep": "plans.sweep",
    "Trace": "plans.trace",
    **dict.fromkeys(
        (
            "BudgetExceeded",
            "CaptureError",
            "DeviceError",
            "InfeasibleBudget",
            "LeftOutError",
            "OffmateError",
            "PlanFileError",
            "ProtocolError",
            "SolverError",
            "StorageError",
        ),
        "errors",
    ),
}
_SUBMODULES = ("errors", "solver", "runtime")

__all__ = [
    "BudgetExceeded",
    "CaptureError",
    "Config",
    "DeviceError",
    "Handle",
    "InfeasibleBudget",
    "LeftOutError",
    "OffmateError",
    "Plan",
    "PlanFileError",
    "ProtocolError",
    "SolverError",
    "Split",
    "StorageError",
    "StoragePath",
    "SweepPoint",
    "Trace",
    "__version__",
    "cast_weights",
    "compile",
    "load_checkpoint",
    "load_plan",
    "plan",
    "plot_sweep",
    "remove_checkpoint",
    "save_checkpoint",
    "sweep",
    "with_master_weights",
]


def __getattr__(name: str) -> Any:
    """Load on first use: `import offmate.solver` needs no torch."""
    if name in _HOME:
        with library_errors():
            return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what is public, for completion: most of it is not loaded before its first use."""
    return sorted([*__all__, *_SUBMODULES])
