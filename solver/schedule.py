"""What the runtime replays: whole tensors and actions, small, frozen, printed as they parse.

An item is something that occupies device bytes. Its name says what it is:

| item | what |
| --- | --- |
| `p:NAME` | compute copy of parameter tensor NAME |
| `g:NAME` | its gradient |
| `s:NAME` | its optimizer state |
| `v:NAME` | interface value |
| `d:NAME` | gradient of an interface value or of an output |
| `k:I` | what block I keeps on the device for its backward |
| `a:I` | what block I offloads after its forward and needs back for its backward |
| `x:NAME` | shared value |
| `o:NAME` | output of this iteration |
| `old:NAME` | output of the last iteration, until this one's forwards have ended |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .problem import Rates


class Kind(Enum):
    """What an action does; the value is the word it prints as."""

    COMPUTE = "compute"  # runs the compute NAME: "start", "F3", "user", "B3"
    PREFETCH = "prefetch"  # allocates the item and starts its copy host -> device
    OFFLOAD = "offload"  # starts the item's copy device -> host
    FREE = "free"  # releases the item, after its offload if one is under way
    UPDATE_CPU = "update-cpu"  # starts the update of tensor NAME on the host
    UPDATE_DEVICE = "update-device"  # updates tensor NAME on the device


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
class Schedule:
    """One iteration as actions over whole tensors, in the order in which the executor takes them.

    The forward part runs inside the model's call, the backward part inside the user's backward, the turn-around part
    in the optimizer's step. After it the iteration starts again: what is resident then is what `resident` lists.

    Parameters
    ----------
    options: the option index chosen for each block.
    item_bytes: bytes of every item.
    resident: items on the device when an iteration starts, ascending by name.
    computes: specification of every compute action by name.
    update_cpu_s, update_device_s: seconds per tensor for the tensors updated there.
    host_bytes: bytes reserved in host memory.
    gate: no update starts in the backward part. Gradients stay on the device or go out as they are made; the
        turn-around part, which the executor takes in the optimizer's step, starts the updates: `update-device` all
        there, `update-cpu` there or in the next forward part. An executor that scales gradients (clipping) does so
        before the first of them: every gradient is then on the device, on the host, or on its way there.
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

    @property
    def actions(self) -> tuple[Action, ...]:
        """All actions of an iteration, in order."""
        return self.forward + self.backward + self.turn_around
