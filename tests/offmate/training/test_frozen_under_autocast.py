"""Frozen float32 parameters that autocast casts at every use come to the device cast, with plain PyTorch's bits."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from offmate.solver import items
from offmate.solver.schedule import Schedule

import offmate

from ..loops import AMPLE, CPU_BUDGET

LOWER = torch.bfloat16
SETTINGS: dict[str, Any] = {
    "device": "emulated", "cpu_budget": CPU_BUDGET, "config": offmate.Config(cache_dir=None),
}  # fmt: skip


class Adapted(torch.nn.Module):
    """Frozen layers, with a trained adapter beside each."""

    def __init__(self, layers: int = 4, width: int = 64, rank: int = 2) -> None:
        super().__init__()
        self.base = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers)).requires_grad_(False)
        self.norm = torch.nn.LayerNorm(width).requires_grad_(False)
        self.down = torch.nn.ModuleList(torch.nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = torch.nn.ModuleList(torch.nn.Linear(rank, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for base, down, up in zip(self.base, self.down, self.up):
            x = x + torch.nn.functional.gelu(base(x) + up(down(x)))
        return {"loss": self.norm(x).float().pow(2).mean()}


class WithOwnRegion(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", dtype=LOWER):
            return super().forward(x)


class LooksAtPrecision(Adapted):
    """One base weight is also read in its own precision, and another one through a view."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x)["loss"] + 1e-3 * self.base[0].weight.sum()
        return {"loss": found + torch.nn.functional.linear(x, self.base[1].weight.t()).float().mean()}


def model(kind: type[Adapted] = Adapted) -> Adapted:
    torch.manual_seed(0)
    return kind()


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 64, generator=torch.Generator().manual_seed(step))}


def adamw(own: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in own.parameters() if p.requires_grad), lr=1e-2, fused=True)


def around(own: Adapted) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if isinstance(own, WithOwnRegion) else torch.autocast("cpu", dtype=LOWER)


def planned(own: Adapted, budget: int = AMPLE, **changes: Any) -> offmate.Plan:
    with around(own):
        return offmate.plan(own, budget, example_inputs=batch(0), optimizer=adamw(own), **SETTINGS | changes)


def param_bytes(schedule: Schedule) -> dict[str, int]:
    return {item.name: size for item, size in schedule.item_bytes.items() if item == items.parameter(item.name)}


