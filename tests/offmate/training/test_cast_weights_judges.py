"""What `offmate.cast_weights` notices of a model, and that it leaves the model as it was."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

import offmate

from .test_cast_weights import SETTINGS, Adapted, WithOwnRegion, adamw, around, batch, cast, model, train, with_copies


class Constant(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x * torch.tensor(0.1, dtype=self.base[0].weight.dtype))


class Chosen(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        whole = self.base[0].weight.dtype == torch.float32
        return super().forward(x * (torch.tensor([0.5]) if whole else torch.tensor([0.25])))


class LikeTheWeight(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x + self.base[0].weight.new_tensor([0.1]))


class Region(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.base[0].weight.dtype == torch.float32):
            x = torch.nn.functional.gelu(x)
        return super().forward(x)


class SaysPrecision(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {**super().forward(x), "bytes": self.base[0].weight.element_size()}


@pytest.mark.parametrize("kind", [Constant, Chosen, LikeTheWeight, Region, SaysPrecision])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_constants_regions_and_outputs_that_depend_on_the_precision_are_refused(
    kind: type[Adapted], where: str
) -> None:
    own = model(kind).to(where)
    with around(own), pytest.raises(offmate.CaptureError, match="asks for the precision of a parameter: at "):
        offmate.cast_weights(own, example_inputs={"x": batch(0)["x"].to(where)}, device="emulated")
    assert {p.dtype for p in own.parameters()} == {torch.float32}


class SameConstant(Adapted):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x * torch.tensor([0.1, 0.2] * 32))


def test_a_constant_that_stays_the_same_is_no_question() -> None:
    assert len(cast(model(SameConstant))) == 8


class Merging(torch.nn.Linear):
    """An adapted layer whose `eval()` adds the adapter to its frozen weight, and whose `train()` takes it out again."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.requires_grad_(False)
        self.down, self.up = (torch.nn.Parameter(torch.randn(size) / 8) for size in ((2, width), (width, 2)))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (1 - 2 * mode) * (self.up @ self.down)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.merged else super().forward(x) + x @ self.down.T @ self.up.T


class Merged(Adapted):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.ModuleList(Merging(64) for _ in range(4))


def test_a_model_whose_train_method_changes_weights_is_left_alone() -> None:
    own, twin = model(Merged).train(), model(Merged).train()
    found = cast(own)
    assert "base.0.weight" in found and own.training
    for layer, other in zip(own.base, twin.base):
        assert torch.equal(layer.weight, other.weight.bfloat16()) and not layer.merged
    optimizer = adamw(own)
    offmate.compile(own, "1GiB", optimizer=optimizer, **SETTINGS)
    assert all(map(torch.equal, train(own, optimizer), train(twin, adamw(twin))))


def test_a_frozen_weight_that_the_optimizer_holds_is_trained_later_from_its_float32_values() -> None:
    own, twin = model(), model()
    optimizer, plain = with_copies(own), torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    with around(own):
        found = offmate.cast_weights(own, example_inputs=batch(0), optimizer=optimizer, device="emulated")
    assert "base.0.weight" in found
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # states that hold only copies yet
    offmate.compile(own, "1GiB", optimizer=optimizer, **SETTINGS)
    for _ in range(2):
        assert all(map(torch.equal, train(own, optimizer), train(twin, plain)))
        own.base.requires_grad_(True)
        twin.base.requires_grad_(True)
    expected = dict(twin.named_parameters())
    for name, param in own.named_parameters():
        assert torch.equal(optimizer.state[param]["master"] if name in found else param, expected[name]), name


@pytest.mark.parametrize("order", ["load, cast", "cast, load"])
def test_saved_float32_values_are_resumed_from_in_any_order(order: str) -> None:
    def made() -> tuple[Adapted, torch.optim.Optimizer]:
        own = model().requires_grad_()
        return own, with_copies(own)

    def converted(own: Adapted, optimizer: torch.optim.Optimizer) -> None:
        with around(own):
            assert offmate.cast_weights(own, example_inputs=batch(0), optimizer=optimizer, device="emulated")

    first, optimizer = made()
    converted(first, optimizer)
    train(first, optimizer)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    again, resumed = made()
    for step in order.split(", "):
        if step == "cast":
            converted(again, resumed)
        else:
            again.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
    offmate.compile(again, "1GiB", optimizer=resumed, **SETTINGS)
    assert all(map(torch.equal, train(again, resumed), train(first, optimizer)))


def test_a_weight_that_was_trained_since_its_copy_was_loaded_counts() -> None:
    own = model().requires_grad_()
    optimizer = with_copies(own)
    weight = own.down[0].weight
    optimizer.state[weight]["master"] = weight.detach() + 1e-6
    before = weight.detach().clone()
    with around(own):
        offmate.cast_weights(own, example_inputs=batch(0), optimizer=optimizer, device="emulated")
    assert torch.equal(optimizer.state[weight]["master"], before)


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.float16)])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("copied", [True, False])
def test_a_converted_model_is_refused_outside_its_autocast(around: Any, gradients: bool, copied: bool) -> None:
    own = model()
    cast(own)
    own = copy.deepcopy(own) if copied else own
    offmate.compile(own, "1GiB", **SETTINGS)
    with torch.set_grad_enabled(gradients):
        with (
            around(),
            pytest.raises(
                offmate.CaptureError, match=r"weight was converted to torch.bfloat16 by offmate.cast_weights, but"
            ),
        ):
            own(**batch(0))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.isfinite(own(**batch(0))["loss"])


def test_a_converted_model_with_a_region_of_its_own_runs_anywhere() -> None:
    own, twin = model(WithOwnRegion), model(WithOwnRegion)
    cast(own)
    wrapped = torch.nn.Sequential(own)
    offmate.compile(wrapped, "1GiB", **SETTINGS)
    with torch.no_grad():
        assert torch.equal(wrapped(batch(0)["x"])["loss"], twin(**batch(0))["loss"])
