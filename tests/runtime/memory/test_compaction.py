"""Which tensors move aside for one that finds no place."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from offmate.runtime.memory.changes import Change
from offmate.runtime.memory.compaction import Extent, cheapest_run, first_without_place, gaps_between, run_to_pack
from offmate.runtime.memory.pools import Pools, played, pool_peaks

MIB = 2**20


def laid_out(text: str) -> list[Extent]:
    """Memory as text, two MiB per sign: "." free, a letter a tensor, a capital one that stays."""
    found, at = [], 0
    while at < len(text):
        end = at
        while end < len(text) and text[end] == text[at]:
            end += 1
        if text[at] != ".":
            found.append(Extent(2 * MIB * at, 2 * MIB * end, text[at].islower(), 2 * MIB * (end - at)))
        at = end
    return found


def run_of(text: str, size: int) -> tuple[int, int, list[int]] | None:
    run = cheapest_run(laid_out(text), 0, 2 * MIB * len(text), 2 * MIB * size)
    return run and (run.start // 2 // MIB, run.end // 2 // MIB, [one.start // 2 // MIB for one in run.extents])


def test_the_least_moves():
    assert run_of("aaa..b...cc...", 5) == (3, 9, [5])
    assert run_of("aaa..bb..c.ddd..", 4) == (7, 11, [9])


def test_what_stays_is_not_in_a_run():
    assert run_of("..A..b..", 4) == (3, 8, [5])
    assert run_of("..A..B..", 4) is None


def test_everything_that_moves_finds_place_outside_the_run():
    run = run_of("....aaaaa....", 5)
    assert run is None  # a is larger than every gap beside it


def test_where_one_move_is_not_enough_a_gap_grows():
    """Two tensors, each as large as a gap, lie between what is wanted: one of them goes first."""
    assert run_of("..aa..bb..cc", 6) == (0, 6, [2])


def test_a_tensor_needs_less_elsewhere_than_its_piece():
    """Two MiB lie in a piece of three; they fit in a gap of two and a half, and leave more than that."""
    extents = [Extent(0, 3 * MIB, True, 2 * MIB), Extent(3 * MIB, 8 * MIB, True, 5 * MIB)]
    end = 10 * MIB + MIB // 2
    assert cheapest_run(extents, 0, end, 3 * MIB) == (0, 3 * MIB, (extents[0],))


def test_packing_takes_the_run_with_the_least_bytes():
    run = run_to_pack(laid_out(".aaa.bbb.C.dd.ee."), 0, 34 * MIB, 4 * MIB)
    assert run is not None
    assert (run.start, run.end) == (20 * MIB, 28 * MIB)
    run = run_to_pack(laid_out(".aaa.bbb.C.dd.ee."), 0, 34 * MIB, 6 * MIB)
    assert run is not None
    assert (run.start, run.end) == (20 * MIB, 34 * MIB)
    assert run_to_pack(laid_out(".aaa.bbb.C.dd.ee."), 0, 34 * MIB, 8 * MIB) is None


def test_packing_counts_what_pieces_hold_beyond_their_tensors():
    extents = [Extent(at * MIB, (at + 4) * MIB, True, 3 * MIB) for at in range(0, 12, 4)]
    assert run_to_pack(extents, 0, 12 * MIB, 2 * MIB) == (0, 8 * MIB, tuple(extents[:2]))
    assert run_to_pack(extents, 0, 12 * MIB, 4 * MIB) is None


def test_each_takes_the_smallest_gap():
    assert first_without_place([4 * MIB, 9 * MIB], [8 * MIB, 4 * MIB]) is None
    assert first_without_place([4 * MIB, 9 * MIB], [8 * MIB, 5 * MIB]) == 5 * MIB
    assert first_without_place([], [MIB]) == MIB


def test_gaps_are_what_an_allocator_would_cut_off():
    extents = [Extent(0, 3 * MIB, True, 3 * MIB), Extent(4 * MIB, 5 * MIB, True, MIB)]
    assert gaps_between(extents, 0, 8 * MIB) == [(5 * MIB, 8 * MIB)]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_overlaps(seed: int) -> None:
    """Whatever moves, every allocation keeps a piece of its own that is large enough."""
    chance, pools, live = random.Random(seed), Pools(64 * MIB), {}
    for number in range(600):
        while live and sum(live.values()) > 52 * MIB:
            gone = chance.choice(sorted(live))
            pools.change(Change(gone, 0))
            del live[gone]
        live[number] = chance.randrange(3 * MIB // 2, 9 * MIB)
        pools.change(Change(number, live[number], fixed=chance.random() < 0.05))
        pieces = {n: pools.piece(n) for n in live}
        assert all(length >= live[n] for n, (_, length) in pieces.items())
        for (a, size), (b, other) in combinations(pieces.values(), 2):
            assert a + size <= b or b + other <= a
    assert pools.moved_bytes > 0


def test_a_budget_is_used_up_to_a_few_percent():
    """Where a few large tensors alternate with many of other sizes, gaps cost half as much again; moves cost little."""
    sizes = [[33] * 12, [46] * 8, [131, 262], [17] * 20, [23] * 14, [262, 100]]
    changes, live, number = [], [], 0
    for phase in sizes * 3:
        for size in phase:
            number += 1
            changes.append(Change(number, size * MIB))
            live.append((number, size))
            while sum(s for _, s in live) > 420:
                changes.append(Change(live.pop(len(live) // 3)[0], 0))
    changes += [Change(n, 0) for n, _ in live]
    peak, _ = pool_peaks(changes)
    segment = (peak * 103 // 100 + 4 * MIB) // (2 * MIB) * 2 * MIB
    assert played([[], changes], segment).reserved_bytes == segment
    assert played([[], changes], 0).reserved_bytes > peak * 115 // 100
