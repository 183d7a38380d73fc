"""Shares follow the paths' rates: after three iterations, with one log line, and not for a little."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from offmate.runtime.storage.balance import Balance
from offmate.runtime.storage.disk_rates import MeanRates


class Paths:
    """Paths of given speeds, as engine and store at once: bytes move as asked, and are busy as long as they take."""

    def __init__(self, *speeds, total=1_000_000, can_move=True):
        self.speeds, self.total, self.can_move = list(speeds), total, can_move
        self.folders = [Path(f"/mnt/{k}") for k in range(len(speeds))]
        self.bytes_by_path = [total // len(speeds)] * len(speeds)
        self.asked = []

    def iteration_done(self):
        busy_s = [n_bytes / speed for n_bytes, speed in zip(self.bytes_by_path, self.speeds)]
        return [
            (one_s, MeanRates((0.0, 0.0, one_s), (0.0, 0.0, 2.0 * n_bytes), n_bytes, n_bytes))
            for one_s, n_bytes in zip(busy_s, self.bytes_by_path)
        ]

    def move(self, shares):
        self.asked.append(list(shares))
        if not self.can_move:
            return 0
        before = self.bytes_by_path
        self.bytes_by_path = [int(self.total * share / sum(shares)) for share in shares]
        return sum(max(0, new - old) for new, old in zip(self.bytes_by_path, before))


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "offmate")
    return lambda: [record.message for record in caplog.records]


def after(paths, n_iterations, balance=None):
    balance = balance or Balance(paths, paths)
    for _ in range(n_iterations):
        balance.iteration_done()
    return balance


def test_a_slow_path_gives_bytes_away_after_three_iterations(lines):
    paths = Paths(1e6, 5e5)
    balance = after(paths, 2)
    assert not paths.asked and not lines()
    after(paths, 1, balance)
    assert paths.asked == [[0.667, 0.333]]
    (line,) = lines()
    assert "/mnt/0 gets 67 % of the bytes instead of 50 %, since it reads and writes 1.91 MiB per second" in line
    assert "/mnt/1 gets 33 % of the bytes instead of 50 %" in line and "163 KiB move when they are written next" in line
    after(paths, 50, balance)
    assert len(paths.asked) == 1 and len(lines()) == 1


def test_a_path_that_recovers_gets_its_share_back(lines):
    paths = Paths(1e6, 1e4)
    balance = after(paths, 4)
    assert paths.bytes_by_path[1] < 11_000
    paths.speeds[1] = 1e6
    after(paths, 4, balance)
    assert paths.bytes_by_path == [500_000, 500_000] and len(lines()) == 2


def test_paths_that_are_apart_by_less_than_a_tenth_are_left_alone():
    paths = Paths(1e6, 9.2e5)
    after(paths, 20)
    assert not paths.asked


def test_paths_that_are_slow_in_turn_are_left_alone():
    paths, speeds = Paths(1e6, 1e6), [[1e6, 5e5], [5e5, 1e6]]
    balance = Balance(paths, paths)
    for number in range(20):
        paths.speeds = speeds[number // 2 % 2]
        balance.iteration_done()
    assert not paths.asked


def test_a_path_that_is_slow_for_two_iterations_is_left_alone():
    paths = Paths(1e6, 1e6)
    balance = Balance(paths, paths)
    for number in range(30):
        paths.speeds[1] = 1e6 if number % 3 == 0 else 5e5
        balance.iteration_done()
    assert not paths.asked


def test_what_takes_no_time_is_left_alone():
    paths = Paths(1e9, 1e8)
    after(paths, 20)
    assert not paths.asked


def test_after_a_move_that_has_no_room_it_is_not_tried_at_once_again(lines):
    paths = Paths(1e6, 5e5, can_move=False)
    after(paths, 33)
    assert len(paths.asked) == 1 and not lines()
    after(paths, 3 * 33)
    assert len(paths.asked) == 4


@pytest.mark.parametrize("speeds", [[1e6], []])
def test_one_path_has_nothing_to_share(speeds):
    paths = Paths(*speeds) if speeds else Paths(1e6, total=0)
    after(paths, 10)
    assert not paths.asked
