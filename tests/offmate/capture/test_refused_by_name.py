"""Models and loops for which a graph would give other numbers without a word: each is right, or named."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import types
from typing import Any

import numpy
import pytest
import torch

import offmate
from offmate import CaptureError, ProtocolError

from ..loops import CPU_BUDGET


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.relu(self.a(x))).pow(2).mean()


def made(kind: type[torch.nn.Module], compiles: bool, planned: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    if compiles:
        offmate.compile(
            model, 1 << 30, optimizer=optimizer if planned else None, device="emulated", cpu_budget=CPU_BUDGET,
            config=offmate.Config(cache_dir=None, options_per_block=3),
        )  # fmt: skip
    torch.manual_seed(1)
    return model, optimizer


def train(kind: type[torch.nn.Module], compiles: bool, change: Any = None, steps: int = 4) -> list[torch.Tensor]:
    model, optimizer = made(kind, compiles)
    losses = []
    for step in range(steps):
        if change is not None and step == 3:
            change(model)
        loss = model(torch.randn(3, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


def alike(kind: type[torch.nn.Module], change: Any = None) -> None:
    assert all(map(torch.equal, train(kind, True, change), train(kind, False, change)))


def holding(make: Any, read: Any) -> type[torch.nn.Module]:
    """A model that holds what `make` gives, and scales by what `read` finds in it."""

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.held = make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * read(self.held)

    return Holding


class Scaled:
    f = 1.0

    def __call__(self) -> float:
        return self.f


class Slotted:
    __slots__ = ("f",)

    def __init__(self) -> None:
        self.f = 1.0


def settings_class() -> type:
    return type("Settings", (), {"f": 1.0, "__module__": __name__})


@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (lambda: types.SimpleNamespace(f=1.0), lambda q: q.f, lambda q: setattr(q, "f", 3.0)),
        (Scaled, lambda q: q(), lambda q: setattr(q, "f", 3.0)),
        (Slotted, lambda q: q.f, lambda q: setattr(q, "f", 3.0)),
        (settings_class, lambda q: q.f, lambda q: setattr(q, "f", 3.0)),
        (lambda: collections.deque([1.0]), lambda q: q[0], lambda q: q.append(q.popleft() + 2)),
        (lambda: functools.partial(dict, f=1.0), lambda q: q()["f"], lambda q: q.keywords.update(f=3.0)),
        (lambda: {"f": 1.0, "g": 2.0}, lambda q: next(iter(q.values())), lambda q: q.update(f=q.pop("f"))),
        (lambda: {"add": 2.0}, lambda q: 3.0 if "mul" in q else 1.0, lambda q: q.update(mul=q.pop("add"))),
    ],
    ids=["namespace", "callable", "slots", "class", "deque", "partial", "order", "keys"],
)
def test_settings_in_any_holder_are_seen(make, read, change):
    alike(holding(make, read), lambda model: change(model.held))


def test_what_a_class_holds_is_seen():
    class Block(torch.nn.Module):
        k = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.k

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.block(x))

    for compiles in (True, False):
        Block.k = 1.0
        runs = [train(Model, compiles, lambda _: setattr(Block, "k", 3.0))]
        Block.forward = lambda self, x: x + self.k
        runs.append(train(Model, compiles))
        Block.forward = lambda self, x: x * self.k
        if compiles:
            ours = runs
    assert all(torch.equal(a, b) for one, other in zip(ours, runs) for a, b in zip(one, other))


@pytest.mark.parametrize(
    ("make", "read", "words"),
    [
        (lambda: random.Random(0), lambda q: 1 + q.random(), "draws from held"),
        (lambda: numpy.random.default_rng(0), lambda q: 1 + float(q.random()), "draws from held"),
        (lambda: itertools.count(1), next, "draws from held"),
        (lambda: 0, lambda q: torch.manual_seed(3) and 1.0, r"calls torch.manual_seed\(\)"),
        (lambda: [torch.nn.Parameter(torch.ones(()))], lambda q: q[0], "requires a gradient.*not a parameter"),
        (lambda: torch.ones((), requires_grad=True), lambda q: q, "requires a gradient.*not a parameter"),
    ],
    ids=["random", "numpy", "iterator", "seed", "list of parameters", "tensor"],
)
def test_what_one_graph_cannot_hold_is_named(make, read, words):
    with pytest.raises(CaptureError, match=words):
        train(holding(make, read), True)


def test_buffers_that_share_memory_are_refused_if_one_is_written():
    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(8)
            self.register_buffer("p", whole)
            self.b.register_buffer("q", whole[:4])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.p.add_(x.mean(0))
            return super().forward(x) * (1 + self.b.q.sum())

    with pytest.raises(CaptureError, match=r"writes into .* shares"):
        train(Shared, True)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_written_buffer_on_the_memory_of_a_parameter_is_refused(frozen: bool, read: bool):
    class Lying(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8), requires_grad=not frozen)
            self.register_buffer("count", self.scale.detach()[2:3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return super().forward(x * self.scale if read else x)

    with pytest.raises(CaptureError, match="writes into buffer count, which shares memory with parameter scale"):
        train(Lying, True)


def test_buffers_side_by_side_in_one_memory_may_be_written():
    class Neighbours(Net):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(16)
            self.register_buffer("p", whole[:8])
            self.register_buffer("q", whole[8:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.p.add_(x.detach().mean(0))
            return super().forward(x + self.q) * (1 + self.p.sum())

    alike(Neighbours)


@pytest.mark.parametrize("constant", [False, True])
def test_a_tensor_on_the_memory_of_a_trained_parameter_is_refused(constant: bool):
    class Reading(Net):
        def __init__(self) -> None:
            super().__init__()
            values = torch.ones(8)
            self.scale = torch.nn.Parameter(values)
            if constant:
                self.other = values
            else:
                self.register_buffer("other", values)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.other) + self.scale.sum()

    kind = "constant" if constant else "buffer"
    with pytest.raises(CaptureError, match=f"reads {kind} other, which shares memory with parameter scale"):
        train(Reading, True)


def test_memory_that_two_arrays_share_is_seen():
    class Overlapping(Net):
        def __init__(self) -> None:
            super().__init__()
            whole = numpy.zeros(12, dtype=numpy.float32)
            self.register_buffer("p", torch.from_numpy(whole[:8]))
            self.register_buffer("q", torch.from_numpy(whole[4:]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.p.add_(x.detach().mean(0))
            return super().forward(x + self.q)

    with pytest.raises(CaptureError, match="writes into buffer p, which shares memory with buffer q"):
        train(Overlapping, True)


@pytest.mark.parametrize("planned", [True, False])
def test_parameters_without_elements_are_refused_if_they_are_read(planned: bool):
    class Gappy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.none = torch.nn.Parameter(torch.randn(0, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.none.sum()

    with pytest.raises(CaptureError, match=r"reads none, a parameter of shape \(0, 8\) without elements"):
        made(Gappy, True, planned)[0](torch.randn(3, 8))


class Layer(torch.nn.Module):
    """One layer that is given, then a linear one."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.a = layer, torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.layer(x)).square().mean()


