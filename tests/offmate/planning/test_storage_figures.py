"""Figures of storage paths follow what their disks do."""

from __future__ import annotations

import pytest
from offmate.runtime.storage.disk_rates import MeanRates

from offmate.planning.storage import PathFigures, proportions, together, turn_s

PATH = PathFigures("/mnt/nvme", 200.0, 100.0, 150.0, 10**9)


def test_without_measurements_figures_are_the_known_ones():
    nothing = MeanRates((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 0.0, 0.0)
    assert PATH.measured(nothing) == PATH


def test_rates_that_were_measured_replace_the_known_ones_and_the_others_slow_down_alike():
    both_at_half = MeanRates((0.0, 0.0, 2.0), (0.0, 0.0, 150.0), 75.0, 75.0)
    assert PATH.measured(both_at_half) == PathFigures("/mnt/nvme", 100.0, 50.0, 75.0, 10**9)
    reads_too = MeanRates((1.0, 0.0, 2.0), (200.0, 0.0, 150.0), 275.0, 75.0)
    measured = PATH.measured(reads_too)
    assert (measured.read_bytes_per_s, measured.both_bytes_per_s) == (200.0, 75.0)
    assert measured.write_bytes_per_s == pytest.approx(100 / 1.5)


def test_paths_together_are_as_fast_as_the_best_shares_let_them_be():
    figures = [PATH, PATH.slower(2), PATH.slower(4)]
    least_s = turn_s(figures)
    assert least_s == pytest.approx(PATH.turn_s / 1.75)
    for one, share in zip(figures, proportions(figures)):
        assert share * one.turn_s == pytest.approx(least_s)


def test_a_plan_counts_the_seconds_of_a_drive_that_reads_faster_than_it_writes():
    """The tier has the rate of both, as many bytes of each, whatever the rates alone are."""
    path = together([PathFigures("/mnt/nvme", 7.0, 1.4, 7 / 3, 10**9)], 0).tier.path
    assert path.alike_bytes_per_s == pytest.approx(7 / 3)
    assert path.together == pytest.approx(0.5), "they take turns"
