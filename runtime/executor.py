"""Replays a schedule: walks its actions in order, one short handler per kind, waiting for events and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..solver.schedule import Action, Kind, Schedule
from .binding import Binding, BlockBinding, HostState, Port, Update
from .device import Device, Event
from .program import run


@dataclass
class Buffer:
    """Device tensors of one item and the event after which they may be read. A buffer and its event travel together."""

    tensors: dict[str, torch.Tensor]
    arrived: Event | None = None
    leaving: Event | None = None

    def settle(self) -> None:
        """Wait for the copies that read or write it."""
        for event in (self.arrived, self.leaving):
            if event is not None:
                event.wait()


@dataclass
class Saved:
    """What a block's forward left for its backward: registers by number, bytes by storage."""

    registers: dict[int, torch.Tensor] = field(default_factory=dict)
    storage_bytes: dict[int, int] = field(default_factory=dict)


def storage_view(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor as one flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def on_storage(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor that views `flat`'s storage as `like` views its own."""
    view = torch.empty(0, dtype=like.dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that remembers shape, strides, offset and dtype."""
    whole = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
    return on_storage(whole, tensor)


class Executor:
    """Replays one schedule on one device.

    State: what is on the device (`params`, `states`, `values`, `shared`, `grads`, `saved`), what is on the host and
    under way. All of it is changed on the thread that calls `forward`, `backward` and `turn_around`, in the order of
    the schedule's actions; workers only fill tensors they were given.

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
        self.on_action: Callable[[Action], None] | None = None
        names = {a.name for a in schedule.actions if a.kind in (Kind.PREFETCH, Kind.OFFLOAD, Kind.UPDATE_CPU)}
        self.homeless = frozenset(
            item[2:] for item in schedule.resident if item[:2] == "p:" and item not in names and item[2:] not in names
        )
        self._clear()
        self._handlers = {
            Kind.PREFETCH: self._prefetch,
            Kind.OFFLOAD: self._offload,
            Kind.FREE: self._free,
            Kind.UPDATE_CPU: self._update_cpu,
            Kind.UPDATE_DEVICE: self._update_device,
        }

    def _clear(self) -> None:
        self.params: dict[str, Buffer] = {}
        self.states: dict[str, Buffer] = {}
        self.values: dict[str, Buffer] = {}
        self.shared: dict[str, torch.Tensor] = {}
        self.grads: dict[str, torch.Tensor] = {}
        self.grad_leaving: dict[str, Event] = {}
        self.saved: dict[int, Saved] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.newer: set[str] = set()
        self.written: dict[str, Event] = {}
        self.pending: set[str] = set()
        self.host_grads: dict[str, torch.Tensor] = getattr(self, "host_grads", {})
        self.host_copies: dict[str, dict[str, torch.Tensor]] = getattr(self, "host_copies", {})
        self._metas: dict[str, dict[str, torch.Tensor]] = {}

    # -- an iteration -------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Bring to the device what an iteration finds there when it starts."""
        ledger = self.device.ledger
        ledger.add("b", self.fixed_bytes)
        for item in self.schedule.resident:
            if item.startswith(("old:", "g:")):
                # What the last iteration would have left; in the first one it is only counted.
                ledger.add(item.split(":")[0], self.schedule.item_bytes[item])
            elif item.startswith("p:") and item[2:] in self.homeless:
                ledger.add("p", self.schedule.item_bytes[item])
                self.params[item[2:]] = Buffer({"": self.host.params[item[2:]]})
            else:
                self._prefetch(item)
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
        self._batch = tuple(batch)
        self._walk(self.schedule.forward)
        outputs, self.outputs = self.outputs, {}
        return outputs

    def backward(self, gradients: dict[str, torch.Tensor]) -> None:
        """Run the backwards.

        Parameters
        ----------
        gradients: of those outputs that the plan differentiates, by name.
        """
        self._incoming = gradients
        self._walk(self.schedule.backward)

    def turn_around(self) -> None:
        """Run what lies between the last backward and the next forward."""
        self._walk(self.schedule.turn_around)
        for name in self.binding.outputs:
            self.values.pop(name, None)

    def _walk(self, actions: tuple[Action, ...]) -> None:
        with torch.no_grad(), torch._C._DisableAutocast():
            for action in actions:
                if self.on_action is not None:
                    self.on_action(action)
                if action.kind is Kind.COMPUTE:
                    self._compute(action.name)
                else:
                    self._handlers[action.kind](action.name)

    # -- the truth ------------------------------------------------------------------------------------------------

    def take_host_grads(self) -> dict[str, torch.Tensor]:
        """Hand over the gradients that have arrived on the host."""
        grads, self.host_grads = self.host_grads, {}
        return grads

    def sync(self) -> None:
        """Wait for everything under way, and copy to the host what only the device has."""
        if self.update is not None:
            # Updates that the schedule starts during the next forward are done now; it will find them done.
            for name in sorted(self.pending):
                if name not in self.grad_leaving:
                    self._send_gradient(name)
                self._update_cpu(name)
        for event in [*self.written.values(), *self.grad_leaving.values()]:
            event.wait()
        self._rescue()

    def _rescue(self) -> None:
        """Copy what the device has newer than the host; nothing may be under way."""
        with torch.no_grad():
            for name in self.newer & self.params.keys():
                own = self.host.params[name]
                if name not in self.homeless:
                    own.copy_(self.params[name].tensors[""])
                for key, tensor in self.states[name].tensors.items() if name in self.states else ():
                    target = self.host.states[name].get(key)
                    if isinstance(target, torch.Tensor) and target is not tensor:
                        target.copy_(tensor)

    def unload(self) -> None:
        """Take everything off the device; afterwards the host holds the truth."""
        self.sync()
        for buffer in [*self.params.values(), *self.states.values()]:
            buffer.settle()
        self.device.ledger.remove("all", self.device.ledger.level_bytes)
        self._clear()
        self.loaded = False

    def abandon(self) -> None:
        """After a failure: let what is under way end, save what only the device has, take everything off it."""
        self.device.drain()
        self._rescue()
        self.device.ledger.remove("all", self.device.ledger.level_bytes)
        self._clear()
        self.host_grads.clear()
        self.loaded = False

    # -- compute ------------------------------------------------------------------------------------------------

    def _compute(self, name: str) -> None:
        if name == "start":
            self._start()
        elif name == "user":
            self._user()
        elif name[0] == "F":
            self._forward_block(int(name[1:]))
        else:
            self._backward_block(int(name[1:]))

    def _start(self) -> None:
        start, ledger = self.binding.start, self.device.ledger
        batch_bytes: dict[str, int] = {}
        for name, tensor in zip(start.batch, self._batch):
            if name is not None and tensor is not None:
                self.shared[name] = own = self.device.empty_like(tensor)
                own.copy_(tensor)
                batch_bytes[name] = own.untyped_storage().nbytes()
                ledger.add("x", batch_bytes[name])
        self._batch = ()
        registers: list[Any] = [None] * start.program.n_registers
        given: dict[int, int] = {}
        for port in start.inputs:
            registers[port.register] = self._read(port)
            if port.storage in start.program.given:
                given[port.storage] = batch_bytes[port.name]
        for name in batch_bytes:
            if name not in self.binding.shared_item:
                self.shared.pop(name)
        run(start.program, registers, ledger, given)
        for port in start.results:
            self.shared[port.name] = registers[port.register]

    def _forward_block(self, index: int) -> None:
        block = self.binding.blocks[index]
        registers = self._registers(block, block.forward.n_registers)
        live = run(block.forward, registers, self.device.ledger, {})
        for port in block.writes:
            self.host.buffers[port.name].copy_(registers[port.register])
            self.device.ledger.freed(live.pop(port.storage))
        for port in block.results:
            self.values[port.name] = Buffer({"": registers[port.register]})
            if port.name in self.binding.outputs:
                self.outputs[port.name] = registers[port.register]
        saved = self.saved[index] = Saved()
        for storage, views in {**block.kept, **block.offloaded}.items():
            saved.registers |= {r: registers[r] for r in views}
            saved.storage_bytes[storage] = live[storage]

    def _backward_block(self, index: int) -> None:
        block = self.binding.blocks[index]
        saved = self.saved.pop(index)
        copies = self.values.pop(f"a:{index}", None)
        if copies is not None:
            copies.settle()
        registers = self._registers(block, block.backward.n_registers)
        for port in block.results:
            buffer = self.values.get(port.name)
            if buffer is not None:
                registers[port.register] = self._arrived(buffer)
        for register, tensor in saved.registers.items():
            registers[register] = tensor
        given = dict(saved.storage_bytes)
        saved = copies = None  # type: ignore[assignment]
        for port in block.tangents:
            registers[port.register] = tensor = self.grads.pop(port.name)
            given[port.storage] = tensor.untyped_storage().nbytes()
        tensor = None  # type: ignore[assignment]
        run(block.backward, registers, self.device.ledger, given)
        for port in block.grads:
            self.grads[port.name] = registers[port.register]
            if port.name.startswith("param:"):
                self.pending.add(port.name[6:])

    def _registers(self, block: BlockBinding, n_registers: int) -> list[Any]:
        registers: list[Any] = [None] * n_registers
        for port in block.inputs:
            registers[port.register] = self._read(port)
        return registers

    def _read(self, port: Port) -> torch.Tensor | None:
        if port.kind == "param":
            return self._arrived(self.params[port.name]) if port.name in self.params else None
        if port.kind == "buffer":
            return self.host.buffers[port.name]
        if port.kind == "shared":
            constant = self.binding.constants.get(port.name)
            return self.shared.get(port.name) if constant is None else constant
        buffer = self.values.get(port.name)
        return None if buffer is None else self._arrived(buffer)

    @staticmethod
    def _arrived(buffer: Buffer) -> torch.Tensor:
        if buffer.arrived is not None:
            buffer.arrived.wait()
            buffer.arrived = None
        return next(iter(buffer.tensors.values()))

    def _user(self) -> None:
        """The user's code has run between the forwards and the backwards and hands in gradients."""
        spec = self.schedule.computes["user"]
        self.device.ledger.made(0, spec.rise_bytes)
        for item in spec.makes:
            name = item[2:]
            self.device.ledger.add("d", self.schedule.item_bytes[item])
            self.grads[f"value:{name}"] = self._incoming.pop(name)

    # -- copies -------------------------------------------------------------------------------------------------

    def _prefetch(self, item: str) -> None:
        kind, name = item.split(":", 1)
        self.device.ledger.add(kind, self.schedule.item_bytes[item])
        if kind == "p":
            source = self.host.params[name]
            after = (self.written.pop(name),) if name in self.written else ()
            self.params[name] = self._bring({"": source}, after)
        elif kind == "s":
            after = (self.written.pop(item),) if item in self.written else ()
            host = {k: v for k, v in self.host.states.get(name, {}).items() if is_bulk(v)}
            self.states[name] = self._bring(host, after)  # type: ignore[arg-type]
        else:
            self._restore(item, kind, name)

    def _bring(self, sources: dict[str, torch.Tensor], after: tuple[Event, ...]) -> Buffer:
        buffer = Buffer({})
        for key, source in sources.items():
            buffer.tensors[key] = target = self.device.empty_like(source)
            buffer.arrived = self.device.copy_in(target, source, after)
        return buffer

    def _restore(self, item: str, kind: str, name: str) -> None:
        after = (self.written.pop(item),)
        buffer = self._bring(self.host_copies[item], after)
        metas = self._metas.pop(item)
        if kind == "v":
            whole = next(iter(buffer.tensors.values()))
            for value, meta in metas.items():
                self.values[value] = Buffer({"": on_storage(whole, meta)}, buffer.arrived)
            return
        saved = self.saved[int(name)]
        for register, meta in metas.items():
            storage, number = register.split("/")
            saved.registers[int(number)] = on_storage(buffer.tensors[storage], meta)
        self.values[item] = Buffer({}, buffer.arrived)

    def _offload(self, item: str) -> None:
        kind, name = item.split(":", 1)
        if kind == "p":
            self._send(self.params[name], {"": self.host.params[name]}, name)
        elif kind == "s":
            self._send(self.states[name], self._host_state(name), item)
        elif kind == "g":
            if name in self.pending:
                self._send_gradient(name)
        else:
            self._put_away(item, kind, name)

    def _send_gradient(self, name: str) -> None:
        grad = self.grads[f"param:{name}"]
        if name not in self.host_grads:
            self.host_grads[name] = self.device.empty_host_like(grad)
        self.grad_leaving[name] = self.device.copy_out(self.host_grads[name], grad, ())

    def _send(self, buffer: Buffer, targets: dict[str, torch.Tensor], key: str) -> None:
        after = () if buffer.arrived is None else (buffer.arrived,)
        for part, tensor in buffer.tensors.items():
            buffer.leaving = self.device.copy_out(targets[part], tensor, after)
        if buffer.leaving is not None:
            self.written[key] = buffer.leaving

    def _host_state(self, name: str) -> dict[str, torch.Tensor]:
        state = self.host.states[name]
        for key, tensor in self.states[name].tensors.items():
            if state.get(key) is tensor or not isinstance(state.get(key), torch.Tensor):
                state[key] = self.device.empty_host_like(tensor)
        return state  # type: ignore[return-value]

    def _put_away(self, item: str, kind: str, name: str) -> None:
        """Copy whole storages out, and remember how tensors view them."""
        if kind == "v":
            names = [v for v, i in self.binding.value_item.items() if i == item and v in self.values]
            views = {v: self._arrived(self.values[v]) for v in names}
            wholes = {"": storage_view(next(iter(views.values())))}
            self._metas[item] = {v: meta_of(t) for v, t in views.items()}
        else:
            saved, offloaded = self.saved[int(name)], self.binding.blocks[int(name)].offloaded
            wholes, self._metas[item] = {}, {}
            for storage, registers in offloaded.items():
                wholes[str(storage)] = storage_view(saved.registers[registers[0]])
                self._metas[item] |= {f"{storage}/{r}": meta_of(saved.registers[r]) for r in registers}
        homes = self.host_copies.setdefault(item, {})
        for key, whole in wholes.items():
            if key not in homes or homes[key].shape != whole.shape:
                homes[key] = self.device.empty_host_like(whole)
            self.written[item] = self.device.copy_out(homes[key], whole, ())

    def _free(self, item: str) -> None:
        kind, name = item.split(":", 1)
        if kind == "p":
            self.params.pop(name).settle()
        elif kind == "s":
            self.states.pop(name).settle()
        elif kind == "g":
            if name in self.grad_leaving:
                self.grad_leaving[name].wait()
            self.grads.pop(f"param:{name}", None)
        elif kind == "d":
            self.grads.pop(f"value:{name}")
        elif kind == "x":
            for shared in [n for n, i in self.binding.shared_item.items() if i == item]:
                self.shared.pop(shared, None)
        elif kind == "v":
            if item in self.written:
                self.written[item].wait()
            for value in [v for v, i in self.binding.value_item.items() if i == item]:
                self.values.pop(value, None)
        elif kind == "a":
            self.written[item].wait()
            saved = self.saved[int(name)]
            for registers in self.binding.blocks[int(name)].offloaded.values():
                for register in registers:
                    del saved.registers[register]
        self.device.ledger.remove(kind, self.schedule.item_bytes[item])

    # -- updates ------------------------------------------------------------------------------------------------

    def _update_cpu(self, name: str) -> None:
        if name not in self.pending:
            return
        self.pending.remove(name)
        assert self.update is not None
        update, host, grad = self.update, self.host, self.host_grads[name]
        after = (self.grad_leaving.pop(name),)

        def work() -> None:
            update(name, host.params[name], grad, host.states.setdefault(name, {}))
            host.updates[name] = host.updates.get(name, 0) + 1

        self.written[name] = self.device.update_on_host(work, after)

    def _update_device(self, name: str) -> None:
        assert self.update is not None
        param, grad = self._arrived(self.params[name]), self.grads[f"param:{name}"]
        buffer = self.states.setdefault(name, Buffer({}))
        buffer.settle()
        host = self.host.states.setdefault(name, {})
        state: dict[str, object] = {**host, **buffer.tensors}
        self.pending.discard(name)
        self.newer.add(name)
        self.update(name, param, grad, state)
        self.host.updates[name] = self.host.updates.get(name, 0) + 1
        buffer.tensors = {k: v for k, v in state.items() if is_bulk(v)}  # type: ignore[misc]
        for key, value in state.items():
            if not is_bulk(value) or not isinstance(host.get(key), torch.Tensor):
                host[key] = value


def is_bulk(value: object) -> bool:
    """Whether a part of an optimizer's state is a tensor worth moving; scalars stay where they are."""
    return isinstance(value, torch.Tensor) and value.dim() > 0
