"""Replays a schedule: walks its actions in order, one short handler per kind, waiting for events and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..solver.schedule import Action, Kind, Schedule
from . import interrupts
from .binding import Binding, HostState, Update
from .computes import Computes
from .contents import Buffer, Contents
from .device import Device
from .transfers import Transfers
from .updates import Updates

_MOVING = (Kind.PREFETCH, Kind.OFFLOAD, Kind.UPDATE_CPU)


class Executor:
    """Replays one schedule on one device.

    State: `contents`, what is on the device and under way; `loaded`, whether what an iteration starts from is there;
    `complete`, whether the last backward has ended, so that all its gradients are whole. All of it is changed on the
    thread that calls `forward`, `backward` and `turn_around`, in the order of the schedule's actions; workers only
    fill tensors they were given.

    Parameters
    ----------
    schedule, binding: what to do, and on which tensors.
    host: parameters, buffers and optimizer states.
    device: where; its ledger counts every byte.
    update: the optimizer's update of one tensor; None if the user's code updates.
    fixed_bytes: what lies on the device whatever the schedule does (buffers, scalar states).
    """

    def __init__(
        self,
        schedule: Schedule,
        binding: Binding,
        host: HostState,
        device: Device,
        update: Update | None,
        fixed_bytes: int = 0,
    ) -> None:
        self.schedule, self.binding, self.host, self.device, self.update = schedule, binding, host, device, update
        self.fixed_bytes = fixed_bytes
        self.loaded = False
        self.complete = True
        self.on_action: Callable[[Action], None] | None = None
        self._contents = contents = Contents()
        self._homeless = _never_moved(schedule)
        self._transfers = Transfers(schedule, binding, host, device, contents)
        self._updates = Updates(host, device, contents, self._transfers, update, self._homeless)
        self._computes = Computes(schedule, binding, host, device, contents)
        self._updating = False
        self._handlers: dict[Kind, Callable[[str], None]] = {
            Kind.COMPUTE: self._computes.run,
            Kind.PREFETCH: self._transfers.prefetch,
            Kind.OFFLOAD: self._transfers.offload,
            Kind.FREE: self._transfers.free,
            Kind.UPDATE_CPU: self._updates.on_host,
            Kind.UPDATE_DEVICE: self._updates.on_device,
        }

    # -- an iteration -------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Bring to the device what an iteration finds there when it starts."""
        ledger = self.device.ledger
        ledger.add("b", self.fixed_bytes)
        for item in self.schedule.resident:
            if item.startswith(("old:", "g:")):
                # What the last iteration would have left; in the first one it is only counted.
                ledger.add(item.split(":")[0], self.schedule.item_bytes[item])
            elif item.startswith("p:") and item[2:] in self._homeless:
                ledger.add("p", self.schedule.item_bytes[item])
                self._contents.params[item[2:]] = Buffer({"": self.host.params[item[2:]]})
            else:
                self._take(Action(0, Kind.PREFETCH, item))
        self.loaded = True

    def forward(self, batch: Iterable[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Run the forwards.

        Parameters
        ----------
        batch: tensors in the order of `StartBinding.batch`.

        Returns: the model's output tensors by name.
        """
        if not self.loaded:
            self.load()
        self._computes.batch = tuple(batch)
        self._walk(self.schedule.forward)
        outputs, self._contents.outputs = self._contents.outputs, {}
        return outputs

    def backward(self, gradients: dict[str, torch.Tensor]) -> None:
        """Run the backwards.

        Parameters
        ----------
        gradients: of those outputs that the plan differentiates, by name.
        """
        self.complete = False
        self._computes.incoming = gradients
        self._walk(self.schedule.backward)
        self.complete, self._updating = True, False

    def turn_around(self) -> None:
        """Run what lies between the last backward and the next forward."""
        self._walk(self.schedule.turn_around)
        for name in self.binding.outputs:
            self._contents.values.pop(name, None)

    def _walk(self, actions: tuple[Action, ...]) -> None:
        recorder = self.device.recorder
        if recorder is not None:
            recorder.begin(self.schedule, actions)
        with torch.no_grad(), torch._C._DisableAutocast():
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
        leaving = self._contents.grad_leaving
        for event in leaving.values():
            event.wait()
        leaving.clear()
        grads, self._transfers.host_grads = self._transfers.host_grads, {}
        return grads

    def sync(self) -> None:
        """Wait for everything under way, do the updates that are still to come, and bring home what is newer."""
        self._updates.start_pending()
        for event in [*self._contents.written.values(), *self._contents.grad_leaving.values()]:
            event.wait()
        self._updates.rescue()

    def unload(self) -> None:
        """Take everything off the device; afterwards the host holds the truth."""
        self.sync()
        for buffer in [*self._contents.params.values(), *self._contents.states.values()]:
            buffer.settle()
        self._transfers.release_host()
        self._empty()

    def abandon(self) -> None:
        """After a failure: let what is under way end, save what only the device has, take everything off it."""
        self.device.drain()
        if self.complete:
            self._updates.salvage_pending()
        self._updates.rescue()
        self._transfers.release_host()
        self._empty()
        self.complete, self._updating = True, False

    def _empty(self) -> None:
        self.device.ledger.clear()
        self._contents.clear()
        self.loaded = False


def _never_moved(schedule: Schedule) -> frozenset[str]:
    """Parameters that stay on the device all the time."""
    names = {a.name for a in schedule.actions if a.kind in _MOVING}
    return frozenset(
        item[2:] for item in schedule.resident if item[:2] == "p:" and item not in names and item[2:] not in names
    )
