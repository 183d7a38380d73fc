"""Updates on the host before the gate: each keeps a log of the old values, which undoes it.

A state in files needs no log: its pieces are written to their second places there, and the old ones stay.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeGuard

import torch

from ...errors import StorageError
from ...solver import items
from ...solver.schedule import Kind, Schedule
from ..devices.device import Device
from ..events import Event
from ..storage.earlier import Earlier
from .binding import HostState
from .contents import is_bulk
from .gate import Gate
from .gradients import Gradients
from .norms import Norms
from .updates import Updates
from .world import World

_PARAM = ""  # the parameter's key in a log, beside those of its state


class _Stage(Enum):
    """How far an update before the gate has come."""

    WAITING = auto()  # a worker has not begun it
    LOGGED = auto()  # a worker has begun it, with a log
    KEPT = auto()  # the gate has kept it before a worker began it, so that it needs no log
    GIVEN_UP = auto()  # the parameter has its old values, and its update comes behind the gate


@dataclass
class _Log:
    """The old values of a parameter and its state.

    Parameters
    ----------
    memory: by key, memory for the values of all tensors but those that stay in files. in_files: whether any do.
    state: what the state consisted of; None if there was none.
    """

    memory: dict[str, torch.Tensor]
    in_files: bool = False
    state: dict[str, object] | None = None

    def write(self, host: HostState, name: str) -> None:
        """Note the values that a parameter and its state have now."""
        own = host.states.get(name)
        self.state = None if own is None else dict(own)
        self.memory[_PARAM].copy_(host.params[name])
        for key, value in (own or {}).items():
            if self._holds(value):
                self.memory[key].copy_(value)

    def put_back(self, host: HostState, name: str) -> None:
        """Give a parameter and its state the values that were noted."""
        host.params[name].copy_(self.memory[_PARAM])
        for key, value in (self.state or {}).items():
            if self._holds(value):
                value.copy_(self.memory[key])
        if self.state is None:
            host.states.pop(name, None)
            return
        own = host.states[name]  # others may refer to it, and read it meanwhile
        for key in own.keys() - self.state.keys():
            del own[key]
        own.update(self.state)
        if not self.in_files:
            host.states_written(name)

    def _holds(self, value: object) -> TypeGuard[torch.Tensor]:
        return isinstance(value, torch.Tensor) and not (self.in_files and is_bulk(value))


@dataclass
class _Attempt:
    """An update before the gate.

    Parameters
    ----------
    grad: the whole gradient on the host. log: written when a worker begins it. event: of the worker's job.
    ended: of a state in files, the event of all pieces having been written, or not. counted: whether the update is made
        and counted. adopted: whether the gate has kept it, so that an error counts as that of an update behind the
        gate. stops: whether no further piece of a state in files is updated. earlier: what its pieces had there.
    """

    grad: torch.Tensor
    log: _Log
    stage: _Stage = _Stage.WAITING
    event: Event | None = None
    ended: Event | None = None
    counted: bool = False
    adopted: bool = False
    stops: bool = False
    earlier: Earlier = field(default_factory=Earlier)
    undoing: threading.Lock = field(default_factory=threading.Lock)


class Speculation:
    """Makes the updates that a schedule places before the gate, and keeps or undoes them.

    What happens to the gate decides: if it leaves all gradients as they are, the updates stay. Otherwise, and whenever
    somebody looks at the host's values before, each gets its old values back, and its update is made behind the gate.

    State: `_wanted`, whether updates may begin in this iteration; `kept`, whether those of the last one were kept, or
    would have been if the schedule had any; `_attempts`, by parameter, until the gate opens; `_memory`, by parameter,
    of logs that share no memory with others, kept from one iteration to the next. Workers change attempts under
    `_lock`.

    Parameters
    ----------
    max_norm: above this norm the gate scales gradients; None if it does not look at norms.
    """

    def __init__(
        self,
        world: World,
        gradients: Gradients,
        gate: Gate,
        norms: Norms,
        updates: Updates,
        max_norm: float | None,
    ) -> None:
        self._host, self._contents, self._shared = world.host, world.contents, world.shared_host
        self._device: Device = world.device
        self._gradients, self._gate, self._norms, self._updates = gradients, gate, norms, updates
        self._max_norm, self._worker = max_norm, world.schedule.rates.worker(Kind.UPDATE_CPU.value)
        self._planned, self._sizes = _planned(world.schedule), world.schedule.item_bytes
        self._lock = threading.Lock()
        self._wanted = self.kept = False
        self._attempts: dict[str, _Attempt] = {}
        self._memory: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def any(self) -> bool:
        """Whether an update has been started before the gate, which has not opened yet, or still could be."""
        return self._wanted or bool(self._attempts)

    def begin(self, wanted: bool) -> None:
        """Prepare for a backward in which updates may begin before the gate, if they are `wanted`."""
        self.retract()
        self._attempts.clear()
        self._wanted, self.kept = wanted, False

    def start(self, name: str) -> None:
        """Start the update of a parameter from its gradient on the host, unless updates have to wait for the gate."""
        host, contents = self._host, self._contents
        if not self._wanted or not self._gradients.exists(name):
            return
        in_files = name in host.in_store
        if in_files and not self._updates.may_try(name):
            return
        attempt = _Attempt(host.grads[name], _Log(self._log_memory(name, in_files), in_files))
        arrived = (contents.grad_leaving.get(name), contents.grad_adding.get(name))
        after = (*(event for event in arrived if event is not None), *self._shared.free_after(items.log(name)))
        if in_files:
            attempt.event, attempt.ended = self._updates.tried(name, _InFiles(self, name, attempt), after)
        else:
            attempt.event = self._device.update_on_host(lambda: self._make(name, attempt), after, self._worker)
        self._attempts[name] = attempt

    def settle(self) -> None:
        """Keep the updates if the gate, which has opened, has left gradients as they are; else undo and repeat them."""
        keeps = self._gate.leaves_gradients
        self.kept = self._wanted and keeps
        for name in self._planned:
            attempt = self._attempts.get(name)
            if attempt is None:
                self._updates.on_host(name)
                continue
            begun = attempt.ended is not None and attempt.stage is not _Stage.GIVEN_UP
            failed = begun and self._updates.has_failed(name)
            with self._lock:
                if attempt.stage is _Stage.WAITING:
                    attempt.stage = _Stage.KEPT if keeps else _Stage.GIVEN_UP
                attempt.stops = attempt.stops or failed or not keeps
                attempt.adopted = not attempt.stops and attempt.stage is not _Stage.GIVEN_UP
            self._adopt(name, attempt) if attempt.adopted else self._repeat(name, attempt)
            self._shared.freed(items.log(name), self._contents.written.get(items.parameter(name)))
            del self._attempts[name]

    def _adopt(self, name: str, attempt: _Attempt) -> None:
        assert attempt.event is not None
        attempt.earlier.drop()
        self._updates.adopt(name, attempt.event)

    def _repeat(self, name: str, attempt: _Attempt) -> None:
        def undo() -> None:
            self._undo(name, attempt)

        assert attempt.event is not None
        if attempt.ended is not None:
            self._updates.again(name, undo, attempt.ended)
        else:
            self._updates.on_host(name, first=undo, after=(attempt.event,))

    def retract(self) -> None:
        """Undo all updates that have begun before the gate; they are made behind it. No other may begin until then.

        Raises: StorageError if a state in files could not be put back; the others have been then.
        """
        self._wanted = False
        for attempt in self._attempts.values():
            with self._lock:
                attempt.stage = attempt.stage if attempt.stage is _Stage.LOGGED else _Stage.GIVEN_UP
                attempt.stops = True
        failures = []
        for name, attempt in self._attempts.items():
            under_way = attempt.ended or attempt.event
            if under_way is not None and (attempt.ended is not None or attempt.stage is _Stage.LOGGED):
                under_way.synchronize()
                try:
                    with torch.no_grad():
                        self._undo(name, attempt)
                except StorageError as error:
                    failures.append(error)
                if attempt.ended is not None:
                    self._updates.undone(name)
        if failures:
            raise failures[0]

    def clear(self) -> None:
        """Forget the iteration's updates, which have been retracted, and free the logs' memory."""
        self._attempts.clear()
        self._memory.clear()
        self._wanted = False

    # -- in workers ---------------------------------------------------------------------------------------------------

    def _make(self, name: str, attempt: _Attempt) -> None:
        with self._lock:
            if attempt.stage is _Stage.WAITING:
                attempt.stage = _Stage.LOGGED if self._may_begin(name) else _Stage.GIVEN_UP
            if attempt.stage is _Stage.GIVEN_UP:
                return
            logged = attempt.stage is _Stage.LOGGED
        if logged:
            attempt.log.write(self._host, name)
        try:
            self._updates.make(name, attempt.grad)
            attempt.counted = True
        except BaseException:
            with self._lock:
                if attempt.adopted:
                    raise
                self._undo(name, attempt)  # the update behind the gate will raise the same, where users expect it

    def goes_on(self, name: str, attempt: _Attempt) -> bool:
        """Return whether the next piece of a state in files is to be updated; before the first one, write the log."""
        with self._lock:
            begins = attempt.stage is _Stage.WAITING
            if begins:
                attempt.stage = _Stage.LOGGED if self._may_begin(name) else _Stage.GIVEN_UP
            if attempt.stage is _Stage.GIVEN_UP or attempt.stops:
                return False
        if begins:
            attempt.log.write(self._host, name)
        return True

    def forgives(self, attempt: _Attempt) -> bool:
        """Note that a piece of a state in files could not be updated; return whether the gate has not kept it."""
        with self._lock:
            attempt.stops = attempt.stops or not attempt.adopted
            return not attempt.adopted

    def _may_begin(self, name: str) -> bool:
        unscaling, limit = self._host.unscaling, self._max_norm
        if not self._wanted or (unscaling is not None and name not in unscaling.done):
            return False
        return limit is None or not self._norms.exceed(limit)

    def _undo(self, name: str, attempt: _Attempt) -> None:
        with attempt.undoing:
            if attempt.stage is not _Stage.LOGGED:
                return
            attempt.log.put_back(self._host, name)
            self._host.updates[name] = self._host.updates.get(name, 0) - attempt.counted
            attempt.stage, attempt.counted = _Stage.GIVEN_UP, False
            try:
                attempt.earlier.put_back()
            except StorageError:
                self._updates.broke(name)
                raise

    # -- memory -------------------------------------------------------------------------------------------------------

    def _log_memory(self, name: str, in_files: bool) -> dict[str, torch.Tensor]:
        """Return memory for the old values of a parameter and the tensors of its state: its place, or its own.

        Parameters
        ----------
        in_files: whether the state's values stay in files, so that they need no memory.
        """
        state: dict[str, Any] = self._host.states.get(name, {})
        parts: dict[str, torch.Tensor] = {_PARAM: self._host.params[name]}
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        parts |= {key: value for key, value in tensors.items() if not (in_files and is_bulk(value))}
        # The widest elements first, so that each part begins at a multiple of its own.
        bulk = {key: part for key, part in parts.items() if key == _PARAM or is_bulk(part)}
        bulk = dict(sorted(bulk.items(), key=lambda part: -part[1].element_size()))
        log, placed = items.log(name), dict[str, torch.Tensor]()
        if self._shared.has_place(log) and sum(part.nbytes for part in bulk.values()) <= self._sizes[log]:
            placed = self._shared.take(log, bulk)
        rest = {key: part for key, part in parts.items() if key not in placed}
        own = self._memory.get(name, {})
        if {key: _form(part) for key, part in own.items()} != {key: _form(part) for key, part in rest.items()}:
            own = self._memory[name] = {key: torch.empty_like(part) for key, part in rest.items()}
        return placed | own


@dataclass
class _InFiles:
    """An attempt whose state lies in files, for the ring that its pieces pass."""

    speculation: Speculation
    name: str
    attempt: _Attempt

    @property
    def earlier(self) -> Earlier:
        """What its pieces had in the files."""
        return self.attempt.earlier

    def is_wanted(self) -> bool:
        """Return whether it may still be made."""
        return self.attempt.stage is not _Stage.GIVEN_UP and not self.attempt.stops

    def goes_on(self) -> bool:
        """Return whether its next piece is to be updated."""
        return self.speculation.goes_on(self.name, self.attempt)

    def made(self) -> None:
        """Note that the parameter is updated."""
        self.attempt.counted = True

    def forgives(self) -> bool:
        """Note that a piece could not be updated; return whether that will be repeated."""
        return self.speculation.forgives(self.attempt)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device


def _planned(schedule: Schedule) -> tuple[str, ...]:
    """Return the parameters that a schedule updates before the gate, in order."""
    return tuple(action.name for action in schedule.actions if action.kind is Kind.SPECULATE_CPU)