@pytest.mark.parametrize(
    ("layer", "batch", "words"),
    [
        (torch.nn.Embedding(4, 8, max_norm=1.0), torch.tensor([0, 2]), "layer is an nn.Embedding with max_norm=1,"),
        (torch.nn.BatchNorm1d(8, momentum=None), torch.randn(4, 8), "layer is an nn.BatchNorm1d with momentum=None"),
        (torch.nn.EmbeddingBag(4, 8, sparse=True), torch.tensor([[0, 2]]), "layer is an nn.EmbeddingBag with sparse"),
    ],
)
def test_layers_with_settings_that_no_plan_can_follow(layer: torch.nn.Module, batch: torch.Tensor, words: str):
    model = offmate.compile(Layer(layer), "1GiB", device="emulated", config=offmate.Config(cache_dir=None))
    with pytest.raises(CaptureError, match=words):
        model(batch)


def test_a_batch_norm_that_counts_its_calls_is_evaluated():
    model = Layer(torch.nn.BatchNorm1d(8, momentum=None)).eval()
    batch = torch.randn(4, 8)
    with torch.no_grad():
        expected = model(batch)
        offmate.compile(model, "1GiB", device="emulated", config=offmate.Config(cache_dir=None))
        assert torch.equal(model(batch), expected)


def test_a_parameter_without_elements_that_is_not_read_does_not_matter():
    class Gappy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.none = torch.nn.Parameter(torch.randn(0, 8))

    model, optimizer = made(Gappy, True, True)
    model(torch.randn(3, 8)).square().mean().backward()
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters())) - 1


def test_two_compiled_models_share_no_parameter():
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    offmate.compile(first, "1GiB", device="emulated", cpu_budget=CPU_BUDGET)
    with pytest.raises(offmate.OffmateError, match="weight belongs to another compiled model"):
        offmate.compile(second, "1GiB", device="emulated", cpu_budget=CPU_BUDGET)


def test_a_plan_for_a_machine_that_is_not_here_has_buffers_that_the_forward_writes():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    batch = (torch.zeros(4, 8),)
    plan = offmate.plan(model, "1GiB", example_inputs=batch, hardware="rtx3060", config=offmate.Config(cache_dir=None))
    assert plan.fixed_bytes >= 2 * 8 * 4 + 8  # running mean, variance, count


