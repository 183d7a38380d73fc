"""What torch's own allocator reserves, and what a step asks of a card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .cases import CASES
from .loops import training

pytestmark = pytest.mark.timeout(240)
N_STEPS = 8
STEADY = 5  # steps after which nothing is new


@pytest.mark.parametrize("name", CASES)
def test_what_is_reserved_and_what_a_step_asks_for(name, cache_dir):
    """No more is reserved than predicted; steady steps hardly allocate or make the host wait."""
    case = CASES[name]
    with training(case, cache_dir) as loop:
        steps = [loop.step() for _ in range(N_STEPS)]
        n_params = sum(1 for _ in loop.model.parameters())
        plan, reserved = loop.plan, torch.cuda.max_memory_reserved(0)
    assert plan.schedule.per_step == (case.settings["accumulation_steps"] if case.by_block else 1)
    steady = steps[STEADY:]
    assert reserved <= plan.predicted_peak_bytes, "the allocator reserved more than the plan predicts"
    assert plan.predicted_peak_bytes <= plan.budget_bytes, "the plan predicts more than its budget"
    # What workers still hold depends on time, so that the small pool may grow once more, within the prediction.
    assert sum(step.allocations > 0 for step in steady) <= 1, "steady steps take memory of the card"
    assert [step.host_allocations for step in steady] == [0] * len(steady), "a steady step pins memory"
    waits = 1 + n_params * case.host_looks_at_gradients
    assert max(step.syncs for step in steady) <= waits, f"in a steady step the host waits more often than {waits} times"
    # Not kernels in total: what is moved within the card depends on the state in which a step finds its memory.
    assert len({step.products for step in steady}) == 1, "steady steps make different products"


def test_a_budget_smaller_than_the_copies_that_are_timed_otherwise(tmp_path: Path) -> None:
    """A process that has measured nothing yet stays within it while it measures."""
    budget = 160 << 20
    with training(CASES["llama"], str(tmp_path), budget=budget) as loop:
        loop.step()
        assert torch.cuda.max_memory_reserved(0) <= budget
