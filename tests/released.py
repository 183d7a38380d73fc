"""python released.py solver|training: try an installed package, from a folder in which there are no sources of it."""

from __future__ import annotations

import sys
from pathlib import Path


def solver() -> None:
    """Plan a small problem where there is no torch."""
    from offmate.solver.instances.synthetic import Shape, Speeds, llama
    from offmate.solver.plan import plan
    from offmate.solver.problem import Rates

    assert "torch" not in sys.modules
    speeds = Speeds(1e13, 5e11, 1e10, 1e11, Rates(1e10, 1e10, 1.5e10))
    shape = Shape(layers=2, hidden=256, intermediate=512, vocab=1000, batch=2, sequence=64)
    found = plan(llama(shape, speeds, 1 << 28, 1 << 34))
    assert found.schedule is not None and found.simulation is not None, found.solution.status.value
    print(f"the solver plans a step of {found.simulation.step_s:.3g} s without torch")


def training() -> None:
    """Train a small model beside plain PyTorch."""
    import torch

    import offmate

    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if compiles:
            config = offmate.Config(cache_dir=None)
            offmate.compile(model, "64MiB", optimizer=optimizer, device="emulated", config=config)
        for step in range(3):
            loss = model(torch.full((4, 8), 0.1 * step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:], losses
    print("three steps of a compiled model have plain PyTorch's losses")


if __name__ == "__main__":
    import offmate

    assert "site-packages" in Path(offmate.__file__).parts, offmate.__file__
    {"solver": solver, "training": training}[sys.argv[1]]()
