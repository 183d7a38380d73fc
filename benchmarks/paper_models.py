"""The models of OffMate's table 1 (bf16, a 12 GB card, 128 GB of RAM), with assumptions where the paper is silent.

The paper gives neither batch nor sequence length. Assumed are 512 tokens; batches of 2, 4 and 8 (to show how much the
result depends on them); parameters, gradients and both moments in bf16 (8 bytes per parameter); activations that take
the rest of the paper's memory requirement; an iteration at the paper's samples per second without offloading; the rates
of its RTX 3060; and a budget of 10 GB (the paper's 2 GB of headroom).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offmate.solver.instances.synthetic import Precision, Shape, Speeds, llama
from offmate.solver.plan import Planned, plan
from offmate.solver.problem import Problem
from offmate.solver.solve import least_budget

GB, GIB = 10**9, 2**30
BATCHES = (2, 4, 8)
SEQUENCE = 512
BF16 = Precision(param_bytes=2, grad_bytes=2, state_bytes=4, activation_bytes=2)
_STATE_BYTES = BF16.param_bytes + BF16.grad_bytes + BF16.state_bytes
_BUDGET_BYTES, _HOST_BYTES = 10 * GB, 128 * GB


@dataclass(frozen=True)
class Model:
    """A column of table 1.

    Parameters
    ----------
    required_bytes: the paper's memory requirement, activations included.
    original_per_s, offmate_per_s: the paper's samples per second without a limit and with OffMate.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    kv_hidden: int
    gated: bool
    tied: bool
    required_bytes: int
    original_per_s: float
    offmate_per_s: float

    def shape(self, batch: int) -> Shape:
        """Return the shape with this batch and the assumed sequence length."""
        widths = (self.layers, self.hidden, self.intermediate, self.vocab)
        return Shape(*widths, batch, SEQUENCE, kv_hidden=self.kv_hidden, gated=self.gated, tied=self.tied)


# Shapes from the models' own configuration files.
MODELS = (
    Model("Bloom-3B", 30, 2560, 10240, 250880, 2560, False, True, int(28.0 * GIB), 2.35, 1.68),
    Model("Phi-3.8B", 32, 3072, 8192, 32064, 3072, True, False, int(43.6 * GIB), 1.91, 1.29),
    Model("Mistral-7B", 32, 4096, 14336, 32000, 1024, True, False, int(80.2 * GIB), 0.93, 0.77),
    Model("Llama3-8B", 32, 4096, 14336, 128256, 1024, True, False, int(65.3 * GIB), 0.97, 0.80),
)


def problem_of(model: Model, batch: int, speeds: Speeds, *, whole_layers: bool) -> Problem | None:
    """Return the problem, None if the paper's samples per second leave no time for the device's own updates."""
    shape = model.shape(batch)
    plain = llama(shape, speeds, _BUDGET_BYTES, _HOST_BYTES, precision=BF16)
    params = sum(group.param_bytes for group in plain.groups) // BF16.param_bytes
    activation_bytes = model.required_bytes - params * _STATE_BYTES
    try:
        return llama(
            shape,
            speeds,
            _BUDGET_BYTES,
            _HOST_BYTES,
            precision=BF16,
            whole_layers=whole_layers,
            iteration_s=batch / model.original_per_s,
            activation_bytes=activation_bytes,
        )
    except ValueError:
        return None


def rows(paper: Speeds, ours: Speeds, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield one row per model and batch.

    Parameters
    ----------
    paper: the machine's rates with the paper's H. ours: the same with our H. limit_s: seconds per solve.
    """
    for model in MODELS:
        for batch in BATCHES:
            restricted = problem_of(model, batch, paper, whole_layers=True)
            free = problem_of(model, batch, ours, whole_layers=False)
            if restricted is None or free is None:
                continue
            yield _row(model, batch, plan(restricted, time_limit_s=limit_s), free, limit_s)


def _row(model: Model, batch: int, theirs: Planned, free: Problem, limit_s: float) -> dict[str, Any]:
    planned = plan(free, time_limit_s=limit_s)

    def per_s(seconds: float) -> float:
        return batch / seconds if seconds > 0 else float("inf")

    return {
        "model": model.name,
        "batch": batch,
        "paper, original /s": model.original_per_s,
        "paper, OffMate /s": model.offmate_per_s,
        "restricted /s": per_s(theirs.simulation.step_s) if theirs.simulation else 0.0,
        "bound /s ": per_s(theirs.solution.lower_bound_s),
        "ours /s": per_s(planned.simulation.step_s) if planned.simulation else 0.0,
        "bound /s": per_s(planned.solution.lower_bound_s),
        "GB": planned.simulation.peak_bytes / GB if planned.simulation else float("nan"),
        "RAM": planned.schedule.host_bytes / GB if planned.schedule else float("nan"),
        "least GB": least_budget(free, gap=0.02, time_limit_s=limit_s).bytes / GB,
        "solve s": planned.solution.solve_s,
        "status": planned.solution.status.name,
    }
