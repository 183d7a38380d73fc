"""offmate.plan for another batch than the example's, and for the batch that trains fastest."""

import logging

import pytest
import torch

import offmate
from offmate.planning import sizing
from offmate.planning.batch_size import resized

from ..loops import Tiny, adamw, batch, tiny

SETTINGS = {"device": "emulated", "cpu_budget": 1 << 30, "config": offmate.Config(cache_dir=None)}


def plan(budget, **more):
    model = tiny()
    return offmate.plan(model, budget, example_inputs=batch(0), optimizer=adamw(model), **SETTINGS, **more)


def test_samples_are_repeated_or_dropped():
    given = {"x": torch.arange(6).reshape(3, 2), "y": torch.arange(3), "scale": torch.ones(2), "flag": True}
    larger = resized(given, 5)
    assert larger["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert larger["y"].tolist() == [0, 1, 2, 0, 1]
    assert larger["scale"] is given["scale"] and larger["flag"] is True
    assert resized(given, 1)["y"].tolist() == [0]


def test_a_plan_for_a_given_size_trains_batches_of_that_size():
    larger = plan("1GiB", batch_size=16)
    assert larger.batch_size == 16
    assert "batch size 16" in larger.explain()
    assert plan("1GiB").batch_size is None
    model = tiny()
    optimizer = adamw(model)
    offmate.compile(model, "1GiB", optimizer=optimizer, plan=larger, **SETTINGS)
    model(**resized(batch(0), 16))["loss"].backward()
    optimizer.step()
    assert model.offmate.peak_bytes == larger.predicted_peak_bytes


def test_the_fastest_size_is_chosen_and_planned(caplog):
    with caplog.at_level(logging.INFO, "offmate"):
        found = plan("1GiB", batch_size="auto")
    assert found.batch_size is not None
    tried = [line for line in caplog.text.splitlines() if "samples/s" in line or "does not fit" in line]
    assert any(f"batch size {found.batch_size}:" in line for line in tried) and len(tried) >= 3
    assert found.predicted_peak_bytes <= found.budget_bytes


def test_a_smaller_batch_where_the_example_does_not_fit():
    least = plan("1GiB", batch_size=1).least_budget_bytes
    with pytest.raises(offmate.InfeasibleBudget):
        plan(least, batch_size=64)
    model = tiny()
    example = resized(batch(0), 64)
    found = offmate.plan(model, least, example_inputs=example, optimizer=adamw(model), batch_size="auto", **SETTINGS)
    assert found.batch_size == 1
    with pytest.raises(offmate.InfeasibleBudget):
        plan(least // 2, batch_size="auto")


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "all"])
def test_sizes_that_make_no_sense(size):
    with pytest.raises(offmate.OffmateError, match=r"batch_size is .*whole number above 0"):
        plan("1GiB", batch_size=size)


def wide_plan(**more):
    """A model whose parameters are most of what the GPU holds, so that an update costs much once."""
    with torch.device("meta"):
        model, example = Tiny(3, 1024), {"x": torch.empty(64, 16), "y": torch.empty(64, dtype=torch.long)}
    settings = {**SETTINGS, "hardware": "rtx3060", "batch_size": "auto", **more}
    return offmate.plan(model, "16MiB", example_inputs=example, optimizer=adamw(model), **settings)


def test_size_and_number_of_micro_batches_are_chosen_together(monkeypatch):
    """For the number that suits a size, the size is chosen again; a size that brings no more samples is not taken."""
    tried, real = [], sizing.fastest_batch_size

    def noted(problem, batch_size, *rest):
        size = real(problem, batch_size, *rest)
        tried.append((problem.per_update, size))
        return size // 2 if problem.per_update > 1 else size  # half of it cannot be better

    monkeypatch.setattr(sizing, "fastest_batch_size", noted)
    alone = wide_plan()
    assert tried.pop() == (1, alone.batch_size) and not tried
    found = wide_plan(accumulation_steps="auto")
    assert tried == [(1, alone.batch_size), (found.accumulation_steps, found.batch_size)]
    assert found.accumulation_steps > 1 and found.samples_per_s > alone.samples_per_s
    assert {trial.micro_batches for trial in found.accumulation} >= {1, found.accumulation_steps}
