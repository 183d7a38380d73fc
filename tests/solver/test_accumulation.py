"""The search for the least number of micro-batches: curves whose answer is known, and what is solved on the way."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from offmate.solver import accumulation
from offmate.solver.accumulation import AccumulationTrial, fewest, tried, try_micro_batches
from offmate.solver.fat_steps import for_all
from offmate.solver.instances.synthetic import Rates, Shape, Speeds, llama
from offmate.solver.solve import solve


def _search(monkeypatch, seconds, compute_s=1.0, orders=("by block",), between=None, **limits):
    """Search a curve: `seconds` by micro-batches per update and per pass, None where nothing fits."""
    made: list[tuple[int, int]] = []

    def trial(problem, order, solution):
        made.append((problem.per_update, problem.per_pass))
        return AccumulationTrial(problem.per_update, order, seconds(*made[-1]), compute_s * problem.per_update)

    def some(problem, best_s, *, all_fit):
        tried_between.append((problem.per_update, best_s, all_fit))
        return between(problem.per_update) if between is not None else None

    tried_between: list[tuple[int, float, bool]] = []
    monkeypatch.setattr(accumulation, "solve", lambda problem, **limits: None)
    monkeypatch.setattr(accumulation, "tried", trial)
    monkeypatch.setattr(accumulation, "between", some)
    found = list(try_micro_batches(_Stated, orders=orders, **limits))  # type: ignore[arg-type]
    return fewest(found), made, tried_between


class _Stated(NamedTuple):
    """As much of a problem as the search reads."""

    per_update: int
    per_pass: int


@pytest.mark.parametrize("bend", [1, 2, 3, 5, 13, 20, 33, 57])
def test_the_number_at_which_computing_takes_longest_is_found_with_few_solves(monkeypatch, bend):
    found, made, _ = _search(monkeypatch, lambda count, per_pass: max(float(bend), count))
    assert found.micro_batches == bend
    assert len(made) <= 10


def test_a_curve_that_bends_slowly_ends_where_one_more_adds_less_than_a_percent(monkeypatch):
    # n / (10 + n) grows by less than 1 % where 10 < 0.01 n (11 + n), from 27 on.
    found, made, _ = _search(monkeypatch, lambda count, per_pass: 10.0 + count, gap=0.0)
    assert found.micro_batches in (27, 28)
    assert len(made) <= 12


def test_a_gate_that_comes_with_the_second_micro_batch_does_not_end_the_search(monkeypatch):
    """Two take more than twice as long as one, since they wait for the gate; many share what it costs."""
    found, made, _ = _search(monkeypatch, lambda count, per_pass: 13.0 if count == 1 else 10.0 + 10.0 * count)
    # n / (1 + n) grows by less than 1 % from 10 on, and there 10 / 110 is more than 1.01 / 13.
    assert found.micro_batches in (10, 11)
    assert len(made) <= 10
    found, *_ = _search(monkeypatch, lambda count, per_pass: 11.0 if count == 1 else 10.0 + 10.0 * count)
    assert found.micro_batches == 1, "no number trains 1 % more than one alone"


def test_the_limit_and_the_memory_end_the_search(monkeypatch):
    found, made, _ = _search(monkeypatch, lambda count, per_pass: 1e6, most=24)
    assert found.micro_batches == 24 == max(count for count, _ in made)
    found, *_ = _search(monkeypatch, lambda count, per_pass: 1e6 if count <= 8 else None)
    assert found.micro_batches == 8
    found, made, _ = _search(monkeypatch, lambda count, per_pass: None)
    assert not found.fits and len(made) == 1


def test_the_faster_order_is_taken_and_a_clearly_slower_one_is_left_out(monkeypatch):
    def seconds(count, per_pass):
        if per_pass > 8:
            return None
        return 40.0 + count if per_pass > 1 else 60.0 + count

    found, made, _ = _search(monkeypatch, seconds, orders=("by batch", "by block"), most=16)
    assert (2, 1) in made and (8, 1) not in made
    assert (16, 1) in made  # the other one does not fit there
    assert (found.micro_batches, found.order) == (16, "by batch")


def test_an_order_that_fits_no_more_is_not_left_out_for_fewer(monkeypatch):
    """By block fits up to eleven and is faster there, so no number below is solved in the other order alone."""

    def seconds(count, per_pass):
        if per_pass > 11:
            return None
        return 60.0 + count if per_pass > 1 else 60.0 + 8 * count

    found, made, _ = _search(monkeypatch, seconds, orders=("by batch", "by block"), most=16)
    assert (16, 1) in made
    assert all((count, count) in made for count, _ in made)
    assert found.order == "by block" and found.micro_batches >= 8


def test_passes_of_some_are_tried_beside_both_orders(monkeypatch):
    """Where all in one pass do not fit, they are the fastest; the search then goes on with more."""

    def seconds(count, per_pass):
        if per_pass > 4:
            return None
        return 100.0 / min(count, per_pass) + count

    found, made, between = _search(
        monkeypatch, seconds, orders=("by batch", "by block"), most=16,
        between=lambda count: 4 if count > 4 else None,
    )  # fmt: skip
    assert (found.micro_batches, found.micro_batches_per_pass, found.order) == (16, 4, "by block")
    assert {(8, 1), (8, 8), (8, 4)} <= set(made)
    assert (4, 29.0, True) in between and (8, 108.0, False) in between  # the best one so far, and whether all fit
    _, made, between = _search(monkeypatch, seconds, orders=("by block",), between=lambda count: 2)
    assert not between and all(per_pass in (1, count) for count, per_pass in made)


def test_the_seconds_that_a_trial_names_alone_are_no_more_than_those_of_the_update():
    rates = Rates(2e9, 2e9, 3e9, 1e-5)
    shape = Shape(4, 512, 1408, 2000, batch=1, sequence=128)
    problem = llama(shape, Speeds(1e13, 3e11, 1e9, 8e10, rates), 60 * 10**6, 2 * 10**9, whole_layers=True)
    fat = for_all(problem, 3)
    trial = tried(fat, "by block", solve(fat, gap=0.0))
    blocks = (min(o.forward_s + o.backward_s for o in block.options) for block in problem.blocks)
    assert trial.micro_batches == 3
    assert trial.compute_s == pytest.approx(3 * sum(blocks))
    assert trial.update_s is not None and trial.moved_on == "host"
    # Both links are busy on this one; the bytes of both take longer together than those of the busier link.
    assert 0 < trial.moved_s <= trial.update_s * (1 + 1e-6)
    assert 0 < max(trial.compute_s, trial.cpu_s) <= trial.update_s
