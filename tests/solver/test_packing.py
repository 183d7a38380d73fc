"""Places in shared memory: nobody is there at the same time, and little is lost between them."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from offmate.solver.packing import ALIGN_BYTES, Tenant, aligned, packed, span_of


def test_times_are_cyclic() -> None:
    assert [span_of(first, 2, 4) for first in range(4)] == [0b0011, 0b0110, 0b1100, 0b1001]
    assert span_of(3, 9, 4) == 0b1111  # no longer than all times


def test_tenants_that_never_meet_have_one_place() -> None:
    assert packed((Tenant(1000, 0b0011), Tenant(700, 0b1100))) == ((0, 0), 1024)
    assert packed((Tenant(1000, 0b0011), Tenant(700, 0b0110))) == ((0, 1024), 1024 + 704)
    assert packed(()) == ((), 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_two_tenants_meet(seed: int) -> None:
    rng, n_times = random.Random(seed), 40
    tenants = tuple(
        Tenant(rng.choice([10, 512, 5000, 70_000]), span_of(rng.randrange(n_times), rng.randint(1, 25), n_times))
        for _ in range(60)
    )
    found = packed(tenants)
    for (one, start), (other, since) in combinations(zip(tenants, found.places), 2):
        apart = start + one.bytes <= since or since + other.bytes <= start
        assert apart or not one.times & other.times
    assert all(start % ALIGN_BYTES == 0 for start in found.places)
    assert found.bytes == max(start + aligned(one.bytes) for one, start in zip(tenants, found.places))
    most = max(sum(aligned(t.bytes) for t in tenants if t.times >> k & 1) for k in range(n_times))
    assert most <= found.bytes <= 1.3 * most
