"""What the runtime replays: whole tensors and actions, small, frozen, printed as they parse.

An item is something that occupies device bytes. Its name says what it is:

| item | what |
| --- | --- |
| `p:NAME` | compute copy of parameter tensor NAME |
| `g:NAME` | its gradient, of one micro-batch |
| `t:NAME` | the total of its gradients, where there are several micro-batches and the device updates it |
| `s:NAME` | its optimizer state |
| `s:NAME[A:B]` | rows A to B - 1 of it, where it is several items: pieces that move, and what stays between them |
| `v:NAME` | interface value |
| `d:NAME` | gradient of an interface value or of an output |
| `k:I` | what block I keeps on the device for its backward |
| `a:I` | what block I offloads after its forward and needs back for its backward |
| `x:NAME` | shared value |
| `o:NAME` | output of this iteration |
| `old:NAME` | output of the last forward, until this one's have ended; what `o:NAME` becomes at the end of every pass |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from .problem import Rates, Rows

_PIECE = re.compile(r"s:(.+)\[(\d+):(\d+)\]")


class Kind(Enum):
    """What an action does; the value is the word it prints as."""

    COMPUTE = "compute"  # runs the compute NAME: "start", "F3", "user", "B3", "gate"
    PREFETCH = "prefetch"  # allocates the item and starts its copy host -> device
    OFFLOAD = "offload"  # starts the item's copy device -> host
    FREE = "free"  # releases the item, after its offload if one is under way
    UPDATE_CPU = "update-cpu"  # starts the update of tensor NAME on the host
    UPDATE_DEVICE = "update-device"  # updates tensor NAME on the device
    ACCUMULATE = "accumulate"  # device: the first gradient becomes the total, later ones are added; `g:` is gone
    ACCUMULATE_CPU = "accumulate-cpu"  # host: starts adding the gradient that was sent out; the first is the total

    __hash__ = object.__hash__  # members are keys of what the simulator touches most


@dataclass(frozen=True)
class Action:
    """One action of a schedule: what, on what, in which step. Prints as `STEP KIND NAME`."""

    step: int
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.step} {self.kind.value} {self.name}"

    @staticmethod
    def parse(line: str) -> Action:
        """The action that prints as `line`; raises ValueError naming the line otherwise."""
        parts = line.split(maxsplit=2)
        try:
            return Action(int(parts[0]), Kind(parts[1]), parts[2].strip())
        except (ValueError, IndexError):
            raise ValueError(f"not an action: {line!r}; expected 'STEP KIND NAME'") from None


@dataclass(frozen=True)
class ComputeSpec:
    """What one compute action reads, makes and releases.

    Parameters
    ----------
    seconds: predicted seconds.
    needs: items that must be resident, their copies complete, when it starts.
    makes: items that are resident when it ends and were not before.
    drops: items that it releases itself, at their last use inside.
    rise_bytes: the most that the bytes on the device lie above their level at its start, while it runs.
    """

    seconds: float
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    rise_bytes: int = 0


@dataclass(frozen=True)
class Pass:
    """The forward and the backward of one micro-batch."""

    forward: tuple[Action, ...]
    backward: tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """One iteration as actions over whole tensors, in the order in which the executor takes them.

    The forward part runs inside the model's call, the backward part inside the user's backward, the turn-around part
    in the optimizer's step. After it the iteration starts again: what is resident then is what `resident` lists.

    With several micro-batches these are the last one's parts, and `lead` holds the passes before: none for one
    micro-batch, one for two; for three and more two, the second of which is replayed for every micro-batch between the
    first and the last, and ends with the items on the device with which it starts. Step numbers go on through the
    passes; computes have the same names, and are the same, in each.

    Parameters
    ----------
    options: the option index chosen for each block.
    item_bytes: bytes of every item.
    resident: items on the device when an iteration starts, ascending by name.
    computes: specification of every compute action by name.
    update_cpu_s, update_device_s: seconds per tensor for the tensors updated there.
    add_cpu_s, add_device_s: seconds per tensor to add a gradient to its total, for the tensors updated there; empty for
        one micro-batch.
    host_bytes: bytes reserved in host memory.
    gate: no update starts in the backward part. Gradients stay on the device or go out as they are made; the
        turn-around part, which the executor takes in the optimizer's step, starts the updates: `update-device` all
        there, `update-cpu` there or in the next iteration's first forward part. Between the last backward and the first
        update lies the compute "gate", in which an executor that clips takes the norm: every gradient (or total) is
        then on the device, on the host, or on its way there, and "gate" waits for what is on its way.
    micro_batches: M, forwards and backwards per update; more than one needs a gate. Every pass then ends a gradient
        that the device will use with `accumulate`, and one that the host will use with `offload`, `free` and
        `accumulate-cpu`. Gradients arrive on the host in two buffers used in turn: a copy waits for the addition of
        the last but one.
    """

    options: tuple[int, ...]
    item_bytes: dict[str, int]
    resident: tuple[str, ...]
    computes: dict[str, ComputeSpec]
    update_cpu_s: dict[str, float]
    update_device_s: dict[str, float]
    rates: Rates
    device_budget_bytes: int
    host_budget_bytes: int
    host_bytes: int
    forward: tuple[Action, ...] = field(default=())
    backward: tuple[Action, ...] = field(default=())
    turn_around: tuple[Action, ...] = field(default=())
    gate: bool = False
    micro_batches: int = 1
    lead: tuple[Pass, ...] = field(default=())
    add_cpu_s: dict[str, float] = field(default_factory=dict)
    add_device_s: dict[str, float] = field(default_factory=dict)

    @cached_property
    def states(self) -> dict[str, tuple[str, ...]]:
        """By tensor the items of its optimizer state on the device, first rows first."""
        return state_items(self.item_bytes)

    def share_of_state(self, item: str, size_bytes: int) -> int:
        """An item's part of bytes that all of its tensor's state takes; all of them if the state has no bytes."""
        items = self.states.get(state_rows(item, self.item_bytes)[0], ())
        return size_bytes * self.item_bytes[item] // sum(self.item_bytes[one] for one in items) if items else size_bytes

    def device_s(self, action: Action) -> float:
        """Seconds that an action keeps the device computing, the first of several sums included."""
        if action.kind is Kind.COMPUTE:
            return self.computes[action.name].seconds
        if action.kind is Kind.UPDATE_DEVICE:
            return self.update_device_s[action.name]
        return self.add_device_s[action.name] if action.kind is Kind.ACCUMULATE else 0.0

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The distinct passes in order; a middle one stands for all between the first and the last."""
        return (*self.lead, Pass(self.forward, self.backward))

    def pass_of(self, m: int) -> Pass:
        """The pass of micro-batch `m`, counted from 0; raises IndexError beyond the last."""
        if not 0 <= m < self.micro_batches:
            raise IndexError(f"micro-batch {m} of {self.micro_batches}")
        return self.passes[-1] if m == self.micro_batches - 1 else self.passes[min(m, 1)]

    @property
    def actions(self) -> tuple[Action, ...]:
        """All actions of an iteration, in order, with one middle pass at most."""
        led = tuple(action for one in self.passes for action in one.forward + one.backward)
        return led + self.turn_around

    def resident_at(self, m: int) -> tuple[str, ...]:
        """The items on the device when micro-batch `m` starts, ascending by name; raises IndexError beyond the last."""
        self.pass_of(m)
        there = set(self.resident)
        if m > 0:  # the passes after the first all start with what it leaves
            first = self.passes[0]
            for action in first.forward + first.backward:
                self._carry_out(there, action)
            there = {made_old(item) for item in there}
        return tuple(sorted(there))

    def _carry_out(self, there: set[str], action: Action) -> None:
        if action.kind is Kind.COMPUTE:
            spec = self.computes[action.name]
            there.difference_update(spec.drops)
            there.update(spec.makes)
        elif action.kind is Kind.PREFETCH:
            there.add(action.name)
        elif action.kind is Kind.FREE:
            there.discard(action.name)
        elif action.kind is Kind.ACCUMULATE:
            there.discard(f"g:{action.name}")
            there.add(f"t:{action.name}")


