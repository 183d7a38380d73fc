"""offmate.plan(accumulation_steps="auto"): the number, the order, what was tried, and a loop that follows the plan."""

import pytest
import torch
from offmate.solver.accumulation import AccumulationTrial

import offmate
from offmate.planning.orders import in_faster_order
from offmate.plans.orders import OtherOrder, order_words, other_trial

from ..loops import adamw, batch, tiny

SETTINGS = {"device": "emulated", "cpu_budget": 1 << 30}
QUIET = offmate.Config(cache_dir=None)


def plan(budget, steps="auto", config=QUIET, **more):
    model = tiny()
    arguments = {"example_inputs": batch(0), "optimizer": adamw(model), "accumulation_steps": steps, "config": config}
    return offmate.plan(model, budget, **arguments, **SETTINGS, **more)


def test_a_plan_knows_all_that_was_tried_and_trains_as_chosen(tmp_path):
    found = plan("40KiB")
    count = found.accumulation_steps
    (chosen,) = (
        one for one in found.accumulation
        if (one.micro_batches, one.micro_batches_per_pass) == (count, found.micro_batches_per_pass)
    )  # fmt: skip
    assert chosen.rate == max(one.rate for one in found.accumulation if one.micro_batches == count)
    assert f"{count} micro-batches per update" in found.explain()
    found.save(tmp_path / "plan.json")
    assert offmate.load_plan(tmp_path / "plan.json").accumulation == found.accumulation

    model = tiny()
    optimizer = adamw(model)
    offmate.compile(model, "40KiB", optimizer=optimizer, plan=found, accumulation_steps=count, config=QUIET, **SETTINGS)
    reference = tiny()
    plain = adamw(reference)
    for given in model.offmate.batches([batch(index) for index in range(count)]):
        (model(**given)["loss"] / count).backward()
        (reference(**given)["loss"] / count).backward()
    optimizer.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters()))


def test_a_named_order_is_the_only_one_that_is_tried():
    config = offmate.Config(cache_dir=None, accumulation_order="by batch")
    assert {one.order for one in plan("40KiB", config=config).accumulation} == {"by batch"}


def test_without_an_optimizer_or_elsewhere_auto_is_refused():
    model = tiny()
    with pytest.raises(offmate.OffmateError, match='accumulation_steps="auto" needs optimizer='):
        offmate.plan(model, "40KiB", example_inputs=batch(0), accumulation_steps="auto", **SETTINGS)
    with pytest.raises(offmate.OffmateError, match=r'offmate\.plan finds one for "auto"'):
        offmate.compile(model, "40KiB", optimizer=adamw(model), accumulation_steps="auto", **SETTINGS)


@pytest.mark.parametrize(
    ("per_pass", "other", "words"),
    [
        (8, 2, "micro-batches run block by block; 2 at a time takes 3.00 s per update in fractions of tensors"),
        (2, 8, "micro-batches run block by block, 2 at a time; all at a time takes 3.00 s per update"),
        (1, 8, "micro-batches run one after the other; block by block takes 3.00 s per update"),
        (8, 1, "micro-batches run block by block; one after the other takes 3.00 s per update"),
    ],
)
def test_the_next_best_way_that_was_tried_is_named(per_pass, other, words):
    some = 0 if other in (1, 8) else other
    trials = [
        AccumulationTrial(8, "by batch" if other == 1 else "by block", 3.0, per_pass=some),
        AccumulationTrial(8, "by block", 2.0, per_pass=per_pass)
        if per_pass > 1
        else AccumulationTrial(8, "by batch", 2.0),
        AccumulationTrial(4, "by batch", 1.0),
    ]
    own = OtherOrder(2.0)
    assert order_words(per_pass, 8, own, None, other_trial(trials, 8, per_pass)).startswith(words)


def test_what_an_order_buys_is_said_only_where_both_were_planned(tmp_path):
    alone = plan("1MiB", steps=4)
    assert alone.order_words == "micro-batches run one after the other" and alone.order_words in alone.explain()
    assert plan("1MiB", steps=1).order_words == ""
    own, config = in_faster_order(lambda one: plan("1MiB", steps=4, config=one), QUIET, 4)
    (order,) = {"by batch", "by block"} - {config.accumulation_order}
    other = plan("1MiB", steps=4, config=offmate.Config(cache_dir=None, accumulation_order=order))
    assert own.other_order == other.compared
    assert "less per update than" in own.order_words and own.order_words in own.explain()
    own.save(tmp_path / "plan.json")
    assert offmate.load_plan(tmp_path / "plan.json").order_words == own.order_words
    small, _ = in_faster_order(lambda one: plan("25KiB", steps=4, config=one), QUIET, 4)
    assert "block by block has no plan: a budget of 25 KiB is too small" in small.explain()
