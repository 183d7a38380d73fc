"""Actions on parameters, buffers and the optimizer's states, by those who hold them too."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch

from .table import action
from .worlds import World

# -- parameters and buffers -------------------------------------------------------------------------------------------


@action(weight=1.5, inside=True)
def parameter_edited(world: World, rng: random.Random) -> None:
    """In place, under no_grad()."""
    name, parameter = world.pick(rng, world.trained())
    world.tell(f"with no_grad(): {name}.mul_(0.5)")
    with torch.no_grad():
        parameter.mul_(0.5)


@action(inside=True)
def parameter_edited_by_data(world: World, rng: random.Random) -> None:
    """In place, through `.data`."""
    name, parameter = world.pick(rng, world.trained())
    world.tell(f"{name}.data.add_(0.1)")
    parameter.data.add_(0.1)


def _frozen(world: World) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in world.model.named_parameters() if not p.requires_grad and "lora_" not in n}


@action(weight=1.5, needs="fixed", inside=True)
def frozen_edited(world: World, rng: random.Random) -> None:
    """A weight that nobody trains, under no_grad()."""
    name, parameter = world.pick(rng, _frozen(world))
    world.tell(f"with no_grad(): {name}.mul_(1.5)")
    with torch.no_grad():
        parameter.mul_(1.5)


@action(weight=1.5, needs="fixed", inside=True)
def frozen_edited_by_data(world: World, rng: random.Random) -> None:
    """A weight that nobody trains, through `.data`, as merging adapters does."""
    name, parameter = world.pick(rng, _frozen(world))
    world.tell(f"{name}.data.mul_(1.5)")
    parameter.data.mul_(1.5)


@action(needs="buffer", inside=True)
def buffer_edited(world: World, rng: random.Random) -> None:
    """In place, or replaced."""
    floats = {n: b for n, b in world.model.named_buffers() if b.is_floating_point()}
    name, buffer = world.pick(rng, floats)
    if rng.random() < 0.7:
        world.tell(f"{name}.add_(0.25)")
        with torch.no_grad():
            buffer.add_(0.25)
        return
    world.tell(f"{name} = {name} + 0.25")
    *path, last = name.split(".")
    setattr(world.model.get_submodule(".".join(path)), last, buffer + 0.25)


@action()
def states_kept(world: World, rng: random.Random) -> None:
    """A copy of the states of model and optimizer, for later."""
    world.tell("kept = deepcopy((model.state_dict(), optimizer.state_dict()))")
    world.held["states"] = copy.deepcopy((world.model.state_dict(), world.optimizer.state_dict()))


@action(inside=True)
def model_loaded(world: World, rng: random.Random) -> None:
    """The model's earlier state."""
    if "states" in world.held:
        world.tell("model.load_state_dict(kept[0])")
        # A copy, since what is loaded must not be changed by what is done to it.
        world.model.load_state_dict(copy.deepcopy(world.held["states"][0]), strict=False)


@action(inside=True)
def optimizer_loaded(world: World, rng: random.Random) -> None:
    """The optimizer's earlier state."""
    if "states" in world.held:
        world.tell("optimizer.load_state_dict(kept[1])")
        world.optimizer.load_state_dict(copy.deepcopy(world.held["states"][1]))


@action(weight=0.7, reads=True, inside=True)
def states_in_inference_mode(world: World, rng: random.Random) -> None:
    """state_dict() of both where tensors made are inference tensors."""
    world.tell("with inference_mode(): model.state_dict(), optimizer.state_dict()")
    with torch.inference_mode():
        for name, value in world.model.state_dict().items():
            world.see(f"state of {name}", value)
        world.optimizer.state_dict()


@action(weight=0.4)
def parameter_frozen_for_a_while(world: World, rng: random.Random) -> None:
    """requires_grad_(False), an evaluation, requires_grad_(True), or only the first."""
    name, parameter = world.pick(rng, world.trained())
    back = rng.random() < 0.7
    world.tell(f"{name}.requires_grad_(False){f'; {name}.requires_grad_(True)' if back else ''}")
    parameter.requires_grad_(False)
    if back:
        with torch.no_grad():
            world.look(world.model(**world.batch(rng)))
        parameter.requires_grad_(True)


# -- the optimizer ----------------------------------------------------------------------------------------------------


@action(weight=1.5, inside=True)
def learning_rate(world: World, rng: random.Random) -> None:
    """Another one, from now on."""
    rate = rng.choice((0.01, 0.03))
    world.tell(f"optimizer.param_groups[0]['lr'] = {rate}")
    world.optimizer.param_groups[0]["lr"] = rate


@action(weight=0.7, inside=True)
def weight_decay(world: World, rng: random.Random) -> None:
    """Another one, from now on."""
    decay = rng.choice((0.0, 0.1))
    world.tell(f"optimizer.param_groups[0]['weight_decay'] = {decay}")
    world.optimizer.param_groups[0]["weight_decay"] = decay


@action(inside=True)
def states_cleared(world: World, rng: random.Random) -> None:
    """All of the optimizer's."""
    world.tell("optimizer.state.clear()")
    world.optimizer.state.clear()


@action(inside=True)
def state_dropped(world: World, rng: random.Random) -> None:
    """That of one parameter."""
    name, parameter = world.pick(rng, world.trained())
    world.tell(f"optimizer.state.pop({name}, None)")
    world.optimizer.state.pop(parameter, None)


@action(inside=True)
def state_zeroed(world: World, rng: random.Random) -> None:
    """In place, of one parameter, where there is one."""
    name, parameter = world.pick(rng, world.trained())
    state: dict[str, Any] = world.optimizer.state.get(parameter, {})
    for key in ("exp_avg", "momentum_buffer"):
        if isinstance(state.get(key), torch.Tensor):
            world.tell(f"optimizer.state[{name}][{key!r}].zero_()")
            state[key].zero_()


@action(weight=0.7)
def state_read(world: World, rng: random.Random) -> None:
    """As loops do that log the size of averages."""
    name, parameter = world.pick(rng, world.trained())
    world.tell(f"optimizer.state[{name}]")
    for key, value in sorted(world.optimizer.state.get(parameter, {}).items()):
        world.see(f"optimizer's {key} of {name}", value)
