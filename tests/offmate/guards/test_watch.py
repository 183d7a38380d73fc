"""What changes behind a captured graph: planned anew, part of the graph's outputs, or refused by name."""

from __future__ import annotations

import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize, prune

import offmate
from offmate import CaptureError, OffmateError, ProtocolError
from offmate.guards.watch import Watch

from ..loops import CPU_BUDGET

Action = Callable[[Any], Any]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.5)
        self.act: torch.nn.Module = torch.nn.ReLU()
        self.scale = 1.0
        self.options = {"shift": [0.0, 1.0]}
        self.extra = torch.ones(8)
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.linear(self.dropout(x))) * self.scale
        return x * self.extra + self.options["shift"][0]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(8)
        self.heads = 2

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        q = self.norm(x).view(len(x), self.heads, -1)
        q = torch.nn.functional.scaled_dot_product_attention(q, q, q).reshape(x.shape)
        return ((q - y) ** 2).mean()


class World:
    """A model with its loop, plain or compiled; `losses` of all its steps, and what hooks have `seen`."""

    def __init__(self, compiles: bool, kind: type[torch.nn.Module] = Model, planned: bool = True) -> None:
        torch.manual_seed(0)
        self.model: Any = kind()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []
        self.handles: list[Any] = []
        if compiles:
            self.optimizer_given = self.optimizer if planned else None
            offmate.compile(
                self.model, 1 << 30, optimizer=self.optimizer_given, device="emulated", cpu_budget=CPU_BUDGET,
                config=offmate.Config(cache_dir=None, options_per_block=3),
            )  # fmt: skip

    def step(self) -> None:
        torch.manual_seed(len(self.losses))
        x, y = torch.randn(2, 4, 8)
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def evaluate(self) -> None:
        torch.manual_seed(len(self.losses))
        with torch.no_grad():
            self.losses.append(self.model(*torch.randn(2, 4, 8)))


def alike(*actions: Action, kind: type[torch.nn.Module] = Model, planned: bool = True) -> tuple[World, World]:
    """Both worlds after a step, then every action followed by a step; all their numbers are the same."""
    worlds = World(True, kind, planned), World(False, kind)
    for world in worlds:
        world.step()
        for action in actions:
            action(world)
            world.step()
    ours, plain = worlds
    assert [a.item() for a in ours.losses] == [b.item() for b in plain.losses]
    mine, theirs = ours.model.state_dict(), plain.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert len(ours.seen) == len(plain.seen) and all(map(torch.equal, ours.seen, plain.seen))
    assert ours.model.offmate.peak_bytes <= 1 << 30
    return worlds


def set_to(path: str, value: Any) -> Action:
    owner, _, name = path.rpartition(".")
    return lambda world: setattr(world.model.get_submodule(owner), name, value() if callable(value) else value)


def put(path: str, *keys: Any) -> Action:
    """Set `model.PATH[key][...] = value`, the last key being the value."""

    def action(world: Any) -> None:
        owner, _, name = path.rpartition(".")
        holder = getattr(world.model.get_submodule(owner), name)
        for key in keys[:-2]:
            holder = holder[key]
        holder[keys[-2]] = keys[-1]

    return action


def mode(path: str, trains: bool) -> Action:
    return lambda world: world.model.get_submodule(path).train(trains)


def append(world: Any) -> None:
    world.model.layers.append(Layer().requires_grad_(False))


@pytest.mark.parametrize(
    "actions",
    [
        (mode("norm", False), mode("norm", True)),
        (mode("layers.1.dropout", False), mode("layers.1", True)),
        (set_to("layers.0.dropout.p", 0.1), set_to("layers.0.dropout.p", 0.5)),
        (set_to("norm.momentum", 0.5),),
        (set_to("norm.eps", 0.1),),
        (set_to("layers.2.scale", 3.0), set_to("layers.2.scale", 1.0)),
        (set_to("layers.1.act", torch.nn.Tanh),),
        (set_to("layers.1.act.inplace", True),),
        (set_to("layers.0.extra", lambda: torch.full((8,), 2.0)),),
        (lambda world: world.model.layers[0].extra.mul_(3),),
        (put("layers.1.options", "shift", 0, 2.0), put("layers.1.options", "shift", [1.0, 1.0])),
        (set_to("heads", 4),),
        (append, lambda world: world.model.layers.pop(3)),
    ],
    ids=[
        "frozen norm", "dropout off", "p", "momentum", "eps", "scale", "submodule", "in place", "tensor",
        "tensor edited", "dict of lists", "number of the model", "layers come and go",
    ],
)  # fmt: skip
def test_what_changes_in_the_model_is_planned_anew(actions):
    alike(*actions)


