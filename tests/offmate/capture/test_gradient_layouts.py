"""A loss outside of the model hands in its gradient in a layout that a plan is told of, or that is warned of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offmate
from offmate.capture.gradient_layouts import layout_of, strides_in
from tests.offmate import parity


class Biased(nn.Module):
    """Products to which a bias is added by itself: its gradient is a sum whose order the layout decides."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(2))
        self.name = name

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for weight, bias in zip(self.weights, self.biases):
            x = torch.tanh(x) @ weight + bias
        return {self.name: x}


def _batches() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(37, 11, 16, generator=torch.Generator().manual_seed(step))} for step in range(5)]


LABELS = torch.randint(0, 16, (37, 11), generator=torch.Generator().manual_seed(9))
LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "classes first": (lambda o: nn.functional.cross_entropy(o.transpose(1, 2), LABELS), (0, 2, 1)),
    "batch second": (lambda o: (o.transpose(0, 1) - torch.ones(11, 37, 16)).square().mean(), (1, 0, 2)),
    "of a sum": (lambda o: (o.sum(0) * torch.linspace(0, 1, 16)).tanh().sum(), (1, 2)),
    "dense": (lambda o: o.square().mean(), (0, 1, 2)),
    "mean": (lambda o: o.mean(), (0, 1, 2)),
    "sum": (lambda o: o.sum(), ()),
}


def _case(name: str, layouts: dict[str, tuple[int, ...]]) -> parity.Case:
    loss = LOSSES[name][0]
    return parity.Case(
        f"layout {name}",
        lambda: Biased(name),
        _batches,
        loss=lambda output, batch: loss(output[name]),
        config={"gradient_layouts": layouts},
    )


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
@pytest.mark.parametrize("name", LOSSES)
def test_a_layout_that_was_named_gives_the_same_bits(name: str, budget: str) -> None:
    parity.check(_case(name, {name: LOSSES[name][1]}), budget, None)


def test_a_layout_that_was_not_named_is_warned_of_once_with_the_setting(caplog: Any) -> None:
    case = _case("classes first", {})
    parity.budgeted(case, parity.AMPLE, None)
    words = [record.getMessage() for record in caplog.records if "arrives with strides" in record.getMessage()]
    assert len(words) == 1
    assert "gradient_layouts={'classes first': (0, 2, 1)}" in words[0]


def test_a_gradient_that_does_not_repeat_as_planned_is_refused() -> None:
    model = offmate.compile(
        Biased("dense"), "1GiB", device="emulated",
        config=offmate.Config(cache_dir=None, gradient_layouts={"dense": (2,)}),
    )  # fmt: skip
    loss = model(**_batches()[0])["dense"].square().mean()
    with pytest.raises(offmate.ProtocolError, match=r"'dense' repeats one element along its dimensions \[0, 1\]"):
        loss.backward()


@pytest.mark.parametrize(
    ("layouts", "words"),
    [({"logits": (0, 1, 2)}, "gradient_layouts names logits; outputs that get a gradient: dense"),
     ({"dense": (0, 3)}, r"the dimensions \(0, 3\); it has 3"),
     ({"dense": (0, 0)}, r"the dimensions \(0, 0\); it has 3")],
)  # fmt: skip
def test_layouts_that_cannot_be_are_refused(layouts: dict[str, tuple[int, ...]], words: str) -> None:
    config = offmate.Config(cache_dir=None, gradient_layouts=layouts)
    with pytest.raises(offmate.CaptureError, match=words):
        offmate.compile(Biased("dense"), "1GiB", device="emulated", config=config)(**_batches()[0])


@pytest.mark.parametrize("given", [("logits", (0, 1)), {"logits": [0, 1]}, {0: (0, 1)}, {"logits": (0.0,)}])
def test_layouts_of_other_types_are_refused(given: Any) -> None:
    with pytest.raises(offmate.OffmateError, match="must map names of outputs to tuples of dimensions"):
        offmate.Config(gradient_layouts=given)


def test_layouts_are_told_apart() -> None:
    x = torch.empty(3, 4, 5)
    assert layout_of(x) == (0, 1, 2)
    assert layout_of(x.transpose(0, 2)) == (2, 1, 0)
    assert layout_of(torch.empty(4, 1).expand(3, 4, 5)) == (1,)
    assert layout_of(torch.empty(3, 4, 9)[..., :5]) is None
    assert strides_in((2, 0), (3, 4, 5)) == (1, 0, 3)
