"""Timelines, traces and comparisons of plans, worked out by hand and checked against the dry run."""

import io
import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offmate.solver import items
from offmate.solver.plan import plan
from offmate.solver.schedule import Action, Kind
from offmate.solver.simulate import memory_highs, simulate
from offmate.solver.solve import least_budget
from rich.console import Console

from offmate.plans.diff import Figure
from offmate.reports.chrome_trace import trace
from offmate.reports.items import KINDS, block_of_items, describe_action, describe_item
from offmate.reports.places import Place, step_order, tracks
from offmate.reports.timeline import build_timeline
from offmate.reports.units import byte_ticks, format_seconds, second_ticks, ticks

from ...solver.micro_schedule import micro_schedule
from ...solver.random_problems import random_problem
from ...solver.tiny_schedule import tiny_schedule
from .report_plans import plan_of, resident_plan, tiny_plan


def by_kind(sample):
    return {kind: size for kind, size in zip(KINDS, sample.bytes) if size}


def sample_of(timeline, action):
    return [sample for sample in timeline.memory if str(sample.action) == action][-1]


def check_against_simulation(schedule):
    simulation = simulate(schedule)
    timeline = build_timeline(schedule, simulation)
    assert timeline.peak.total_bytes == simulation.peak_bytes
    assert timeline.stall_s == pytest.approx(sum(simulation.stall_s.values()), abs=1e-9)
    for cause in schedule.rates.resources:
        waited = sum(wait.end_s - wait.start_s for wait in timeline.waits if wait.cause is cause)
        assert waited == pytest.approx(simulation.stall_s[cause], abs=1e-9)
    assert timeline.memory[0].start_s == 0
    assert timeline.memory[-1].end_s == pytest.approx(simulation.step_s)
    assert all(a.end_s == b.start_s for a, b in pairwise(timeline.memory))
    highs = dict(zip(schedule.actions, memory_highs(schedule)))
    reached = dict.fromkeys(highs, 0)
    for sample in timeline.memory:
        assert min(sample.bytes[:-1]) >= 0
        reached[sample.action] = max(reached[sample.action], sample.total_bytes)
    assert all(reached[action] >= high for action, high in highs.items())
    # Nothing runs twice at a time on one resource, tails of the last iteration included.
    for row in timeline.rows:
        spans = sorted((bar.start_s, bar.end_s) for bar in timeline.wrapped() if bar.row is row)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
        assert all(0 <= start <= end <= timeline.step_s + 1e-9 for start, end in spans)
        assert sum(end - start for start, end in spans) == pytest.approx(timeline.busy_s(row))


def test_the_tiny_memory_curve_by_kind():
    timeline = tiny_plan().timeline()
    assert by_kind(sample_of(timeline, "0 prefetch p:w")) == {"parameters": 30, "outputs": 4, "fixed": 7}
    start = {"parameters": 30, "outputs": 4, "fixed": 7, "workspace": 2}
    assert by_kind(sample_of(timeline, "0 compute start")) == start
    forward = {"parameters": 30, "outputs": 4, "shared": 2, "fixed": 7, "workspace": 40}
    assert by_kind(sample_of(timeline, "0 compute F0")) == forward
    backward = {"parameters": 30, "optimizer states": 40, "gradients": 4, "activations": 36, "outputs": 4}
    assert by_kind(sample_of(timeline, "2 compute B1")) == backward | {"shared": 2, "fixed": 7, "workspace": 28}
    assert timeline.peak.total_bytes == tiny_plan().predicted_peak_bytes


def test_the_tiny_waits_and_phases():
    plan = tiny_plan()
    timeline = plan.timeline()
    assert {wait.cause for wait in timeline.waits} == {"copy in", "copy out", "cpu"}
    assert timeline.stall_s == pytest.approx(15)
    assert [name for name, _, _ in timeline.phases] == ["forward", "backward", "turn-around"]
    assert timeline.phases[2][2] == pytest.approx(plan.predicted_step_s)
    # The host's update of w is a tail that goes on in the next iteration.
    tails = [bar for bar in timeline.wrapped() if bar.word == "update on the CPU"]
    assert len(tails) == 1 and tails[0].start_s == 0


