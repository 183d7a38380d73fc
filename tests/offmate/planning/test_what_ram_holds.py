"""A plan's RAM is every byte of the model that the process holds, and an automatic budget includes those there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offmate
from offmate import Config, arguments
from offmate.machines.mapped_files import held_bytes

EXAMPLE = (torch.ones(4, 64),)
FREE_BYTES = 1 << 24


class Net(nn.Module):
    """Trained, frozen and unused parameters, a buffer that the forward reads, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(1000))
        self.register_buffer("scale", torch.full((64,), 0.5))
        self.register_buffer("table", torch.ones(500))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.get_buffer("scale")
        return x.square().mean()


@pytest.mark.parametrize("planned", [True, False], ids=["optimizer", "own loop"])
def test_a_plan_counts_all_of_a_model(planned: bool) -> None:
    """With room for everything on the device; your own loop gets gradients in RAM."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if planned else None
    plan = offmate.plan(
        model, "8MiB", example_inputs=EXAMPLE, optimizer=optimizer, device="emulated", cpu_budget="1GiB",
        config=Config(cache_dir=None, updates="device" if planned else "auto"),
    )  # fmt: skip
    tensors = [*model.parameters(), *model.buffers()]
    trained = [p for p in model.parameters() if p.requires_grad and p is not model.unused]
    gradients = 0 if planned else sum(p.nbytes for p in trained)
    assert plan.host_bytes == sum(t.nbytes for t in tensors) + gradients


def test_memory_that_tensors_share_counts_once() -> None:
    """And all of it counts, also what no tensor of the model shows."""
    model = Net()
    model.unused = nn.Parameter(torch.ones(5000)[:1000], requires_grad=False)
    model.register_buffer("again", model.unused.data[:10])
    plan = offmate.plan(
        model, "8MiB", example_inputs=EXAMPLE, optimizer=torch.optim.SGD(model.layers.parameters(), 0.1),
        device="emulated", cpu_budget="1GiB", config=Config(cache_dir=None, updates="device"),
    )  # fmt: skip
    others = [*model.layers.parameters(), model.get_buffer("scale"), model.get_buffer("table")]
    assert plan.host_bytes == 4 * 5000 + sum(tensor.nbytes for tensor in others)
    one = torch.ones(1)
    assert held_bytes([one.expand(1000, 1000), one, one[:]]) == one.nbytes


def test_what_the_model_and_the_optimizer_hold_belongs_to_an_automatic_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "default_host_budget_bytes", lambda: FREE_BYTES)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]

    def budget() -> int:
        how: dict[str, Any] = {"max_grad_norm": None, "grad_scaler": None, "accumulation_steps": 1}
        asked = arguments.what_is_asked(model, optimizer, Config(), "8MiB", "auto", "emulated", **how)
        return asked.request.host_budget_bytes

    assert budget() == FREE_BYTES + sum(t.nbytes for t in tensors)
    model(*EXAMPLE).backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert budget() == FREE_BYTES + sum(t.nbytes for t in tensors + states)


def test_pages_of_files_are_not_held(tmp_path: Path) -> None:
    """The system counts them as free memory."""
    path = tmp_path / "values"
    path.write_bytes(bytes(1 << 16))
    mapped = torch.from_file(str(path), shared=False, size=1 << 14, dtype=torch.float32)
    own = torch.ones(100)
    assert held_bytes([mapped, own, torch.ones(7, device="meta")]) == own.nbytes
