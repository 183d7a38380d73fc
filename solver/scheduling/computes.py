"""Items and compute specifications: the items that each forward and backward reads, makes and releases."""

from __future__ import annotations

from collections.abc import Iterable

from .. import items
from ..compute_names import BACKWARD, FORWARD, GATE, START, USER, ComputeName
from ..decisions import Decisions, state_parts, stored_parts
from ..fat_steps import for_one
from ..items import Item, ItemKind
from ..problem import Option, Problem, Value
from ..schedule import ComputeSpec


def value_uses(problem: Problem, value: Value) -> tuple[int, int]:
    """Return the last forward use of a value (the step that makes it, if none) and its first backward use.

    Raises: ValueError if no backward reads it.
    """
    forwards = [step for step in value.uses if step < problem.n_blocks]
    backwards = [step for step in value.uses if step >= problem.n_blocks]
    if not backwards:
        raise ValueError(f"no backward reads value {value.name}, so there is nothing to keep it for")
    return (forwards[-1] if forwards else value.made), backwards[0]


def item_sizes(problem: Problem, decisions: Decisions) -> dict[Item, int]:
    """Return the bytes of every item that has any, by name.

    Raises: ValueError if a value and an output share a name: their gradients would be one item.
    """
    both = {value.name for value in problem.values} & {output.name for output in problem.outputs}
    if both:
        raise ValueError(f"values and outputs must not share names: {', '.join(sorted(both))}")
    sizes: dict[Item, int] = {}
    slots = problem.per_step
    for group in problem.groups:
        for tensor in group.tensors:
            sizes[items.parameter(tensor.name)] = tensor.param_bytes
            if group.trainable:
                sizes[items.gradient(tensor.name)] = tensor.grad_bytes
            if len(group.grad_steps) > 1:  # the first micro-batch's becomes the sum
                partial = items.partial(tensor.name)
                sizes |= {partial.at(slot): tensor.grad_bytes for slot in range(1, slots)}
    trained = {t.name: t for group in problem.groups for t in group.tensors if group.trainable}
    if problem.sums_on_device:
        sizes |= {items.total(name): tensor.grad_bytes for name, tensor in trained.items()}
    for plan in decisions.tensors:
        if not plan.cpu:
            if plan.name in trained:
                sizes |= {part.item: part.bytes for part in state_parts(trained[plan.name], plan)}
            if problem.adds_up:
                sizes[items.total(plan.name)] = sizes.get(items.gradient(plan.name), 0)
            continue
        tensor, in_files = trained[plan.name], plan.states_from is not None
        if in_files:
            sizes |= stored_parts(tensor)
        if problem.speculates:
            sizes[items.log(plan.name)] = tensor.param_bytes if in_files else tensor.log_bytes
    by_batch = _sizes_by_batch(problem, decisions)
    sizes |= {item.at(slot): size // slots for slot in range(slots) for item, size in by_batch.items()}
    return {item: size for item, size in sizes.items() if size > 0}


def _sizes_by_batch(problem: Problem, decisions: Decisions) -> dict[Item, int]:
    """Return the bytes of what depends on the batch, of all micro-batches of a step together."""
    sizes: dict[Item, int] = {}
    for value in problem.values:
        sizes[items.value(value.name)] = value.bytes
        sizes[items.value_gradient(value.name)] = value.grad_bytes if value.grad_steps else 0
    for i, (block, chosen) in enumerate(zip(problem.blocks, decisions.options)):
        sizes[items.kept(i)] = block.options[chosen].saved_bytes
        sizes[items.offloaded(i)] = block.options[chosen].offloaded_bytes
    for shared in problem.shared:
        sizes[items.shared(shared.name)] = shared.bytes
    for output in problem.outputs:
        sizes[items.output(output.name)] = sizes[items.old_output(output.name)] = output.bytes
        sizes[items.value_gradient(output.name)] = output.grad_bytes
    return sizes


def compute_specs(problem: Problem, decisions: Decisions, sizes: dict[Item, int]) -> dict[str, ComputeSpec]:
    """Return the specification of every compute by name: "start", "F0".., "user", "B0".., and "gate" if any.

    Parameters
    ----------
    sizes: bytes per item; items without bytes are not mentioned.
    """
    one, specs = for_one(problem), dict[str, ComputeSpec]()
    for slot in range(problem.per_step):
        specs |= _specs_of(one, decisions, sizes, slot, problem)
    if problem.gate:
        specs[GATE] = ComputeSpec(problem.gate_s)
    return specs


def _specs_of(
    problem: Problem, decisions: Decisions, sizes: dict[Item, int], slot: int, of_all: Problem
) -> dict[str, ComputeSpec]:
    """Return the specifications of one micro-batch's computes; the problem is that of one micro-batch."""

    def sized(names: Iterable[Item]) -> tuple[Item, ...]:
        return tuple(name for name in (item.at(slot) for item in names) if name in sizes)

    shared = [items.shared(s.name) for s in problem.shared]
    specs = {
        str(ComputeName(START, slot=slot)): ComputeSpec(
            problem.start_s, makes=sized(shared), rise_bytes=problem.start_peak_bytes
        )
    }
    for i, (block, chosen) in enumerate(zip(problem.blocks, decisions.options)):
        option = block.options[chosen]
        specs[str(ComputeName(FORWARD, i, slot))] = ComputeSpec(
            option.forward_s,
            sized(_reads(problem, i)),
            sized(_forward_makes(problem, i)),
            rise_bytes=option.forward_peak_bytes,
        )
        specs[str(ComputeName(BACKWARD, i, slot))] = _backward_spec(problem, i, option, sizes, slot, of_all)
    grads = sized([items.value_gradient(output.name) for output in problem.outputs])
    handed_in = sum(sizes[item] for item in grads)
    rise = max(problem.user_bytes, handed_in)
    specs[str(ComputeName(USER, slot=slot))] = ComputeSpec(0.0, makes=grads, rise_bytes=rise)
    return specs


def _reads(problem: Problem, step: int) -> list[Item]:
    """List the parameters, values and shared values that the compute of a step reads."""
    names = [items.parameter(t.name) for group in problem.groups if step in group.uses for t in group.tensors]
    names += [items.value(value.name) for value in problem.values if step in value.uses]
    return names + [items.shared(shared.name) for shared in problem.shared if shared.last_step >= step]


def _forward_makes(problem: Problem, block: int) -> list[Item]:
    names = [items.kept(block), items.offloaded(block)]
    names += [items.value(value.name) for value in problem.values if value.made == block]
    return names + [items.output(output.name) for output in problem.outputs if output.made == block]


def _backward_spec(
    problem: Problem, block: int, option: Option, sizes: dict[Item, int], slot: int, of_all: Problem
) -> ComputeSpec:
    """Return a backward's specification; its peak includes what it releases, so the rise is the rest.

    The gradients of the first micro-batch of a step become the sums, to which those of the others are added once they
    are complete. In several passes, each becomes the gradient that an action of its own then adds to a total.
    """
    _, step = problem.runs[block][0]
    drops = [items.kept(block), items.offloaded(block)]
    drops += [items.value_gradient(value.name) for value in problem.values if value.made == block]
    drops += [items.value_gradient(output.name) for output in problem.outputs if output.made == block]
    makes = [items.value_gradient(value.name) for value in problem.values if value.grad_steps[:1] == (step,)]
    adds = [items.value_gradient(value.name) for value in problem.values if step in value.grad_steps[1:]]
    for group in problem.groups:
        for tensor in group.tensors if step in group.grad_steps else ():
            gradient, partial = items.gradient(tensor.name), items.partial(tensor.name)
            own, complete = partial if slot else gradient, step == group.grad_steps[-1]
            if step != group.grad_steps[0]:
                adds.append(own)
            elif not slot or not complete:
                makes.append(own)
            if slot and complete:
                (makes if of_all.sums_on_device else adds).append(gradient)
                drops += [partial] if len(group.grad_steps) > 1 else []
    made, added, dropped = (tuple(i for i in (one.at(slot) for one in those) if i in sizes)
                            for those in (makes, adds, drops))  # fmt: skip
    ending = [group for group in problem.groups if group.grad_steps[-1:] == (step,)]
    sums_s = sum(group.device_add_s for group in ending if slot and not of_all.sums_on_device)
    norms_s = sum(group.norm_s for group in ending if slot == of_all.last_slots - 1)
    reads = tuple(name for name in (item.at(slot) for item in _reads(problem, step)) if name in sizes)
    needs = tuple(dict.fromkeys((*reads, *added, *dropped)))
    rise = option.backward_peak_bytes - sum(sizes[name] for name in dropped if name.kind is not ItemKind.PARTIAL)
    return ComputeSpec(option.backward_s + sums_s + norms_s, needs, made, dropped, rise)
