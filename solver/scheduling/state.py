"""The location of every item while a schedule's actions are taken in order, and the rules that an action must meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .. import items
from ..arrivals import N_BUFFERS
from ..compute_names import parse
from ..effects import Effect, effect
from ..items import Item, ItemKind
from ..returns import Returns
from ..schedule import Action, Kind, Schedule, takes_on_host


class ScheduleError(ValueError):
    """A schedule that cannot be carried out: the message names the action and says why.

    Parameters
    ----------
    action: the action that cannot be carried out, if a single one is at fault.
    """

    def __init__(self, message: str, action: Action | None = None) -> None:
        super().__init__(message)
        self.action = action


def require(holds: bool, where: Action | str, why: str) -> None:
    """Raise ScheduleError, naming the place and the reason, unless a condition holds."""
    if not holds:
        raise ScheduleError(f"{where}: {why}", where if isinstance(where, Action) else None)


@dataclass
class State:
    """The location of every item while actions are taken in order.

    `there`: items on the device. `copies`: items whose values the host holds. `current`: tensors whose values on the
    host are those of the last update. `stale`: tensors whose values on the device are older than their gradient.
    `owed`: tensors whose gradient, or total of gradients, is complete and which are not updated yet. `fresh`: tensors
    whose gradient of this micro-batch is complete and not added to its total yet. `added`: by tensor, the number of
    gradients added; `sums`: of an iteration. `arriving`: tensors whose gradients have been sent to the host and not
    been added, in order.
    `tried`: tensors that the host updates before the gate, which opens yet.
    `held`: items that share host memory and whose values there are still needed.
    `known`: whether the iteration before this one has been walked. `walked`: number of micro-batches that are walked
    per iteration, with two of the middle ones, which are alike.
    """

    schedule: Schedule
    there: set[Item] = field(default_factory=set)
    copies: set[Item] = field(default_factory=set)
    current: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    owed: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    added: dict[str, int] = field(default_factory=dict)
    arriving: deque[str] = field(default_factory=deque)
    batch: int = 0
    known: bool = False
    held: set[Item] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.returns = Returns(schedule.returns)
        self.walked = min(schedule.micro_batches, 4)
        self.sums = (self.walked - 1) * schedule.per_step + schedule.last_slots
        self.trained = items.names_of(schedule.item_bytes, ItemKind.GRADIENT)
        self.external = not (schedule.update_cpu_s or schedule.update_device_s)
        for name in self.trained if not self.external else ():
            updates = (name in schedule.update_cpu_s) + (name in schedule.update_device_s)
            require(updates == 1, f"tensor {name}", f"has {updates} updates per iteration, must have 1")
        self.current = items.names_of(schedule.item_bytes, ItemKind.PARAMETER) - self.trained
        self.complete: dict[str, set[str]] = {}  # by compute: tensors whose gradient it completes
        last: dict[tuple[str, int], str] = {}
        for action in schedule.actions:
            if action.kind is Kind.COMPUTE:
                slot = parse(action.name).slot if schedule.sums_on_device else 0
                made = items.names_of(effect(action, schedule).writes, ItemKind.GRADIENT)
                last.update({(tensor, slot): action.name for tensor in made})
        for (tensor, _), compute in last.items():
            self.complete.setdefault(compute, set()).add(tensor)

    def begin(self, known: bool) -> None:
        """Start an iteration; in the first one the host's contents are not known yet."""
        self.known, self.batch = known, 0
        if not known:
            self.there = set(self.schedule.resident)
        if self.external:
            for name in sorted(self.owed):
                require(
                    items.gradient(name) in self.copies, f"tensor {name}", "its gradient is not on the host at the end"
                )
            self.current |= self.owed
            self.owed = set()

    def close_pass(self, start: Iterable[Item]) -> None:
        """End a pass other than the last: the device must hold the items that the passes after the first start with."""
        self._close(f"end of micro-batch {self.batch}", set(start), "a middle micro-batch")
        self.batch += 1

    def close(self) -> None:
        """End an iteration: outputs become old ones; the device must hold the items that the next one starts with."""
        self._close("end of the iteration", set(self.schedule.resident), "an iteration")

    def _close(self, end: str, start: set[Item], what: str) -> None:
        self.there = {items.after_pass(item) for item in self.there}
        for item in sorted(self.there - start):
            require(False, f"{end}, {item}", f"on the device, but not at the start of {what}")
        for item in sorted(start - self.there):
            require(False, f"{end}, {item}", f"not on the device, but needed there at the start of {what}")
        self.copies = {item for item in self.copies if not item.kind.by_batch}

    def take(self, action: Action) -> None:
        """Carry out one action, or raise ScheduleError with the reason why it cannot be."""
        does = effect(action, self.schedule)
        HANDLERS[action.kind](self, action, does)
        self._share_host(action, does)
        self.there.difference_update(does.releases)
        self.there.update(does.brings)

    def _compute(self, action: Action, does: Effect) -> None:
        self._must_be_there(action, does)
        for item in does.reads:
            stale = self.known and item.kind is ItemKind.PARAMETER and item.name in self.stale
            require(not stale, action, f"reads {item} from before its last update")
        for item in does.brings:
            require(item not in self.there, action, f"makes {item}, which is on the device already")
        for item in does.releases:
            require(item in self.there, action, f"releases {item}, which is not on the device")
        self.copies.difference_update(does.brings)
        if action.name == "gate":
            self._keep_what_was_tried()
        for tensor in self.complete.get(action.name, ()):
            late = self.known and tensor in self.owed
            require(not late, action, f"makes the gradient of {tensor} again before its update")
            self._complete(action, tensor)

    def _must_be_there(self, action: Action, does: Effect) -> None:
        for item in does.reads:
            require(item in self.there, action, f"reads {item}, which is not on the device")

    def _complete(self, action: Action, tensor: str) -> None:
        """Record that a micro-batch's gradient is complete; after the last one's the values are due for an update."""
        if self.walked > 1:
            require(tensor not in self.fresh, action, f"makes the gradient of {tensor} again before it was added")
            self.fresh.add(tensor)
        else:
            self.owed.add(tensor)
        of_last = not self.schedule.sums_on_device or parse(action.name).slot == self.schedule.last_slots - 1
        if self.batch + 1 == self.walked and of_last:
            self.stale.add(tensor)
            self.current.discard(tensor)

    def _prefetch(self, action: Action, does: Effect) -> None:
        item = action.item
        require(item not in self.there, action, "on the device already")
        require(item.kind.returns, action, "items of this kind are never copied to the device")
        if item.kind is ItemKind.PARAMETER:
            require(not self.known or item.name in self.current, action, "the host holds no copy of its new values")
            self.stale.discard(item.name)
        else:
            past = not self.known and not item.kind.by_batch
            require(past or item in self.copies, action, "it was not sent to the host before")

    def _offload(self, action: Action, does: Effect) -> None:
        item = action.item
        require(item in self.there, action, "not on the device")
        require(item.kind.leaves, action, "items of this kind are never copied to the host")
        if item.kind is ItemKind.PARAMETER:
            old = self.known and item.name in self.stale
            require(not old, action, "its values are from before its last update")
            read_only = item in self.schedule.homes and item not in self.schedule.trained_homes
            require(not read_only, action, "it comes from files that are never written")
            self.current.add(item.name)
        elif item.kind in items.WHOLE_GRADIENTS:
            unused = self._unused if item.kind is ItemKind.GRADIENT else self.owed
            early = self.known and item.name not in unused and not self._goes_on(item)
            require(not early, action, "the gradient is not complete, or its update is done")
            if self.walked > 1 and item.kind is ItemKind.GRADIENT:
                full = len(self.arriving) >= N_BUFFERS
                require(not full, action, f"no buffer is free: {', '.join(self.arriving)} wait for their addition")
                self.arriving.append(item.name)
        self.copies.add(item)

    def _share_host(self, action: Action, does: Effect) -> None:
        """Check that whoever had a place on the host before needs it no more."""
        item = takes_on_host(action)
        if item is not None:
            neighbours = self.schedule.host_layout.neighbours
            for other in neighbours.get(item, ()):
                require(other not in self.held, action, f"its place on the host is still in use by {other}")
            self.held |= {item} & neighbours.keys()
        elif action.kind in (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE):
            self.held.discard(items.gradient(action.name))
        elif action.kind is Kind.PREFETCH and self._is_last_return(action.item):
            self.held.discard(action.item)

    def _is_last_return(self, item: Item) -> bool:
        return item.kind is not ItemKind.GRADIENT and self.returns.is_last(item)

    def _goes_on(self, item: Item) -> bool:
        """Return whether an item is a total to which later passes add."""
        return self.schedule.sums_on_device and item.kind is ItemKind.TOTAL and self.added.get(item.name, 0) > 0

    @property
    def _unused(self) -> set[str]:
        """The tensors whose gradient is complete, and neither added to a total nor used by an update."""
        return self.fresh if self.walked > 1 else self.owed

    def _free(self, action: Action, does: Effect) -> None:
        item = action.item
        require(item in self.there, action, "not on the device")
        if item.kind is ItemKind.GRADIENT and self.known:
            lost = item.name in self._unused and item not in self.copies
            require(not lost, action, "the gradient is neither used by an update nor on the host")
        if item.kind is ItemKind.TOTAL:
            lost = (item.name in self.owed or self._goes_on(item)) and item not in self.copies
            require(not lost, action, "the total is neither used by an update nor on the host")
        lost = item.kind is ItemKind.VALUE_GRADIENT and item not in self.copies
        require(not lost, action, "only computes release gradients of values that are nowhere else")

    def _begin_total(self, action: Action, does: Effect) -> None:
        self._check_sum(action, does, begun=False)
        self._add(action.name)

    def _accumulate(self, action: Action, does: Effect) -> None:
        self._check_sum(action, does, begun=True)
        self.copies.discard(items.total(action.name))
        self._add(action.name)

    def _check_sum(self, action: Action, does: Effect, *, begun: bool) -> None:
        tensor, total = action.name, items.total(action.name)
        gradient = does.releases[0]
        fresh = gradient in self.there and tensor in self.fresh
        require(fresh, action, f"no complete {gradient} is on the device to be added")
        first = self.added.get(tensor, 0) == 0
        require(first is not begun, action, f"{total} has {'not begun yet' if first else 'begun already'}")
        why = "is not on the device" if begun else "is on the device already"
        require(begun is (total in self.there), action, f"{total} {why}")

    def _accumulate_cpu(self, action: Action, does: Effect) -> None:
        tensor, gradient = action.name, items.gradient(action.name)
        if not self.known and tensor not in self.fresh:  # sent in the iteration before
            self.arriving = deque(name for name in self.arriving if name != tensor)
            self.copies.discard(gradient)
            return
        require(gradient in self.copies, action, "the gradient was not sent to the host before")
        require(self.arriving[0] == tensor, action, f"the gradient of {self.arriving[0]} must be added first")
        self.arriving.popleft()
        self.copies.discard(gradient)
        self._add(tensor)

    def _add(self, tensor: str) -> None:
        self.fresh.discard(tensor)
        self.added[tensor] = self.added.get(tensor, 0) + 1
        if self.added[tensor] == self.sums:
            self.owed.add(tensor)
            self.added[tensor] = 0

    def _update_cpu(self, action: Action, does: Effect) -> None:
        tensor, gradient = action.name, items.gradient(action.name)
        if self.known:
            require(tensor in self.owed, action, "there is no complete gradient to update from")
            summed = self.schedule.sums_on_device
            whole = items.total(tensor) if summed else gradient
            sent = whole in self.copies or (self.walked > 1 and not summed)
            require(sent, action, "the gradient was not sent to the host before")
        self.copies -= {gradient, items.total(tensor)}
        self.owed.discard(tensor)
        self.current.add(tensor)

    def _speculate_cpu(self, action: Action, does: Effect) -> None:
        tensor, gradient = action.name, items.gradient(action.name)
        if self.known:
            require(tensor in self.owed, action, "there is no complete gradient to update from")
            require(tensor not in self.tried, action, "it was updated before the gate already")
            whole = items.total(tensor) if self.schedule.sums_on_device else gradient
            sent = whole in self.copies or (self.walked > 1 and not self.schedule.sums_on_device)
            require(sent, action, "the gradient was not sent to the host before")
        self.tried.add(tensor)

    def _keep_what_was_tried(self) -> None:
        """Open the gate: what was updated before it is updated now; its gradient and log are needed no more."""
        for tensor in self.tried:
            self.copies.discard(items.gradient(tensor))
            self.held -= {items.gradient(tensor), items.log(tensor)}
        self.owed -= self.tried
        self.current |= self.tried
        self.tried = set()

    def _update_device(self, action: Action, does: Effect) -> None:
        self._must_be_there(action, does)
        require(action.name in self.owed, action, "there is no complete gradient to update from")
        self.copies.difference_update((*does.writes, items.gradient(action.name), items.total(action.name)))
        self.owed.discard(action.name)
        self.stale.discard(action.name)


HANDLERS: dict[Kind, Callable[[State, Action, Effect], None]] = {
    Kind.COMPUTE: State._compute,
    Kind.PREFETCH: State._prefetch,
    Kind.OFFLOAD: State._offload,
    Kind.FREE: State._free,
    Kind.UPDATE_CPU: State._update_cpu,
    Kind.SPECULATE_CPU: State._speculate_cpu,
    Kind.UPDATE_DEVICE: State._update_device,
    Kind.BEGIN_TOTAL: State._begin_total,
    Kind.ACCUMULATE: State._accumulate,
    Kind.ACCUMULATE_CPU: State._accumulate_cpu,
}
