"""Rates of a disk: what was under way decides what a request counts for, and means forget what was long ago."""

from __future__ import annotations

import pytest
from offmate.runtime.storage.disk_rates import DiskRates, MeanRates

READ, WRITE = False, True


def rates_after(*requests, rates=None):
    """Rates after requests, each with its direction, its bytes, and the moments at which it begins and ends."""
    rates = rates or DiskRates()
    marks = {}
    moments = [(end_s, 0, n) for n, (_, _, _, end_s) in enumerate(requests)]
    moments += [(start_s, 1, n) for n, (_, _, start_s, _) in enumerate(requests)]
    for moment_s, begins, number in sorted(moments):
        writes, n_bytes, *_ = requests[number]
        if begins:
            marks[number] = rates.begins(writes, moment_s)
        else:
            rates.ends(writes, n_bytes, marks[number], moment_s)
    return rates


def test_seconds_and_bytes_are_told_apart_by_what_was_under_way():
    rates = rates_after((READ, 300, 0.0, 3.0), (WRITE, 400, 2.0, 6.0), (READ, 50, 8.0, 9.0), (READ, 50, 8.5, 9.0))
    assert rates.busy_s == (4.0, 4.0, 7.0) and rates.done_bytes == (400, 400)
    assert rates.iteration_done(10.0) == 7.0
    means = rates.means
    assert means.seconds == (3.0, 3.0, 1.0)
    assert means.transferred == pytest.approx((300.0, 300.0, 200.0))
    assert means.rates == pytest.approx((100.0, 100.0, 200.0))
    assert means.turn_s == pytest.approx(7.0 / 400)


def test_a_failed_request_takes_time_and_counts_no_bytes():
    rates = rates_after((READ, 0, 0.0, 1.0))
    assert rates.busy_s == (1.0, 0.0, 1.0) and rates.done_bytes == (0, 0)
    rates.iteration_done(1.0)
    assert rates.means.turn_s is None


def test_means_follow_a_change_within_three_iterations_and_keep_little_of_what_was_before():
    rates = DiskRates()
    for number in range(10):
        rates_after((READ, 1000, 10.0 * number, 10.0 * number + 1), rates=rates)
        rates.iteration_done(10.0 * number + 5)
    assert rates.means.rates[0] == pytest.approx(1000)
    for number in range(10, 13):
        rates_after((READ, 1000, 10.0 * number, 10.0 * number + 2), rates=rates)
        assert rates.iteration_done(10.0 * number + 5) == 2.0
    assert 500 < rates.means.rates[0] < 520


def test_an_iteration_that_ends_during_a_request_counts_its_seconds_in_both():
    rates = DiskRates()
    mark = rates.begins(READ, 0.0)
    assert rates.iteration_done(3.0) == 3.0
    rates.ends(READ, 500, mark, 5.0)
    assert rates.iteration_done(6.0) == 2.0
    assert rates.busy_s[2] == 5.0


def test_too_little_says_nothing():
    assert MeanRates((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 0.0, 0.0).rates == (None, None, None)
    means = MeanRates((0.001, 0.0, 5.0), (1e9, 0.0, 500.0), 1e9, 250.0)
    assert means.rates == (None, None, 100.0)
    assert MeanRates((0.001, 0.0, 0.0), (1.0, 0.0, 0.0), 1.0, 0.0).slower_than((1.0, 1.0, 1.0)) is None


def test_how_much_slower_a_disk_is_counts_by_what_it_did():
    means = MeanRates((1.0, 0.0, 4.0), (100.0, 0.0, 400.0), 300.0, 200.0)
    assert means.slower_than((100.0, 50.0, 100.0)) == 1.0
    assert means.slower_than((200.0, 1.0, 200.0)) == 2.0
