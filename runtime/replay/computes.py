"""Execution of a schedule's computes: fills programs' registers with tensors, and keeps the results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...solver import items
from ..torch_names.tensors import version_of
from .binding import BlockBinding, Port
from .contents import Buffer, Saved
from .gate import Gate
from .norms import Norms
from .program import run
from .world import World


class Computes:
    """Runs computes, with one short method per kind.

    State: `batch` and `incoming`, the user's batch and gradients, until they are used; `_seen_buffers`, memory and
    version of the host's buffers of which the device has copies.

    Parameters
    ----------
    gate: the gate that the compute of that name opens. norms: take those of the gradients that backwards complete.
    """

    def __init__(self, world: World, gate: Gate, norms: Norms) -> None:
        self._schedule, self._binding, self._host = world.schedule, world.binding, world.host
        self._device, self._contents, self._gate, self._norms = world.device, world.contents, gate, norms
        self._on_host = world.device.torch_device.type == "cpu"
        self._seen_buffers: dict[str, tuple[int, int]] = {}
        self.batch: tuple[torch.Tensor | None, ...] = ()
        self.incoming: dict[str, torch.Tensor] = {}

    def run(self, name: str) -> None:
        """Run the compute of this name: "start", "F3", "user", "B3", "gate"."""
        if name == "start":
            self._start()
        elif name == "user":
            self._user()
        elif name == "gate":
            self._gate.open()
        elif name[0] == "F":
            self._forward_block(int(name[1:]))
        else:
            self._backward_block(int(name[1:]))

    def renew_buffers(self) -> None:
        """Copy to the device the model's buffers that it lacks, or that the user has changed on the host."""
        contents = self._contents
        for name in self._binding.buffers:
            own = self._host.buffers[name]
            seen = (own.data_ptr(), version_of(own))
            if name not in contents.model_buffers or self._seen_buffers.get(name) != seen:
                contents.model_buffers[name] = own if self._on_host else self._device.bring(own)
                contents.newer_buffers.discard(name)
            self._seen_buffers[name] = seen

    def take_outputs(self) -> dict[str, torch.Tensor]:
        """Hand over the model's outputs, including those that depend on no parameter."""
        outputs, self._contents.outputs = self._contents.outputs, {}
        for name in self._binding.outputs:
            if name not in outputs:
                shared = self._contents.shared
                outputs[name] = shared[name] if name in shared else self._binding.constants[name]
        self._give_way(outputs.values())
        return outputs

    def _give_way(self, outputs: Iterable[torch.Tensor]) -> None:
        """Fix the addresses of outputs, which the user reads from now on, and make room for the user's allocations."""
        arena = self._device.arena
        if arena is None:
            return
        for output in outputs:
            arena.fix(output)
        if "user" in self._schedule.computes:
            arena.room((self._schedule.computes["user"].rise_bytes,))

    def _start(self) -> None:
        start, ledger, contents = self._binding.start, self._device.ledger, self._contents
        batch_bytes: dict[str, int] = {}
        for name, tensor in zip(start.batch, self.batch):
            if name is not None and tensor is not None:
                # No other reference may keep it alive longer than the schedule does.
                contents.shared[name] = self._device.bring(tensor)
                batch_bytes[name] = contents.shared[name].untyped_storage().nbytes()
                ledger.add("x", batch_bytes[name])
        self.batch = ()
        registers: list[Any] = [None] * start.program.n_registers
        given: dict[int, int] = {}
        for port in start.inputs:
            registers[port.register] = self._read(port)
            if port.storage in start.program.given:
                given[port.storage] = batch_bytes[port.name]
        for name in batch_bytes:
            if name not in self._binding.shared_item:
                contents.shared.pop(name)
        run(start.program, registers, ledger, given, self._device.arena)
        for port in start.results:
            contents.shared[port.name] = registers[port.register]

    def _forward_block(self, index: int) -> None:
        block, contents = self._binding.blocks[index], self._contents
        registers = self._registers(block, block.forward.n_registers)
        live = run(block.forward, registers, self._device.ledger, {}, self._device.arena)
        for port in block.writes:
            contents.model_buffers[port.name].copy_(registers[port.register])
            if not self._on_host:
                contents.newer_buffers.add(port.name)
            self._device.ledger.freed(live.pop(port.storage))
        for port in block.results:
            contents.values[port.name] = Buffer({"": registers[port.register]})
            if port.name in self._binding.outputs:
                contents.outputs[port.name] = registers[port.register]
                if not self._on_host and port.name in self._binding.value_item:
                    contents.returned[self._binding.value_item[port.name]] = registers[port.register]
        saved = contents.saved[index] = Saved()
        for storage, views in {**block.kept, **block.offloaded}.items():
            saved.registers |= {r: registers[r] for r in views}
            saved.storage_bytes[storage] = live[storage]

    def _backward_block(self, index: int) -> None:
        block, contents = self._binding.blocks[index], self._contents
        saved = contents.saved.pop(index)
        copies = contents.values.pop(items.offloaded(index), None)
        if copies is not None:
            copies.settle()
        registers = self._registers(block, block.backward.n_registers)
        for port in block.results:
            buffer = contents.values.get(port.name)
            if buffer is not None:
                registers[port.register] = buffer.read()
        for register in saved.registers:
            registers[register] = saved.registers[register]
        given = dict(saved.storage_bytes)
        # Tensors that only the registers hold are freed at their last reader.
        del saved, copies
        for port in block.tangents:
            given[port.storage] = contents.grads[port.name].untyped_storage().nbytes()
            registers[port.register] = contents.grads.pop(port.name)
        run(block.backward, registers, self._device.ledger, given, self._device.arena)
        for port in block.grads:
            contents.grads[port.name] = registers[port.register]
            if port.name.startswith("param:"):
                contents.pending.add(port.name[6:])
                # The gradient of the micro-batch before has left.
                contents.grad_leaving.pop(port.name[6:], None)
        self._norms.of_block(index)

    def _registers(self, block: BlockBinding, n_registers: int) -> list[Any]:
        registers: list[Any] = [None] * n_registers
        for port in block.inputs:
            registers[port.register] = self._read(port)
        return registers

    def _read(self, port: Port) -> torch.Tensor | None:
        contents = self._contents
        if port.kind == "param":
            return contents.params[port.name].read() if port.name in contents.params else None
        if port.kind == "buffer":
            return contents.model_buffers[port.name]
        if port.kind == "shared":
            constant = self._binding.constants.get(port.name)
            return contents.shared.get(port.name) if constant is None else constant
        buffer = contents.values.get(port.name)
        return None if buffer is None else buffer.read()

    def _user(self) -> None:
        """Take the gradients from the user's code, which has run between the forwards and the backwards."""
        spec, arena = self._schedule.computes["user"], self._device.arena
        self._device.ledger.made(0, spec.rise_bytes)
        if arena is not None:
            arena.forget_gaps()
            for gradient in self.incoming.values():
                arena.fix(gradient)
        for item in spec.makes:
            self._device.ledger.add(item.kind.prefix, self._schedule.item_bytes[item])
            self._contents.grads[f"value:{item.name}"] = self.incoming.pop(item.name)
