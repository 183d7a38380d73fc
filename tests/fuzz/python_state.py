"""Actions on the Python behind a captured graph: modes, attributes, submodules, hooks, adapters."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

from .table import action
from .training import evaluate, forward, micro_batches, train
from .worlds import World

# -- modes and attributes ---------------------------------------------------------------------------------------------


@action(weight=1.5, inside=True)
def mode_of_the_model(world: World, rng: random.Random) -> None:
    """train() or eval(), from now on."""
    mode = rng.random() < 0.7
    world.tell(f"model.train({mode})")
    world.model.train(mode)


@action(weight=2, inside=True)
def mode_of_a_submodule(world: World, rng: random.Random) -> None:
    """train() or eval() of one."""
    matter = (nn.Dropout, nn.Dropout2d, nn.BatchNorm1d, nn.BatchNorm2d)
    found = {n: m for n, m in world.modules().items() if isinstance(m, matter)}
    name, module = world.pick(rng, found if found and rng.random() < 0.7 else world.modules())
    mode = not module.training
    world.tell(f"model.{name}.train({mode})")
    module.train(mode)


@action(weight=1.5, needs="dropout", inside=True)
def dropout_rate(world: World, rng: random.Random) -> None:
    """Another p."""
    kinds = (nn.Dropout, nn.Dropout2d)
    name, module = world.pick(rng, {n: m for n, m in world.modules().items() if isinstance(m, kinds)})
    module.p = rng.choice((0.0, 0.5))
    world.tell(f"model.{name}.p = {module.p}")


@action(needs="batchnorm", inside=True)
def momentum_of_statistics(world: World, rng: random.Random) -> None:
    """Another momentum of BatchNorm."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    name, module = world.pick(rng, {n: m for n, m in world.modules().items() if isinstance(m, kinds)})
    module.momentum = rng.choice((0.1, 0.5))
    world.tell(f"model.{name}.momentum = {module.momentum}")


@action(weight=1.5, needs="scale", inside=True)
def float_attribute(world: World, rng: random.Random) -> None:
    """A number that the forward multiplies with."""
    world.model.scale = rng.choice((0.5, 1.0, 2.0))
    world.tell(f"model.scale = {world.model.scale}")


@action(needs="options", inside=True)
def entry_of_an_attribute(world: World, rng: random.Random) -> None:
    """An entry of a dict or of a list."""
    value = rng.choice((0.25, 0.5, 1.0))
    if rng.random() < 0.5:
        world.model.options["gain"] = value
        world.tell(f"model.options['gain'] = {value}")
    else:
        world.model.gains[0] = value
        world.tell(f"model.gains[0] = {value}")


@action(needs="config", inside=True)
def flag_of_the_config(world: World, rng: random.Random) -> None:
    """One that the outputs show, or that the attention reads."""
    config = world.model.config
    if rng.random() < 0.5:
        config.output_hidden_states = not config.output_hidden_states
        world.tell(f"model.config.output_hidden_states = {config.output_hidden_states}")
        return
    name = rng.choice(("eager", "sdpa"))
    world.tell(f"model.set_attn_implementation({name!r})")
    world.model.set_attn_implementation(name)


@action(weight=0.2, needs="habit")
def habit(world: World, rng: random.Random) -> None:
    """What a graph cannot have, all at once."""
    world.model.habit = rng.choice(("", "count", "skip at random", "average", "own backward"))
    world.tell(f"model.habit = {world.model.habit!r}")


@action(needs="act", inside=True)
def submodule_replaced(world: World, rng: random.Random) -> None:
    """Another activation, or the first one again."""
    first = world.held.setdefault("act", world.model.act)
    world.model.act = rng.choice((nn.Tanh(), first))
    world.tell(f"model.act = {world.model.act}")


@action(weight=0.5, inside=True, reads=True)
def copied(world: World, rng: random.Random) -> None:
    """A deep copy, which is evaluated."""
    world.tell("copy.deepcopy(model).eval()(batch)")
    twin = copy.deepcopy(world.model).eval()
    with torch.no_grad():
        world.look(twin(**world.batch(rng)))


# -- hooks ------------------------------------------------------------------------------------------------------------


def _first(value: Any) -> torch.Tensor:
    value = value[0] if isinstance(value, tuple) else value
    return next(iter(value.values())) if isinstance(value, dict) else value


def _keep(world: World, handle: Any) -> None:
    world.held.setdefault("hooks", []).append(handle)


def _target(world: World, rng: random.Random) -> tuple[str, nn.Module]:
    """A submodule that is called, or the model itself."""
    return ("the model", world.model) if rng.random() < 0.25 else world.pick(rng, world.leaves())


@action(weight=1.5, inside=True)
def hook_that_looks(world: World, rng: random.Random) -> None:
    """A forward hook that notes what it sees."""
    name, module = _target(world, rng)
    world.tell(f"{name}.register_forward_hook(look)")

    def look(_: Any, given: Any, output: Any) -> None:
        world.see(f"output of {name}", _first(output).sum())

    _keep(world, module.register_forward_hook(look))


