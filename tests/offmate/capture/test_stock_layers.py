"""Layers and idioms of well-known models train bit for bit, at an ample budget and at the least one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.offmate import parity


class Net(nn.Module):
    """A model of the given parts, whose forward is the given function of it and the batch."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def _case(
    name: str, build: Callable[[], nn.Module], shape: tuple[int, ...] = (4, 6, 16), **options: Any
) -> parity.Case:
    def batches() -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.randn(shape, generator=torch.Generator().manual_seed(seed))} for seed in range(5)]

    loss = options.pop("loss", lambda output, batch: output["loss"])
    return parity.Case(name, build, batches, loss=loss, **options)


def _pairs(net: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The interactions of features in a recommendation model: an index that is two views of one tensor."""
    h = net.a(x)
    rows, columns = torch.tril_indices(6, 6, -1)
    return {"loss": (h @ h.transpose(1, 2))[:, rows, columns].square().mean()}


class Pathless(dict):  # type: ignore[type-arg]
    """An output that torch is told of without paths to its leaves, as diffusers does it."""


torch.utils._pytree.register_pytree_node(
    Pathless, lambda one: (list(one.values()), list(one)), lambda values, names: Pathless(zip(names, values))
)

CASES = [
    _case(
        "pathless",
        lambda: Net(lambda net, x: Pathless(sample=net.a(x), more=[x, net.a(x)]), a=nn.Linear(16, 16)),
        loss=lambda output, batch: output["sample"].square().mean(),
        config={"gradients_into": ("sample",)},
    ),
    _case("pairs", lambda: Net(_pairs, a=nn.Linear(16, 16))),
    _case(
        "lstm",
        lambda: Net(
            lambda net, x: {"loss": net.a(x)[0].square().mean()}, a=nn.LSTM(16, 16, 2, dropout=0.1, batch_first=True)
        ),
    ),
    _case(
        "gru",
        lambda: Net(
            lambda net, x: {"loss": net.a(x)[0].square().mean()}, a=nn.GRU(16, 8, bidirectional=True, batch_first=True)
        ),
    ),
]


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trains_bit_for_bit(case: parity.Case, budget: str) -> None:
    parity.check(case, budget, None)
