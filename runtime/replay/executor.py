"""Replays a schedule: walks its actions in order, one short handler per kind, waiting for events and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from ...solver.schedule import Action, Kind, Schedule, made_old
from .. import interrupts
from ..devices.device import Device
from ..memory.updated import Updated
from ..torch_names.autograd import without_autocast
from .binding import Binding, HostState, Update
from .computes import Computes
from .contents import Buffer, Contents
from .gate import Clip, Gate
from .gradients import Gradients
from .parking import Parked, park, unpark
from .states import States
from .transfers import Transfers
from .updates import Updates

_MOVING = (Kind.PREFETCH, Kind.OFFLOAD, Kind.UPDATE_CPU)


class Executor:
    """Replays one schedule on one device.

    State: `contents`, what is on the device and under way; `loaded`, whether what a micro-batch starts from is there;
    `complete`, whether the last backward has ended, so that all its gradients are whole; `gate`. All of it is changed
    on the thread that calls `forward`, `backward` and `turn_around`, in the order of the schedule's actions; workers
    only fill tensors they were given.

    Parameters
    ----------
    schedule, binding: what to do, and on which tensors.
    host: parameters, buffers and optimizer states.
    device: where; its ledger counts every byte.
    update: the optimizer's update of one tensor; None if the user's code updates.
    fixed_bytes: what lies on the device whatever the schedule does (buffers, scalar states).
    clip: how gradients are clipped when the schedule's gate opens.
    updated: what the optimizer holds of parameters that are updated on an accelerator.
    """

    def __init__(
        self,
        schedule: Schedule,
        binding: Binding,
        host: HostState,
        device: Device,
        update: Update | None,
        fixed_bytes: int = 0,
        clip: Clip | None = None,
        updated: Mapping[str, Updated] | None = None,
    ) -> None:
        self.schedule, self.binding, self.host, self.device, self.update = schedule, binding, host, device, update
        self.fixed_bytes = fixed_bytes
        self.loaded = False
        self.complete = True
        self.on_action: Callable[[Action], None] | None = None
        self._contents = contents = Contents()
        self._homeless = _never_moved(schedule) if device.torch_device.type == "cpu" else frozenset()
        self._gradients = Gradients(schedule, host, device, contents)
        self.gate = Gate(schedule.gate, clip, host, self._gradients)
        states = States(schedule, host, device)
        self._transfers = Transfers(schedule, binding, host, device, contents, states, self._gradients)
        self._updates = Updates(
            host, device, contents, states, self._gradients, self.gate, update, self._homeless, updated or {}
        )
        self._computes = Computes(schedule, binding, host, device, contents, self.gate)
        self._updating = False
        self._handlers: dict[Kind, Callable[[str], None]] = {
            Kind.COMPUTE: self._computes.run,
            Kind.PREFETCH: self._transfers.prefetch,
            Kind.OFFLOAD: self._transfers.offload,
            Kind.FREE: self._transfers.free,
            Kind.ACCUMULATE: self._gradients.accumulate,
            Kind.ACCUMULATE_CPU: self._gradients.accumulate_on_host,
            Kind.UPDATE_CPU: self._updates.on_host,
            Kind.UPDATE_DEVICE: self._updates.on_device,
        }

    # -- an iteration -------------------------------------------------------------------------------------------------

    def load(self, micro_batch: int = 0) -> None:
        """Bring to the device what a micro-batch finds there when it starts."""
        ledger = self.device.ledger
        ledger.add("b", self.fixed_bytes)
        for item in self.schedule.resident_at(micro_batch):
            if item.startswith(("old:", "g:", "x:")):
                # What the last iteration would have left; in the first one it is only counted.
                ledger.add(item.split(":")[0], self.schedule.item_bytes[item])
            elif item.startswith("p:") and item[2:] in self._homeless:
                ledger.add("p", self.schedule.item_bytes[item])
                self._contents.params[item[2:]] = Buffer({"": self.host.params[item[2:]]})
            else:
                self._take(Action(0, Kind.PREFETCH, item))
        self.loaded = True

    def forward(self, batch: Iterable[torch.Tensor | None], micro_batch: int = 0) -> dict[str, torch.Tensor]:
        """Run the forwards.

        Parameters
        ----------
        batch: tensors in the order of `StartBinding.batch`. micro_batch: which one of the iteration, from 0.

        Returns: the model's output tensors by name.
        """
        if not self.loaded:
            self.load(micro_batch)
        self._computes.renew_buffers()
        self._computes.batch = tuple(batch)
        self._walk(self.schedule.pass_of(micro_batch).forward)
        return self._computes.take_outputs()

    def backward(self, gradients: dict[str, torch.Tensor], micro_batch: int = 0) -> None:
        """Run the backwards.

        Parameters
        ----------
        gradients: of those outputs that the plan differentiates, by name. micro_batch: as in `forward`.
        """
        self.complete = False
        self.gate.close()
        self._computes.incoming = gradients
        self._walk(self.schedule.pass_of(micro_batch).backward)
        self.complete, self._updating = True, False
        here = self._contents
        for name in self.binding.outputs:
            here.values.pop(name, None)
        here.returned = {made_old(item): tensor for item, tensor in here.returned.items()}

    def turn_around(self) -> None:
        """Run what lies between the last backward and the next forward; a gate opens in it."""
        self._walk(self.schedule.turn_around)

    def finish(self) -> None:
        """End an iteration of fewer micro-batches than planned: all updates are made on the host, now."""
        self.unload()
        self.gate.open()
        self.sync()

    def _walk(self, actions: tuple[Action, ...]) -> None:
        recorder = self.device.recorder
        if recorder is not None:
            recorder.begin(self.schedule, actions)
        with torch.no_grad(), without_autocast():
            for action in actions:
                if self.on_action is not None:
                    self.on_action(action)
                interrupts.checkpoint(patient=self._updating)
                if not self.complete and action.kind in (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE):
                    self._updating = True
                self._take(action)
        if recorder is not None:
            recorder.end(self.schedule, actions)

    def _take(self, action: Action) -> None:
        handler, recorder = self._handlers[action.kind], self.device.recorder
        if recorder is None:
            handler(action.name)
        else:
            recorder.take(action, handler)

    # -- the truth ----------------------------------------------------------------------------------------------------

    def take_host_grads(self) -> dict[str, torch.Tensor]:
        """Hand over the gradients that have left for the host, once they are there."""
        return self._gradients.take()

    def sync(self) -> None:
        """Wait for everything under way, do the updates that are due, and bring home what is newer."""
        self._updates.start_pending()
        here = self._contents
        for event in [*here.written.values(), *here.grad_leaving.values(), *here.grad_adding.values()]:
            event.synchronize()
        self._updates.rescue()

    @property
    def newer_buffers(self) -> frozenset[str]:
        """The model's buffers, as "b:NAME", of which only the device has the newest values."""
        return frozenset(item for item in self._contents.newer if item.startswith("b:"))

    def bring_buffers(self) -> None:
        """Copy them to the host."""
        self._updates.rescue_items(self.newer_buffers)

    def renew_states(self) -> None:
        """Send the optimizer states on the device anew; the host's are the newest, after `sync`."""
        self._transfers.renew_states()

    def unload(self) -> None:
        """Take everything off the device; afterwards the host holds the truth, sums of gradients included."""
        self.sync()
        if not self.gate.is_open:
            self._gradients.store_totals()
        for buffer in [*self._contents.params.values(), *self._contents.states.values()]:
            buffer.synchronize()
        self.device.drain()
        self._transfers.release_host()
        self._gradients.release_host()
        self._empty()

    def park(self, given: Iterable[torch.Tensor]) -> Parked:
        """Leave the device to something else between a forward and its backward; `unpark` goes on.

        Parameters
        ----------
        given: the outputs; their memory stays, as does what the host shares.
        """
        self.sync()
        for buffers in (self._contents.params, self._contents.states, self._contents.values, self._contents.totals):
            for buffer in buffers.values():
                buffer.synchronize()
        self.device.drain()
        host = self.host
        states = [v for state in host.states.values() for v in state.values() if isinstance(v, torch.Tensor)]
        shared = [*host.params.values(), *host.buffers.values(), *host.grads.values(), *states]
        storages = park(self._contents, [*given, *shared, *self.binding.constants.values()])
        return Parked(storages, self.device.ledger.put_aside())

    def unpark(self, parked: Parked) -> None:
        """Have everything on the device as it was when `park` was called."""
        unpark(parked)
        self.device.ledger.restore(parked.level)

    def abandon(self) -> frozenset[str]:
        """After a failure: let what is under way end, save what only the device has, take everything off it.

        Returns: the tensors whose newest values could not be saved, since the device was lost.
        """
        lost: frozenset[str] = frozenset()
        try:
            self.device.drain()
            self._updates.salvage_begun()
            if self.complete:
                self._updates.salvage_pending()
            self._updates.rescue()
        except torch.AcceleratorError:
            lost = self._updates.give_up_on_device()
        self._transfers.release_host()
        self._gradients.forget()
        self._empty()
        self.complete, self._updating = True, False
        return lost

    def _empty(self) -> None:
        self.device.ledger.clear()
        self._contents.clear()
        if self.device.arena is not None:
            self.device.arena.let_go()
        self.loaded = False


def _never_moved(schedule: Schedule) -> frozenset[str]:
    """Parameters that stay on the device all the time."""
    names = {a.name for a in schedule.actions if a.kind in _MOVING}
    return frozenset(
        item[2:] for item in schedule.resident if item[:2] == "p:" and item not in names and item[2:] not in names
    )
