"""`offmate.cast_weights`: parameters kept in the precision that every use casts them to, with the same bits."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import pytest
import torch

import offmate

from ..loops import CPU_BUDGET

LOWER = torch.bfloat16
SETTINGS: dict[str, Any] = {
    "device": "emulated", "cpu_budget": CPU_BUDGET, "config": offmate.Config(cache_dir=None),
}  # fmt: skip


class Adapted(torch.nn.Module):
    """Frozen layers with a trained adapter beside each, and a frozen norm, which reads its weights in float32."""

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


class ReadWhole(Adapted):
    """Weights that something besides a product reads: a sum, a view, a comparison, a region without autocast."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x)["loss"] + 1e-3 * self.base[0].weight.sum()
        found = found + torch.nn.functional.linear(x, self.base[1].weight.t()).float().mean()
        found = found + torch.where(self.base[2].weight > 0, 1e-3, 2e-3).sum()
        with torch.autocast("cpu", enabled=False):
            return {"loss": found + self.base[3](x).mean()}


class Powers(Adapted):
    """A product that casts a weight several times, and one that reads it whole."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x)["loss"] + torch.matrix_power(self.base[0].weight, 3).float().mean()
        return {"loss": found + self.base[0].weight.amax()}


class OtherInEvaluation(Adapted):
    """Evaluation reads a weight whole."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x)["loss"]
        return {"loss": found if self.training else found + self.base[0].weight.amax()}


class AsksForPrecision(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x.to(self.base[0].weight.dtype))


class Returned(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**super().forward(x), "first": self.base[0].weight}


def model(kind: type[Adapted] = Adapted) -> Adapted:
    torch.manual_seed(0)
    return kind()


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 64, generator=torch.Generator().manual_seed(step))}


def adamw(own: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in own.parameters() if p.requires_grad), lr=1e-2, fused=True)


def around(own: Adapted) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if isinstance(own, WithOwnRegion) else torch.autocast("cpu", dtype=LOWER)


def cast(own: Adapted) -> dict[str, torch.dtype]:
    with around(own):
        return offmate.cast_weights(own, example_inputs=batch(0), device="emulated")


def with_copies(own: torch.nn.Module) -> torch.optim.Optimizer:
    return offmate.with_master_weights(torch.optim.AdamW)(own.parameters(), lr=1e-2, fused=True)


def planned(own: Adapted) -> offmate.Plan:
    with around(own):
        return offmate.plan(own, "1GiB", example_inputs=batch(0), optimizer=adamw(own), **SETTINGS)


