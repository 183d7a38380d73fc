"""A user who reads, edits, evaluates, waits and changes shapes at random, beside one who does so in plain PyTorch."""

from __future__ import annotations

import random
from typing import Any

import torch

from .test_state_storage import batch


def _meddle(model: Any, optimizer: torch.optim.Optimizer, what: str, step: int) -> object:
    """Do it, and give what it shows."""
    param = list(model.parameters())[step % 8]
    if what == "edit":
        with torch.no_grad():
            param.mul_(0.9)
    elif what == "evaluate":
        with torch.no_grad():
            loss = model.eval()(batch(step))["loss"].item()
        model.train()
        return loss
    elif what == "read":
        return param.detach().clone().sum().item()
    elif what == "states":
        return [t.sum().item() for s in optimizer.state_dict()["state"].values() for t in s.values() if t.dim()]
    elif what == "sync" and hasattr(model, "offmate"):
        model.offmate.sync()
    return None


def check_meddling(pair: Any, plain: Any, seed: int, max_grad_norm: float | None = None) -> None:
    """Six steps show the same to both, whatever comes within a step and between two."""
    chance = random.Random(seed)
    for step in range(6):
        rows, seen = chance.choice([16, 16, 16, 8]), []
        within = chance.choice(["", "", "sync", "read"])
        between = chance.choice(["", "edit", "evaluate", "read", "states", "sync"])
        for model, optimizer in (pair, plain):
            loss = model(batch(step, rows=rows))["loss"]
            loss.backward()
            # Without a gate, updates begin in the backward, and plain PyTorch's come with `step()`.
            found = _meddle(model, optimizer, within if max_grad_norm or within == "sync" else "", step)
            if max_grad_norm and model is plain[0]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((loss.item(), found, _meddle(model, optimizer, between, step)))
        assert seen[0] == seen[1], (step, within, between)
