"""The rule that changes between plans by how many steps clip: what it loses against the better of both."""

from __future__ import annotations

import random

import pytest

from offmate.plans.break_even import BreakEven
from offmate.session.clipping import Clipping

GAINS = [(0.04, 0.2), (0.1, 0.2), (0.13, 0.3), (0.26, 0.5)]
SWITCH = [0.0, 0.2]  # of a step


def figures_of(gained: float, lost: float, switch: float = 0.0) -> BreakEven:
    return BreakEven(1.0, 1.0 - gained, 1.0 + lost, switch, 0)


def seconds(figures: BreakEven, trace: list[bool]) -> tuple[float, int]:
    """Seconds of a run by the rule, switches included, and how often it switches."""
    rule, total_s, switches = Clipping(), 0.0, 0
    for missed in trace:
        total_s += (figures.missed_s if missed else figures.kept_s) if rule.early else figures.gated_s
        switches += rule.note(figures, missed)
    return total_s + switches * figures.switch_s, switches


def beyond_the_better(figures: BreakEven, trace: list[bool]) -> float:
    """The part by which the rule is slower than the better of both ways, kept all the time."""
    early_s = sum(figures.missed_s if missed else figures.kept_s for missed in trace)
    return seconds(figures, trace)[0] / min(early_s, len(trace) * figures.gated_s) - 1


def by_chance(share: float, steps: int, seed: int = 0) -> list[bool]:
    rng = random.Random(seed)
    return [rng.random() < share for _ in range(steps)]


def alternating(period: int, steps: int) -> list[bool]:
    return [bool(step // period % 2) for step in range(steps)]


TRACES = {
    "none": [False] * 1000,
    "all": [True] * 1000,
    "frequent for 1,000 steps, then 93 of 79,000": by_chance(0.7, 1000) + by_chance(93 / 79_000, 79_000),
    **{f"{share:.0%} by chance": by_chance(share, 1000, int(100 * share)) for share in (0.05, 0.2, 0.3, 0.5, 0.9)},
    **{f"alternating every {period}": alternating(period, 1000) for period in (8, 32, 48, 64, 96, 128)},
    "bursts": [step % 100 < 8 for step in range(1000)],
}


@pytest.mark.parametrize("switch", SWITCH)
@pytest.mark.parametrize(("gained", "lost"), GAINS)
@pytest.mark.parametrize("trace", TRACES)
def test_it_loses_little_against_the_better_way(trace: str, gained: float, lost: float, switch: float) -> None:
    assert beyond_the_better(figures_of(gained, lost, switch), TRACES[trace]) <= 0.02


@pytest.mark.parametrize(("gained", "lost"), GAINS)
def test_a_trace_that_answers_to_the_rule_costs_no_more_than_is_proved(gained: float, lost: float) -> None:
    """Whatever is decided, the step is the worse one. No rule that decides before a step loses less than the first."""
    figures, rule, trace = figures_of(gained, lost), Clipping(), []
    for _ in range(3000):
        trace.append(rule.early)
        rule.note(figures, trace[-1])
    early_s = sum(figures.missed_s if missed else figures.kept_s for missed in trace)
    lost_s = (seconds(figures, trace)[0] - min(early_s, 3000.0)) / 3000
    assert gained * lost / (gained + lost) * 0.99 <= lost_s <= 2 * gained * lost / (gained + 2 * lost) * 1.01


def test_it_begins_and_ends_with_the_evidence() -> None:
    figures, rule = figures_of(0.1, 0.4), Clipping()
    assert [rule.note(figures, missed=False) for _ in range(10)] == [False] * 9 + [True]  # 25 * 0.4
    assert rule.early and rule.steps == (0, 10)
    assert [rule.note(figures, missed=True) for _ in range(3)] == [False, False, True]  # 25 * 0.1 and a half
    again = [rule.note(figures, missed=False) for _ in range(21)]
    assert again.index(True) == 19  # twice as many as before


def test_many_misses_in_the_window_outweigh_a_few_kept_ones() -> None:
    figures, rule = figures_of(0.1, 0.4), Clipping()
    for _ in range(64):
        rule.note(figures, missed=True)
    kept = [rule.note(figures, missed=False) for _ in range(64)]
    assert kept.index(True) == 51  # fewer than a fifth of 64 have missed then, 12


def test_plans_that_gain_nothing_are_never_changed() -> None:
    for figures in (figures_of(0.0, 0.1), figures_of(-0.1, 0.3), BreakEven(0.0, 0.0, 0.0, 0.0, 0)):
        assert figures.share == 0
        assert seconds(figures, [False] * 100)[1] == 0
        assert "gain nothing" in figures.words()


def test_the_share_at_which_both_are_as_fast() -> None:
    figures = BreakEven(2.0, 1.5, 3.0, 0.0, 1 << 30)
    assert figures.share == pytest.approx(1 / 3)
    mean_s = figures.share * figures.missed_s + (1 - figures.share) * figures.kept_s
    assert mean_s == pytest.approx(figures.gated_s)
    assert "fewer than 33 %" in figures.words() and "1 GiB of old values" in figures.words()
    assert BreakEven(2.0, 1.5, 1.9, 0.0, 0).share == 1  # even a miss is faster than waiting
