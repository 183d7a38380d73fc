"""SELECT against brute force."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offmate.solver.rounding.knapsack import select


def brute_force(sizes, target):
    items = sorted(sizes)
    subsets = chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))
    reaching = [s for s in subsets if sum(sizes[n] for n in s) >= target]
    return frozenset(min(reaching, key=lambda s: (sum(sizes[n] for n in s), len(s), s)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.floats(0.0, 1.0))
def test_select_is_the_least_sum_with_the_fewest_and_first_names(numbers, part):
    sizes = {f"t{i}": size for i, size in enumerate(numbers)}
    target = int(part * sum(numbers))
    assert select(sizes, target) == brute_force(sizes, target)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=19, max_size=24), st.floats(0.01, 1.0))
def test_many_items_reach_the_least_sum(numbers, part):
    sizes = {f"t{i:02}": 64 * size for i, size in enumerate(numbers)}
    target = int(part * sum(sizes.values()))
    reachable = {0}
    for size in sizes.values():
        reachable |= {r + size for r in reachable}
    assert sum(sizes[n] for n in select(sizes, target)) == min(r for r in reachable if r >= target)


def test_many_items_without_a_common_divisor_reach_the_target():
    sizes = {f"t{i:02}": 1_000_000_007 + 7919 * i for i in range(20)}
    chosen = sum(sizes[n] for n in select(sizes, 10_000_800_000))
    assert 10_000_800_000 <= chosen < 10_000_800_000 * 1.2


def test_nothing_to_reach_selects_nothing():
    assert select({"a": 3}, 0) == frozenset()
    assert select([("a", 3)], -5) == frozenset()


def test_an_unreachable_target_is_refused():
    with pytest.raises(ValueError, match="7 bytes cannot reach a target of 8"):
        select({"a": 3, "b": 4}, 8)
