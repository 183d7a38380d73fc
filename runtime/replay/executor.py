"""Replay of a schedule: walks its actions in order, with one short handler per kind, and waits for events only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ...errors import StorageError
from ...solver import items
from ...solver.effects import resident_at
from ...solver.items import ItemKind
from ...solver.schedule import Action, Kind, Schedule
from .. import interrupts
from ..devices.generator import Generator
from ..torch_names.autograd import without_autocast
from .computes import Batch, Computes, Incoming
from .gate import Clip, Gate
from .gradients import Gradients
from .handlers import Handlers
from .norms import Norms
from .parking import Parked, park, unpark
from .rescue import Rescue
from .shapes import Shape
from .speculation import Speculation
from .states import States
from .transfers import Transfers
from .updates import Updates
from .world import World

_MOVING = (Kind.PREFETCH, Kind.OFFLOAD, Kind.UPDATE_CPU, Kind.SPECULATE_CPU)
_OF_THE_LAST = (ItemKind.OLD_OUTPUT, ItemKind.GRADIENT, ItemKind.SHARED)  # present at the start, never brought


class Executor:
    """Replays one schedule on one device.

    State: the world's contents; `loaded`, whether the items that a pass starts with are on the device;
    `complete`, whether the last backward has ended, so that all its gradients are complete; `gate`. All of it changes
    on the thread that calls `forward`, `backward` and `turn_around`, in the order of the schedule's actions; workers
    only fill the tensors that they are given.

    Parameters
    ----------
    world: the schedule, its tensors and the device.
    fixed_bytes: bytes that are on the device regardless of the schedule (buffers, scalar states).
    clip: the clipping of gradients when the schedule's gate opens.
    """

    def __init__(self, world: World, fixed_bytes: int = 0, clip: Clip | None = None) -> None:
        self.world = world
        self.schedule, self.binding, self.host, self.device = world.schedule, world.binding, world.host, world.device
        self.fixed_bytes = fixed_bytes
        self.loaded = False
        self.complete = True
        self.on_action: Callable[[Action], None] | None = None
        self._contents = world.contents
        unmoved = _never_moved(world.schedule) if world.device.torch_device.type == "cpu" else frozenset()
        self._norms = Norms(world, clip.names if clip is not None else ())
        states, self._gradients = States(world), Gradients(world, self._norms)
        self.gate = Gate(world.schedule.gate, clip, world.host, self._gradients, self._norms)
        self._by_kind = Handlers(world, states, self._gradients, unmoved)
        self._transfers = Transfers(world, self._by_kind.of)
        self._rescue = Rescue(world, states, unmoved)
        self._updates = Updates(world, states, self._gradients, self.gate, self._rescue)
        self._computes = Computes(world, self.gate, self._norms)
        max_norm = clip.max_norm if clip is not None else None
        self._speculation = Speculation(world, self._gradients, self.gate, self._norms, self._updates, max_norm)
        self._updating = False
        # Handlers with a reference to the executor would keep it, and its programs, alive until garbage is collected.
        computes, transfers, gradients, updates = self._computes, self._transfers, self._gradients, self._updates
        speculation = self._speculation

        def compute(action: Action) -> None:
            computes.run(action.name)
            if action.name == "gate":
                speculation.settle()

        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.COMPUTE: compute,
            Kind.PREFETCH: lambda action: transfers.prefetch(action.item),
            Kind.OFFLOAD: lambda action: transfers.offload(action.item),
            Kind.FREE: lambda action: transfers.free(action.item),
            Kind.BEGIN_TOTAL: lambda action: gradients.begin_total(action.name),
            Kind.ACCUMULATE: lambda action: gradients.accumulate(action.name),
            Kind.ACCUMULATE_CPU: lambda action: gradients.accumulate_on_host(action.name),
            Kind.UPDATE_CPU: lambda action: updates.on_host(action.name),
            Kind.SPECULATE_CPU: lambda action: speculation.start(action.name),
            Kind.UPDATE_DEVICE: lambda action: updates.on_device(action.name),
        }

    # -- an iteration -------------------------------------------------------------------------------------------------

    def load(self, number: int = 0) -> None:
        """Bring to the device the items with which a pass starts.

        Parameters
        ----------
        number: of the pass in the update, from 0.
        """
        self.device.ledger.add("b", self.fixed_bytes)
        for item in resident_at(self.schedule, number):
            if item.kind in _OF_THE_LAST or (item.kind is ItemKind.TOTAL and number == 0):
                self._transfers.count(item)
            else:
                self._take(Action(0, Kind.PREFETCH, item))
        self.loaded = True

    @property
    def generator(self) -> Generator:
        """What the forwards draw from."""
        return self._computes.generator

    @property
    def drawn_from(self) -> tuple[torch.Tensor, ...]:
        """The generator's state before each micro-batch of the last pass, if its forwards draw; empty otherwise."""
        return self._computes.drawn_from

    def settle_states(self) -> bool:
        """Move the host's optimizer states to RAM or to files, as the schedule has them; return whether any moved."""
        return self._by_kind.states.settle(self.schedule.states_in_files)

    def reserve_states(self, forms: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the space in files for states that their first updates will make; see `States.reserve`."""
        self._by_kind.states.reserve(forms)

    def forward(
        self, batch: Iterable[torch.Tensor | None], number: int = 0, shape: Shape | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the forwards of a pass of one micro-batch.

        Parameters
        ----------
        batch: tensors in the order of `StartBinding.batch`. number: of the pass in the update, from 0.
        shape: of the batch; None for the schedule's own.

        Returns: the model's output tensors by name.
        """
        (outputs,) = self.forwards((tuple(batch),), number, () if shape is None else (shape,))
        return outputs

    def forwards(
        self, batches: Iterable[Batch], number: int = 0, shapes: Sequence[Shape] = ()
    ) -> list[dict[str, torch.Tensor]]:
        """Run the forwards of a pass, for all its micro-batches.

        Parameters
        ----------
        batches: of each micro-batch, as in `forward`. number: of the pass in the update, from 0.
        shapes: of the batches; empty if all have the schedule's own.

        Returns: by micro-batch, the model's output tensors by name.
        """
        self.world.shapes.begin(shapes, lambda: resident_at(self.schedule, number))
        if not self.loaded:
            self.load(number)
        self._computes.renew_buffers()
        self._computes.batches = list(batches)
        self._walk(self.schedule.pass_of(number).forward)
        return self._computes.take_outputs()

    def backward(self, gradients: dict[str, torch.Tensor], number: int = 0, speculates: bool = False) -> None:
        """Run the backwards of a pass of one micro-batch.

        Parameters
        ----------
        gradients: by name, the gradients of the outputs that the plan differentiates. number: as in `forward`.
        speculates: whether updates that the schedule places before the gate may begin there.
        """
        self.backwards((gradients,), number, speculates)

    def backwards(self, gradients: Sequence[Incoming], number: int = 0, speculates: bool = False) -> None:
        """Run the backwards of a pass, for all its micro-batches but those that are left out.

        Parameters
        ----------
        gradients: by micro-batch and name, those of the outputs that the plan differentiates; None for a micro-batch
            that is left out. number: as in `forwards`. speculates: as in `backward`.
        """
        self.complete = False
        self.gate.close()
        last = number == self.schedule.micro_batches - 1
        self._norms.begin(last=last)
        self._speculation.begin(speculates and last)
        self._computes.incoming = gradients
        self._contents.left_out = {slot for slot, own in enumerate(gradients) if own is None}
        self._walk(self.schedule.pass_of(number).backward)
        self.complete, self._updating = True, False
        contents = self._contents
        for batch in contents.batches.values():
            for name in self.binding.outputs:
                batch.values.pop(name, None)
        contents.returned = {items.after_pass(item): tensor for item, tensor in contents.returned.items()}

    def turn_around(self) -> None:
        """Run the actions between the last backward and the next forward; a gate opens in it."""
        self._walk(self.schedule.turn_around)
        if not self.schedule.gate:
            self.gate.measure()

    @property
    def has_speculated(self) -> bool:
        """Whether updates have been started before the gate, which has not opened yet, or still could be."""
        return self._speculation.any

    @property
    def kept(self) -> bool:
        """Whether the gate, once open, has kept the updates before it, or would have kept them."""
        return self._speculation.kept

    def retract(self) -> None:
        """Undo the updates that were started before the gate; they are made behind it."""
        self._speculation.retract()

    def unscale(self) -> None:
        """Unscale the complete gradients that have not been unscaled yet; updates may then begin at any time."""
        with torch.no_grad(), without_autocast():
            self.gate.unscale()

    def finish(self) -> None:
        """End an iteration of fewer passes than planned by making all updates on the host, now."""
        self.unload()
        self.gate.open()
        self.sync()

    def _walk(self, actions: tuple[Action, ...]) -> None:
        recorder = self.device.recorder
        if recorder is not None:
            recorder.begin(self.world.shapes.schedule, actions)
        with torch.no_grad(), without_autocast():
            for action in actions:
                if self.on_action is not None:
                    self.on_action(action)
                interrupts.checkpoint(patient=self._updating)
                if not self.complete and action.kind in (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE):
                    self._updating = True
                self._take(action)
        if recorder is not None:
            recorder.end(self.world.shapes.schedule, actions)

    def _take(self, action: Action) -> None:
        handler, recorder = self._handlers[action.kind], self.device.recorder
        if recorder is None:
            handler(action)
        else:
            recorder.take(action, handler)

    # -- synchronization with the host --------------------------------------------------------------------------------

    def take_host_grads(self) -> dict[str, torch.Tensor]:
        """Hand over the gradients that have left for the host, once they are there."""
        return self._gradients.take()

    def sync(self) -> None:
        """Wait for everything under way, make the updates that are due, and copy newer values to the host."""
        self.retract()
        self._updates.start_pending()
        contents = self._contents
        for event in [*contents.written.values(), *contents.grad_leaving.values(), *contents.grad_adding.values()]:
            event.synchronize()
        # Whoever reads or writes files directly must be alone.
        in_files = [buffer for item, buffer in contents.states.items() if item.name in self.host.in_store]
        in_files += [buffer for name, buffer in contents.params.items() if self.host.stores(name)]
        for buffer in in_files:
            buffer.synchronize()
        self._rescue.everything()

    @property
    def newer_buffers(self) -> frozenset[str]:
        """The names of the model's buffers of which only the device has the newest values."""
        return frozenset(self._contents.newer_buffers)

    def bring_buffers(self) -> None:
        """Copy the model's buffers that are newer on the device to the host."""
        self._rescue.buffers()

    def renew_parameters(self, names: Iterable[str]) -> None:
        """Copy the host's values of these parameters, the newest after `sync`, to the device again."""
        self._by_kind.parameters.renew(names)

    def renew_states(self) -> None:
        """Copy the host's optimizer states, the newest after `sync`, to the device again."""
        self._by_kind.states.renew()

    def unload(self) -> None:
        """Take everything off the device; afterwards the host's values are current, sums of gradients included."""
        self.sync()
        if not self.gate.is_open:
            self._gradients.store_totals()
        for buffer in [*self._contents.params.values(), *self._contents.states.values()]:
            buffer.synchronize()
        self.device.drain()
        self._by_kind.release_host()
        self._gradients.release_host()
        self._empty()

    def release_files(self) -> None:
        """Give back the space in files of activations, after `unload`; the next iteration takes it again."""
        self._by_kind.release_files()

    def park(self, given: Iterable[torch.Tensor]) -> Parked:
        """Clear the device for other work between a forward and its backward, until `unpark`.

        Parameters
        ----------
        given: the outputs; their memory stays, as does the memory shared with the host.
        """
        self.sync()
        contents = self._contents
        for buffer in contents.buffers():
            buffer.synchronize()
        self.device.drain()
        host = self.host
        states = [v for state in host.states.values() for v in state.values() if isinstance(v, torch.Tensor)]
        shared = [*host.params.values(), *host.buffers.values(), *host.grads.values(), *states]
        storages = park(contents, [*given, *shared, *self.binding.constants.values()])
        return Parked(storages, self.device.ledger.put_aside())

    def unpark(self, parked: Parked) -> None:
        """Restore everything on the device as it was when `park` was called."""
        unpark(parked)
        self.device.ledger.restore(parked.level)

    def abandon(self) -> frozenset[str]:
        """Clear the device after a failure: let work under way end, and save values that only the device has.

        Returns: the tensors whose newest values could not be saved, because the device was lost or a disk failed.
        """
        lost: frozenset[str] = frozenset()
        with contextlib.suppress(StorageError):  # what could not be put back is among what is lost
            self.retract()
        try:
            self.device.drain()
            self._updates.salvage_begun()
            if self.complete:
                self._updates.salvage_pending()
            lost = self._rescue.everything(after_failure=True) | self._rescue.unread()
        except torch.AcceleratorError:
            lost = self._rescue.give_up_on_device()
        lost |= self._updates.lost_from_files()
        self._by_kind.release_host()
        self._gradients.forget()
        self._empty()
        self.complete, self._updating = True, False
        return lost

    def _empty(self) -> None:
        self.device.ledger.clear()
        self._contents.clear()
        self._norms.clear()
        self._speculation.clear()
        self._updates.forget()
        if self.device.arena is not None:
            self.device.arena.let_go()
        self.loaded = False


def _never_moved(schedule: Schedule) -> frozenset[str]:
    """Return the parameters that stay on the device all the time, and whose homes are in RAM."""
    names = {a.name for a in schedule.actions if a.kind in _MOVING} | schedule.parameters_in_files
    resident = (item for item in schedule.resident if item.kind is ItemKind.PARAMETER)
    return frozenset(item.name for item in resident if item not in names and item.name not in names)
