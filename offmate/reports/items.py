"""What the names of a schedule's items say: the kind of their bytes, their tensor, the block that they belong to."""

from __future__ import annotations

from ..solver.schedule import Action, Kind, Schedule, update_items

KINDS = (
    "parameters",
    "optimizer states",
    "gradients",
    "activations",
    "outputs",
    "shared",
    "fixed",
    "workspace",
)  # the order in which the memory curve stacks them: what changes most comes last

_KIND_OF_PREFIX = {
    "p": "parameters",
    "s": "optimizer states",
    "g": "gradients",
    "t": "gradients",
    "d": "gradients",
    "v": "activations",
    "k": "activations",
    "a": "activations",
    "o": "outputs",
    "old": "outputs",
    "x": "shared",
}
_WORD_OF_PREFIX = {
    "p": "parameter",
    "s": "optimizer state of",
    "g": "gradient of",
    "t": "total gradient of",
    "d": "gradient of",
    "v": "value",
    "o": "output",
    "old": "last output",
    "x": "shared value",
}
_ACTION_WORDS = {
    Kind.PREFETCH: "bring in",
    Kind.OFFLOAD: "send out",
    Kind.FREE: "free",
    Kind.UPDATE_CPU: "update on the CPU",
    Kind.UPDATE_DEVICE: "update on the device",
    Kind.ACCUMULATE: "add to the total",
    Kind.ACCUMULATE_CPU: "add to the total on the CPU",
}
_COMPUTE_WORDS = {
    "start": "start: the batch comes in",
    "user": "your code between forward and backward",
    "gate": "the gate: all gradients are complete",
}
_ABOUT_PARAMETERS = (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE, Kind.ACCUMULATE, Kind.ACCUMULATE_CPU)


def kind_of(item: str) -> str:
    """The kind of an item's bytes, one of `KINDS`."""
    return _KIND_OF_PREFIX[item.split(":", 1)[0]]


def item_of(action: Action) -> str:
    """The item that an action is about; a compute's own name, and the parameter of an update."""
    return f"p:{action.name}" if action.kind in _ABOUT_PARAMETERS else action.name


def parts_of(schedule: Schedule) -> list[tuple[str, tuple[Action, ...]]]:
    """The parts of an iteration by name, in order; of several micro-batches one middle pass stands for all."""
    named = []
    for number, one in enumerate(schedule.passes):
        which = _pass_words(schedule, number)
        named += [(f"forward{which}", one.forward), (f"backward{which}", one.backward)]
    return [*named, ("turn-around", schedule.turn_around)]


def _pass_words(schedule: Schedule, number: int) -> str:
    if len(schedule.passes) == 1:
        return ""
    return f" {schedule.micro_batches if number == len(schedule.passes) - 1 else number + 1}"


def describe_item(item: str) -> str:
    """An item in words, such as "gradient of lm_head.weight"; anything else as it is."""
    prefix, colon, name = item.partition(":")
    if not colon:
        return item
    if prefix in "ka":
        return f"values that block {name} {'keeps' if prefix == 'k' else 'offloads'}"
    return f"{_WORD_OF_PREFIX[prefix]} {name}"


def describe_action(action: Action) -> str:
    """An action in words, such as "free value embedding" or "forward of block 3"."""
    if action.kind is not Kind.COMPUTE:
        return f"{_ACTION_WORDS[action.kind]} {describe_item(action.name)}"
    direction = {"F": "forward", "B": "backward"}.get(action.name[0])
    return f"{direction} of block {action.name[1:]}" if direction else _COMPUTE_WORDS.get(action.name, action.name)


def block_of_items(schedule: Schedule) -> dict[str, int]:
    """The block of every item that belongs to one, and of every forward and backward.

    A parameter, its gradient and its state belong to the first block that reads it; what is made in a forward to the
    block that makes it.
    """
    blocks: dict[str, int] = {}
    for i in range(len(schedule.options)):
        spec = schedule.computes[f"F{i}"]
        blocks |= {f"F{i}": i, f"B{i}": i}
        for item in spec.needs:
            if item.startswith("p:"):
                for own in update_items(item[2:], schedule.states):
                    blocks.setdefault(own, i)
        for item in spec.makes:
            blocks[item] = i
            if item[:2] in ("v:", "o:"):
                blocks[f"d:{item[2:]}"] = i
    return blocks