@action(weight=1.5, inside=True)
def hook_that_changes(world: World, rng: random.Random) -> None:
    """A forward hook that halves the output of a submodule."""
    name, module = world.pick(rng, world.leaves())
    world.tell(f"{name}.register_forward_hook(halve)")

    def halve(_: Any, given: Any, output: Any) -> Any:
        return tuple(0.5 * value for value in output) if isinstance(output, tuple) else 0.5 * output

    _keep(world, module.register_forward_hook(halve))


@action(weight=0.7, inside=True)
def hook_of_the_model_that_changes(world: World, rng: random.Random) -> None:
    """A forward hook that doubles the loss."""
    world.tell("model.register_forward_hook(double the loss)")

    def double(_: Any, given: Any, output: Any) -> Any:
        if "loss" in output and output["loss"] is not None:
            output["loss"] = 2 * output["loss"]
        return output

    _keep(world, world.model.register_forward_hook(double))


@action(inside=True)
def hook_before(world: World, rng: random.Random) -> None:
    """A forward pre-hook that changes a floating input, or looks at another."""
    name, module = world.pick(rng, world.leaves())
    world.tell(f"{name}.register_forward_pre_hook(double floats)")

    def double(_: Any, given: Any) -> Any:
        return tuple(2 * v if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in given)

    _keep(world, module.register_forward_pre_hook(double))


@action(inside=True, refused="all")
def hook_of_the_backward(world: World, rng: random.Random) -> None:
    """A full backward hook that looks, or scales what goes on."""
    name, module = world.pick(rng, world.leaves())
    looks = rng.random() < 0.5
    world.tell(f"{name}.register_full_backward_hook({'look' if looks else 'halve'})")

    def hook(_: Any, given: Any, made: Any) -> Any:
        if looks:
            world.see(f"gradient at {name}", _first(made))
            return None
        return tuple(None if grad is None else 0.5 * grad for grad in given)

    _keep(world, module.register_full_backward_hook(hook))


@action(inside=True, refused="planned")
def hook_of_a_parameter(world: World, rng: random.Random) -> None:
    """One that halves its gradient."""
    name, parameter = world.pick(rng, world.trained())
    world.tell(f"{name}.register_hook(halve)")
    _keep(world, parameter.register_hook(lambda grad: 0.5 * grad))


@action(weight=2.5, inside=True)
def hooks_removed(world: World, rng: random.Random) -> None:
    """All, or the last one."""
    hooks = world.held.setdefault("hooks", [])
    count = len(hooks) if rng.random() < 0.5 else min(1, len(hooks))
    world.tell(f"remove {count} hooks")
    for _ in range(count):
        hooks.pop().remove()


# -- adapters ---------------------------------------------------------------------------------------------------------


@action(weight=2, needs="peft", inside=True)
def evaluation_without_adapter(world: World, rng: random.Random) -> None:
    """The base model's answer, in eval or in train mode."""
    mode = rng.choice((False, None))
    world.tell(f"with disable_adapter(), no_grad(): model(batch)  # mode {mode}")
    with world.model.disable_adapter():
        evaluate(world, rng, torch.no_grad, mode)


@action(weight=2, needs="peft", pauses=True)
def step_against_the_base(world: World, rng: random.Random) -> None:
    """As preference training does: a reference pass without the adapter, between forward and backward."""
    first = rng.random() < 0.3
    world.tell(f"train(loss - reference loss)  # reference {'first' if first else 'second'}")

    def reference(batch: Any) -> Any:
        with torch.no_grad(), world.model.disable_adapter():
            return forward(world, batch)["loss"]

    batches = micro_batches(world, rng)
    known = [reference(batch) if first else None for batch in batches]
    queue = iter(known)

    def loss_of(outputs: Any, batch: Any) -> torch.Tensor:
        early = next(queue)
        return (outputs["loss"] - (reference(batch) if early is None else early)).sigmoid()

    train(world, batches, loss_of)


@action(needs="peft", inside=True)
def adapter_chosen(world: World, rng: random.Random) -> None:
    """One of the two."""
    name = rng.choice(("default", "other"))
    world.tell(f"model.set_adapter({name!r})")
    world.model.set_adapter(name)


@action(needs="peft", reads=True)
def adapter_merged(world: World, rng: random.Random) -> None:
    """Into the base weights, and after an evaluation out of them."""
    world.tell("model.merge_adapter(); evaluate; model.unmerge_adapter()")
    world.model.merge_adapter()
    evaluate(world, rng, torch.no_grad, False)
    world.model.unmerge_adapter()


@action(weight=0.2, needs="peft")
def adapter_added(world: World, rng: random.Random) -> None:
    """A third one, which is not used yet."""
    name = f"number {len(world.model.peft_config)}"
    world.tell(f"model.add_adapter({name!r})")
    world.model.add_adapter(name, copy.deepcopy(world.model.peft_config["default"]))