def test_going_back_takes_the_plan_from_before():
    ours, _ = alike(set_to("layers.0.scale", 2.0), set_to("layers.0.scale", 1.0), set_to("layers.0.scale", 2.0))
    assert len(ours.model.offmate.plans) == 2


def test_what_no_forward_reads_makes_no_plan():
    ours, _ = alike(set_to("layers.0.unread", 1), set_to("layers.0.unread", 2))
    assert len(ours.model.offmate.plans) == 1
    ours.model.layers[0].forward = lambda x: x * ours.model.layers[0].unread
    ours.step()
    ours.model.layers[0].unread = 0
    ours.step()
    assert ours.losses[-1] != ours.losses[-2] and len(ours.model.offmate.plans) == 3


@pytest.mark.parametrize(
    "around",
    [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.backends.mkldnn.flags(enabled=False),
    ],
    ids=["attention", "autocast", "mkldnn"],
)
def test_settings_around_a_call_are_part_of_what_a_plan_is_for(around):
    def step(world: World) -> None:
        with around():
            world.evaluate()

    alike(step, step)


def test_a_backward_under_autocast_is_refused():
    """Plain PyTorch would run the backward's operators in lower precision, too."""
    world = World(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = world.model(*torch.randn(2, 4, 8))
        with pytest.raises(ProtocolError, match=r"backward\(\) inside torch.autocast.*outside"):
            loss.backward()


@pytest.mark.parametrize("planned", [True, False])
def test_parametrizations_are_followed(planned):
    def bounded(world: World) -> None:
        if hasattr(world.model, "offmate"):
            world.model.offmate.sync()
        parametrize.register_parametrization(world.model.layers[0].linear, "weight", torch.nn.Tanh())

    def unbounded(world: World) -> None:
        if hasattr(world.model, "offmate"):
            world.model.offmate.sync()
        parametrize.remove_parametrizations(world.model.layers[0].linear, "weight", leave_parametrized=False)

    alike(bounded, lambda world: None, unbounded, lambda world: None, planned=planned)


def test_parametrizations_with_parameters_of_their_own():
    """Frozen ones are followed; the planned optimizer does not hold what would be trained."""

    def normed(world: World) -> None:
        linear = torch.nn.utils.parametrizations.weight_norm(world.model.layers[0].linear)
        linear.requires_grad_(False)

    ours, _ = alike(normed, lambda world: None, kind=Frozen)
    torch.nn.utils.parametrizations.weight_norm(ours.model.layers[1].linear)
    with pytest.raises(
        ProtocolError, match=r"layers.1.linear.parametrizations.weight.original0 requires.*not in the planned optimizer"
    ):
        ours.step()


def test_parameters_made_of_a_models_share_memory_and_versions():
    def doubled(world: World) -> None:
        for linear in (world.model.layers[0].linear, world.model.layers[1].linear):
            same = torch.nn.Parameter(linear.weight, requires_grad=False)
            assert type(same) is torch.nn.Parameter and not same.requires_grad
            assert isinstance(linear.weight, torch.nn.Parameter) and torch.nn.Parameter(linear.weight).requires_grad
            same.mul_(2)

    alike(doubled, doubled, kind=Frozen)


@pytest.mark.parametrize(
    "old", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm, None], ids=["w", "s", "prune"]
)
def test_hooks_that_make_weights_are_part_of_the_graph(old):
    class Normed(Model):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                old(layer.linear) if old else prune.random_unstructured(layer.linear, "weight", 0.5)

    alike(lambda world: None, lambda world: None, kind=Normed)


