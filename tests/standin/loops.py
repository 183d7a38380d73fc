"""Training over the stand-in."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import offmate

from .card import Counts, counts
from .cases import Case

AMPLE_BYTES = 1 << 30
HOST_BYTES = 4 << 30


@dataclass
class Loop:
    """A compiled model and its loop."""

    case: Case
    model: Any
    optimizer: torch.optim.Optimizer
    index: int

    def step(self) -> Counts:
        """Train one step; what the card was asked for meanwhile."""
        before = counts(self.index)
        batches = self.case.micro_batches()
        for batch in self.model.offmate.batches(batches) if self.case.by_block else batches:
            with self.case.casting():
                found = self.model(**batch)
            (found if isinstance(found, torch.Tensor) else found.loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return counts(self.index).since(before)

    @property
    def plan(self) -> offmate.Plan:
        return self.model.offmate.plan


@contextlib.contextmanager
def training(
    case: Case, cache_dir: str, *, device: str = "cuda:0", budget: int | None = None, **settings: Any
) -> Iterator[Loop]:
    """A compiled loop; closed afterwards, with nothing of it left on the card.

    Parameters
    ----------
    budget: in bytes; None takes one in which most has to move. settings: further ones of `offmate.compile`.
    """
    model = case.model()
    optimizer = case.kind(model.parameters(), lr=1e-3, fused=case.planned)
    given = {
        "optimizer": optimizer if case.planned else None,
        "device": device,
        "cpu_budget": HOST_BYTES,
        **case.settings,
        "config": replace(case.settings.get("config", offmate.Config()), cache_dir=cache_dir),
        **settings,
    }
    if budget is None:
        budget = tight_budget(case, model, given)
    index = torch.device(device).index
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(index)
    offmate.compile(model, budget, **given)
    loop = Loop(case, model, optimizer, index)
    try:
        yield loop
    finally:
        session = model._offmate_session
        session.residence.bring_home()
        session.device.close()
        del loop, model, optimizer, given, session
        gc.collect()
        torch.cuda.empty_cache()


def tight_budget(case: Case, model: torch.nn.Module, given: dict[str, Any]) -> int:
    """Return a budget little above the least one, in bytes."""
    with case.casting():
        ample = offmate.plan(model, AMPLE_BYTES, example_inputs=case.batch(), **given)
    assert ample.least_budget_bytes is not None
    return ample.least_budget_bytes * 115 // 100 + (32 << 20)
