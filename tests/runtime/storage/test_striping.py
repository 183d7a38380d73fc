"""Chunks are dealt out in proportion, within a tensor and over many, and ranges of bytes add up."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offmate.runtime.storage.ranges import first_missing, joined, within, without
from offmate.runtime.storage.striping import Striping

from offmate.errors import ArgumentValueError

SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)


@settings(max_examples=100)
@given(SHARES, st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_no_path_is_ever_more_than_a_chunk_per_path_away_from_its_share(shares, tensors):
    striping, dealt = Striping(len(shares)), []
    for n_chunks in tensors:
        dealt += striping.deal([10] * n_chunks, shares)
        for path, share in enumerate(shares):
            due = Fraction(share, sum(shares)) * len(dealt)
            assert abs(dealt.count(path) - due) < len(shares)
            assert share or not dealt.count(path)


def test_equal_paths_take_turns():
    striping = Striping(2)
    assert striping.deal([8, 8, 8], None) == [0, 1, 0]
    assert striping.deal([8], None) == [1]


def test_proportions_may_change_from_tensor_to_tensor():
    striping = Striping(2)
    assert striping.deal([8] * 4, [1, 3]) == [1, 0, 1, 1]
    assert striping.deal([8] * 2, [1, 0]) == [0, 0]


@settings(max_examples=50)
@given(SHARES, st.lists(st.integers(1, 60), min_size=2, max_size=8), st.data())
def test_chunks_that_are_taken_back_count_no_longer(shares, tensors, data):
    kept = data.draw(st.lists(st.booleans(), min_size=len(tensors), max_size=len(tensors)))
    striping, without = Striping(len(shares)), Striping(len(shares))
    for n_chunks, stays in zip(tensors, kept):
        dealt = striping.deal([10] * n_chunks, shares)
        if stays:
            assert dealt == without.deal([10] * n_chunks, shares)
        else:
            striping.take_back([10] * n_chunks, dealt, shares)


@settings(max_examples=100)
@given(SHARES, SHARES, st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_chunks_move_only_as_far_as_new_shares_need(old, new, tensors):
    n_paths = min(len(old), len(new))
    old, new = old[:n_paths], new[:n_paths]
    if not any(old) or not any(new):
        return
    before = [Striping(n_paths).deal([10] * n_chunks, old) for n_chunks in tensors]
    again, dealt = Striping(n_paths), []
    for lie in before:
        dealt.append(again.deal([10] * len(lie), new, lie))
    lay, lie = ([path for paths in found for path in paths] for found in (before, dealt))
    for path, share in enumerate(new):
        assert abs(lie.count(path) - Fraction(share, sum(new)) * len(lie)) < n_paths
    assert not [path for was, path in zip(lay, lie) if was != path and not new[path]]


def test_where_shares_stay_nothing_moves():
    striping = Striping(3)
    lie = striping.deal([8] * 30, [3, 2, 1])
    assert Striping(3).deal([8] * 30, [3, 2, 1], lie) == lie
    assert Striping(3).deal([8] * 30, [1, 0, 0], lie, stay={lie.index(1), lie.index(2)}).count(0) == 28


def test_chunks_that_lie_somewhere_are_counted_there():
    striping = Striping(2)
    striping.count([8] * 3, [0, 0, 0], [1, 1])
    assert striping.deal([8] * 3, [1, 1]) == [1, 1, 1]


@pytest.mark.parametrize("shares", [[], [1], [1, 2, 3], [-1, 2], [0, 0], [float("inf"), 1]])
def test_shares_that_do_not_fit_are_refused(shares):
    with pytest.raises(ArgumentValueError, match="do not fit 2 paths"):
        Striping(2).deal([8], shares)


RANGES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))), max_size=5
)


def bytes_of(ranges):
    return {byte for start, end in ranges for byte in range(start, end)}


@settings(max_examples=200)
@given(RANGES, st.integers(0, 30), st.integers(0, 30))
def test_ranges_are_sets_of_bytes(ranges, start, length):
    end, known, asked = start + length, bytes_of(ranges), set(range(start, start + length))
    assert bytes_of(joined(ranges)) == known
    assert all(one[1] < other[0] for one, other in zip(joined(ranges), joined(ranges)[1:]))
    assert bytes_of(without(ranges, start, end)) == known - asked
    assert bytes_of(within(ranges, start, end)) == known & asked
    assert first_missing(ranges, start, end) == min(asked - known, default=None)