def test_a_schedule_that_waits_agrees_with_its_dry_run():
    check_against_simulation(tiny_schedule())


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["planned", "external"]), st.floats(0.0, 0.6), st.booleans())
def test_timelines_agree_with_the_dry_run(seed, update, room, shared_cores):
    problem = random_problem(random.Random(seed), update=update)
    least, ample = least_budget(problem).bytes, problem.device_budget_bytes
    tight = replace(problem, device_budget_bytes=int(least + room * (ample - least)))
    schedule = plan(replace(tight, rates=replace(tight.rates, shared_cores=shared_cores))).schedule
    assert schedule is not None
    check_against_simulation(schedule)


@pytest.mark.parametrize("micro_batches", [2, 3, 6])
def test_several_micro_batches(micro_batches):
    schedule = micro_schedule(micro_batches)
    simulation = simulate(schedule)
    timeline = build_timeline(schedule, simulation)
    assert timeline.peak.total_bytes == simulation.peak_bytes
    assert all(a.end_s == b.start_s for a, b in pairwise(timeline.memory))
    assert all(a[2] == b[1] for a, b in pairwise(timeline.phases))
    names = [name for name, _, _ in timeline.phases]
    assert names[-3:] == [f"forward {micro_batches}", f"backward {micro_batches}", "turn-around"]
    assert ("3 more" in names) is (micro_batches == 6)
    highs = dict(zip(schedule.actions, memory_highs(schedule)))
    assert all(sample.total_bytes <= highs[sample.action] for sample in timeline.memory)
    where = {track.item: track.places for track in tracks(schedule)}
    assert where["t:u"][2] == Place.ARRIVING and where["t:u"][-1] == Place.LEAVING
    assert Place.HOST not in where["t:u"][2:-1]
    plan = plan_of(schedule)
    one = sum(schedule.item_bytes[a.name] for a in schedule.forward + schedule.backward if a.kind is Kind.PREFETCH)
    state = sum(schedule.item_bytes[a.name] for a in schedule.turn_around if a.kind is Kind.PREFETCH)
    assert plan.moved_bytes[0] == micro_batches * one + state
    assert "add to the total" in plan._repr_html_()


def test_items_in_words_and_their_blocks():
    blocks = block_of_items(tiny_schedule())
    assert blocks["p:w"] == blocks["g:w"] == blocks["a:0"] == blocks["v:h"] == blocks["d:h"] == 0
    assert blocks["p:u"] == blocks["s:u"] == blocks["k:1"] == blocks["B1"] == blocks["d:y"] == 1
    assert "x:m" not in blocks
    assert describe_item(items.gradient("lm_head.weight")) == "gradient of lm_head.weight"
    assert describe_item(items.offloaded(3)) == "values that block 3 offloads"
    assert describe_action(Action.parse("0 compute F12")) == "forward of block 12"
    assert describe_action(Action.parse("0 free v:h")) == "free value h"


def test_where_tensors_are():
    schedule = tiny_schedule()
    assert step_order(schedule) == (0, 1, 2, 3, 4)
    where = {track.item: track.places for track in tracks(schedule)}
    gone, leaving, arriving, there = Place
    assert where["p:w"] == (arriving, there, there, leaving, gone)
    assert where["p:u"] == (there,) * 5
    assert where["s:u"] == (gone, gone, leaving, gone, gone)
    assert where["a:0"] == (leaving, gone, arriving, leaving, gone)
    assert where["old:y"] == (there, leaving, gone, gone, gone)


