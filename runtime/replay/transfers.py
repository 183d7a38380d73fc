"""Items to tensors: what a schedule's prefetch, offload and free do."""

from __future__ import annotations

import torch

from ...solver.schedule import Schedule
from ..devices.device import Device
from ..events import Event, UnderWay
from ..layouts import meta_of, on_storage, storage_view
from .binding import Binding, HostState
from .contents import Buffer, Contents
from .gradients import Gradients
from .states import States


class Transfers:
    """Starts copies and releases tensors.

    State: `host_copies`, host memory that activations and values leave to; it is kept from one iteration to the next.

    Parameters
    ----------
    contents: what is on the device; changed here.
    """

    def __init__(
        self,
        schedule: Schedule,
        binding: Binding,
        host: HostState,
        device: Device,
        contents: Contents,
        states: States,
        gradients: Gradients,
    ) -> None:
        self._sizes, self._binding, self._host, self._device = schedule.item_bytes, binding, host, device
        self._contents, self._states, self._gradients = contents, states, gradients
        self.host_copies: dict[str, dict[str, torch.Tensor]] = {}

    def release_host(self) -> None:
        """Let go of the host memory that things left to; nothing may be under way, and nothing there still needed."""
        self.host_copies.clear()

    # -- in -----------------------------------------------------------------------------------------------------------

    def prefetch(self, item: str) -> None:
        """Allocate an item and start its copy host -> device."""
        kind, name = item.split(":", 1)
        here = self._contents
        self._device.ledger.add(kind, self._sizes[item])
        if kind == "p":
            # What is written stays noted: whoever reads the host's copy has to wait for it too.
            after = (here.written[name],) if name in here.written else ()
            here.params[name] = self._bring(item, {"": self._host.params[name]}, after)
        elif kind == "s":
            after = (here.written[item],) if item in here.written else ()
            here.states[item] = self._bring(item, self._states.sources(item), after)
        elif kind == "t":
            here.totals[name] = self._gradients.restore(name)
        else:
            self._restore(item, kind, name)

    def _bring(self, item: str, sources: dict[str, torch.Tensor], after: tuple[Event, ...]) -> Buffer:
        tensors = {key: self._device.empty_like(source) for key, source in sources.items()}
        copies = tuple(self._device.copy_in(tensors[key], source, after) for key, source in sources.items())
        return Buffer(tensors, UnderWay(f"the copy of {item} to the device", copies) if copies else None)

    def renew_states(self) -> None:
        """Copy the states that are on the device from the host again."""
        for item, buffer in self._contents.states.items():
            buffer.settle()
            sources = self._states.sources(item)
            with torch.no_grad():
                for key, tensor in buffer.tensors.items():
                    tensor.copy_(sources[key])

    def _restore(self, item: str, kind: str, name: str) -> None:
        here = self._contents
        buffer = self._bring(item, self.host_copies[item], (here.written.pop(item),))
        views = here.views.pop(item)
        if kind == "v":
            whole = next(iter(buffer.tensors.values()))
            for value, view in views.items():
                here.values[value] = Buffer({"": on_storage(whole, view)}, buffer.arrived)
            return
        saved = here.saved[int(name)]
        for key, view in views.items():
            storage, register = key.split("/")
            saved.registers[int(register)] = on_storage(buffer.tensors[storage], view)
        here.values[item] = Buffer({}, buffer.arrived)

    # -- out ----------------------------------------------------------------------------------------------------------

    def offload(self, item: str) -> None:
        """Start an item's copy device -> host."""
        kind, name = item.split(":", 1)
        here = self._contents
        if kind == "p":
            self._send(item, here.params[name], {"": self._host.params[name]}, name)
        elif kind == "s":
            buffer = here.states[item]
            self._send(item, buffer, self._states.homes(item, buffer.tensors), item)
        elif kind == "g":
            self._gradients.offload(name)
        else:
            self._put_away(item, kind, name)

    def _send(self, item: str, buffer: Buffer, targets: dict[str, torch.Tensor], key: str) -> None:
        after = () if buffer.arrived is None else (buffer.arrived,)
        copies = tuple(self._device.copy_out(targets[part], t, after) for part, t in buffer.tensors.items())
        if copies:
            buffer.leaving = self._contents.written[key] = UnderWay(f"the copy of {item} to the host", copies)
            # Until it is known to have arrived, the device's copy is the one to trust.
            self._contents.newer.add(item)

    def _put_away(self, item: str, kind: str, name: str) -> None:
        """Copy whole storages out, and remember how tensors view them."""
        here = self._contents
        if kind == "v":
            views = {v: here.values[v].read() for v in self._values_of(item) if v in here.values}
            wholes = {"": storage_view(next(iter(views.values())))}
            here.views[item] = {v: meta_of(t) for v, t in views.items()}
        else:
            saved, offloaded = here.saved[int(name)], self._binding.blocks[int(name)].offloaded
            wholes, here.views[item] = {}, {}
            for storage, registers in offloaded.items():
                wholes[str(storage)] = storage_view(saved.registers[registers[0]])
                here.views[item] |= {f"{storage}/{r}": meta_of(saved.registers[r]) for r in registers}
        homes = self.host_copies.setdefault(item, {})
        copies = []
        for key, whole in wholes.items():
            if key not in homes or homes[key].shape != whole.shape:
                homes[key] = self._device.empty_host_like(whole)
            copies.append(self._device.copy_out(homes[key], whole, ()))
        here.written[item] = UnderWay(f"the copy of {item} to the host", tuple(copies))

    def _values_of(self, item: str) -> list[str]:
        return [value for value, holder in self._binding.value_item.items() if holder == item]

    # -- away ---------------------------------------------------------------------------------------------------------

    def free(self, item: str) -> None:
        """Release an item, after the copies that read it; if one failed the item stays."""
        kind, name = item.split(":", 1)
        here = self._contents
        if kind in "ps":
            buffers, key = (here.params, name) if kind == "p" else (here.states, item)
            buffers[key].settle()
            del buffers[key]
            here.newer.discard(item)
        elif kind == "g":
            self._gradients.free(name)
        elif kind == "t":
            here.totals.pop(name, None)
        elif kind == "d":
            here.grads.pop(f"value:{name}")
        elif kind == "x":
            for shared in [n for n, i in self._binding.shared_item.items() if i == item]:
                here.shared.pop(shared, None)
        elif kind == "v":
            if item in here.written:
                here.written[item].wait()
            for value in self._values_of(item):
                here.values.pop(value, None)
        elif kind == "a":
            here.written[item].wait()
            saved = here.saved[int(name)]
            for registers in self._binding.blocks[int(name)].offloaded.values():
                for register in registers:
                    del saved.registers[register]
        elif kind == "old":
            here.returned.pop(item, None)
        self._device.ledger.remove(kind, self._sizes[item])
