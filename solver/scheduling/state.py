"""What is where while a schedule's actions are taken in order, and what keeps one of them from being carried out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..schedule import Action, ComputeSpec, Kind, Schedule, made_old

_BUFFERS = 2  # in which gradients arrive on the host before they are added up


class ScheduleError(ValueError):
    """A schedule that cannot be carried out: the message names the action and says why."""


def require(holds: bool, where: Action | str, why: str) -> None:
    """Raise ScheduleError, naming where and why, unless something holds."""
    if not holds:
        raise ScheduleError(f"{where}: {why}")


@dataclass
class State:
    """What is where while actions are taken in order.

    `there`: items on the device. `copies`: items whose values the host holds. `current`: tensors whose values on the
    host are those of the last update. `stale`: tensors whose values on the device are older than their gradient.
    `owed`: tensors whose gradient, or total of gradients, is complete and which are not updated yet. `fresh`: tensors
    whose gradient of this micro-batch is complete and not added to its total yet. `added`: how many were, by tensor.
    `arriving`: tensors whose gradients have been sent to the host and not been added, in order. `known`: whether the
    past is known. `walked`: micro-batches of an iteration that are walked; of the middle ones, which are alike, two.
    """

    schedule: Schedule
    there: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    current: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    owed: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    added: dict[str, int] = field(default_factory=dict)
    arriving: deque[str] = field(default_factory=deque)
    batch: int = 0
    known: bool = False

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.walked = min(schedule.micro_batches, 4)
        self.trained = {item[2:] for item in schedule.item_bytes if item.startswith("g:")}
        self.external = not (schedule.update_cpu_s or schedule.update_device_s)
        for name in self.trained if not self.external else ():
            updates = (name in schedule.update_cpu_s) + (name in schedule.update_device_s)
            require(updates == 1, f"tensor {name}", f"has {updates} updates per iteration, must have 1")
        self.current = {item[2:] for item in schedule.item_bytes if item.startswith("p:")} - self.trained
        self.complete: dict[str, set[str]] = {}  # by compute: tensors whose gradient it completes
        last: dict[str, str] = {}
        for action in schedule.actions:
            if action.kind is Kind.COMPUTE:
                spec = schedule.computes[action.name]
                last.update({i[2:]: action.name for i in spec.needs + spec.makes if i.startswith("g:")})
        for tensor, compute in last.items():
            self.complete.setdefault(compute, set()).add(tensor)

    def begin(self, known: bool) -> None:
        """Start an iteration; in the first one the host's past is not known yet."""
        self.known, self.batch = known, 0
        if not known:
            self.there = set(self.schedule.resident)
        if self.external:
            for name in sorted(self.owed):
                require(f"g:{name}" in self.copies, f"tensor {name}", "its gradient is not on the host at the end")
            self.current |= self.owed
            self.owed = set()

    def close_pass(self, start: Iterable[str]) -> None:
        """End a pass but the last: what is there must be what the passes after the first start with."""
        self._close(f"end of micro-batch {self.batch}", set(start), "a middle micro-batch")
        self.batch += 1

    def close(self) -> None:
        """End an iteration: outputs become old ones, and what is there must be what the next one starts with."""
        self._close("end of the iteration", set(self.schedule.resident), "an iteration")

    def _close(self, end: str, start: set[str], what: str) -> None:
        self.there = {made_old(item) for item in self.there}
        for item in sorted(self.there - start):
            require(False, f"{end}, {item}", f"on the device, but not when {what} starts")
        for item in sorted(start - self.there):
            require(False, f"{end}, {item}", f"not on the device, but when {what} starts")
        self.copies = {item for item in self.copies if item[:2] not in ("a:", "v:")}

    def take(self, action: Action) -> None:
        """Carry out one action or say why it cannot be."""
        handlers = {
            Kind.COMPUTE: self._compute,
            Kind.PREFETCH: self._prefetch,
            Kind.OFFLOAD: self._offload,
            Kind.FREE: self._free,
            Kind.UPDATE_CPU: self._update_cpu,
            Kind.UPDATE_DEVICE: self._update_device,
            Kind.ACCUMULATE: self._accumulate,
            Kind.ACCUMULATE_CPU: self._accumulate_cpu,
        }
        handlers[action.kind](action, action.name)

    def _compute(self, action: Action, name: str) -> None:
        spec: ComputeSpec = self.schedule.computes[name]
        for item in spec.needs:
            require(item in self.there, action, f"reads {item}, which is not on the device")
            stale = self.known and item.startswith("p:") and item[2:] in self.stale
            require(not stale, action, f"reads {item} from before its last update")
        for item in spec.makes:
            require(item not in self.there, action, f"makes {item}, which is on the device already")
        for item in spec.drops:
            require(item in self.there, action, f"releases {item}, which is not on the device")
        self.there = (self.there - set(spec.drops)) | set(spec.makes)
        self.copies -= set(spec.makes)
        for tensor in self.complete.get(name, ()):
            late = self.known and tensor in self.owed
            require(not late, action, f"makes the gradient of {tensor} again before its update")
            self._complete(action, tensor)

    def _complete(self, action: Action, tensor: str) -> None:
        """A micro-batch's gradient is complete; after the last one's the values are due for an update."""
        if self.walked > 1:
            require(tensor not in self.fresh, action, f"makes the gradient of {tensor} again before it was added")
            self.fresh.add(tensor)
        else:
            self.owed.add(tensor)
        if self.batch + 1 == self.walked:
            self.stale.add(tensor)
            self.current.discard(tensor)

    def _prefetch(self, action: Action, item: str) -> None:
        require(item not in self.there, action, "on the device already")
        tensor = item[2:]
        if item.startswith("p:"):
            require(not self.known or tensor in self.current, action, "the host holds no copy of its new values")
            self.stale.discard(tensor)
        else:
            require(item[:2] in ("a:", "v:", "s:"), action, "items of this kind never come in")
            past = not self.known and item.startswith("s:")
            require(past or item in self.copies, action, "it was not sent to the host before")
        self.there.add(item)

    def _offload(self, action: Action, item: str) -> None:
        require(item in self.there, action, "not on the device")
        kind, tensor = item[:2], item[2:]
        require(kind in ("p:", "g:", "s:", "a:", "v:"), action, "items of this kind never go out")
        if kind == "p:":
            old = self.known and tensor in self.stale
            require(not old, action, "its values are from before its last update")
            self.current.add(tensor)
        elif kind == "g:":
            early = self.known and tensor not in (self.fresh if self.walked > 1 else self.owed)
            require(not early, action, "the gradient is not complete, or its update is done")
            if self.walked > 1:
                full = len(self.arriving) >= _BUFFERS
                require(not full, action, f"arrives where {', '.join(self.arriving)} wait for their addition")
                self.arriving.append(tensor)
        self.copies.add(item)

    def _free(self, action: Action, item: str) -> None:
        require(item in self.there, action, "not on the device")
        if item.startswith("g:") and self.known:
            lost = item[2:] in (self.fresh if self.walked > 1 else self.owed) and item not in self.copies
            require(not lost, action, "the gradient is neither used by an update nor on the host")
        if item.startswith("t:"):
            require(item[2:] not in self.owed, action, "the total is not used by an update yet")
        require(not item.startswith("d:"), action, "gradients of values are released by computes only")
        self.there.remove(item)

    def _accumulate(self, action: Action, tensor: str) -> None:
        gradient, total = f"g:{tensor}", f"t:{tensor}"
        require(gradient in self.there and tensor in self.fresh, action, f"there is no complete {gradient} to add")
        require(total in self.schedule.item_bytes, action, f"adds to {total}, which is no item")
        begun = self.added.get(tensor, 0) > 0
        require(begun == (total in self.there), action, f"{total} is {'gone' if begun else 'on the device already'}")
        self.there = self.there - {gradient} | {total}
        self._add(tensor)

    def _accumulate_cpu(self, action: Action, tensor: str) -> None:
        if not self.known and tensor not in self.fresh:  # of the iteration before
            self.arriving = deque(name for name in self.arriving if name != tensor)
            self.copies.discard(f"g:{tensor}")
            return
        require(f"g:{tensor}" in self.copies, action, "the gradient was not sent to the host before")
        require(self.arriving[0] == tensor, action, f"the gradient of {self.arriving[0]} arrives, and is added, first")
        self.arriving.popleft()
        self.copies.discard(f"g:{tensor}")
        self._add(tensor)

    def _add(self, tensor: str) -> None:
        self.fresh.discard(tensor)
        self.added[tensor] = self.added.get(tensor, 0) + 1
        if self.added[tensor] == self.walked:
            self.owed.add(tensor)
            self.added[tensor] = 0

    def _update_cpu(self, action: Action, tensor: str) -> None:
        if self.known:
            require(tensor in self.owed, action, "there is no complete gradient to update from")
            sent = self.walked > 1 or f"g:{tensor}" in self.copies
            require(sent, action, "the gradient was not sent to the host before")
        self.copies.discard(f"g:{tensor}")
        self.owed.discard(tensor)
        self.current.add(tensor)

    def _update_device(self, action: Action, tensor: str) -> None:
        gradient = "t" if self.walked > 1 else "g"
        states = self.schedule.states.get(tensor, ())
        for item in (f"p:{tensor}", f"{gradient}:{tensor}", *states):
            here = item in self.there or item not in self.schedule.item_bytes
            require(here, action, f"reads {item}, which is not on the device")
        require(tensor in self.owed, action, "there is no complete gradient to update from")
        self.copies -= {f"p:{tensor}", *states}
        self.owed.discard(tensor)
        self.stale.discard(tensor)
