"""Gradients of parameters: their way to the host, and their sums over the micro-batches of an iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...solver import items
from ...solver.arrivals import N_BUFFERS, Arrivals, Place
from ...solver.items import ItemKind
from ...solver.schedule import Kind
from ..events import Event, UnderWay
from ..layouts import on_storage
from .contents import Buffer
from .norms import Norms
from .world import World


class Gradient(NamedTuple):
    """The gradient of a parameter, and its place."""

    tensor: torch.Tensor
    on_host: bool


@dataclass(eq=False)
class _Arrival:
    """A gradient of a later micro-batch in one of the buffers on the host, until it is added to its total.

    Parameters
    ----------
    name: its parameter. place: its bytes. gradient: a view of them. completes: whether it completes a total that is
        taken then. added: the event after which the bytes may be written again, once its addition has begun.
    """

    name: str
    place: Place
    gradient: torch.Tensor
    completes: bool
    added: Event | None = None


class Gradients:
    """Moves gradients and adds them up.

    With one pass, a gradient that leaves is copied to `HostState.grads`. With several, the first one becomes the
    total, on the host or on the device; later ones are added to it once they are complete, as autograd adds to `.grad`.
    If passes have several micro-batches, the device adds all of them. A total may then be on the host between passes.

    State: `_memories`, the two host buffers, made when first needed, and `_places` in them; `_arrivals`, the gradients
    there, in order; `_unbegun`, the totals on the device to which no micro-batch has added yet, since earlier ones ran
    by plans without that parameter. All other state is in `contents` and `host`.
    """

    def __init__(self, world: World, norms: Norms) -> None:
        self._host, self._device, self._contents, self._norms = world.host, world.device, world.contents, norms
        self._shared = world.shared_host
        self._adder = world.schedule.rates.worker(Kind.ACCUMULATE_CPU.value)
        self._sizes, self._adds_up = world.schedule.item_bytes, world.schedule.adds_up
        self._on_device = world.schedule.sums_on_device
        largest = max((size for item, size in self._sizes.items() if item.kind is ItemKind.GRADIENT), default=0)
        self._largest_bytes, self._places = largest, Arrivals(largest)
        self._memories: tuple[torch.Tensor, ...] = ()
        self._arrivals: list[_Arrival] = []
        self._unbegun: set[str] = set()

    # -- items --------------------------------------------------------------------------------------------------------

    def offload(self, name: str) -> None:
        """Start the copy of a gradient to the host, unless it is on its way or its update has begun already."""
        if name in self._contents.pending and name not in self._contents.grad_leaving:
            self._send(name)

    def free(self, name: str) -> None:
        """Free a gradient on the device, after the copies that read or write it."""
        self._settle(name)
        self._contents.grads.pop(f"param:{name}", None)

    def offload_total(self, name: str) -> None:
        """Start the copy of a total to the host, where it waits for its update, or for further gradients."""
        if name in self._contents.pending and name not in self._contents.grad_leaving:
            self._copy(name, self._contents.totals[name].read())

    def free_total(self, name: str) -> None:
        """Free a total on the device, after the copies that read or write it."""
        self._settle(name)
        self._contents.totals.pop(name, None)

    def bring_back(self, name: str) -> None:
        """Start the copy of a whole gradient that waits on the host to the device, for its update there."""
        leaving, home = self._contents.grad_leaving[name], self._host.grads[name]
        tensor = self._device.empty_like(home)
        copy = self._device.copy_in(tensor, home, (leaving,))
        arrived = UnderWay(f"the copy of the gradient of {name} to the device", (copy,))
        self._contents.returned_grads[name] = Buffer({"": tensor}, arrived)

    def _settle(self, name: str) -> None:
        contents = self._contents
        if name in contents.grad_copied:
            contents.grad_copied.pop(name).wait()
        if name in contents.returned_grads:
            contents.returned_grads.pop(name).settle()

    def begin_total(self, name: str) -> None:
        """Make the first micro-batch's gradient the total on the device, or make room if it is left out."""
        gradient, total = items.gradient(name), items.total(name)
        grad = self._contents.grads.pop(f"param:{name}", None)
        if grad is None:
            self._unbegun.add(name)
            grad = self._device.empty_like(self._host.whole(name))
        else:
            self._device.ledger.remove(gradient.kind.prefix, self._sizes[gradient])
        self._contents.totals[name] = Buffer({"": grad})
        self._contents.grad_leaving.pop(name, None)
        self._device.ledger.add(total.kind.prefix, self._sizes[total])

    def accumulate(self, name: str) -> None:
        """Add a gradient to its total on the device, unless its micro-batch is left out."""
        contents, gradient = self._contents, items.gradient(name)
        grad, total = contents.grads.pop(f"param:{name}", None), contents.totals[name].read()
        if grad is not None and name in self._unbegun:
            total.copy_(grad)
            self._unbegun.discard(name)
        elif grad is not None:
            total.add_(grad)
        # The host's copy, if there was one, lacks this gradient, or is not unscaled as the device's is.
        contents.grad_leaving.pop(name, None)
        if name not in self._unbegun:
            self._norms.of_total(name)
        if grad is not None:
            self._device.ledger.remove(gradient.kind.prefix, self._sizes[gradient])

    def accumulate_on_host(self, name: str) -> None:
        """Start the addition of a gradient that was sent to its total on the host; the first one is the total."""
        for arrival in self._arrivals:
            if arrival.name == name and arrival.added is None:
                self._add(arrival)

    def restore(self, name: str) -> Buffer:
        """Bring a total back to the device before further gradients, or make room for one that has not begun."""
        leaving = self._contents.grad_leaving.get(name)
        if name not in self._host.totals and leaving is None:
            self._unbegun.add(name)
            return Buffer({"": self._device.empty_like(self._host.whole(name))})
        total = self._host.grads[name]
        tensor = self._device.empty_like(total)
        copy = self._device.copy_in(tensor, total, (leaving,) if leaving is not None else ())
        self._host.totals.discard(name)
        if self._on_device:
            self._contents.pending.add(name)
        return Buffer({"": tensor}, UnderWay(f"the copy of the total of {name} to the device", (copy,)))

    # -- the whole gradient -------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The parameters of which this iteration has made a gradient that no update has used yet."""
        return sorted(self._contents.pending | self._host.totals)

    def exists(self, name: str) -> bool:
        """Return whether this iteration has made a gradient of a parameter that no update has used yet."""
        return name in self._contents.pending or name in self._host.totals

    def whole(self, name: str) -> Gradient:
        """Return a parameter's complete gradient, once it can be read."""
        contents = self._contents
        if name in contents.returned_grads:
            return Gradient(contents.returned_grads[name].read(), False)
        if name in contents.totals and name not in contents.grad_leaving:
            return Gradient(contents.totals[name].read(), False)
        if not self._adds_up and f"param:{name}" in contents.grads and name not in contents.grad_leaving:
            return Gradient(contents.grads[f"param:{name}"], False)
        for event in self.bring_home(name):
            event.synchronize()
        return Gradient(self._host.grads[name], True)

    def bring_home(self, name: str) -> tuple[Event, ...]:
        """Have the complete gradient copied to the host; return the events after which it is there."""
        contents = self._contents
        if name in contents.totals:
            if name not in self._unbegun and name not in contents.grad_leaving:
                self._copy(name, contents.totals[name].read())
        elif f"param:{name}" in contents.grads and name not in contents.grad_leaving and name in contents.pending:
            self._send(name)
        self.accumulate_on_host(name)
        events = (contents.grad_leaving.get(name), contents.grad_adding.get(name))
        return tuple(event for event in events if event is not None)

    def store_totals(self) -> None:
        """Copy all sums of gradients to the host, in the middle of an iteration."""
        contents = self._contents
        for name in sorted({*contents.totals, *contents.pending} - self._unbegun):
            for event in self.bring_home(name):
                event.synchronize()
            self._host.totals.add(name)

    def take(self) -> dict[str, torch.Tensor]:
        """Hand over the gradients sent to the host, once they have arrived."""
        leaving = self._contents.grad_leaving
        for event in leaving.values():
            event.synchronize()
        leaving.clear()
        grads, self._host.grads = self._host.grads, {}
        return grads

    def release_host(self) -> None:
        """Free host memory; nothing may be under way. Sums with which an iteration continues stay."""
        self._host.grads = {name: grad for name, grad in self._host.grads.items() if name in self._host.totals}
        self._shared.clear()
        self._arrivals.clear()
        self._memories = ()
        self._unbegun.clear()

    def forget(self) -> None:
        """Discard all sums, since the iteration was given up."""
        self._host.totals.clear()
        self.release_host()

    # -- copies -------------------------------------------------------------------------------------------------------

    def _send(self, name: str) -> None:
        grad = self._contents.grads[f"param:{name}"]
        if self._adds_up and name in self._host.totals:
            self._send_to_arrival(name, grad)
        else:
            self._copy(name, grad)
            if self._adds_up:
                self._host.totals.add(name)

    def _copy(self, name: str, grad: torch.Tensor) -> None:
        item = items.gradient(name)
        if self._shared.has_place(item):
            self._host.grads[name] = self._shared.take(item, {"": grad})[""]
        elif name not in self._host.grads or self._host.grads[name].dtype != grad.dtype:
            self._host.grads[name] = self._device.empty_host_like(grad)
        copy = self._device.copy_out(self._host.grads[name], grad, self._shared.free_after(item))
        self._leaves(name, copy)

    def _leaves(self, name: str, copy: Event) -> None:
        contents = self._contents
        contents.grad_leaving[name] = UnderWay(f"the copy of the gradient of {name} to the host", (copy,))
        contents.grad_copied[name] = contents.grad_leaving[name]

    def _send_to_arrival(self, name: str, grad: torch.Tensor) -> None:
        place = self._places.place(grad.untyped_storage().nbytes())
        after = self._free_after(place)
        gradient = on_storage(self._memory(place.buffer), grad, place.start_bytes)
        self._arrivals.append(_Arrival(name, place, gradient, self._norms.completes(name)))
        self._leaves(name, self._device.copy_out(gradient, grad, after))

    def _memory(self, buffer: int) -> torch.Tensor:
        if not self._memories:
            like = torch.empty(self._largest_bytes, dtype=torch.uint8, device="meta")
            self._memories = tuple(self._device.empty_host_like(like) for _ in range(N_BUFFERS))
        return self._memories[buffer]

    def _free_after(self, place: Place) -> tuple[Event, ...]:
        """Return the additions after which a place may be written; those that have not begun begin."""
        # One that a place takes in part stays in the list: whoever takes the rest has to wait for it, too.
        self._arrivals = [arrival for arrival in self._arrivals if arrival.added is None or not arrival.added.ready()]
        earlier = [arrival for arrival in self._arrivals if arrival.place.overlaps(place)]
        return tuple(arrival.added or self._add(arrival) for arrival in earlier)

    def _add(self, arrival: _Arrival) -> Event:
        """Begin a gradient's addition to its total; return the event of its end."""
        contents, name, gradient = self._contents, arrival.name, arrival.gradient
        total = self._host.grads[name]
        before = contents.grad_adding.get(name)
        after = (contents.grad_leaving[name], *((before,) if before is not None else ()))
        norms = self._norms if arrival.completes else None
        if norms is not None:
            after += norms.awaited
        added = self._device.update_on_host(lambda: _add_to(total, gradient, name, norms), after, self._adder)
        arrival.added = UnderWay(f"the addition of the gradient of {name} on the CPU", (added,))
        contents.grad_adding[name] = arrival.added
        return arrival.added


def _add_to(total: torch.Tensor, gradient: torch.Tensor, name: str, norms: Norms | None) -> None:
    total.add_(gradient)
    if norms is not None:
        norms.on_worker(name, total)
