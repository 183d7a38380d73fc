"""The optimizer's updates on host and device, and what makes the host hold the truth."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from .binding import HostState, Update
from .contents import Buffer, Contents, UnderWay, is_bulk
from .device import Device
from .gate import Gate
from .gradients import Gradients
from .updated import Updated


class Updates:
    """Runs updates, and brings to the host what only the device has.

    Parameters
    ----------
    contents: what is on the device; changed here. update: of one tensor; None if the user's code updates.
    homeless: parameters that never leave the device and share their memory with the host's on an emulated one.
    updated: what the optimizer holds of a parameter on an accelerator.
    """

    def __init__(
        self,
        host: HostState,
        device: Device,
        contents: Contents,
        gradients: Gradients,
        gate: Gate,
        update: Update | None,
        homeless: frozenset[str],
        updated: Mapping[str, Updated],
    ) -> None:
        self._host, self._device, self._contents = host, device, contents
        self._gradients, self._gate = gradients, gate
        self._update, self._homeless, self._updated = update, homeless, updated

    def on_host(self, name: str) -> None:
        """Start the update of a parameter on a worker, unless it has been started already."""
        here, host = self._contents, self._host
        if not self._gradients.exists(name):
            return
        here.pending.discard(name)
        host.totals.discard(name)
        update, grad, scale = self._known(), host.grads[name], self._gate.scale_of(name)

        def work() -> None:
            if scale is not None:
                grad.mul_(scale)
            update(name, host.params[name], grad, host.states.setdefault(name, {}))
            host.updates[name] = host.updates.get(name, 0) + 1

        arrived = (here.grad_leaving.pop(name, None), here.grad_adding.pop(name, None))
        under_way = self._device.update_on_host(work, tuple(event for event in arrived if event is not None))
        here.written[name] = UnderWay(f"the update of {name} on the host", (under_way,))

    def on_device(self, name: str) -> None:
        """Update a parameter on the device."""
        here = self._contents
        param, grad = here.params[name], self._gradients.whole(name).tensor
        buffer = here.states.setdefault(name, Buffer({}))
        # A copy to the host may still read what is overwritten here.
        param.settle()
        buffer.settle()
        host = self._host.states.setdefault(name, {})
        state: dict[str, object] = {**host, **buffer.tensors}
        here.newer |= {f"p:{name}", f"s:{name}"}
        here.states_at_home.setdefault(name, dict(host))
        self._make_room(name, buffer)
        self._known()(name, param.read(), grad, state)
        self._host.updates[name] = self._host.updates.get(name, 0) + 1
        here.pending.discard(name)
        buffer.tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and is_bulk(v)}
        for key, value in state.items():
            if not is_bulk(value) or not isinstance(host.get(key), torch.Tensor):
                host[key] = value
        if self._device.arena is not None:
            for tensor in buffer.tensors.values():
                self._device.arena.note(tensor)

    def _make_room(self, name: str, buffer: Buffer) -> None:
        """For what an update allocates, its state among it if there is none yet."""
        if self._device.arena is not None and name in self._updated:
            updated = self._updated[name]
            self._device.arena.room((*(() if buffer.tensors else updated.state_bytes), updated.workspace_bytes))

    def _known(self) -> Update:
        assert self._update is not None, "a schedule with updates needs the optimizer's update"
        return self._update

    # -- the truth ----------------------------------------------------------------------------------------------------

    def start_pending(self) -> None:
        """Start now what the schedule starts later; it will find it done."""
        for name in self._owed():
            self._start(name)

    def salvage_pending(self) -> None:
        """After a failure: do the updates that were still to come, as far as their gradients can be had."""
        for name in self._owed():
            with contextlib.suppress(Exception):
                self._start(name)
        self._device.drain()

    def _owed(self) -> list[str]:
        if self._update is None or not self._gate.is_open:
            return []
        return sorted(self._contents.pending | self._host.totals)

    def _start(self, name: str) -> None:
        self._gradients.bring_home(name)
        for item in (f"p:{name}", f"s:{name}"):
            if item in self._contents.newer:
                self._rescue(item)
                self._contents.newer.discard(item)
        self.on_host(name)

    def rescue(self) -> None:
        """Copy to the host what only the device has; no copy may be under way."""
        here = self._contents
        with torch.no_grad():
            for item in sorted(here.newer):
                self._rescue(item)
            self._rescue_scalars()
        here.newer.clear()
        here.states_at_home.clear()

    def give_up_on_device(self) -> frozenset[str]:
        """The device is lost: states that it shares with the host become what they were before it had them.

        Returns: the tensors of which only the device had the newest values.
        """
        here = self._contents
        lost = {item[2:] for item in here.newer} | here.states_at_home.keys()
        for name, known in here.states_at_home.items():
            state = self._host.states[name]
            away = [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.device.type != "cpu"]
            if any(key not in known for key in away):
                # Its first update was the device's, and half a state is none.
                state.clear()
            else:
                state.update({key: known[key] for key in away})
        here.newer.clear()
        return frozenset(lost)

    def _rescue(self, item: str) -> None:
        here = self._contents
        kind, name = item.split(":", 1)
        if kind == "p" and name in here.params and name not in self._homeless:
            self._host.params[name].copy_(here.params[name].tensors[""])
        elif kind == "s" and name in here.states:
            self._rescue_state(name)
        elif kind == "b":
            self._host.buffers[name].copy_(here.model_buffers[name])

    def _rescue_scalars(self) -> None:
        """Scalars of states live where their parameter was updated last; they come home all at once."""
        away = [
            (state, key, value)
            for state in self._host.states.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type != "cpu"
        ]
        for dtype in {value.dtype for _, _, value in away}:
            same = [entry for entry in away if entry[2].dtype == dtype]
            for (state, key, _), value in zip(same, torch.stack([value for _, _, value in same]).cpu()):
                state[key] = value.clone()

    def _rescue_state(self, name: str) -> None:
        state = self._host.states[name]
        for key, tensor in self._contents.states[name].tensors.items():
            own = state.get(key)
            if not isinstance(own, torch.Tensor):
                continue
            if own is not tensor:
                own.copy_(tensor)
            elif tensor.device.type != "cpu":
                # Made on the device by the first update; the host has no copy yet.
                state[key] = self._device.empty_host_like(tensor).copy_(tensor)