# -- hooks ------------------------------------------------------------------------------------------------------------


def hook(path: str, make: Callable[[World], Any], name: str = "register_forward_hook", **options: Any) -> Action:
    def action(world: World) -> None:
        world.handles.append(getattr(world.model.get_submodule(path), name)(make(world), **options))

    return action


def unhook(world: World) -> None:
    world.handles.pop().remove()


def keeps(world: World) -> Any:
    """A hook that keeps the values that it sees; under capture they have none."""

    def look(module: Any, *given: Any) -> None:
        if not torch.compiler.is_exporting():
            world.seen += [leaf.detach().clone() for leaf in torch.utils._pytree.tree_leaves(given)]

    return look


def triples(module: Any, given: Any, out: torch.Tensor) -> None:
    out.mul_(3)


LAYER, PRE = "layers.1", "register_forward_pre_hook"


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    "actions",
    [
        (hook(LAYER, keeps), lambda world: None, unhook),
        (hook(LAYER, keeps, PRE), unhook),
        (hook(LAYER, keeps, with_kwargs=True), unhook),
        (hook(LAYER, lambda _: lambda module, given, out: out * 3), unhook),
        (hook(LAYER, lambda _: triples), unhook),
        (hook(LAYER, lambda _: lambda module, given: (given[0] * 3,), PRE), unhook),
        (hook("", keeps), unhook),
        (hook("", lambda _: lambda module, given, out: out * 3), unhook),
        (hook("", lambda _: lambda module, given: (given[0] * 3, given[1]), PRE), unhook),
    ],
    ids=["looks", "looks before", "keywords", "changes", "in place", "before", "model looks", "model", "model before"],
)
def test_forward_hooks_run_as_in_plain_pytorch(actions, planned):
    alike(*actions, planned=planned)


def test_a_hook_that_looks_gives_no_gradient_without_a_word():
    world = World(True)
    kept: list[torch.Tensor] = []
    world.model.layers[1].register_forward_hook(lambda module, given, out: kept.append(out))
    loss = world.model(*torch.randn(2, 4, 8))
    with pytest.raises(ProtocolError, match=r"layers.1 \(.*lambda.*gradients_into"):
        (loss + kept[-1].sum()).backward()


