"""Actions of the training loop: steps of many kinds, evaluation in every mode."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .models import Batch
from .table import AFTER_BACKWARD, AFTER_FORWARD, BETWEEN, action, pause
from .worlds import Oops, World


def forward(world: World, batch: Batch, around: Any = contextlib.nullcontext) -> Any:
    """The model on a batch, which is observed."""
    with around():
        outputs = world.model(**batch)
    world.look(outputs)
    return outputs


def finish(world: World) -> None:
    """The update, and what comes after it."""
    setup = world.setup
    if setup.clip is not None:
        params = [p for group in world.optimizer.param_groups for p in group["params"]]
        norm = None if world.compiled else torch.nn.utils.clip_grad_norm_(params, setup.clip)
        world.optimizer.step()
        world.see("norm of the gradients", world.model.offmate.grad_norm if world.compiled else norm)
    else:
        world.optimizer.step()
    world.optimizer.zero_grad()


def train(world: World, batches: list[Batch], loss_of: Any = None, around: Any = contextlib.nullcontext) -> None:
    """One update from these micro-batches; what else happens on the way is up to the pauses."""
    for index, batch in enumerate(batches):
        if index:
            pause(world, BETWEEN)
        outputs = forward(world, batch, around)
        loss = outputs["loss"] if loss_of is None else loss_of(outputs, batch)
        pause(world, AFTER_FORWARD)
        (loss / len(batches)).backward()
        del outputs, loss
    world.see_gradients()
    pause(world, AFTER_BACKWARD)
    finish(world)


def micro_batches(world: World, rng: random.Random) -> list[Batch]:
    """As many as the setup plans for."""
    return [world.batch(rng) for _ in range(world.setup.micro)]


@action(weight=10, pauses=True)
def step(world: World, rng: random.Random) -> None:
    """An ordinary update."""
    world.tell("train()")
    train(world, micro_batches(world, rng))


@action(weight=3)
def three_steps(world: World, rng: random.Random) -> None:
    """Updates one after another, with batches of one size."""
    world.tell("for _ in range(3): train()")
    seed = rng.randrange(2**31)
    for _ in range(3):
        train(world, micro_batches(world, random.Random(seed)))


@action(weight=2, pauses=True)
def accumulated_step(world: World, rng: random.Random) -> None:
    """An update from another number of micro-batches, where the plan allows it."""
    most = 3 if not world.setup.planned else world.setup.micro
    count = rng.randint(1, most)
    world.tell(f"train(micro_batches={count})")
    train(world, [world.batch(rng) for _ in range(count)])


@action(refused="planned")
def step_with_regulariser(world: World, rng: random.Random) -> None:
    """A term of the loss on a parameter, outside of the model."""
    name, parameter = world.pick(rng, world.trained())
    world.tell(f"train(loss + 0.1 * {name}.pow(2).sum())")
    train(world, micro_batches(world, rng), lambda outputs, _: outputs["loss"] + 0.1 * parameter.pow(2).sum())


@action(weight=0.3)
def step_with_loss_outside(world: World, rng: random.Random) -> None:
    """A loss of the user's own, from the model's scores."""
    world.tell("train(loss=cross_entropy(model(x).scores, y))")
    batches = micro_batches(world, rng)
    labels = [batch.pop(world.kind.label) for batch in batches]
    queue = iter(labels)

    def loss_of(outputs: Any, _: Batch) -> torch.Tensor:
        scores = outputs["scores"] if "scores" in outputs else outputs["logits"]
        return functional.cross_entropy(scores.flatten(0, -2), next(queue).flatten())

    train(world, batches, loss_of)


@action(weight=0.7, refused="all")
def step_with_scores_edited(world: World, rng: random.Random) -> None:
    """An output changed in place before the backward."""
    world.tell("train(scores.mul_(2) before backward)")

    def loss_of(outputs: Any, _: Batch) -> torch.Tensor:
        with torch.no_grad():
            outputs["scores" if "scores" in outputs else "logits"].mul_(2)
        return outputs["loss"]

    train(world, micro_batches(world, rng), loss_of)


@action(weight=0.3, refused="all")
def step_through_scores_edited(world: World, rng: random.Random) -> None:
    """An output changed in place as autograd sees it, before a loss is made of it."""
    world.tell("train(scores.mul_(2).pow(2).mean())")

    def loss_of(outputs: Any, _: Batch) -> torch.Tensor:
        return outputs["scores" if "scores" in outputs else "logits"].mul_(2).pow(2).mean()

    train(world, micro_batches(world, rng), loss_of)


@action()
def step_in_autocast(world: World, rng: random.Random) -> None:
    """The forward in bfloat16 where torch thinks fit."""
    world.tell("train(autocast)")
    train(world, micro_batches(world, rng), around=lambda: torch.autocast("cpu", torch.bfloat16))


@action(needs="attention")
def step_with_another_kernel(world: World, rng: random.Random) -> None:
    """Attention by its plain formula."""
    world.tell("train(sdpa_kernel(MATH))")
    train(world, micro_batches(world, rng), around=lambda: sdpa_kernel(SDPBackend.MATH))


@action()
def deterministic(world: World, rng: random.Random) -> None:
    """torch's flag, the other way."""
    world.deterministic = not world.deterministic
    torch.use_deterministic_algorithms(world.deterministic)
    world.tell(f"use_deterministic_algorithms({world.deterministic})")


