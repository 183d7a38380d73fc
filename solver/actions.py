"""Actions, and the parts of an iteration that they make up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .items import Item
from .steps import Direction


class Kind(Enum):
    """The kind of an action; the value is the word that it prints as."""

    COMPUTE = "compute"  # runs the compute NAME: "start", "F3", "user", "B3", "gate"
    PREFETCH = "prefetch"  # allocates the item and starts its copy from its tier to the device
    OFFLOAD = "offload"  # starts the item's copy from the device to its tier
    FREE = "free"  # releases the item, after its offload if one is under way
    UPDATE_CPU = "update-cpu"  # starts the update of tensor NAME on the host
    SPECULATE_CPU = "speculate-cpu"  # the same, before the gate and with a log of the old values that undoes it
    UPDATE_DEVICE = "update-device"  # updates tensor NAME on the device
    BEGIN_TOTAL = "begin-total"  # on the device: the first micro-batch's gradient of tensor NAME becomes its total
    ACCUMULATE = "accumulate"  # on the device: adds the gradient of tensor NAME to its total, and releases it
    ACCUMULATE_CPU = "accumulate-cpu"  # on the host: starts adding the gradient sent out; the first is the total

    __hash__ = object.__hash__  # members are keys of the dictionaries that the simulator uses most


ABOUT_ITEMS = (Kind.PREFETCH, Kind.OFFLOAD, Kind.FREE)


@dataclass(frozen=True)
class Action:
    """One action of a schedule: its step, its kind, and its object. Prints as `STEP KIND NAME`.

    Parameters
    ----------
    name: the item that is moved or released; the compute; the tensor that is updated or whose gradients are summed.
    """

    step: int
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.step} {self.kind.value} {self.name}"

    @property
    def item(self) -> Item:
        """The item that is moved or released; raises TypeError for actions that are about something else."""
        if not isinstance(self.name, Item):
            raise TypeError(f"{self} is not about an item")
        return self.name

    @staticmethod
    def parse(line: str) -> Action:
        """Return the action that prints as `line`; raises ValueError naming the line otherwise."""
        parts = line.split(maxsplit=2)
        try:
            step, kind, name = int(parts[0]), Kind(parts[1]), parts[2].strip()
        except (ValueError, IndexError):
            raise ValueError(f"not an action: {line!r}; expected 'STEP KIND NAME'") from None
        return Action(step, kind, Item.parse(name) if kind in ABOUT_ITEMS else name)


@dataclass(frozen=True)
class ComputeSpec:
    """The items that one compute action reads, makes and releases.

    Parameters
    ----------
    seconds: predicted seconds.
    needs: items that must be resident, their copies complete, when it starts.
    makes: items that it adds to those that are resident.
    drops: items that it releases itself, at their last use.
    rise_bytes: the most by which the bytes on the device exceed their level at its start while it runs.
    """

    seconds: float
    needs: tuple[Item, ...] = ()
    makes: tuple[Item, ...] = ()
    drops: tuple[Item, ...] = ()
    rise_bytes: int = 0


@dataclass(frozen=True)
class Pass:
    """The forward and the backward of the micro-batches that a pass runs."""

    forward: tuple[Action, ...]
    backward: tuple[Action, ...]


@dataclass(frozen=True)
class Part:
    """A part of an iteration that the executor walks without interruption.

    Parameters
    ----------
    of_pass: which of the schedule's passes it belongs to; the turn-around follows the last and belongs to it.
    micro_batches: the first pass of an update that it stands for, and the one after the last.
    """

    direction: Direction
    of_pass: int
    micro_batches: tuple[int, int]
    actions: tuple[Action, ...]

    @property
    def times(self) -> int:
        """Number of passes of an update that it stands for."""
        return self.micro_batches[1] - self.micro_batches[0]
