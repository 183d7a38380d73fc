"""Tensors move aside in an accelerator's memory: nothing is lost, nothing is read or written where it no longer is."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch
from offmate.runtime.devices.streams import StreamDevice, StreamEvent
from offmate.runtime.memory.arena import Arena
from offmate.runtime.memory.compaction import Stretch
from offmate.runtime.memory.pools import SMALL_SEGMENT_BYTES

MIB = 2**20
DEVICE = "sim:0"


def arena_of(mib: int) -> Arena:
    """An empty arena; what keeps its segment comes on top."""
    arena = Arena(torch.device(DEVICE))
    arena.take(mib * MIB + SMALL_SEGMENT_BYTES)
    return arena


def put(arena: Arena, mib: int, value: int) -> torch.Tensor:
    arena.room((mib * MIB,))
    tensor = torch.full((mib * MIB,), value, dtype=torch.uint8, device=DEVICE)
    arena.note(tensor)
    return tensor


def scattered(arena: Arena) -> list[torch.Tensor | None]:
    """Four tensors of 4 MiB with gaps of 4 MiB between them; and one of 2 at the end."""
    tensors: list[torch.Tensor | None] = [put(arena, 4, i) for i in range(8)]
    tensors.append(put(arena, 2, 8))
    for i in range(0, 8, 2):
        tensors[i] = None
    return tensors


def holds(tensor: torch.Tensor | None, value: int) -> bool:
    return tensor is not None and bool((tensor.cpu() == value).all())


def test_room_is_made_and_nothing_is_lost(sim: ModuleType) -> None:
    arena = arena_of(34)
    tensors = scattered(arena)
    view = tensors[3][MIB : 2 * MIB]  # type: ignore[index]
    reserved = sim.memory_reserved()
    large = put(arena, 12, 99)
    assert sim.memory_reserved() == reserved
    assert 0 < arena.moved_bytes <= 8 * MIB
    assert holds(large, 99)
    assert all(holds(tensors[i], i) for i in (1, 3, 5, 7, 8))
    assert holds(view, 3)
    view.fill_(50)
    assert holds(tensors[3][MIB : 2 * MIB], 50)  # type: ignore[index]


def test_gaps_elsewhere_do_not_keep_it_from_moving_anything(sim: ModuleType) -> None:
    """The gap beside two workspaces of 9 MiB in a segment of 20 is as large as the piece that keeps the arena's."""
    workspaces = [torch.empty(9 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    arena = arena_of(34)
    tensors = scattered(arena)
    reserved = sim.memory_reserved()
    assert holds(put(arena, 12, 99), 99)
    assert arena.moved_bytes > 0
    assert sim.memory_reserved() == reserved, (len(tensors), len(workspaces))


def crowded(sim: ModuleType, arena: Arena) -> list[torch.Tensor]:
    """Three tensors of 5 MiB with gaps of 2 MiB before each: no gap takes a tensor, and no more can be reserved."""
    tensors = [put(arena, mib, mib + i) for i in range(3) for mib in (2, 5)]
    sim.set_total_bytes(sim.memory_reserved())
    return tensors[1::2]


def test_where_nothing_can_move_tensors_are_laid_side_by_side(sim: ModuleType) -> None:
    arena = arena_of(21)
    tensors = crowded(sim, arena)
    view, reserved = tensors[1][MIB : 2 * MIB], sim.memory_reserved()
    large = put(arena, 6, 99)
    assert sim.memory_reserved() == reserved
    assert arena.moved_bytes == 10 * MIB
    assert holds(large, 99)
    assert all(holds(tensor, 5 + i) for i, tensor in enumerate(tensors))
    view.fill_(50)
    assert holds(tensors[1][MIB : 2 * MIB], 50)


def test_tensors_stay_where_the_host_has_no_memory_for_them(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator then says that there is no room, and nothing is lost."""
    arena = arena_of(21)
    tensors = crowded(sim, arena)
    empty = torch.empty

    def refused(*size: int, **settings: object) -> torch.Tensor:
        if "device" not in settings:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*size, **settings)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refused)
        arena.room((6 * MIB,))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(6 * MIB, dtype=torch.uint8, device=DEVICE)
    assert all(holds(tensor, 5 + i) for i, tensor in enumerate(tensors))
    assert holds(put(arena, 6, 99), 99)
    assert all(holds(tensor, 5 + i) for i, tensor in enumerate(tensors))


def test_tensors_stay_where_the_allocator_has_memory_elsewhere(sim: ModuleType) -> None:
    arena = arena_of(21)
    tensors = crowded(sim, arena)
    sim.set_total_bytes(sim.memory_reserved() + 20 * MIB)
    assert holds(put(arena, 6, 99), 99)
    assert arena.moved_bytes == 0
    assert all(holds(tensor, 5 + i) for i, tensor in enumerate(tensors))


def test_copies_end_before_tensors_are_laid_side_by_side(sim: ModuleType) -> None:
    """Also those that a worker has yet to launch."""
    device = StreamDevice(torch.device(DEVICE), 1 << 30)
    arena = device.arena
    arena.take(21 * MIB + SMALL_SEGMENT_BYTES)
    tensors = crowded(sim, arena)
    hosts = [device.empty_host_like(tensor) for tensor in tensors]
    begin = threading.Event()

    def waits() -> None:
        begin.wait(10)

    late = device.update_on_host(waits, ())
    sim.set_delays(3, 4000)
    for tensor, host in zip(tensors, hosts):
        device.copy_out(host, tensor, (late,))
    threading.Timer(0.2, begin.set).start()
    large = put(arena, 6, 99)
    sim.set_delays(0, 0)
    device.drain()
    assert arena.moved_bytes == 10 * MIB
    assert holds(large, 99)
    assert all(holds(host, 5 + i) for i, host in enumerate(hosts))
    assert all(holds(tensor, 5 + i) for i, tensor in enumerate(tensors))
    device.close()


def test_nothing_moves_where_there_is_room(sim: ModuleType) -> None:
    arena = arena_of(34)
    tensors = scattered(arena)
    assert holds(put(arena, 4, 1), 1)
    assert arena.moved_bytes == 0, len(tensors)


def test_what_somebody_else_uses_stays(sim: ModuleType) -> None:
    arena = arena_of(34)
    tensors = scattered(arena)
    for i in (1, 3, 5):
        arena.fix(tensors[i])  # type: ignore[arg-type]
        arena.note(tensors[i], alone=True)  # type: ignore[arg-type]
    places = [tensors[i].data_ptr() for i in (1, 3, 5)]  # type: ignore[union-attr]
    large = put(arena, 8, 99)
    assert arena.moved_bytes > 0
    assert holds(large, 99)
    assert [tensors[i].data_ptr() for i in (1, 3, 5)] == places  # type: ignore[union-attr]


def test_a_copy_that_is_under_way_ends_first(sim: ModuleType) -> None:
    """What is copied to the host is not written over, though it has moved and its memory is in use again."""
    device = StreamDevice(torch.device(DEVICE), 1 << 30)
    arena = device.arena
    arena.take(34 * MIB + SMALL_SEGMENT_BYTES)
    tensors = scattered(arena)
    hosts = [device.empty_host_like(t) if t is not None else None for t in tensors]
    sim.set_delays(3, 4000)
    for tensor, host in [(tensors[8], hosts[8])] * 40 + list(zip(tensors, hosts)):
        if tensor is not None and host is not None:
            device.copy_out(host, tensor, ())
    large = put(arena, 16, 99)
    sim.set_delays(0, 0)
    device.drain()
    assert arena.moved_bytes > 0
    assert holds(large, 99)
    assert all(holds(host, i) for i, host in enumerate(hosts) if host is not None)
    assert all(holds(tensor, i) for i, tensor in enumerate(tensors) if tensor is not None)
    device.close()


def test_what_has_arrived_goes_before_what_is_under_way(sim: ModuleType) -> None:
    arena = arena_of(34)
    tensors = scattered(arena)
    stream = torch.Stream(device="sim")
    sim.set_delays(1, 1)
    with sim.held(stream):
        for i in (1, 3, 5):
            arena.copied(tensors[i], StreamEvent(stream))  # type: ignore[arg-type]
        places = [tensors[i].data_ptr() for i in (1, 3, 5)]  # type: ignore[union-attr]
        large = put(arena, 8, 99)
        assert arena.moved_bytes > 0
        assert [tensors[i].data_ptr() for i in (1, 3, 5)] == places  # type: ignore[union-attr]
    sim.set_delays(0, 0)
    assert holds(large, 99)


def test_a_neighbour_that_is_let_go_meanwhile_costs_no_memory(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a worker lets go of it: what moved then leaves a larger gap than it took, which begins sooner."""
    arena = arena_of(20)
    tensors: list[torch.Tensor | None] = [put(arena, mib, mib) for mib in (3, 5, 5, 4)]
    moved, tensors[2] = tensors[1], None
    assert moved is not None
    at, move, reserved = moved.data_ptr(), Arena._move, sim.memory_reserved()

    def lets_go(self: Arena, one: object) -> None:
        tensors[0] = None
        move(self, one)  # type: ignore[arg-type]

    monkeypatch.setattr(Arena, "_move", lets_go)
    arena._clear(next(Stretch(one.start, one.end, (one,)) for one in arena._extents(waits=True) if one.start == at))
    assert moved.data_ptr() != at
    assert holds(moved, 5)
    assert sim.memory_reserved() == reserved


def test_what_is_not_known_is_left_where_it_is(sim: ModuleType) -> None:
    arena = arena_of(34)
    tensors = scattered(arena)
    unknown = torch.full((4 * MIB,), 7, dtype=torch.uint8, device=DEVICE)
    assert holds(put(arena, 8, 99), 99)
    assert holds(unknown, 7)
    assert all(holds(tensors[i], i) for i in (1, 3, 5, 7, 8))


def test_a_segment_is_taken_anew_only_where_it_fits(sim: ModuleType) -> None:
    arena = Arena(torch.device(DEVICE))
    arena.take(40 * MIB)
    arena.take(60 * MIB)
    assert sim.memory_reserved() == 60 * MIB
    held = torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
    sim.set_limit_bytes(80 * MIB)
    arena.take(30 * MIB)
    assert sim.memory_reserved() == 60 * MIB, held.shape
    assert holds(put(arena, 40, 1), 1)
    assert sim.memory_reserved() == 60 * MIB


@pytest.mark.parametrize("sizes", [(), (0,), (MIB,), (100, 200)])
def test_small_tensors_need_no_room(sim: ModuleType, sizes: tuple[int, ...]) -> None:
    arena = arena_of(4)
    full = put(arena, 4, 1)
    arena.room(sizes)
    assert arena.moved_bytes == 0, full.shape
