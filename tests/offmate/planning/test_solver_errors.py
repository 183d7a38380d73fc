"""A solver that fails or runs out of time says so with what to try."""

from __future__ import annotations

import pytest
import torch
from offmate.solver import solve
from offmate.solver.backends import BackendError

import offmate


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (solve.NoAnswer("no budget was found: no answer"), r"ran out of time; give it more with Config\(solver_time"),
        (BackendError("highs is not installed"), "no plan can be made: highs is not installed"),
    ],
)
def test_errors_of_a_solver_are_offmates(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def fails(*given: object, **named: object) -> None:
        raise error

    monkeypatch.setattr("offmate.planning.subject.least_budget", fails)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = offmate.Config(cache_dir=None, gradients_into=("output",))
    with pytest.raises(offmate.SolverError, match=words):
        offmate.plan(model, "1MiB", example_inputs={"input": torch.randn(2, 8)}, device="emulated", config=config)