def test_layers_that_change_places_keep_their_states():
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](torch.relu(self.layers[0](x))).pow(2).mean()

    def swap(model: Any) -> None:
        if hasattr(model, "offmate"):
            model.offmate.sync()
        model.layers[0], model.layers[1] = model.layers[1], model.layers[0]

    ours, plain = train(Two, True, swap, 6), train(Two, False, swap, 6)
    assert all(map(torch.equal, ours, plain))


class Heads(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x), self.b(x)


@pytest.mark.parametrize("planned", [True, False])
def test_an_output_that_the_loss_leaves_out_gives_no_zeros(planned):
    model, _ = made(Heads, True, planned)
    with pytest.raises(ProtocolError, match=r"no gradient to the output '1'.*none to b\..*gradients_into=\('0',\)"):
        model(torch.randn(3, 8))[0].pow(2).mean().backward()


def test_an_output_that_shares_all_its_parameters_may_be_left_out():
    class Same(Net):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.a(x)
            return self.b(hidden), hidden

    runs = []
    for compiles in (True, False):
        model, optimizer = made(Same, compiles)
        for _ in range(3):
            model(torch.randn(3, 8))[0].pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([value.clone() for value in model.state_dict().values()])
    assert all(map(torch.equal, *runs))


def test_gradients_left_at_zero_are_named_where_they_count():
    class Branches(Net):
        def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
            return (self.a if first else self.b)(x).pow(2).mean()

    model, optimizer = made(Branches, True)
    model(torch.randn(3, 8), True).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model(torch.randn(3, 8), True).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(ProtocolError, match=r"set_to_none=False.*a\.bias"):
        model(torch.randn(3, 8), False).backward()


def test_an_input_that_requires_a_gradient_is_named_when_nothing_is_trained():
    model, _ = made(Net, True, planned=False)
    model.requires_grad_(False)
    with pytest.raises(ProtocolError, match="requires a gradient"):
        model(torch.randn(3, 8, requires_grad=True))


def test_batches_of_other_strides_are_other_batches():
    class Asks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if x.is_contiguous() else 1.0)

    runs = []
    for compiles in (True, False):
        model, _ = made(Asks, compiles)
        with torch.no_grad():
            runs.append([model(x) for x in (torch.ones(8, 8), torch.ones(8, 8).t(), torch.ones(8, 8)[:, ::1])])
    assert all(map(torch.equal, *runs))


def test_arguments_that_cannot_be_compared_are_named():
    model, _ = made(Net, True)
    with pytest.raises(CaptureError, match="argument is a ndarray"):
        model(numpy.zeros((3, 8), dtype=numpy.float32))


def test_the_fused_path_of_evaluation_is_named():
    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model, _ = made(Encoder, True)
    model.eval()
    with torch.no_grad(), pytest.raises(CaptureError, match="set_fastpath_enabled"):
        model(torch.randn(3, 7, 16))


def test_anomaly_detection_around_a_call():
    with torch.autograd.detect_anomaly(check_nan=True):
        alike(Net)


def add_one(model: Any, x: torch.Tensor) -> Any:
    model.held.add_(1)
    return model.a(x).sum(), model.held


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: (m.a(x).sum(), m.held), r"output '1' is the buffer held itself.*held\.clone\(\)"),
        (add_one, r"output '1' is the buffer held itself"),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_the_model_holds_is_no_output(forward, words, trains):
    class Returning(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.ones(8))
            self.a.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            return forward(self, x)

    model, _ = made(Returning, True, planned=False)
    with torch.set_grad_enabled(trains), pytest.raises(CaptureError, match=words):
        model(torch.randn(3, 8))


def picks(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x)[x[:, 0] > -9]


def picks_kept(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x).masked_select(x > 0).sum()


def slices(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x)[: (x > 0).sum()]


def counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x) * x.nonzero().shape[0]


def lists(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x) * x.tolist()[0][0]


def repeats(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x).repeat_interleave((x[:, 0] > 0).long(), 0)


def bins(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x).sum() + torch.bincount((x[0] > 0).long()).sum()


def uniques(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x).sum() + x.unique().sum()


