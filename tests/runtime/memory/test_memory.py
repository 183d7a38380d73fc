"""What the ledger says was let go is really gone, and nobody reads it; nothing depends on who is faster."""

import dataclasses
import gc
import random
import time
import weakref

import pytest
import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.runtime.replay import computes, contents
from offmate.runtime.replay.transfers import Transfers
from offmate.solver.items import Item, ItemKind
from offmate.solver.schedule import Kind

from ...offmate.loops import assert_same, plain, trained

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("budget", ["ample", "middle", "least"])
def test_freed_registers_die(budget, monkeypatch):
    """After every instruction, the storages that end there have died."""
    loop = trained(budget, steps=1)
    checked = []

    def run(program, registers, ledger, given, arena):
        # One instruction at a time, so that it can be seen what is left after each.
        live, made_in = dict(given), {}
        for step in program.instructions:
            live = real(dataclasses.replace(program, instructions=(step,)), registers, ledger, live, arena)
            for position, register in step.outs:
                for _, storage, _ in (m for m in step.makes if m[0] == position):
                    made_in[storage] = weakref.ref(registers[register]) if registers[register] is not None else None
            for storage in step.ends:
                reference = made_in.get(storage)
                assert reference is None or reference() is None, f"storage {storage} outlives {step.target}"
                checked.append(storage)
        return live

    real = computes.run
    monkeypatch.setattr(computes, "run", run)
    assert loop.steps(1, 3) == plain(1).steps(1, 3)
    assert len(checked) > 20


def poisoned(here, item: Item) -> list[torch.Tensor]:
    """The device tensors that a free of this item lets go."""
    kind, name = item.kind, item.name
    if kind is ItemKind.PARAMETER:
        return list(here.params[name].tensors.values())
    if kind is ItemKind.STATE:
        return list(here.states[item].tensors.values())
    if kind is ItemKind.GRADIENT:
        return [here.grads[f"param:{name}"]] if f"param:{name}" in here.grads else []
    if kind is ItemKind.VALUE:
        return [t for b in [here.of(item.slot).values.get(name)] if b is not None for t in b.tensors.values()]
    return []


@pytest.mark.parametrize("budget", ["middle", "least"])
def test_freed_memory_is_not_read(budget, monkeypatch):
    loop = trained(budget, steps=1)
    free = Transfers.free
    poisons = []

    def poisoning(self, item):
        going = poisoned(loop.executor._contents, item)
        free(self, item)
        for tensor in going:
            if tensor.is_floating_point():
                poisons.append(tensor.fill_(float("nan")).numel())

    monkeypatch.setattr(Transfers, "free", poisoning)
    loop.executor._handlers = {
        kind: (lambda action: poisoning(loop.executor._transfers, action.item)) if kind.value == "free" else handler
        for kind, handler in loop.executor._handlers.items()
    }
    reference = plain(1)
    assert loop.steps(1, 4) == reference.steps(1, 4)
    assert_same(loop, reference)
    assert sum(poisons) > 1000
    monkeypatch.undo()
    loop.executor._handlers[Kind.FREE] = lambda action: loop.executor._transfers.free(action.item)


@pytest.mark.parametrize("budget", ["middle", "least"])
def test_delays_change_nothing(budget, monkeypatch):
    loop = trained(budget, steps=1)
    chance = random.Random(0)
    for name in ("copy_in", "copy_out"):
        monkeypatch.setattr(EmulatedDevice, name, delayed(getattr(EmulatedDevice, name), chance))
    copy, update = EmulatedDevice._copy, EmulatedDevice.update_on_host

    def slow_copy(self, *given):
        time.sleep(chance.random() * 2e-3)
        copy(self, *given)

    def slow_update(self, work, *given):
        pause = chance.random() * 2e-3
        return update(self, lambda: (time.sleep(pause), work())[1], *given)

    monkeypatch.setattr(EmulatedDevice, "_copy", slow_copy)
    monkeypatch.setattr(EmulatedDevice, "update_on_host", slow_update)
    reference = plain(1)
    assert loop.steps(1, 21) == reference.steps(1, 21)
    assert_same(loop, reference)
    plan = loop.model.offmate.plan
    assert loop.model.offmate.peak_bytes <= plan.budget_bytes


def delayed(start, chance):
    def later(self, *given):
        if chance.random() < 0.1:
            time.sleep(1e-3)
        return start(self, *given)

    return later


def test_nothing_stays_after_a_backward():
    """Between iterations the device holds what the schedule says is resident, and no activation."""
    loop = trained("least", steps=2)
    loop.step(2)
    gc.collect()
    here: contents.Contents = loop.executor._contents
    assert not any(batch.saved or batch.outputs for batch in here.batches.values()) and not here.views
    sizes = loop.executor.schedule.item_bytes
    resident = sum(sizes[i] for i in loop.executor.schedule.resident if i.kind in (ItemKind.PARAMETER, ItemKind.STATE))
    held = [t for b in [*here.params.values(), *here.states.values()] for t in b.tensors.values()]
    assert sum(t.untyped_storage().nbytes() for t in held) == resident
