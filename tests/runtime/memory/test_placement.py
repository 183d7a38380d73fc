"""What an allocator reserves for an iteration, on the simulated accelerator's."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from offmate.runtime.memory.arena import Arena
from offmate.runtime.memory.changes import Change, Rehearsal
from offmate.runtime.memory.pools import SMALL_SEGMENT_BYTES, Pools, rounded
from offmate.runtime.memory.reserve import Reserved, Shortfall, make_pockets, reserve

KIB, MIB = 2**10, 2**20
DEVICE = "sim"


def drawn(seed: int, n: int = 400) -> list[Change]:
    """Allocations of every size, of which about twenty live at a time."""
    chance, live, changes = random.Random(seed), [], []
    for number in range(n):
        while len(live) > chance.randrange(40):
            changes.append(Change(live.pop(chance.randrange(len(live))), 0))
        size = chance.choice(
            [chance.randrange(1, 2 * KIB), chance.randrange(1, 3 * MIB), chance.randrange(1, 30 * MIB)]
        )
        changes.append(Change(number, size))
        live.append(number)
    return changes + [Change(number, 0) for number in live]


def iterations(*sizes_mib: float) -> Rehearsal:
    """Nothing at the start; then, in every iteration, all of these sizes, let go in the order in which they came."""
    made = [Change(number, int(size * MIB)) for number, size in enumerate(sizes_mib)]
    return Rehearsal(([], [*made, *(Change(change.number, 0) for change in made)]), len(made))


@pytest.mark.parametrize("seed", range(3))
def test_the_rules_are_the_allocator_s_own(sim: ModuleType, seed: int) -> None:
    pools, live = Pools(0), {}
    for change in drawn(seed):
        pools.change(change)
        if change.bytes:
            live[change.number] = torch.empty(change.bytes, dtype=torch.uint8, device=DEVICE)
        else:
            del live[change.number]
        assert pools.reserved_bytes == sim.memory_reserved()


@pytest.mark.parametrize("seed", range(3))
def test_moves_are_rehearsed_as_they_happen(sim: ModuleType, seed: int) -> None:
    """Every large tensor lies where the rules say, whatever has moved aside for it."""
    chance, segment = random.Random(seed), 64 * MIB
    pools, arena, live = Pools(segment), Arena(torch.device(DEVICE)), dict[int, torch.Tensor]()
    arena.take(segment)
    start = arena.start
    for number in range(300):
        while sum(rounded(tensor.nbytes) for tensor in live.values()) > 44 * MIB:
            gone = chance.choice(sorted(live))
            pools.change(Change(gone, 0))
            del live[gone]
        size = chance.randrange(MIB + 1, 6 * MIB)
        pools.change(Change(number, size))
        arena.room((size,))
        live[number] = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        arena.note(live[number], alone=True)
        assert {n: tensor.data_ptr() - start for n, tensor in live.items()} == {n: pools.piece(n)[0] for n in live}
    assert arena.moved_bytes == pools.moved_bytes > 0
    assert pools.reserved_bytes == sim.memory_reserved() == segment


@pytest.mark.parametrize("order", [1, -1])
def test_the_start_that_takes_most_counts(sim: ModuleType, order: int) -> None:
    starts = (iterations(30, 30), iterations(30, 30, 6, *[0.5] * 20))[::order]
    found = reserve(torch.device(DEVICE), starts, 128 * MIB)
    assert isinstance(found, Reserved)
    assert found.place.segment_bytes >= 66 * MIB
    assert 76 * MIB <= found.needed_bytes <= found.bytes <= 128 * MIB


def test_the_least_budget_that_works(sim: ModuleType) -> None:
    starts = (iterations(30, 12, 50, *[0.7] * 9), iterations(40, 40))
    short = reserve(torch.device(DEVICE), starts, 60 * MIB)
    assert isinstance(short, Shortfall)
    least = short.needed_bytes
    assert (92 + 8) * MIB + SMALL_SEGMENT_BYTES < least < 114 * MIB
    found = reserve(torch.device(DEVICE), starts, least)
    assert isinstance(found, Reserved)
    assert found.bytes <= least
    assert isinstance(reserve(torch.device(DEVICE), starts, least - 8 * MIB), Shortfall)


def test_numbers_and_batches_cut_nothing_up(sim: ModuleType) -> None:
    walls = make_pockets(torch.device(DEVICE), 8, [4 * KIB])
    before = torch.empty(600 * KIB, dtype=torch.uint8, device=DEVICE)
    others = [torch.empty(1000 * KIB, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    place = before.data_ptr()
    del before
    users = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in (4, 4 * KIB, 1, 4 * KIB)]
    assert torch.empty(600 * KIB, dtype=torch.uint8, device=DEVICE).data_ptr() == place
    assert len({wall.data_ptr() for wall in (*walls, *users, *others)}) == len(walls) + 6
