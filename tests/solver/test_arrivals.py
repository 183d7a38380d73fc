"""Places for gradients that arrive on the host: none waits longer than with a buffer of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from offmate.solver.arrivals import N_BUFFERS, Arrivals, Place

LARGEST = 1000


@given(st.lists(st.integers(1, LARGEST), min_size=1, max_size=60))
def test_a_gradient_waits_at_most_for_those_before_the_previous_one(sizes: list[int]) -> None:
    arrivals = Arrivals(LARGEST)
    places = [arrivals.place(size) for size in sizes]
    for number, (place, size) in enumerate(zip(places, sizes)):
        assert place.buffer in range(N_BUFFERS)
        assert place.start_bytes >= 0
        assert place.start_bytes + size == place.end_bytes <= LARGEST
        # With one gradient per buffer it would wait for the one before the previous one, and for all before that.
        assert not any(place.overlaps(other) for other in places[max(number - 1, 0) : number])


def test_small_ones_lie_behind_each_other() -> None:
    arrivals = Arrivals(LARGEST)
    places = [arrivals.place(256) for _ in range(8)]
    assert [place.start_bytes for place in places] == [0, 256, 512, 0, 256, 512, 0, 256]
    assert [place.buffer for place in places] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert [places[0].overlaps(other) for other in places] == [True, *[False] * 5, True, False]


def test_places_that_only_touch_share_nothing() -> None:
    assert not Place(0, 0, 64).overlaps(Place(0, 64, 128))
    assert Place(0, 0, 65).overlaps(Place(0, 64, 128))
    assert not Place(0, 0, 64).overlaps(Place(1, 0, 64))
