"""Layers and idioms of well-known models train bit for bit, at an ample budget and at the least one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offmate
from offmate import OffmateError
from offmate.capture.spec import gapped_stride
from offmate.programs.programs import ClassGraph
from tests.offmate import parity
from tests.offmate.replayed import check_replay


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
    return parity.Case(f"stock {name}", build, batches, loss=loss, **options)  # other files have cases of these names


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


def _instance_norms() -> nn.Sequential:
    rows = [(nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(inplace=True)) for _ in range(3)]
    return nn.Sequential(*(layer for row in rows for layer in row))


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
    # A block hands on a view of what its backward reads through another view.
    _case(
        "instance norms",
        lambda: Net(lambda net, x: {"loss": net.layers(x).square().mean()}, layers=_instance_norms()),
        shape=(2, 4, 8, 8),
    ),
]


class Counting(nn.Module):
    """Divides by the number of its calls, which it counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"loss": self.a(x).square().mean() / self.calls}


class TwoNames(nn.Module):
    """Holds one batch norm under two names, and returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(6)
        self.same = self.norm

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.same(self.norm(self.a(x)))
        return {"loss": h.square().mean(), "scale": self.a.bias}


class Checkpointed(nn.Module):
    """A checkpoint in a checkpoint, and a conversion that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.a, x, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = checkpoint(self.inner, self.b.to(x.dtype)(x), use_reentrant=False)
        return {"loss": h.square().mean()}


CASES += [_case("counting", Counting), _case("two names", TwoNames), _case("checkpointed", Checkpointed)]

_LIBRARY = torch.library.Library("stock_layers", "DEF")


def _operator(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.stock_layers, name)  # type: ignore[no-any-return]


def _turn(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(torch.complex(torch.tanh(x), x))


_turned = _operator("turned", lambda x: torch.sigmoid(x).transpose(0, 1))
_cut = _operator("cut", lambda x: torch.sigmoid(x)[:, 1:])
_conjugate = _operator("conjugate", lambda x: _turn(x).conj())
_pairs_of = _operator("pairs_of", lambda x: torch.view_as_real(_turn(x)))


class Shifted(nn.Module):
    """A linear layer whose bias gets a sum over two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.3)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def _then(between: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    """Layers that are given what `between` makes of the one before: its backward makes their gradients' strides."""

    def forward(net: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": net.c(between(net.b(torch.tanh(net.a(x))))).tanh().mean()}

    return lambda: Net(forward, a=Shifted(), b=Shifted(), c=Shifted())


CASES += [
    _case(name, _then(between), (37, 11, 16))
    for name, between in {
        "conjugate of an operator": lambda h: torch.abs(_conjugate(h)),
        "real view of an operator": lambda h: _pairs_of(h).mean(-1),
        "gradient with gaps": lambda h: torch.cat([h, torch.ones(37, 3, 16)], 1),
        "gradient that is a real part": lambda h: torch.fft.fft(h, dim=1).real,
        "gradient with repeats": lambda h: h.sum(0) * 0.01,
        "complex number": lambda h: (torch.exp(1j * h) * (1 + 2j)).real,
    }.items()
]


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trains_bit_for_bit(case: parity.Case, budget: str) -> None:
    parity.check(case, budget, None)


def test_an_expanded_weight_is_refused() -> None:
    model = Net(lambda net, x: net.a(x) * net.scale, a=nn.Linear(16, 16), scale=nn.Parameter(torch.ones(1).expand(16)))
    with pytest.raises(OffmateError, match=r"scale, of shape \(16,\), is expanded.*nn.Parameter\(weight.clone\(\)\)"):
        offmate.compile(model, "1GiB", device="emulated")


def test_an_operator_that_refuses_the_batch_is_named() -> None:
    model = Net(lambda net, x: net.a(x.bfloat16()), a=nn.Linear(16, 16))
    compiled = offmate.compile(model, "1GiB", device="emulated", config=offmate.Config(cache_dir=None))
    with pytest.raises(OffmateError, match="same dtype"):
        compiled(torch.randn(4, 16))


def _three(view: Any) -> nn.Module:
    """Layers whose backward reads what they made, of which the next one is given a view."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in net.layers:
            x = view(layer(x))
        return x.square().mean()

    return Net(forward, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(3)))


@pytest.mark.parametrize(
    "model",
    [
        Net(lambda net, x: net.a(x)[0], a=nn.LSTM(16, 16, 2, dropout=0.1, batch_first=True)),
        _three(_turned),
        _three(_cut),
    ],
    ids=["lstm", "turned", "cut"],
)
def test_no_operator_runs_again_for_what_a_view_of_it_rests(model: nn.Module) -> None:
    found = check_replay(model, torch.randn(4, 6, 16))
    for block in found.blocks:
        programs = ClassGraph(block.joint).programs(frozenset())
        assert programs.recomputed == 0
        made = {storage for step in programs.forward.instructions for _, storage, _ in step.makes}
        ended = {storage for step in programs.backward.instructions for storage in step.ends}
        assert programs.saved.keys() <= ended
        assert not made & {storage for step in programs.backward.instructions for _, storage, _ in step.makes}


class Skips(nn.Module):
    """A U-Net's skip: the gradient of what is joined is a part of a larger one, of which a batch norm takes sums."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.norm(self.down(x))
        inner = torch.relu(self.inner(torch.zeros_like(h)))
        return {"loss": self.up(torch.cat([torch.relu(inner), h], dim=1)).square().mean()}


class Repeats(nn.Module):
    """The gradient of a sum repeats one element; a batch norm adds it up in another order than a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.norm(self.a(x)).sum() / 7}


class OnePicture(nn.Module):
    """A convolution tells by the stride of a dimension of size 1 whether its channels are last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out, self.norm = nn.Conv2d(32, 64, 2, stride=2), nn.Conv2d(64, 32, 1), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.norm(x[:1, :16]).permute(0, 2, 1).reshape(1, 32, 4, 4)
        return {"loss": self.out(nn.functional.gelu(self.conv(h))).square().mean()}


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
@pytest.mark.parametrize(
    "case",
    [
        _case("skips", Skips, (4, 3, 16, 16)),
        _case("repeats", Repeats, (4, 3, 16, 16)),
        _case("one picture", OnePicture, (1, 32, 32)),
    ],
    ids=lambda case: case.name,
)
def test_layouts_that_decide_how_kernels_add_up(case: parity.Case, budget: str) -> None:
    parity.check(case, budget, None)


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(4, 64, 8, 8), (4096, 64, 8, 1)),
        (torch.empty(4, 64, 8, 8)[:, :32], (2064, 64, 8, 1)),
        (torch.empty(4, 64, 8, 8)[:, :, 3], (1024, 16, 1)),
        (torch.empty(5, 6)[:, :4], (6, 1)),
        (torch.empty(4, 8)[:, ::2], (8, 2)),
        (torch.empty(4, 1).expand(4, 7), (1, 0)),
        (torch.empty(()).expand(3, 4), (0, 0)),
        (torch.empty(2, 8, 8, 16).permute(0, 3, 1, 2), (1024, 1, 128, 16)),
        (torch.empty(9).unfold(0, 3, 1), (3, 1)),
    ],
)
def test_gaps_are_kept_and_made_small(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    assert gapped_stride(tensor) == stride
