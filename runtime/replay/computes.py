"""Execution of a schedule's computes: fills programs' registers with tensors, and keeps the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...solver import items
from ...solver.compute_names import BACKWARD, FORWARD, START, USER, ComputeName, parse
from ..devices.generator import Generator
from ..torch_names.tensors import version_of
from .binding import Binding, Port
from .contents import Buffer, OfBatch, Saved
from .draws import Draws
from .gate import Gate
from .norms import Norms
from .program import run
from .world import World

Batch = tuple[torch.Tensor | None, ...]
"""The tensors of a batch, in the order of `StartBinding.batch`."""

Incoming = dict[str, torch.Tensor] | None
"""The gradients of a micro-batch's outputs by name; None if it is left out, since its backward() never came."""


class Computes:
    """Runs computes, with one short method per kind.

    State: `batches` and `incoming`, by slot the user's batch and gradients, until they are used, and None for a
    micro-batch that is left out; `_seen_buffers`, memory and version of the host's buffers of which the device has
    copies.

    Parameters
    ----------
    gate: the gate that the compute of that name opens. norms: take those of the gradients that backwards complete.
    """

    def __init__(self, world: World, gate: Gate, norms: Norms) -> None:
        self._schedule, self._shapes, self._host = world.schedule, world.shapes, world.host
        self._device, self._contents, self._gate, self._norms = world.device, world.contents, gate, norms
        self._on_host = world.device.torch_device.type == "cpu"
        self._seen_buffers: dict[str, tuple[int, int]] = {}
        several, generator = world.schedule.per_step > 1, Generator(world.device.torch_device)
        self._draws = Draws(world.shapes, world.device.ledger, generator, several=several)
        self.batches: list[Batch] = []
        self.incoming: Sequence[Incoming] = ()

    def run(self, name: str) -> None:
        """Run the compute of this name: "start", "F3", "user", "B3", "gate", or one of another slot, such as "F3@2"."""
        what, block, slot = compute = parse(name)
        if what == START:
            self._start(slot)
        elif what == USER:
            self._user(compute)
        elif what == FORWARD and block is not None:
            self._forward_block(block, slot)
        elif what == BACKWARD and block is not None:
            if self.incoming[slot] is None:
                self._leave_out(block, slot)
            else:
                self._backward_block(compute, block, slot)
            if slot == self._last:
                self._norms.of_block(block)
        else:
            self._gate.open()

    @property
    def _last(self) -> int:
        """The last slot of the pass that runs."""
        return len(self.batches) - 1

    @property
    def generator(self) -> Generator:
        """What the forwards draw from."""
        return self._draws.generator

    @property
    def drawn_from(self) -> tuple[torch.Tensor, ...]:
        """The generator's state before each micro-batch of the last pass, if its forwards draw; empty otherwise."""
        return self._draws.begins

    def renew_buffers(self) -> None:
        """Copy to the device the model's buffers that it lacks, or that the user has changed on the host."""
        contents = self._contents
        for name in self._shapes.own.binding.buffers:
            own = self._host.buffers[name]
            seen = (own.data_ptr(), version_of(own))
            if name not in contents.model_buffers or self._seen_buffers.get(name) != seen:
                contents.model_buffers[name] = own if self._on_host else self._device.bring(own)
                contents.newer_buffers.discard(name)
            self._seen_buffers[name] = seen

    def take_outputs(self) -> list[dict[str, torch.Tensor]]:
        """Hand over the model's outputs by slot, including those that depend on no parameter."""
        self._draws.after_all()
        found = []
        for slot in range(self._last + 1):
            batch, binding = self._contents.of(slot), self._shapes.binding(slot)
            outputs, batch.outputs = batch.outputs, {}
            for name in binding.outputs:
                if name not in outputs:
                    outputs[name] = batch.shared[name] if name in batch.shared else binding.constants[name]
            found.append(outputs)
        self._give_way(output for outputs in found for output in outputs.values())
        return found

    def _give_way(self, outputs: Iterable[torch.Tensor]) -> None:
        """Fix the addresses of outputs, which the user reads from now on, and make room for the user's allocations."""
        arena = self._device.arena
        if arena is None:
            return
        for output in outputs:
            arena.fix(output)
        if USER in self._schedule.computes:
            users = ((str(ComputeName(USER, slot=slot)), slot) for slot in range(self._last + 1))
            arena.room((max(self._shapes.spec(*user).rise_bytes for user in users),))

    def _start(self, slot: int) -> None:
        if slot == 0:
            self._draws.foresee(len(self.batches))
        binding, ledger, batch = self._shapes.binding(slot), self._device.ledger, self._contents.of(slot)
        start = binding.start
        batch_bytes: dict[str, int] = {}
        for name, tensor in zip(start.batch, self.batches[slot]):
            if name is not None and tensor is not None:
                # No other reference may keep it alive longer than the schedule does.
                batch.shared[name] = self._device.bring(tensor)
                batch_bytes[name] = batch.shared[name].untyped_storage().nbytes()
                ledger.add("x", batch_bytes[name])
        self.batches[slot] = ()
        registers: list[Any] = [None] * start.program.n_registers
        given: dict[int, int] = {}
        for port in start.inputs:
            registers[port.register] = self._read(port, batch, binding)
            if port.storage in start.program.given:
                given[port.storage] = batch_bytes[port.name]
        for name in batch_bytes:
            if name not in binding.shared_item:
                batch.shared.pop(name)
        run(start.program, registers, ledger, given, self._device.arena)
        for port in start.results:
            batch.shared[port.name] = registers[port.register]

    def _forward_block(self, index: int, slot: int) -> None:
        binding, contents, batch = self._shapes.binding(slot), self._contents, self._contents.of(slot)
        block = binding.blocks[index]
        registers = self._registers(binding, index, block.forward.n_registers, batch)
        self._draws.before(index, slot)
        live = run(block.forward, registers, self._device.ledger, {}, self._device.arena)
        self._draws.after(index, slot)
        for port in block.writes:
            contents.model_buffers[port.name].copy_(registers[port.register])
            if not self._on_host:
                contents.newer_buffers.add(port.name)
            self._device.ledger.freed(live.pop(port.storage))
        for port in block.results:
            batch.values[port.name] = Buffer({"": registers[port.register]})
            if port.name in binding.outputs:
                batch.outputs[port.name] = registers[port.register]
                if not self._on_host and port.name in binding.value_item:
                    contents.returned[binding.value_item[port.name].at(slot)] = registers[port.register]
        saved = batch.saved[index] = Saved()
        for storage, views in {**block.kept, **block.offloaded}.items():
            saved.registers |= {r: registers[r] for r in views}
            saved.storage_bytes[storage] = live[storage]

    def _backward_block(self, compute: ComputeName, index: int, slot: int) -> None:
        binding, batch = self._shapes.binding(slot), self._contents.of(slot)
        block = binding.blocks[index]
        saved = batch.saved.pop(index)
        copies = batch.values.pop(items.offloaded(index).at(slot), None)
        if copies is not None:
            copies.settle()
        registers = self._registers(binding, index, block.backward.n_registers, batch)
        for port in block.results:
            buffer = batch.values.get(port.name)
            if buffer is not None:
                registers[port.register] = buffer.read()
        for register in saved.registers:
            registers[register] = saved.registers[register]
        given = dict(saved.storage_bytes)
        # Tensors that only the registers hold are freed at their last reader.
        del saved, copies
        for port in block.tangents:
            returned = batch.values.pop(items.value_gradient(port.name.split(":", 1)[1]).at(slot), None)
            if returned is not None:
                returned.settle()
            given[port.storage] = batch.grads[port.name].untyped_storage().nbytes()
            registers[port.register] = batch.grads.pop(port.name)
        live = run(block.backward, registers, self._device.ledger, given, self._device.arena)
        spec = self._shapes.spec(str(compute), slot)
        for port in block.grads:
            made = registers[port.register]
            if not port.name.startswith("param:"):
                batch.grads[port.name] = made
                continue
            name = port.name[6:]
            sums = self._contents.grads
            if slot and items.gradient(name) in spec.needs and port.name not in sums:
                sums[port.name] = made  # those before are left out
            elif slot and items.gradient(name) in spec.needs:  # complete, to be added to those before
                sums[port.name].add_(made)
                registers[port.register] = made = None
                self._device.ledger.freed(live.pop(port.storage))
            else:  # complete ones have one place, until they are used
                (self._contents if items.gradient(name) in spec.makes else batch).grads[port.name] = made
            self._contents.pending.add(name)
            if not self._schedule.sums_on_device:  # the gradient of the micro-batch before has left
                self._contents.grad_leaving.pop(name, None)

    def _leave_out(self, index: int, slot: int) -> None:
        """Free what a backward would have used, since the micro-batch adds nothing."""
        batch = self._contents.of(slot)
        saved = batch.saved.pop(index)
        copies = batch.values.pop(items.offloaded(index).at(slot), None)
        if copies is not None:
            copies.settle()
        self._device.ledger.freed(sum(saved.storage_bytes.values()))

    def _registers(self, binding: Binding, index: int, n_registers: int, batch: OfBatch) -> list[Any]:
        registers: list[Any] = [None] * n_registers
        for port in binding.blocks[index].inputs:
            registers[port.register] = self._read(port, batch, binding)
        return registers

    def _read(self, port: Port, batch: OfBatch, binding: Binding) -> torch.Tensor | None:
        contents = self._contents
        if port.kind == "param":
            return contents.params[port.name].read() if port.name in contents.params else None
        if port.kind == "buffer":
            return contents.model_buffers[port.name]
        if port.kind == "shared":
            constant = binding.constants.get(port.name)
            return batch.shared.get(port.name) if constant is None else constant
        buffer = batch.values.get(port.name)
        return None if buffer is None else buffer.read()

    def _user(self, compute: ComputeName) -> None:
        """Take the gradients from the user's code, which has run between the forwards and the backwards."""
        spec, arena = self._shapes.spec(str(compute), compute.slot), self._device.arena
        incoming = self.incoming[compute.slot]
        self._device.ledger.made(0, spec.rise_bytes)
        if arena is not None:
            arena.forget_gaps()
        if incoming is None:
            return
        if arena is not None:
            for gradient in incoming.values():
                arena.fix(gradient)
        for item in spec.makes:
            self._device.ledger.add(item.kind.prefix, self._shapes.bytes_of(item))
            self._contents.of(compute.slot).grads[f"value:{item.name}"] = incoming.pop(item.name)
