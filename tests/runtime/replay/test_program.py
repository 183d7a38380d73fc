"""A program that one function runs: bytes are counted as promised, and what ends in it can die in it."""

import weakref

import pytest
import torch
from offmate.runtime.ledger import Ledger, LimitExceeded
from offmate.runtime.replay.program import BlockProgram, Fused, Made, View, run

KIB = 1 << 10


def fused_program(function):
    """Reads register 0 (storage 7, which ends) and register 1; leaves storage 8, seen by registers 2 and 3."""
    views = (View(2, (256,), (1,), 0), View(3, (16, 8), (1, 16), 128))
    fused = Fused(function, (0, 1), (), (0,), (7,), (Made(8, KIB, views),), 3 * KIB)
    return BlockProgram(4, (), {7: KIB}, 3 * KIB, 0, 0.0, fused)


def test_bytes_rise_and_then_are_what_is_left():
    ledger = Ledger(10 * KIB)
    ledger.made(2 * KIB)
    seen = []

    def function(tensors):
        seen.append((ledger.level_bytes, ledger.peak_bytes))
        return [tensors[0] + tensors[1]]

    registers = [torch.ones(256), torch.arange(256.0), None, None]
    live = run(fused_program(function), registers, ledger, {7: KIB})
    assert seen == [(2 * KIB, 5 * KIB)]
    assert (ledger.level_bytes, ledger.peak_bytes) == (2 * KIB, 5 * KIB)
    assert live == {8: KIB}
    assert registers[0] is None and registers[1] is not None
    assert torch.equal(registers[2], torch.arange(256.0) + 1)
    assert torch.equal(registers[3], registers[2][128:].reshape(8, 16).T)
    assert registers[3].untyped_storage().data_ptr() == registers[2].untyped_storage().data_ptr()


def test_what_ends_can_die_inside():
    given = torch.ones(256)
    reference = weakref.ref(given)

    def function(tensors):
        result = tensors[0] + 1
        tensors.clear()
        assert reference() is None
        return [result]

    registers = [given, torch.ones(256), None, None]
    del given
    run(fused_program(function), registers, Ledger(10 * KIB), {7: KIB})


def test_the_budget_is_checked_before_it_runs():
    def function(tensors):
        raise AssertionError("ran")

    with pytest.raises(LimitExceeded):
        run(fused_program(function), [torch.ones(256)] * 4, Ledger(2 * KIB), {7: KIB})
