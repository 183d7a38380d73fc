"""Train any exportable PyTorch model inside a device-memory budget, with plain PyTorch's numbers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import compile, plan
    from .budgets import SweepPoint, sweep
    from .config import Config
    from .errors import (
        BudgetExceeded,
        CaptureError,
        DeviceError,
        InfeasibleBudget,
        OffmateError,
        PlanFileError,
        ProtocolError,
    )
    from .masters import with_master_weights
    from .plans import Plan, load_plan
    from .reports.plots import plot_sweep
    from .split import Split
    from .trace import Trace

__version__ = "0.1.0"

_HOME = {
    "compile": "api",
    "plan": "api",
    "Config": "config",
    "Plan": "plans",
    "load_plan": "plans",
    "with_master_weights": "masters",
    "plot_sweep": "reports.plots",
    "SweepPoint": "budgets",
    "Split": "split",
    "sweep": "budgets",
    "Trace": "trace",
    **dict.fromkeys(
        (
            "BudgetExceeded",
            "CaptureError",
            "DeviceError",
            "InfeasibleBudget",
            "OffmateError",
            "PlanFileError",
            "ProtocolError",
        ),
        "errors",
    ),
}
_SUBMODULES = ("solver", "runtime")

__all__ = [
    "BudgetExceeded",
    "CaptureError",
    "Config",
    "DeviceError",
    "InfeasibleBudget",
    "OffmateError",
    "Plan",
    "PlanFileError",
    "ProtocolError",
    "Split",
    "SweepPoint",
    "Trace",
    "__version__",
    "compile",
    "load_plan",
    "plan",
    "plot_sweep",
    "sweep",
    "with_master_weights",
]


def __getattr__(name: str) -> Any:
    """Load on first use: `import offmate.solver` needs no torch."""
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