def state_item(tensor: str, rows: Rows | None) -> str:
    """The item of some rows of a tensor's optimizer state; of all of it with None."""
    return f"s:{tensor}" if rows is None else f"s:{tensor}[{rows[0]}:{rows[1]}]"


def state_rows(item: str, sizes: Mapping[str, int]) -> tuple[str, Rows | None]:
    """The tensor, and which rows of its optimizer state, an item is; None for all of it.

    Parameters
    ----------
    sizes: bytes of every item: a tensor whose own name looks like a piece is known by its compute copy.
    """
    piece = _PIECE.fullmatch(item)
    if piece is None or f"p:{item[2:]}" in sizes:
        return item[2:], None
    return piece[1], (int(piece[2]), int(piece[3]))


def state_items(sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """By tensor the items of its optimizer state, first rows first.

    Parameters
    ----------
    sizes: bytes of every item.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for item in sizes:
        if item.startswith("s:"):
            tensor, rows = state_rows(item, sizes)
            found.setdefault(tensor, []).append((rows[0] if rows else 0, item))
    return {tensor: tuple(item for _, item in sorted(items)) for tensor, items in found.items()}


def update_items(tensor: str, states: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The items that an update on the device may read: compute copy, gradient, total and all of the state."""
    return (f"p:{tensor}", f"g:{tensor}", f"t:{tensor}", *states.get(tensor, ()))


def made_old(item: str) -> str:
    """What an item is called when a pass has ended: outputs become old ones."""
    return f"old:{item[2:]}" if item.startswith("o:") else item