def test_the_trace_holds_what_the_timeline_holds():
    plan = tiny_plan()
    timelines = [plan.timeline(), plan.timeline("measured")]
    events = trace(timelines)["traceEvents"]
    assert json.loads(json.dumps(events)) == events
    for process, timeline in enumerate(timelines, 1):
        own = [event for event in events if event["pid"] == process]
        assert {"name": timeline.name} in [e["args"] for e in own if e["name"] == "process_name"]
        spans = [event for event in own if event["ph"] == "X"]
        assert len(spans) == len(timeline.bars) + len(timeline.waits)
        counters = [sum(event["args"].values()) for event in own if event["ph"] == "C"]
        assert max(counters) == plan.predicted_peak_bytes
        for track in {span["tid"] for span in spans}:
            ordered = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == track)
            assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(ordered))


def test_a_plan_against_itself():
    difference = tiny_plan().diff(tiny_plan())
    assert str(difference) == "the plans predict and do the same"


def test_two_plans_in_words_and_as_a_table():
    difference = tiny_plan().diff(resident_plan())
    words = difference.words()
    assert "activations kept: 6 B → 36 B (+500.0 %)" in words
    assert "activations offloaded: 30 B → 0 B" in words
    assert "1 block from offload to keep: 0" in words
    assert "parameters now updated on the GPU: 10 B" in words
    for width in (80, 120):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(difference.table())
        text = console.export_text()
        assert "…" not in text and all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize(
    ("before_mib", "after_mib", "change"),
    [
        (685, 0, ""), (100, 700, ""), (2048, 30720, ""), (0, 4096, ""),
        (4096, 2048, "-50.0 %"), (4096, 4096, "same"), (4096, 36864, "+800.0 %"),
    ],
)  # fmt: skip
def test_ratios_that_say_nothing_are_left_out(before_mib, after_mib, change):
    figure = Figure("kept", "B", before_mib << 20, after_mib << 20, largest=1 << 40)
    assert figure.texts()[2] == change


def test_plans_of_different_models_compare_totals_only():
    schedule = tiny_schedule()
    renamed = plan_of(tiny_schedule(item_bytes=schedule.item_bytes | {"p:w": 12}))
    difference = tiny_plan().diff(renamed)
    assert not difference.same_model and difference.options is None
    assert "different models" in difference.words()[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(13.654, "13.7 s"), (0.47783, "478 ms"), (0.99999, "1.00 s"), (2e-6, "2.00 µs"), (0, "0 s"), (123.4, "123 s")],
)
def test_seconds_as_people_read_them(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(1e-9, 1e6), st.integers(2, 20))
def test_marks_are_round_few_and_inside(end, about):
    marks = ticks(end, about)
    assert marks[0] == 0 and len(marks) <= about + 1
    assert all(mark <= end * (1 + 1e-6) for mark in marks)
    assert len({text for _, text in second_ticks(end, about)}) == len(second_ticks(end, about))


def test_marks_of_bytes():
    assert byte_ticks(10 * 2**30) == [0, 2 * 2**30, 4 * 2**30, 6 * 2**30, 8 * 2**30, 10 * 2**30]
    assert ticks(0) == [0.0]


def test_the_formulation_names_what_the_code_has():
    root = Path(__file__).parents[3]
    code = "\n".join(path.read_text() for path in (root / "solver").rglob("*.py"))
    names = re.findall(r"`([A-Za-z_.]+)`", (root / "docs" / "formulation.md").read_text())
    assert len(names) > 40
    assert [name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", code)] == []


def test_what_the_bound_says():
    plan, faster = tiny_plan(), "no plan that keeps to the program's steps is faster than"
    assert plan.bound_words.startswith(f"{faster} 9.00 s, and moving only whole tensors costs ")
    program_s = plan.predicted_step_s * 0.995
    assert replace(plan, lower_bound_s=program_s, gap=0.0).bound_words == f"{faster} {format_seconds(program_s)}"
    assert "faster than the program's bound of 90.0 s" in replace(plan, lower_bound_s=90.0).explain()
