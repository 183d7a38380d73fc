"""A line through copies of several sizes: its slope is the rate, its height the seconds per copy."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from offmate.machines.curve import Copied, fitted, line

SIZES = (1 << 14, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
RATE, PER_COPY_S = 25e9, 12e-6


def seconds(size: int) -> float:
    return PER_COPY_S + size / RATE


def test_copies_on_a_line_give_it_back() -> None:
    found = line([(size, seconds(size)) for size in SIZES])
    assert found.bytes_per_s == pytest.approx(RATE) and found.per_copy_s == pytest.approx(PER_COPY_S)


@pytest.mark.parametrize("disturbed", range(len(SIZES)))
def test_one_copy_that_was_disturbed_moves_it_little(disturbed: int) -> None:
    points = [(size, seconds(size) * (3 if i == disturbed else 1)) for i, size in enumerate(SIZES)]
    found = line(points)
    assert found.bytes_per_s == pytest.approx(RATE, rel=0.4)
    assert found.per_copy_s < 3 * PER_COPY_S


def test_sizes_too_alike_for_their_noise_have_the_largest_ones_rate() -> None:
    assert line([(1 << 12, 5e-6), (1 << 16, 4e-6)]) == ((1 << 16) / 4e-6, 0.0)
    assert line([(1 << 16, 4e-6)]) == ((1 << 16) / 4e-6, 0.0)


def test_copies_that_gain_by_a_cache_take_no_negative_seconds() -> None:
    assert line([(1 << 14, 1e-7), (1 << 16, 1e-6), (1 << 24, 1e-3), (1 << 28, 16e-3)]).per_copy_s == 0.0


def test_both_directions_at_once_add_up() -> None:
    curve = [Copied(way, size, size / seconds(size)) for way in ("in", "out") for size in SIZES]
    curve += [Copied("both", size, 2 * size / (PER_COPY_S + 2 * size / 45e9)) for size in SIZES]
    found = fitted(curve)
    assert astuple(found) == pytest.approx((RATE, RATE, 45e9, PER_COPY_S))
    with pytest.raises(ValueError, match="no copy in direction both"):
        fitted(curve[: -len(SIZES)])