class Residual(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def kept_in_the_loss(compiles: bool, between: torch.nn.Module) -> list[torch.Tensor]:
    """States of a loop whose loss reads what a hook has kept of a layer in the middle."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Residual(), between, Residual())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[torch.Tensor] = []
    model[0].register_forward_hook(keeping := lambda module, given, out: kept.append(out))
    if compiles:
        name = f"0 ({keeping.__qualname__})"
        offmate.compile(
            model, 1 << 30, optimizer=optimizer, device="emulated",
            config=offmate.Config(cache_dir=None, gradients_into=("output", name)),
        )  # fmt: skip
    torch.manual_seed(1)
    for _ in range(3):
        (model(torch.randn(16, 32)).pow(2).mean() + kept[-1].pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def test_what_a_hook_keeps_may_enter_the_loss():
    assert all(map(torch.equal, *(kept_in_the_loss(compiles, torch.nn.Identity()) for compiles in (True, False))))


def test_what_a_hook_keeps_and_the_forward_writes_later_may_not():
    with pytest.raises(CaptureError, match=r"0 \(.*lambda.*writes into it after the plan has kept it.*inplace=False"):
        kept_in_the_loss(True, torch.nn.ReLU(inplace=True))


def test_a_hook_that_fails_without_values_is_named():
    world = World(True)
    world.model.layers[1].register_forward_hook(lambda module, given, out: {}[float(out.sum())])
    with pytest.raises(CaptureError, match=r"hook .*lambda.* of layers.1 failed.*is_exporting"):
        world.step()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_of_a_hook_says_that_the_whole_forward_has_run(caplog, error):
    world = World(True)
    world.step()

    def fails(module, given, out):
        if not torch.compiler.is_exporting():
            raise error("the user's own")

    handle = world.model.layers[1].register_forward_hook(fails)
    with pytest.raises(error, match="own"), caplog.at_level("WARNING", "offmate"):
        world.step()
    assert "drawn all its random numbers" in caplog.text
    handle.remove()
    world.step()


def test_backward_hooks_inside_the_model_are_refused():
    world = World(False)
    handle = world.model.layers[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ProtocolError, match=r"layers.0 has a backward hook"):
        offmate.compile(world.model, 1 << 30)
    handle.remove()
    world = World(True)
    world.step()
    handle = world.model.layers[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ProtocolError, match=r"layers.0 has a backward hook.*autograd.Function"):
        world.step()
    handle.remove()
    world.step()


def test_hooks_on_parameters():
    def scaled(world: World) -> None:
        weight = world.model.layers[0].linear.weight
        world.handles.append(weight.register_hook(lambda grad: grad * 3))
        weight.register_post_accumulate_grad_hook(lambda p: world.seen.append(p.grad.clone()))

    alike(scaled, unhook, planned=False)
    with pytest.raises(ProtocolError, match=r"layers.0.linear.weight has a hook on its gradient.*without optimizer="):
        alike(scaled)


def test_a_hook_on_a_gradient_between_forward_and_backward_is_refused():
    world = World(True)
    loss = world.model(*torch.randn(2, 4, 8))
    handle = world.model.layers[0].linear.weight.register_hook(lambda grad: grad * 3)
    with pytest.raises(ProtocolError, match=r"layers.0.linear.weight got a hook.*between the forward and backward"):
        loss.backward()
    handle.remove()
    world.step()


def test_a_hook_on_a_gradient_removed_between_forward_and_backward():
    def run(world: World) -> None:
        weight = world.model.layers[0].linear.weight
        handle = weight.register_hook(lambda grad: grad * 3)
        weight.register_post_accumulate_grad_hook(lambda p: world.seen.append(p.grad.clone()))
        torch.manual_seed(9)
        loss = world.model(*torch.randn(2, 4, 8))
        handle.remove()
        loss.backward()

    alike(run, planned=False)


def test_hooks_on_all_modules_are_refused():
    world = World(True)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ProtocolError, match="hooks on all modules"):
            world.step()
    finally:
        handle.remove()
    world.step()


# -- what the forward does besides ------------------------------------------------------------------------------------


def forward_of(body: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any) -> type[torch.nn.Module]:
    """A model whose middle layer runs `body`."""

    class Odd(Model):
        def __init__(self) -> None:
            super().__init__()
            for name, value in attributes.items():
                setattr(self.layers[1], name, value)
            self.layers[1].forward = lambda x: body(self.layers[1], Layer.forward(self.layers[1], x))

    return Odd


def counts(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return x * layer.calls


def goes_on(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.mean = 0.9 * layer.mean + x.detach().mean()
    return x - layer.mean


def begins(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.mean = x.detach().mean() if layer.mean is None else 0.9 * layer.mean
    return x - layer.mean


def maps(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.found["x"] = x.detach()
    return x


def collects(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.outputs.append(x)
    return x


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (forward_of(counts, calls=0), r"changes layers.1.calls at every call.*left 1, then 2.*buffer"),
        (forward_of(goes_on, mean=torch.zeros(())), r"reads layers.1.mean and sets it.*register_buffer"),
        (forward_of(begins, mean=None), r"reads layers.1.mean and sets it"),
        (forward_of(maps, found={}), r"reads layers.1.found\['x'\] and sets it.*register_buffer"),
        (forward_of(collects, outputs=[]), r"changes layers.1.outputs at every call"),
        (forward_of(lambda layer, x: x * random.random()), r"draws from Python's random"),
        (forward_of(lambda layer, x: x * float(numpy.random.rand())), r"draws from numpy.random"),
        (forward_of(lambda layer, x: (x.register_hook(lambda g: g * 2), x)[1]), r"register_hook\(\) on a tensor"),
    ],
    ids=["counter", "running mean", "first call", "dict", "list", "random", "numpy", "gradient hook"],
)  # fmt: skip
@pytest.mark.parametrize("trains", [True, False])
def test_state_that_a_graph_cannot_follow_is_refused(kind, words, trains):
    world = World(True, kind)
    before = random.getstate()
    with pytest.raises(CaptureError, match=words):
        world.step() if trains else world.evaluate()
    assert random.getstate() == before
    assert world.model.layers[1].__dict__.get("calls", 0) == 0


def stores(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.kept, layer.rows = x.detach() * 2, len(x)
    return x


def caches(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.size != x.shape[-1]:
        layer.size, layer.table = x.shape[-1], torch.arange(x.shape[-1]).sqrt()
    return x * layer.table


def test_attributes_that_a_forward_sets_hold_the_values_of_the_last_call():
    def look(world: World) -> None:
        layer = world.model.layers[1]
        world.seen += [layer.kept, torch.tensor(layer.rows)]

    ours, _ = alike(look, look, kind=forward_of(stores))
    assert len(ours.model.offmate.plans) == 1


def test_caches_of_constants_are_left_alone():
    ours, plain = alike(lambda world: None, kind=forward_of(caches, size=None, table=None))
    assert ours.model.layers[1].size == plain.model.layers[1].size == 8
    assert torch.equal(ours.model.layers[1].table, plain.model.layers[1].table)


# -- parameters -------------------------------------------------------------------------------------------------------


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("way", ["data", "no_grad", "detach", "assigned"])
def test_edits_of_frozen_weights_are_used(way, planned):
    def edit(world: World) -> None:
        weight = world.model.layers[0].linear.weight
        with torch.no_grad():
            if way == "data":
                weight.data.mul_(3)
            elif way == "no_grad":
                weight.mul_(3)
            elif way == "detach":
                weight.detach().mul_(3)
            else:
                weight.data = weight.data * 3

    alike(edit, edit, kind=Frozen, planned=planned)


def test_edits_of_frozen_weights_before_the_step_are_used():
    """Their updates cannot have been made too early, since they have none."""

    def edit(world: World) -> None:
        torch.manual_seed(9)
        world.model(*torch.randn(2, 4, 8)).backward()
        world.model.layers[0].linear.weight.data.mul_(3)
        world.optimizer.step()
        world.optimizer.zero_grad()

    alike(edit, edit, kind=Frozen)


def test_which_parameters_are_trained_may_change():
    def trains(path: str, value: bool) -> Action:
        return lambda world: world.model.get_submodule(path).requires_grad_(value)

    for planned in (True, False):
        alike(trains("layers.0", False), trains("layers.1", False), trains("layers.0", True), planned=planned)


def test_parameters_that_share_memory_are_refused():
    whole = torch.randn(3, 4)
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Parameter(whole[:2]), torch.nn.Parameter(whole[1:])
    with pytest.raises(OffmateError, match=r"b shares memory with a.*one parameter"):
        offmate.compile(model, 1 << 30)
    columns = torch.nn.Linear(4, 4)
    columns.weight, columns.bias = torch.nn.Parameter(whole[:, :2]), torch.nn.Parameter(whole[:, 2])
    offmate.compile(columns, 1 << 30)


# -- the watch itself -------------------------------------------------------------------------------------------------


def test_states_are_numbered_by_value():
    model = Model()
    watch = Watch(model)
    states = [watch.look()]
    for value in (2.0, 1.0, 2.0, 1, 1.0):
        model.layers[0].scale = value
        states.append(watch.look())
    assert states == [0, 1, 0, 1, 2, 0]
    assert watch.changes == "layers.0.scale was 1, is 1.0"
    model.norm.num_batches_tracked += 1
    model.layers[2].options = {"shift": [0.0, 1.0]}
    assert watch.look() == 0


def test_a_model_is_not_kept_alive_by_what_watches_it():
    model = Model()
    watch, gone = Watch(model), weakref.ref(model)
    del model
    assert gone() is None and watch.parameters == ()


def test_a_process_that_ends_after_one_iteration_ends_well():
    script = """
import torch, offmate
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
offmate.compile(model, "1GiB", device="emulated", config=offmate.Config(cache_dir=None))
model(torch.randn(2, 4)).sum().backward()
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
