"""Descriptions of a schedule's items: the kind of their bytes, their tensor, and the block that they belong to."""

from __future__ import annotations

from itertools import product

from ..solver import items
from ..solver.compute_names import BACKWARD, FORWARD, ComputeName, parse
from ..solver.items import Item, ItemKind
from ..solver.schedule import Action, Direction, Kind, Part, Schedule

KINDS = (
    "parameters",
    "optimizer states",
    "gradients",
    "activations",
    "outputs",
    "shared",
    "fixed",
    "workspace",
)  # in the order in which the memory curve stacks them: the kind that changes most comes last

ACTION_WORDS = {
    Kind.PREFETCH: "bring in",
    Kind.OFFLOAD: "send out",
    Kind.FREE: "free",
    Kind.UPDATE_CPU: "update on the CPU",
    Kind.SPECULATE_CPU: "update on the CPU before the gate",
    Kind.UPDATE_DEVICE: "update on the device",
    Kind.BEGIN_TOTAL: "begin the total of",
    Kind.ACCUMULATE: "add to the total",
    Kind.ACCUMULATE_CPU: "add to the total on the CPU",
}
COMPUTE_WORDS = {FORWARD: "forward", BACKWARD: "backward"}
_COMPUTE_WORDS = {
    "start": "start: the batch comes in",
    "user": "your code between forward and backward",
    "gate": "the gate: all gradients are complete",
}


def item_of(action: Action) -> str:
    """Return the item that an action is about: a compute's own name; for an update, the parameter."""
    if action.kind is Kind.COMPUTE or isinstance(action.name, Item):
        return action.name
    return items.parameter(action.name)


def parts_of(schedule: Schedule) -> list[tuple[str, tuple[Action, ...]]]:
    """List the parts of an iteration by name, in order; one middle pass stands for all middle micro-batches."""
    return [(f"{part.direction.value}{_which(schedule, part)}", part.actions) for part in schedule.parts]


def _which(schedule: Schedule, part: Part) -> str:
    """Return the number of a part's micro-batch, or its first and last; of the middle passes, those of the first."""
    if not schedule.adds_up or part.direction is Direction.TURN_AROUND:
        return ""
    first = part.micro_batches[0] * schedule.per_step + 1
    last = min(first + schedule.per_step - 1, schedule.per_update)
    return f" {first}" if first == last else f" {first}-{last}"


def describe_item(item: str) -> str:
    """Describe an item, such as "gradient of lm_head.weight"; return anything else unchanged."""
    return item.words if isinstance(item, Item) else item


def describe_action(action: Action) -> str:
    """Describe an action, such as "free value embedding" or "forward of block 3"."""
    if action.kind is not Kind.COMPUTE:
        return f"{ACTION_WORDS[action.kind]} {describe_item(action.name)}"
    what, block, slot = parse(action.name)
    of = f" for micro-batch {slot + 1}" if slot else ""
    return f"{COMPUTE_WORDS[what]} of block {block}{of}" if block is not None else f"{_COMPUTE_WORDS[what]}{of}"


def block_of_items(schedule: Schedule) -> dict[str, int]:
    """Map every item that belongs to a block, and every forward and backward, to its block.

    A parameter, its gradient and its state belong to the first block that reads it; a value that a forward makes
    belongs to the block that makes it.
    """
    blocks: dict[str, int] = {}
    for i, slot in product(range(len(schedule.options)), range(schedule.per_step)):
        forward, backward = (str(ComputeName(what, i, slot)) for what in (FORWARD, BACKWARD))
        spec = schedule.computes[forward]
        blocks |= {forward: i, backward: i}
        for item in spec.needs:
            if item.kind is ItemKind.PARAMETER:
                sums = (items.gradient(item.name), items.total(item.name))
                for own in (item, *sums, *schedule.states.get(item.name, ())):
                    blocks.setdefault(own, i)
        for item in spec.makes:
            blocks[item] = i
            if item.kind in (ItemKind.VALUE, ItemKind.OUTPUT):
                blocks[items.value_gradient(item.name).at(slot)] = i
    return blocks
