"""The optimizer's updates on host and device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from ...solver import items
from ...solver.items import Item
from ...solver.schedule import Kind
from ..events import Event, UnderWay
from ..ledger import LimitExceeded
from .binding import Update
from .cast import MASTER, make_copy, stays_behind
from .contents import Buffer, is_bulk
from .gate import Gate
from .gradients import Gradients
from .rescue import Rescue
from .state_ring import StateRing, Trial
from .states import States, in_rows
from .world import World


class Updates:
    """Runs updates as the schedule has them, and those that are due when an iteration ends early."""

    def __init__(self, world: World, states: States, gradients: Gradients, gate: Gate, rescue: Rescue) -> None:
        self._host, self._device, self._contents, self._states = world.host, world.device, world.contents, states
        self._gradients, self._gate, self._rescue = gradients, gate, rescue
        self._update, self._updated = world.update, world.updated
        self._planned, self._shared = world.schedule.item_bytes, world.shared_host
        self._cast = world.schedule.cast_parameters
        self._worker = world.schedule.rates.worker(Kind.UPDATE_CPU.value)
        self._ring = StateRing(world, states)

    def on_host(self, name: str, first: Callable[[], None] | None = None, after: tuple[Event, ...] = ()) -> None:
        """Start the update of a parameter on a worker, unless it has been started already.

        Parameters
        ----------
        first: what the worker does before it. after: events before that, beside the gradient's arrival.
        """
        contents, host = self._contents, self._host
        if not self._gradients.exists(name):
            return
        update, grad = self._known(), host.grads[name]
        scale = self._gate.scale_of(name, grad.device)
        done = contents.updated_rows.pop(name, 0)
        arrived = (contents.grad_leaving.get(name), contents.grad_adding.get(name))
        after = (*(event for event in arrived if event is not None), *after)
        if first is None and not done and self._ring.takes(name):
            updated = self._ring.start(name, update, grad, scale, after)
            self.adopt(name, updated, self._ring.values_of(name))
            return
        # The last rows are never among those that have been updated.
        known = frozenset(contents.states[self._states.items(name)[-1]].tensors if done else ())

        def work() -> None:
            if first is not None:
                first()
            if not done:
                self.make(name, grad, scale)
                return
            param, state = host.params[name], host.states.setdefault(name, {})
            _update_rest(update, name, param, grad, state, done, known, scale)
            host.written((param,))
            self._made(name)

        self.adopt(name, self._device.update_on_host(work, after, self._worker))

    def may_try(self, name: str) -> bool:
        """Return whether a parameter whose state lies in files may be updated before the gate."""
        return self._ring.may_try(name)

    def tried(self, name: str, trial: Trial, after: tuple[Event, ...]) -> tuple[Event, Event]:
        """Start the update of such a parameter; return the events of it, and of the end of all of its writes."""
        updated = self._ring.start(name, self._known(), self._host.grads[name], None, after, trial)
        return updated, self._ring.ended(name)

    def again(self, name: str, undo: Callable[[], None], ended: Event) -> None:
        """Undo an update before the gate from files, on a worker once it has ended, and start it again."""
        undone = self._device.update_on_host(undo, (ended,), self._worker)
        self._ring.comes_after(name, undone)
        self.on_host(name, after=(undone,))

    def has_failed(self, name: str) -> bool:
        """Return whether it is known that the new state of such a parameter does not come to its files."""
        return self._ring.has_failed(name)

    def undone(self, name: str) -> None:
        """Note that an update before the gate from files has ended and was undone."""
        self._ring.undone(name)

    def broke(self, name: str) -> None:
        """Note that the state that a parameter had in files before an update could not be put back."""
        self._ring.broke(name)

    def make(self, name: str, grad: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Update a whole parameter on the host, now and in this thread; `scale` multiplies its gradient first."""
        host = self._host
        param, state = host.params[name], host.states.setdefault(name, {})
        if name in self._cast and stays_behind(host, name):
            if MASTER not in state:
                make_copy(host, name)
            self._known()(name, param, grad, state, scale, casts=False)
            host.newer_copies.add(name)
        else:
            self._known()(name, param, grad, state, scale)
            host.written((param,))
            host.newer_copies.discard(name)
        self._made(name)

    def _made(self, name: str) -> None:
        self._host.states_written(name)
        self._host.updates[name] = self._host.updates.get(name, 0) + 1

    def adopt(self, name: str, under_way: Event, values: tuple[Event, ...] = ()) -> None:
        """Note that the update of a parameter on the host is under way behind the gate, and uses its gradient up.

        Parameters
        ----------
        values: events of its new values being in files, if they are not in RAM.
        """
        contents = self._contents
        contents.pending.discard(name)
        self._host.totals.discard(name)
        contents.grad_leaving.pop(name, None)
        contents.grad_adding.pop(name, None)
        updated = UnderWay(f"the update of {name} on the CPU", (under_way,))
        contents.written[items.parameter(name)] = (
            UnderWay(f"the write of parameter {name} to its files", values) if values else updated
        )
        self._shared.freed(items.gradient(name), updated)

    def on_device(self, name: str) -> None:
        """Update a parameter on the device, item by item of its state, each with its own rows."""
        contents = self._contents
        returned = contents.returned_grads.get(name)
        arrived = returned.arrived if returned is not None else None
        param, grad = contents.params[name], self._gradients.whole(name).tensor
        scale = self._gate.scale_of(name, grad.device)
        # Otherwise it has come back from the host, whose own copy stays.
        if scale is not None and not self._host.is_low(name, grad):
            grad.mul_(scale)
            scale = None
        parts = self._states.items(name)
        buffers = [contents.states.setdefault(item, Buffer({})) for item in parts]
        # A copy to the host may still read the memory that the update overwrites (see contents.py).
        for buffer in (param, *buffers):
            buffer.settle()
        host = self._host.states.setdefault(name, {})
        contents.newer |= {items.parameter(name), *parts}
        for item in parts:
            contents.on_tiers.pop(item, None)  # an older copy from now on
        contents.states_at_home.setdefault(name, dict(host))
        if len(parts) > 1:
            self._on_device_in_rows(name, param.read(), grad, dict(zip(parts, buffers)), host, scale)
        else:
            self._on_device_whole(name, param.read(), grad, buffers[0], host, scale)
        self._host.updates[name] = self._host.updates.get(name, 0) + 1
        contents.pending.discard(name)
        contents.grad_leaving.pop(name, None)
        # Until here the host's copy was what a failure would have left of the gradient.
        self._shared.freed(items.gradient(name), arrived)

    def _on_device_whole(
        self,
        name: str,
        param: torch.Tensor,
        grad: torch.Tensor,
        buffer: Buffer,
        host: dict[str, object],
        factor: torch.Tensor | None,
    ) -> None:
        state: dict[str, object] = {**host, **buffer.tensors}
        self._make_room(name, self._states.items(name)[0], buffer)
        self._known()(name, param, grad, state, factor)
        self._keep(self._states.items(name)[0], buffer, state)
        for key in host.keys() - state.keys():
            del host[key]
        for key, value in state.items():
            if not is_bulk(value) or not isinstance(host.get(key), torch.Tensor):
                host[key] = value

    def _make_room(self, name: str, item: Item, buffer: Buffer) -> None:
        """Make room for what the update of an item's rows allocates, including their state if there is none yet."""
        if self._device.arena is not None and name in self._updated:
            updated, share = self._updated[name], self._states.share
            made = tuple(share(item, size) for size in updated.state_bytes[len(buffer.tensors) :])
            self._device.arena.room((*made, share(item, updated.workspace_bytes)))

    def _keep(self, item: Item, buffer: Buffer, state: dict[str, object]) -> None:
        buffer.tensors = _bulk(state)
        held = sum(tensor.nbytes for tensor in buffer.tensors.values())
        if held > self._planned.get(item, 0):
            raise LimitExceeded(
                f"the optimizer holds {held} bytes of state for {item.name} on the device, but the plan counts "
                f"{self._planned.get(item, 0)}; plan again, with another cache_dir if the plan was cached"
            )
        if self._device.arena is not None:
            for tensor in buffer.tensors.values():
                self._device.arena.note(tensor)

    def _on_device_in_rows(
        self,
        name: str,
        param: torch.Tensor,
        grad: torch.Tensor,
        buffers: dict[Item, Buffer],
        host: dict[str, object],
        factor: torch.Tensor | None,
    ) -> None:
        """Update rows item by item; the values that all rows share advance once, with the last rows."""
        last = next(reversed(buffers))
        for item, buffer in buffers.items():
            rows = item.rows
            assert rows is not None, "a state of several items is cut by rows"
            shared = {k: v for k, v in host.items() if not is_bulk(v)}
            if item != last:
                shared = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in shared.items()}
            state: dict[str, object] = {**shared, **buffer.tensors}
            self._make_room(name, item, buffer)
            self._known()(name, in_rows(param, rows), in_rows(grad, rows), state, factor)
            self._keep(item, buffer, state)
            self._contents.updated_rows[name] = rows[1]
        host.update({k: v for k, v in state.items() if not is_bulk(v)})
        del self._contents.updated_rows[name]

    def _known(self) -> Update:
        assert self._update is not None, "a schedule with updates needs the optimizer's update"
        return self._update

    # -- synchronization with the host --------------------------------------------------------------------------------

    def start_pending(self) -> None:
        """Start now the updates that the schedule starts later, which it will then find started."""
        for name in self._owed():
            self._start(name)

    def salvage_begun(self) -> None:
        """After a failure, complete on the host the updates that were made in part on the device."""
        self._salvage(sorted(self._contents.updated_rows))

    def salvage_pending(self) -> None:
        """After a failure, make the updates that were still to come, as far as their gradients can be read."""
        self._salvage(self._owed())

    def _salvage(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                self._start(name)
        self._device.drain()

    def _owed(self) -> list[str]:
        if self._update is None or not self._gate.is_open:
            return []
        return self._gradients.names

    def _start(self, name: str) -> None:
        self._gradients.bring_home(name)
        for item in (items.parameter(name), *self._states.items(name)):
            if item in self._contents.newer:
                self._rescue.one(item)
                self._contents.newer.discard(item)
            self._contents.on_tiers.pop(item, None)  # outdated once the host updates the state
        self.on_host(name)

    def lost_from_files(self) -> frozenset[str]:
        """Return, after a failure, the tensors updated in part, or whose new states are not in their files."""
        return self._ring.lost()

    def forget(self) -> None:
        """Forget the updates from files; none may be under way."""
        self._ring.clear()


def _bulk(state: dict[str, object]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and is_bulk(v)}


def _update_rest(
    update: Update,
    name: str,
    param: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, object],
    done: int,
    known: frozenset[str],
    factor: torch.Tensor | None = None,
) -> None:
    """Update the rows that an update on the device has not reached.

    Parameters
    ----------
    state: the whole state, whose first `done` rows are updated. known: its parts that existed before that update; the
        remaining rows of other parts are made here. factor: multiplies the gradient first, None for 1.
    """
    rows = (done, param.shape[0])
    bulk = _bulk(state)
    rest: dict[str, object] = {key: in_rows(whole, rows) for key, whole in bulk.items() if key in known}
    rest |= {key: value for key, value in state.items() if key not in bulk}
    update(name, in_rows(param, rows), in_rows(grad, rows), rest, factor)
    for key, value in rest.items():
        if key not in bulk:
            state[key] = value
        elif key not in known and isinstance(value, torch.Tensor):
            in_rows(bulk[key], rows).copy_(value)
