"""Whole things spread over tiers as the fractions say."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st
from offmate.solver.resources import HOST
from offmate.solver.rounding.tiers import Spread


def test_without_fractions_all_goes_to_the_host():
    assert Spread({}).take(10, {}) == HOST


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.floats(0, 1))
def test_the_bytes_by_tier_stay_within_one_thing_of_the_fractions(sizes, part):
    spread, gone = Spread({"peer": inf}), {HOST: 0, "peer": 0}
    for size in sizes:
        gone[spread.take(size, {HOST: 1 - part, "peer": part})] += size
    assert abs(gone["peer"] - part * sum(sizes)) <= max(sizes)


def test_a_tier_that_gets_nothing_is_never_chosen():
    spread = Spread({"peer": inf})
    assert {spread.take(5, {HOST: 0.0, "peer": 1.0}) for _ in range(5)} == {"peer"}


def test_what_a_tier_has_no_room_for_goes_to_the_host():
    spread = Spread({"peer": 12.0})
    assert [spread.take(5, {HOST: 0.0, "peer": 1.0}) for _ in range(3)] == ["peer", "peer", HOST]
