"""What makes a schedule valid: everything read is there, nothing leaves too early, the cycle closes, budgets hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from .schedule import Action, ComputeSpec, Kind, Schedule
from .simulate import memory_highs


class ScheduleError(ValueError):
    """A schedule that cannot be carried out: the message names the action and says why."""


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError, naming the first action that cannot be carried out and why.

    Checked are names, residency of what computes and updates read, host copies of what is brought in, gradients and
    updates (each tensor once per iteration, every compute with values of the last update), that what is where at the
    end is what the next iteration starts with, and the device and host budgets at every action.

    Parameters
    ----------
    schedule: one iteration.

    Raises: ScheduleError.
    """
    _check_names(schedule)
    _check_gate(schedule)
    state = _State(schedule)
    # What the host holds when an iteration starts is what the one before left there: the first pass finds it out.
    for known in (False, True):
        state.begin(known)
        for action in schedule.actions:
            state.take(action)
        state.close()
    _check_budgets(schedule)


def _check_names(schedule: Schedule) -> None:
    resident = schedule.resident
    _require(list(resident) == sorted(set(resident)), "resident", "items must ascend without repeats")
    for item in resident:
        _require(item in schedule.item_bytes, f"resident {item}", "no such item")
    for item, size in schedule.item_bytes.items():
        _require(size > 0, f"item {item}", f"has {size} bytes; only items that occupy bytes are named")
    for name, spec in schedule.computes.items():
        for item in spec.needs + spec.makes + spec.drops:
            _require(item in schedule.item_bytes, f"compute {name}", f"names {item}, which is no item")
        change = sum(schedule.item_bytes[i] for i in spec.makes) - sum(schedule.item_bytes[i] for i in spec.drops)
        least = max(0, change)
        _require(spec.rise_bytes >= least, f"compute {name}", f"rises by {spec.rise_bytes}, needs {least} bytes")
    known: dict[Kind, dict[str, object]] = {
        Kind.COMPUTE: dict(schedule.computes),
        Kind.UPDATE_CPU: dict(schedule.update_cpu_s),
        Kind.UPDATE_DEVICE: dict(schedule.update_device_s),
    }
    once: set[tuple[Kind, str]] = set()
    for action in schedule.actions:
        names = known.get(action.kind, schedule.item_bytes)
        _require(action.name in names, action, "no such name")
        if action.kind in known:
            _require((action.kind, action.name) not in once, action, "done twice in an iteration")
            once.add((action.kind, action.name))
    for kind, names in known.items():
        for name in names:
            _require((kind, name) in once, f"{kind.value} {name}", "announced, but no action does it")


def _check_gate(schedule: Schedule) -> None:
    if not schedule.gate:
        return
    for action in schedule.backward:
        update = action.kind in (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE)
        _require(not update, action, "updates before the last backward has ended")
    for action in schedule.forward:
        _require(action.kind is not Kind.UPDATE_DEVICE, action, "with a gate it belongs into the turn-around part")


def _check_budgets(schedule: Schedule) -> None:
    budget = schedule.device_budget_bytes
    for action, high in zip(schedule.actions, memory_highs(schedule)):
        _require(high <= budget, action, f"{high} bytes on the device, the budget is {budget}")
    host, limit = schedule.host_bytes, schedule.host_budget_bytes
    _require(host <= limit, "host", f"{host} bytes reserved, the budget is {limit}")


def _require(holds: bool, where: Action | str, why: str) -> None:
    if not holds:
        raise ScheduleError(f"{where}: {why}")