def train(own: Adapted, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for step in range(4):
        with around(own):
            loss = own(**batch(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return found


@pytest.mark.parametrize("kind", [Adapted, WithOwnRegion, ReadWhole, Powers])
@pytest.mark.parametrize("budget", ["ample", "least"])
def test_numbers_are_those_of_the_model_in_float32(kind: type[Adapted], budget: str) -> None:
    own, twin = model(kind), model(kind)
    assert cast(own)
    size = 1 << 30 if budget == "ample" else planned(copy.deepcopy(own)).least_budget_bytes
    optimizer, plain = adamw(own), adamw(twin)
    offmate.compile(own, size, optimizer=optimizer, **SETTINGS)
    for found, expected in zip(train(own, optimizer), train(twin, plain), strict=True):
        assert torch.equal(found, expected)
    trained = dict(twin.named_parameters())
    for name, param in own.named_parameters():
        assert torch.equal(param, trained[name].to(param.dtype)), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Adapted, WithOwnRegion, ReadWhole])
@pytest.mark.parametrize("budget", ["plain", "ample", "least"])
@pytest.mark.parametrize("gate", [False, True])
def test_trained_weights_keep_their_float32_values_in_the_optimizer(
    kind: type[Adapted], budget: str, gate: bool
) -> None:
    own, twin = model(kind).requires_grad_(), model(kind).requires_grad_()
    optimizer, plain = with_copies(own), torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    with around(own):
        found = offmate.cast_weights(own, example_inputs=batch(0), optimizer=optimizer, device="emulated")
    assert {"down.0.weight", "up.3.weight", "base.0.bias"} <= set(found) and "norm.weight" not in found
    if budget != "plain":
        settings = SETTINGS | ({"max_grad_norm": float("inf")} if gate else {})
        size: int | str = "1GiB"
        if budget == "least":
            again = copy.deepcopy(own)
            with around(own):
                plan = offmate.plan(again, size, example_inputs=batch(0), optimizer=with_copies(again), **settings)
            size = plan.least_budget_bytes
        offmate.compile(own, size, optimizer=optimizer, **settings)
    for one, other in zip(train(own, optimizer), train(twin, plain), strict=True):
        assert torch.equal(one, other)
    expected = dict(twin.named_parameters())
    for name, param in own.named_parameters():
        whole = optimizer.state[param]["master"] if name in found else param
        assert torch.equal(whole, expected[name]) and torch.equal(param, whole.to(param.dtype)), name


class Twice(Adapted):
    """Every layer is used twice, so that gradients of two casts add up."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(super().forward(x)["loss"] + x)


def test_a_trained_weight_that_is_cast_twice_stays() -> None:
    own = model(Twice).requires_grad_()
    own.base.requires_grad_(False)
    with around(own):  # frozen ones that the optimizer holds may be trained later
        assert not offmate.cast_weights(own, example_inputs=batch(0), optimizer=with_copies(own), device="emulated")
    assert set(cast(own)) == {f"base.{i}.{name}" for i in range(4) for name in ("weight", "bias")}


def test_an_optimizer_without_float32_copies_is_refused() -> None:
    own = model()
    with around(own), pytest.raises(offmate.OffmateError, match="optimizer= is of class AdamW"):
        offmate.cast_weights(own, example_inputs=batch(0), optimizer=adamw(own), device="emulated")
    assert {p.dtype for p in own.parameters()} == {torch.float32}


def test_half_the_bytes_move_and_take_memory() -> None:
    own, twin = model(), model()
    found = cast(own)
    assert found == {f"base.{i}.{name}": LOWER for i in range(4) for name in ("weight", "bias")}
    whole, half = planned(twin), planned(own)
    for name in found:
        before, after = (p.schedule.item_bytes for p in (whole, half))
        (item,) = (item for item in before if item.name == name)
        assert 2 * after[item] == before[item]
    assert half.least_budget_bytes < whole.least_budget_bytes


def test_what_is_trained_or_read_whole_stays() -> None:
    found = cast(model(ReadWhole))
    assert set(found) == {"base.0.bias", "base.1.bias", "base.2.bias"}
    assert "base.0.weight" not in cast(model(Powers))
    assert "base.0.weight" not in cast(model(Returned))
    assert "base.0.weight" not in cast(model(OtherInEvaluation))


def test_what_shares_memory_or_has_a_gradient_stays() -> None:
    own = model()
    own.register_buffer("alias", own.base[0].weight.detach()[:2])
    own.base[1].weight.grad = torch.ones(64, 64)
    assert not {"base.0.weight", "base.1.weight"} & set(cast(own))


def test_one_parameter_under_two_names_is_converted_once() -> None:
    own = model()
    own.base[1] = own.base[0]
    found = cast(own)
    assert own.base[1].weight.dtype == LOWER and own.base[1].weight is own.base[0].weight
    assert "base.0.weight" in found and "base.1.weight" not in found


def test_without_autocast_nothing_is_converted() -> None:
    own = model()
    assert offmate.cast_weights(own, example_inputs=batch(0), device="emulated") == {}
    assert {p.dtype for p in own.parameters()} == {torch.float32}


def test_a_forward_that_asks_for_the_precision_is_refused_and_nothing_is_converted() -> None:
    own = model(AsksForPrecision)
    with pytest.raises(offmate.CaptureError, match="asks for the precision of a parameter"):
        cast(own)
    assert {p.dtype for p in own.parameters()} == {torch.float32}


def test_a_compiled_model_is_refused() -> None:
    own = offmate.compile(model(), "1GiB", **SETTINGS)
    with pytest.raises(offmate.OffmateError, match="already compiled by offmate"):
        cast(own)


def test_modes_and_random_numbers_stay_as_they_are() -> None:
    own = model().eval()
    own.base.train()
    state = torch.get_rng_state()
    cast(own)
    assert not own.training and own.base.training and not own.norm.training
    assert torch.equal(torch.get_rng_state(), state)


def test_on_the_meta_device_for_a_plan_of_another_machine() -> None:
    own, example = model().to("meta"), {"x": batch(0)["x"].to("meta")}
    with torch.autocast("cpu", dtype=LOWER):
        settings: dict[str, Any] = {"example_inputs": example, "hardware": "rtx4090"}
        whole = offmate.plan(own, optimizer=adamw(own), **settings)
        assert len(offmate.cast_weights(own, example_inputs=example)) == 8
        half = offmate.plan(own, optimizer=adamw(own), **settings)
    assert half.least_budget_bytes < whole.least_budget_bytes


def test_a_plan_says_what_could_be_converted(caplog: pytest.LogCaptureFixture) -> None:
    own = model()
    with caplog.at_level(logging.WARNING, "offmate"):
        planned(own)
        assert "65 KiB of frozen parameters are float32" in caplog.text and "offmate.cast_weights" in caplog.text
        caplog.clear()
        cast(own)
        planned(own)
        assert "cast_weights" not in caplog.text
