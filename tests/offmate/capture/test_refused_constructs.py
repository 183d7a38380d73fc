"""Constructs that no plan can hold are refused in the model's own terms: what, where, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offmate
from offmate import CaptureError

from .test_capture_rules import traced


class Layer(nn.Module):
    """A module inside the model, whose forward is the given function of it and its input."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call, self.linear, self.table = call, nn.Linear(16, 16), nn.Embedding(10, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        if call is sparse_buffer:
            self.register_buffer("sparse", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x)


class Model(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = Layer(call)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def masked(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(x)[x > 0]


def branching(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(x) if x.sum() > 0 else x


def mixture(layer: Any, x: torch.Tensor) -> torch.Tensor:
    chosen = torch.where(layer.linear(x).argmax(-1) > 3)[0]
    return layer.linear(x[chosen])


def ctc(layer: Any, x: torch.Tensor) -> torch.Tensor:
    scores, lengths = layer.linear(x)[:, None].log_softmax(-1), torch.full((1,), 4)
    return functional.ctc_loss(scores, torch.ones(1, 2, dtype=torch.long), lengths, lengths // 2)


def mapped(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(layer.linear)(x)


def differentiated(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(torch.func.grad(lambda z: layer.linear(z).sum())(x))


def sparse_buffer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(layer.sparse, layer.linear(x))


def sparse_made(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), layer.linear(x))


def sparse_gradient(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.embedding(x.long().clamp(0, 9), layer.table.weight, sparse=True)


def penalised(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer.linear(x).tanh().sum(), x, create_graph=True)[0]


def backward_inside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    h = layer.linear(x)
    h.sum().backward(retain_graph=True)
    return h


def converted(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.linear.to(torch.float64)(x.double())


def halved(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.linear.bfloat16()(x.bfloat16())


def clamped(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.linear.weight.data.clamp_(-1, 1)
    return layer.linear(x)


def packed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    sequences = nn.utils.rnn.pack_padded_sequence(layer.linear(x)[None], torch.tensor([3]), batch_first=True)
    return layer.rnn(sequences)[1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (packed, r"`return layer.rnn\(sequences\)\[1\]`.*packed sequence.*torch.gather"),
        (masked, r"aten.index.Tensor \(`return self.call\(self, x\)`.*in layer, a Layer.*torch.where, masked_fill"),
        (branching, r"`return layer.linear\(x\) if x.sum\(\) > 0 else x`.*an `if`.*torch.where"),
        (mixture, r"aten.where.default.*in layer, a Layer.*whose shape depends on values.*size fixed"),
        (ctc, r"_ctc_loss.*`return functional.ctc_loss"),
        (mapped, r"the forward.*in layer, a Layer.*torch.vmap.*einsum"),
        (differentiated, r"torch.vmap or a transform of torch.func.*einsum"),
        (sparse_buffer, r"takes layer_sparse.*a sparse tensor.*to_dense\(\)"),
        (sparse_made, r"makes to_sparse.*in layer, a Layer.*a sparse tensor.*to_dense\(\)"),
        (sparse_gradient, r"aten.embedding.default.*in layer, a Layer.*sparse=True.*call it with sparse=False"),
        (penalised, r"calls torch.autograd.grad\(\).*`return torch.autograd.grad.*formula of tensors"),
        (backward_inside, r"calls torch.Tensor.backward\(\).*`h.sum\(\).backward.*formula of tensors"),
        (converted, r"converts Linear.to\(torch.float64\).*`return layer.linear.to.*before offmate.compile"),
        (halved, r"converts a module.*Convert the module before offmate.compile"),
        (clamped, r"reads the `.data` of a parameter.*write into parameters only outside of the forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_plan_can_hold_is_named_with_its_line(call: Callable[..., Any], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        traced(Model(call), (torch.randn(4, 16),))


def test_the_remedy_for_an_embedding_that_scales_its_weight() -> None:
    plain, planned = (_scaled_in_the_loop(compiles) for compiles in (False, True))
    assert all(torch.equal(expected, found) for expected, found in zip(plain, planned, strict=True))


def _scaled_in_the_loop(compiles: bool) -> list[torch.Tensor]:
    """Train an embedding with max_norm, or one without it whose weight the loop scales."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(10, 16, max_norm=None if compiles else 1.0), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if compiles:
        model = offmate.compile(
            model, "1GiB", optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None)
        )
    for step in range(3):
        ids = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(step))
        if compiles:
            with torch.no_grad():
                torch.embedding_renorm_(model[0].weight, ids, 1.0, 2.0)
        model(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values())