@dataclass
class _State:
    """What is where while actions are taken in order.

    `there`: items on the device. `copies`: items whose values the host holds. `current`: tensors whose values on the
    host are those of the last update. `stale`: tensors whose values on the device are older than their gradient.
    `owed`: tensors whose gradient is complete and which are not updated yet. `known`: whether the past is known.
    """

    schedule: Schedule
    there: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    current: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    owed: set[str] = field(default_factory=set)
    known: bool = False

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.trained = {item[2:] for item in schedule.item_bytes if item.startswith("g:")}
        self.external = not (schedule.update_cpu_s or schedule.update_device_s)
        for name in self.trained if not self.external else ():
            updates = (name in schedule.update_cpu_s) + (name in schedule.update_device_s)
            _require(updates == 1, f"tensor {name}", f"has {updates} updates per iteration, must have 1")
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
        self.known = known
        if not known:
            self.there = set(self.schedule.resident)
        if self.external:
            for name in sorted(self.owed):
                _require(f"g:{name}" in self.copies, f"tensor {name}", "its gradient is not on the host at the end")
            self.current |= self.owed
            self.owed = set()

    def close(self) -> None:
        """End an iteration: outputs become old ones, and what is there must be what the next one starts with."""
        self.there = {f"old:{item[2:]}" if item.startswith("o:") else item for item in self.there}
        start = set(self.schedule.resident)
        for item in sorted(self.there - start):
            _require(False, f"end of the iteration, {item}", "on the device, but not when an iteration starts")
        for item in sorted(start - self.there):
            _require(False, f"end of the iteration, {item}", "not on the device, but when an iteration starts")
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
        }
        handlers[action.kind](action, action.name)

    def _compute(self, action: Action, name: str) -> None:
        spec: ComputeSpec = self.schedule.computes[name]
        for item in spec.needs:
            _require(item in self.there, action, f"reads {item}, which is not on the device")
            stale = self.known and item.startswith("p:") and item[2:] in self.stale
            _require(not stale, action, f"reads {item} from before its last update")
        for item in spec.makes:
            _require(item not in self.there, action, f"makes {item}, which is on the device already")
        for item in spec.drops:
            _require(item in self.there, action, f"releases {item}, which is not on the device")
        self.there = (self.there - set(spec.drops)) | set(spec.makes)
        self.copies -= set(spec.makes)
        for tensor in self.complete.get(name, ()):
            late = self.known and tensor in self.owed
            _require(not late, action, f"makes the gradient of {tensor} again before its update")
            self.owed.add(tensor)
            self.stale.add(tensor)
            self.current.discard(tensor)

    def _prefetch(self, action: Action, item: str) -> None:
        _require(item not in self.there, action, "on the device already")
        tensor = item[2:]
        if item.startswith("p:"):
            _require(not self.known or tensor in self.current, action, "the host holds no copy of its new values")
            self.stale.discard(tensor)
        else:
            _require(item[:2] in ("a:", "v:", "s:"), action, "items of this kind never come in")
            past = not self.known and item.startswith("s:")
            _require(past or item in self.copies, action, "it was not sent to the host before")
        self.there.add(item)

    def _offload(self, action: Action, item: str) -> None:
        _require(item in self.there, action, "not on the device")
        kind, tensor = item[:2], item[2:]
        _require(kind in ("p:", "g:", "s:", "a:", "v:"), action, "items of this kind never go out")
        if kind == "p:":
            old = self.known and tensor in self.stale
            _require(not old, action, "its values are from before its last update")
            self.current.add(tensor)
        elif kind == "g:":
            early = self.known and tensor not in self.owed
            _require(not early, action, "the gradient is not complete, or its update is done")
        self.copies.add(item)

    def _free(self, action: Action, item: str) -> None:
        _require(item in self.there, action, "not on the device")
        if item.startswith("g:") and self.known:
            lost = item[2:] in self.owed and item not in self.copies
            _require(not lost, action, "the gradient is neither used by an update nor on the host")
        _require(not item.startswith("d:"), action, "gradients of values are released by computes only")
        self.there.remove(item)

    def _update_cpu(self, action: Action, tensor: str) -> None:
        if self.known:
            _require(tensor in self.owed, action, "there is no complete gradient to update from")
            _require(f"g:{tensor}" in self.copies, action, "the gradient was not sent to the host before")
        self.copies.discard(f"g:{tensor}")
        self.owed.discard(tensor)
        self.current.add(tensor)

    def _update_device(self, action: Action, tensor: str) -> None:
        for item in (f"p:{tensor}", f"g:{tensor}", f"s:{tensor}"):
            here = item in self.there or item not in self.schedule.item_bytes
            _require(here, action, f"reads {item}, which is not on the device")
        _require(tensor in self.owed, action, "there is no complete gradient to update from")
        self.copies -= {f"s:{tensor}", f"p:{tensor}"}
        self.owed.discard(tensor)
        self.stale.discard(tensor)