@action(weight=2, needs="routed", inside=True)
def other_arguments(world: World, rng: random.Random) -> None:
    """Another branch, or another number, from now on."""
    arguments = world.held.setdefault("arguments", {})
    if rng.random() < 0.6:
        arguments["branch"] = rng.choice("ab")
    else:
        arguments["power"] = rng.choice((1, 2, 3))
    world.tell(f"arguments = {arguments}")


@action(weight=1.5)
def skipped_batch(world: World, rng: random.Random) -> None:
    """A forward whose loss nobody wants."""
    world.tell("model(batch)  # no backward")
    forward(world, world.batch(rng))


@action(weight=0.3, refused="all")
def two_forwards(world: World, rng: random.Random) -> None:
    """Two forwards, then one backward through both."""
    world.tell("(model(a).loss + model(b).loss).backward()")
    first, second = (forward(world, world.batch(rng))["loss"] for _ in range(2))
    (first + second).backward()
    del first, second
    finish(world)


@action(weight=0.2, refused="all")
def two_backwards(world: World, rng: random.Random) -> None:
    """Through the same forward twice."""
    world.tell("loss.backward(retain_graph=True); loss.backward()")
    loss = forward(world, world.batch(rng))["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    del loss
    finish(world)


@action(weight=1.5)
def exception_before_backward(world: World, rng: random.Random) -> None:
    """The user's code fails between forward and backward, and the loop goes on."""
    world.tell("try: loss = model(batch).loss; raise Oops")
    try:
        loss = forward(world, world.batch(rng))["loss"]
        raise Oops(f"{loss.dim()} dimensions")
    except Oops:
        pass


@action(weight=0.4, refused="all")
def exception_in_forward(world: World, rng: random.Random) -> None:
    """A hook fails in the forward, once, and the loop goes on."""
    name, module = world.pick(rng, world.leaves())
    world.tell(f"{name} raises Oops in a forward, then no longer")

    def fails(*_: Any) -> None:
        raise Oops

    handle = module.register_forward_pre_hook(fails)
    try:
        forward(world, world.batch(rng))
    except Oops:
        world.see("raised", "Oops")
    finally:
        handle.remove()


@action(weight=0.7, refused="ungated")
def dropped_gradients(world: World, rng: random.Random) -> None:
    """A backward whose gradients are cleared without an update."""
    world.tell("loss.backward(); optimizer.zero_grad()  # no step")
    forward(world, world.batch(rng))["loss"].backward()
    world.optimizer.zero_grad()


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(world: World, rng: random.Random, around: Any, mode: bool | None) -> None:
    """A forward in a mode of gradients, and in one of the model."""
    before = {module: module.training for module in world.model.modules()}
    if mode is not None:
        world.model.train(mode)
    with around():
        forward(world, world.batch(rng, labels=rng.random() < 0.7))
    for module, training in before.items():
        module.training = training


@action(weight=3, inside=True)
def evaluation(world: World, rng: random.Random) -> None:
    """eval() and no_grad(), then every module as before."""
    world.tell("eval(); with no_grad(): model(batch); train()")
    evaluate(world, rng, torch.no_grad, False)


@action(weight=2, inside=True)
def evaluation_in_inference_mode(world: World, rng: random.Random) -> None:
    """The same with inference_mode()."""
    world.tell("eval(); with inference_mode(): model(batch); train()")
    evaluate(world, rng, torch.inference_mode, False)


@action(weight=2, inside=True)
def forward_without_gradients(world: World, rng: random.Random) -> None:
    """no_grad() in the mode that there is."""
    world.tell("with no_grad(): model(batch)")
    evaluate(world, rng, torch.no_grad, None)


@action(weight=0.5)
def evaluation_with_gradients(world: World, rng: random.Random) -> None:
    """eval() without no_grad(), as forgetful loops do."""
    world.tell("eval(); model(batch); train()")
    evaluate(world, rng, contextlib.nullcontext, False)


@action(weight=2)
def checkpoint(world: World, rng: random.Random) -> None:
    """All that training changes is compared."""
    world.tell("# compare states")
    world.check()