def train(own: Adapted, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    found = []
    for step in steps:
        with around(own):
            loss = own(**batch(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return found


def evaluated(own: Adapted) -> list[torch.Tensor]:
    with torch.no_grad():
        plain = own(**batch(9))["loss"].clone()
        with torch.autocast("cpu", dtype=LOWER):
            return [plain, own(**batch(9))["loss"].clone()]


@pytest.mark.parametrize("kind", [Adapted, WithOwnRegion, LooksAtPrecision])
@pytest.mark.parametrize("budget", ["ample", "least"])
@pytest.mark.parametrize("updates", ["planned", "the user's"])
def test_losses_and_parameters_are_plain_pytorchs(kind: type[Adapted], budget: str, updates: str) -> None:
    own, twin = model(kind), model(kind)
    size = AMPLE if budget == "ample" else planned(model(kind)).least_budget_bytes
    optimizer, plain = adamw(own), adamw(twin)
    offmate.compile(own, size, optimizer=optimizer if updates == "planned" else None, **SETTINGS)
    found, expected = train(own, optimizer, range(4)), train(twin, plain, range(4))
    found += evaluated(own)
    expected += evaluated(twin)
    found += train(own, optimizer, range(4, 6))  # from the variant of another precision back to the first one
    expected += train(twin, plain, range(4, 6))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, own.state_dict().values(), twin.state_dict().values()))


def test_they_take_two_bytes_on_the_device_and_on_the_link() -> None:
    plan = planned(model())
    own = model()
    sizes = param_bytes(plan.schedule)
    for name, param in own.named_parameters():
        lower = name.startswith("base")
        assert sizes[name] == param.numel() * (2 if lower else 4), name


def test_those_that_any_use_reads_whole_stay_whole() -> None:
    sizes = param_bytes(planned(model(LooksAtPrecision)).schedule)
    assert [sizes[f"base.{i}.weight"] for i in range(4)] == [64 * 64 * 4] * 2 + [64 * 64 * 2] * 2


def test_parameters_on_one_memory_stay_whole() -> None:
    own = model()
    memory = torch.randn(2, 64, 64)
    own.base[0].weight, own.base[1].weight = (torch.nn.Parameter(memory[i], requires_grad=False) for i in range(2))
    sizes = param_bytes(planned(own).schedule)
    assert [sizes[f"base.{i}.weight"] for i in range(3)] == [64 * 64 * 4] * 2 + [64 * 64 * 2]


@pytest.mark.parametrize("cut", ["repeats", "gaps"])
def test_parameters_with_repeated_elements_or_gaps_stay_whole(cut: str) -> None:
    own = model()
    memory = torch.randn(64, 128)
    values = memory[:1, :64].expand(64, 64) if cut == "repeats" else memory[:, ::2]
    own.base[0].weight = torch.nn.Parameter(values, requires_grad=False)
    twin, size = copy.deepcopy(own), param_bytes(planned(own).schedule)["base.0.weight"]
    assert size == 64 * 64 * 4
    optimizer, plain = adamw(own), adamw(twin)
    offmate.compile(own, AMPLE, optimizer=optimizer, **SETTINGS)
    assert all(map(torch.equal, train(own, optimizer, range(2)), train(twin, plain, range(2))))


def test_edits_of_frozen_parameters_are_followed() -> None:
    own, twin = model(), model()
    optimizer, plain = adamw(own), adamw(twin)
    offmate.compile(own, planned(model()).least_budget_bytes, optimizer=optimizer, **SETTINGS)
    found, expected = [], []
    for step in range(4):
        for one, by, losses in ((own, optimizer, found), (twin, plain, expected)):
            losses += train(one, by, range(step, step + 1))
            with torch.no_grad():
                one.base[step].weight.mul_(1.5)
                one.base[(step + 1) % 4].bias.data = torch.full((64,), 0.25)
            losses += train(one, by, range(step, step + 1))
    assert all(map(torch.equal, found, expected))


def test_parameters_that_thaw_and_freeze_again() -> None:
    own, twin = model(), model()
    everything = [torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True) for one in (own, twin)]
    offmate.compile(own, AMPLE, optimizer=everything[0], **SETTINGS)
    found, expected = [], []
    for thawed in (False, True, False):
        for one, by, losses in ((own, everything[0], found), (twin, everything[1], expected)):
            one.base[1].requires_grad_(thawed)
            losses += train(one, by, range(3))
    assert all(map(torch.equal, found, expected))


def test_without_room_for_the_copies_the_device_casts() -> None:
    """Copies need two bytes per parameter on the host; a budget without that room still has a plan."""
    own = Adapted(layers=10)
    trained = sum(p.nbytes for p in own.parameters() if p.requires_grad)
    tight = sum(p.nbytes for p in own.parameters()) + 3 * trained + (8 << 10)
    with pytest.raises(offmate.InfeasibleBudget) as short:
        planned(own, planned(own).least_budget_bytes, cpu_budget=tight)
    budget = short.value.least_budget_bytes
    assert budget is not None
    assert param_bytes(planned(own, budget).schedule)["base.0.weight"] == 64 * 64 * 2
    assert param_bytes(planned(own, budget, cpu_budget=tight).schedule)["base.0.weight"] == 64 * 64 * 4
    twin = copy.deepcopy(own)
    optimizer, plain = adamw(own), adamw(twin)
    offmate.compile(own, budget, optimizer=optimizer, **SETTINGS | {"cpu_budget": tight})
    assert all(map(torch.equal, train(own, optimizer, range(3)), train(twin, plain, range(3))))


def test_a_saved_plan_serves_again(tmp_path: Any) -> None:
    plan = planned(model())
    plan.save(tmp_path / "plan.json")
    own, twin = model(), model()
    optimizer, plain = adamw(own), adamw(twin)
    again = offmate.load_plan(tmp_path / "plan.json")
    offmate.compile(own, AMPLE, optimizer=optimizer, plan=again, **SETTINGS)
    assert all(map(torch.equal, train(own, optimizer, range(3)), train(twin, plain, range(3))))


def test_a_copy_of_the_model_is_plain() -> None:
    own = model()
    optimizer = adamw(own)
    offmate.compile(own, AMPLE, optimizer=optimizer, **SETTINGS)
    train(own, optimizer, range(2))
    assert {p.dtype for p in copy.deepcopy(own).parameters()} == {torch.float32}