def compares(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.a(x) if torch.equal(x, x + 1) else model.a(x) * 2


SHAPE, NUMBER = "shape depends on values.*torch.where", r"reads a Python number.*or pass the number"
# torch 2.11.0 stops at the bound itself, and names no operator.
BOUND = rf"item.*{NUMBER}|^the forward.*{NUMBER}"


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (picks, rf"index.*{SHAPE}"), (picks_kept, rf"masked_select.*{SHAPE}"), (slices, BOUND),
        (counts, rf"nonzero.*{SHAPE}"), (lists, rf"item.*{NUMBER}"), (repeats, rf"repeat_interleave.*{SHAPE}"),
        (bins, rf"bincount.*{SHAPE}"), (uniques, rf"_unique2.*{SHAPE}"), (compares, rf"equal.*{NUMBER}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("trains", [True, False])
def test_sizes_and_numbers_made_from_values_are_named(forward, words, trains):
    class Values(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    model, _ = made(Values, True)
    with torch.set_grad_enabled(trains), pytest.raises(CaptureError, match=rf"^aten\.{words}") as caught:
        model(torch.randn(3, 8))
    assert "(`return " in str(caught.value) and "test_refused_by_name.py, line " in str(caught.value)


def test_sizes_made_from_values_in_a_model_of_transformers_are_named():
    transformers = pytest.importorskip("transformers")

    class Picking(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig
        __module__ = "transformers.models"

        def __init__(self) -> None:
            super().__init__(transformers.PretrainedConfig())
            self.a = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x)
            return hidden[hidden[:, 0] > -9]

    model, _ = made(Picking, True)
    with pytest.raises(CaptureError, match=rf"^aten\.nonzero.*return hidden\[.*test_refused_by_name.*{SHAPE}"):
        model(torch.randn(3, 8))


def test_sizes_made_from_values_that_nobody_needs_are_left_out():
    class Unneeded(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check((x > 0).sum().item() < 100)
            x.nonzero()
            hidden = self.a(x).clone()
            hidden[x > 0] = 0.0
            return self.b(hidden).sum()

    alike(Unneeded)


def overwrites(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.a(x).exp()
    hidden.add_(1)
    return hidden.sum()


def overwrites_later(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.a(x).exp()
    result = model.b(hidden)
    hidden.mul_(2)
    return (result + hidden).sum()


@pytest.mark.parametrize("forward", [overwrites, overwrites_later])
def test_what_a_backward_needs_and_the_forward_overwrites_is_named(forward):
    class Overwriting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    x = torch.randn(3, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made(Overwriting, False)[0](x).backward()
    model, _ = made(Overwriting, True)
    words = r"its backward fails in plain PyTorch, too: one of the variables.*version 0 instead\. Let the forward"
    with pytest.raises(CaptureError, match=words):
        model(x)
    with torch.no_grad():
        assert torch.equal(model(x), made(Overwriting, False)[0](x))


class Other(torch.nn.Linear):
    """Of another class than the one that it takes the place of."""


class Replacing(Net):
    """As BigBird does with short sequences: its first forward puts other modules in."""

    def forward(self, x: torch.Tensor) -> Any:
        if not isinstance(self.a, Other):
            self.a = Other(8, 8)
        return super().forward(x)


class Growing(Net):
    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "c"):
            self.c = torch.nn.Dropout(0.5)
        return super().forward(self.c(x))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Replacing, "sets the submodule a, of class Linear, to a new Other"),
        (Growing, "sets the submodule c, which was not there before, to a new Dropout"),
    ],
)
def test_a_forward_that_puts_other_submodules_in(kind: type[torch.nn.Module], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        train(kind, True, steps=1)


def test_a_forward_that_has_put_its_submodules_in_before() -> None:
    def run(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Growing()
        model(torch.randn(3, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiles:
            offmate.compile(model, 1 << 30, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET)
        torch.manual_seed(1)
        loss = model(torch.randn(3, 8))
        loss.backward()
        optimizer.step()
        return [loss.detach(), *(value.clone() for value in model.state_dict().values())]

    assert all(map(torch.equal, run(True), run(False)))


def test_a_refusal_prints_nothing_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    class Averaging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8, momentum=None)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(self.norm(x))

    with pytest.raises(CaptureError):
        train(Averaging, True, steps=1)
    printed = capfd.readouterr()
    assert "def forward" not in printed.out + printed.err and "user code" not in printed.err


class Guarded:
    """As a configuration of transformers whose layers differ: some attributes are not to be read."""

    def __init__(self) -> None:
        self.width, self.factor = 8, 2.0

    def __getattribute__(self, name: str) -> Any:
        if name == "width":
            raise LookupError("width differs from layer to layer")
        return object.__getattribute__(self, name)


class Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Guarded()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x * self.config.factor)


def test_an_object_that_refuses_reads_is_followed_all_the_same() -> None:
    def change(model: torch.nn.Module) -> None:
        model.config.factor = 3.0

    alike(Configured)
    alike(Configured, change)
