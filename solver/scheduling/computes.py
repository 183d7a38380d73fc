"""Items and compute specifications: what each forward and backward reads, makes and releases, and what rests."""

from __future__ import annotations

from collections.abc import Iterable

from ..decisions import Decisions, state_parts
from ..problem import Option, Problem, Value
from ..schedule import Action, ComputeSpec, Kind, state_items, update_items


def value_uses(problem: Problem, value: Value) -> tuple[int, int]:
    """The last forward use of a value (the step that makes it, if none) and its first backward use.

    Raises: ValueError if no backward reads it.
    """
    forwards = [step for step in value.uses if step < problem.n_blocks]
    backwards = [step for step in value.uses if step >= problem.n_blocks]
    if not backwards:
        raise ValueError(f"value {value.name} is read by no backward; there is no stay that it could spend away")
    return (forwards[-1] if forwards else value.made), backwards[0]


def item_sizes(problem: Problem, decisions: Decisions) -> dict[str, int]:
    """Bytes of every item that has any, by name.

    Raises: ValueError if a value and an output share a name: their gradients would be one item.
    """
    both = {value.name for value in problem.values} & {output.name for output in problem.outputs}
    if both:
        raise ValueError(f"values and outputs need names of their own: {', '.join(sorted(both))}")
    sizes: dict[str, int] = {}
    for group in problem.groups:
        for tensor in group.tensors:
            sizes[f"p:{tensor.name}"] = tensor.param_bytes
            if group.trainable:
                sizes[f"g:{tensor.name}"] = tensor.grad_bytes
    trained = {t.name: t for group in problem.groups for t in group.tensors if group.trainable}
    for plan in decisions.tensors:
        if not plan.cpu:
            if plan.name in trained:
                sizes |= {part.item: part.bytes for part in state_parts(trained[plan.name], plan)}
            if problem.micro_batches > 1:
                sizes[f"t:{plan.name}"] = sizes.get(f"g:{plan.name}", 0)
    for value in problem.values:
        sizes[f"v:{value.name}"] = value.bytes
        sizes[f"d:{value.name}"] = value.grad_bytes if value.grad_steps else 0
    for i, (block, chosen) in enumerate(zip(problem.blocks, decisions.options)):
        sizes[f"k:{i}"] = block.options[chosen].saved_bytes
        sizes[f"a:{i}"] = block.options[chosen].offloaded_bytes
    for shared in problem.shared:
        sizes[f"x:{shared.name}"] = shared.bytes
    for output in problem.outputs:
        sizes[f"o:{output.name}"] = sizes[f"old:{output.name}"] = output.bytes
        sizes[f"d:{output.name}"] = output.grad_bytes
    return {item: size for item, size in sizes.items() if size > 0}


def compute_specs(problem: Problem, decisions: Decisions, sizes: dict[str, int]) -> dict[str, ComputeSpec]:
    """The specification of every compute, by name: "start", "F0".., "user", "B0".., and "gate" if there is one.

    Parameters
    ----------
    sizes: bytes per item; what has none is not mentioned.
    """

    def items(names: list[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in sizes)

    specs = {
        "start": ComputeSpec(
            problem.start_s, makes=items([f"x:{s.name}" for s in problem.shared]), rise_bytes=problem.start_peak_bytes
        )
    }
    for i, (block, chosen) in enumerate(zip(problem.blocks, decisions.options)):
        option = block.options[chosen]
        specs[f"F{i}"] = ComputeSpec(
            option.forward_s,
            items(_reads(problem, i)),
            items(_forward_makes(problem, i)),
            rise_bytes=option.forward_peak_bytes,
        )
        specs[f"B{i}"] = _backward_spec(problem, i, option, sizes)
    grads = items([f"d:{output.name}" for output in problem.outputs])
    handed_in = sum(sizes[item] for item in grads)
    specs["user"] = ComputeSpec(0.0, makes=grads, rise_bytes=max(problem.user_bytes, handed_in))
    if problem.gate:
        specs["gate"] = ComputeSpec(problem.gate_s)
    return specs


def _reads(problem: Problem, step: int) -> list[str]:
    """Parameters, values and shared values that the compute of a step reads."""
    names = [f"p:{t.name}" for group in problem.groups if step in group.uses for t in group.tensors]
    names += [f"v:{value.name}" for value in problem.values if step in value.uses]
    return names + [f"x:{shared.name}" for shared in problem.shared if shared.last_step >= step]


def _forward_makes(problem: Problem, block: int) -> list[str]:
    names = [f"k:{block}", f"a:{block}"]
    names += [f"v:{value.name}" for value in problem.values if value.made == block]
    return names + [f"o:{output.name}" for output in problem.outputs if output.made == block]


def _backward_spec(problem: Problem, block: int, option: Option, sizes: dict[str, int]) -> ComputeSpec:
    """A backward: its peak contains what it releases, so the rise is what comes on top of that."""
    step = problem.backward_step(block)
    drops = [f"k:{block}", f"a:{block}"]
    drops += [f"d:{value.name}" for value in problem.values if value.made == block]
    drops += [f"d:{output.name}" for output in problem.outputs if output.made == block]
    makes = [f"d:{value.name}" for value in problem.values if value.grad_steps[:1] == (step,)]
    adds = [f"d:{value.name}" for value in problem.values if step in value.grad_steps[1:]]
    for group in problem.groups:
        grads = [f"g:{tensor.name}" for tensor in group.tensors]
        makes += grads if group.grad_steps[:1] == (step,) else []
        adds += grads if step in group.grad_steps[1:] else []
    dropped = tuple(name for name in drops if name in sizes)
    return ComputeSpec(
        option.backward_s,
        tuple(name for name in _reads(problem, step) + adds if name in sizes) + dropped,
        tuple(name for name in makes if name in sizes),
        dropped,
        option.backward_peak_bytes - sum(sizes[name] for name in dropped),
    )


def resident_items(
    actions: Iterable[Action], computes: dict[str, ComputeSpec], sizes: dict[str, int]
) -> tuple[str, ...]:
    """What an iteration starts with: the items whose first mention does not bring them or make them."""
    brought: dict[str, bool] = {}
    states = state_items(sizes)
    for action in actions:
        if action.kind is Kind.COMPUTE:
            spec = computes[action.name]
            for item in spec.needs + spec.drops:
                brought.setdefault(item, False)
            for item in spec.makes:
                brought.setdefault(item, True)
        elif action.kind is Kind.UPDATE_DEVICE:
            for item in update_items(action.name, states):
                brought.setdefault(item, False)
        elif action.kind is Kind.ACCUMULATE:
            brought.setdefault(f"g:{action.name}", False)
            brought.setdefault(f"t:{action.name}", True)
        elif action.kind not in (Kind.UPDATE_CPU, Kind.ACCUMULATE_CPU):
            brought.setdefault(action.name, action.kind is Kind.PREFETCH)
    return tuple(sorted(item for item, by_action in brought.items() if not by_action and item in sizes))
