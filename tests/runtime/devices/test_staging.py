"""Copies of memory that is not pinned: through buffers that are taken before the pool, piece by piece."""

from __future__ import annotations

import pytest
import torch
from offmate.runtime.devices import staging
from offmate.runtime.devices.pinned import PinnedMemory
from offmate.runtime.devices.streams import StreamDevice
from offmate.solver.resources import Resource

MIB = 1 << 20


@pytest.fixture
def fresh(sim, monkeypatch):
    """No process has such buffers yet."""
    monkeypatch.setattr(staging, "INTO", staging.Staging())
    monkeypatch.setattr(staging, "OUT_OF", staging.Staging())
    return sim


def taken(one):
    return [buffer.numel() for buffer in one._blocks]


@pytest.mark.parametrize(
    ("limit", "into", "out_of"),
    [
        (512, [8, 8], [8, 8]),
        (32, [8, 8], [8, 8]),
        (20, [8, 4], [8]),
        (4, [4], []),
        (0, [], []),
    ],
)
def test_the_buffers_are_as_large_as_the_system_allows(fresh, limit, into, out_of):
    fresh.let_pin(limit * MIB)
    device = StreamDevice(torch.device("sim:0"), 1 << 28)
    device.empty_host_like(torch.empty(400 * MIB, dtype=torch.uint8, device="meta"))  # the pool takes what is left
    assert taken(staging.INTO) == [size * MIB for size in into]
    assert taken(staging.OUT_OF) == [size * MIB for size in out_of]
    device.close()


@pytest.mark.parametrize("limit", [512, 33, 20, 4, 0])
@pytest.mark.parametrize("n_bytes", [1, 8 * MIB, 8 * MIB + 1, 37 * MIB])
def test_bytes_arrive_in_both_directions_at_every_limit(fresh, limit, n_bytes):
    fresh.let_pin(limit * MIB)
    device = StreamDevice(torch.device("sim:0"), 1 << 28)
    fresh.set_delays(1, 200)
    host = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8)
    there, back = torch.empty_like(host, device="sim:0"), torch.zeros_like(host)
    arrived = device.copy_in(there, host, (), Resource.IN)
    device.copy_out(back, there, (arrived,), Resource.OUT).synchronize()
    assert torch.equal(back, host)
    device.drain()
    device.close()


def test_a_piece_leaves_while_the_one_before_goes_on_to_the_host(fresh, monkeypatch):
    """The device is given the next piece before the host waits for the first."""
    device, order = StreamDevice(torch.device("sim:0"), 1 << 28), []
    deliver = staging._deliver
    monkeypatch.setattr(staging, "_deliver", lambda *given: (order.append("deliver"), deliver(*given)))

    class Stream:
        own = torch.Stream(device="sim:0")

        def __enter__(self):
            self.own.__enter__()

        def __exit__(self, *error):
            self.own.__exit__(*error)

        def record_event(self):
            order.append("launch")
            return self.own.record_event()

    there = torch.ones(32 * MIB, dtype=torch.uint8, device="sim:0")
    staging.OUT_OF.send(torch.zeros(32 * MIB, dtype=torch.uint8), there, Stream())
    assert order == ["launch", "launch", "deliver", "launch", "deliver", "launch", "deliver", "deliver"]
    device.close()


def test_smaller_blocks_are_tried_before_pinning_counts_as_refused(sim):
    sim.let_pin(7 * MIB)
    memory = PinnedMemory()
    sizes = [memory.empty_strided((MIB,), (1,), torch.uint8) for _ in range(7)]
    assert all(one.is_pinned() for one in sizes) and memory.reserved_bytes == 7 * MIB and not memory.refused
    assert not memory.empty_strided((MIB,), (1,), torch.uint8).is_pinned() and memory.refused
    del sizes[0]
    assert memory.empty_strided((MIB,), (1,), torch.uint8).is_pinned()
