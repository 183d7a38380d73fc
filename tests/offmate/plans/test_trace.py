"""What was recorded of an iteration: the schedule's actions, the ledger's bytes, and nothing disturbed."""

import json
from itertools import pairwise

import pytest
from offmate.runtime.trace import Recording, Taken
from offmate.solver.resources import Resource
from offmate.solver.schedule import Action, Kind, Schedule
from offmate.solver.simulate import BusySpan, simulate

from offmate.reports.measured import measured_timeline
from offmate.reports.timeline import build_timeline

from ...solver.micro_schedule import micro_schedule
from ...solver.tiny_schedule import BACKWARD, tiny_schedule
from ..loops import assert_same, compiled, plain, trained


@pytest.fixture(scope="module")
def recorded():
    """A loop whose second and third step were recorded, and plain PyTorch's after as many steps."""
    ours, reference = trained("least"), plain()
    losses = ours.steps(0, 1)
    with ours.model.offmate.record():
        losses += ours.steps(1, 3)
    losses += ours.steps(3, 4)
    assert losses == reference.steps(0, 4)
    assert_same(ours, reference)
    return ours


def test_every_action_was_taken_once_and_in_order(recorded):
    plan, recording = recorded.model.offmate.plan, recorded.model.offmate.trace.recording
    taken = [one for walk in recording.walks for one in walk]
    assert tuple(one.action for one in taken) == plan.schedule.actions
    assert all(a.end_s <= b.start_s for a, b in pairwise(taken))
    assert all(one.start_s <= one.end_s for one in taken)


def test_every_copy_and_update_was_done_with_its_bytes(recorded):
    plan, trace = recorded.model.offmate.plan, recorded.model.offmate.trace
    jobs = trace.recording.jobs
    for resource, moved_bytes in zip((Resource.IN, Resource.OUT), plan.moved_bytes):
        assert sum(job.bytes for job in jobs if job.resource == resource) == moved_bytes
    updates = {job.action.name for job in jobs if job.resource == Resource.CPU}
    assert updates == plan.schedule.update_cpu_s.keys()
    for resource in (Resource.IN, Resource.OUT, Resource.CPU):
        spans = sorted((job.start_s, job.end_s) for job in jobs if job.resource == resource)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_measured_memory_is_the_predicted_one_by_kind_and_to_the_byte(recorded):
    trace = recorded.model.offmate.trace
    measured = {sample.action: sample.bytes for sample in trace.measured.memory}
    predicted = {sample.action: sample.bytes for sample in trace.predicted.memory}
    last = [walk[-1].action for walk in trace.recording.walks if walk]
    assert all(measured[action] == predicted[action] for action in measured if action not in last)
    assert trace.peak_bytes == trace.measured.peak.total_bytes == recorded.model.offmate.plan.predicted_peak_bytes
    assert trace.measured.kinds() == trace.predicted.kinds()


def test_the_timeline_has_no_gaps_and_no_overlaps(recorded):
    timeline = recorded.model.offmate.trace.measured
    assert all(a.end_s == b.start_s for a, b in pairwise(timeline.memory))
    assert [name for name, _, _ in timeline.phases] == ["forward", "backward", "turn-around"]
    for row in timeline.rows:
        spans = sorted((bar.start_s, bar.end_s) for bar in timeline.wrapped() if bar.row is row)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert timeline.stall_s == pytest.approx(sum(recorded.model.offmate.trace.stall_s.values()))


def test_predicted_and_measured_lie_in_one_file(recorded, tmp_path):
    trace = recorded.model.offmate.trace
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["predicted", "measured"]
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
    trace.save_html(tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text()
    assert "<h3>predicted</h3>" in page and "<h3>measured</h3>" in page
    assert trace._repr_html_() in page
    assert "measured" in str(trace) and "predicted" in str(trace)


def test_an_iteration_in_which_nothing_moves():
    loop = trained("ample", steps=1)
    with loop.model.offmate.record():
        loop.steps(1, 2)
    trace = loop.model.offmate.trace
    assert trace.recording.walks[-1] == ()
    assert trace.stall_s == {}
    assert trace.peak_bytes == trace.predicted.peak.total_bytes
    assert trace.measured.memory[-1].end_s == pytest.approx(trace.step_s)


def test_recording_is_off_unless_asked_for():
    loop = compiled("middle", steps=1)
    handle = loop.model.offmate
    assert handle.trace is None
    peak_bytes = handle.peak_bytes
    with handle.record():
        assert handle.trace is None
        loop.steps(1, 2)
        assert handle.trace is not None
    assert handle.peak_bytes == peak_bytes
    first = handle.trace.recording
    loop.steps(2, 3)
    assert handle.trace.recording == first


def test_half_an_iteration_is_no_trace():
    loop = trained("middle", steps=1)
    loss = loop.forward(1)
    with loop.model.offmate.record():
        loss.backward()
        loop.optimizer.step()
    assert loop.model.offmate.trace is None
    loop.optimizer.zero_grad()
    with loop.model.offmate.record():
        loss = loop.forward(2)
    loss.backward()
    loop.optimizer.step()
    assert loop.model.offmate.trace is None


def walked(schedule: Schedule) -> tuple[tuple[Taken, ...], ...]:
    """A recording's walks in which every action takes ten seconds."""
    walks, clock = [], 0.0
    for part in (*(p for one in schedule.passes for p in (one.forward, one.backward)), schedule.turn_around):
        walk = []
        for action in part:
            walk.append(Taken(action, clock, clock + 10, 0, 0, 0, clock, clock + 10))
            clock += 10
        walks.append(tuple(walk))
    return tuple(walks)


def test_waits_are_told_by_what_ended_meanwhile():
    schedule = tiny_schedule()
    walks = walked(schedule)
    taken = {one.action: one for walk in walks for one in walk}
    first = next(a for a in schedule.forward if a.kind is Kind.COMPUTE and a.name == "F0")
    prefetch = next(a for a in schedule.forward if a.kind is Kind.PREFETCH and a.name == "p:w")
    start = taken[first].start_s
    update = BusySpan(Action(4, Kind.UPDATE_CPU, "w"), Resource.CPU, start - 20, start + 2, 0)
    copy = BusySpan(prefetch, Resource.IN, start + 2, start + 5, 10)
    timeline = measured_timeline(Recording(schedule, 7, walks, (copy,), (update,)), 100)
    spans = [(wait.cause, wait.start_s - start, wait.end_s - start) for wait in timeline.waits]
    assert spans == [(Resource.CPU, 0, 2), (Resource.IN, 2, 5)]
    (bar,) = [bar for bar in timeline.bars if bar.name == "F0"]
    assert (bar.start_s, bar.end_s) == (start + 5, start + 10)


def test_an_update_waits_for_every_piece_of_its_state():
    backward = BACKWARD.replace("2 prefetch s:u", "2 prefetch s:u[0:2]\n2 prefetch s:u[2:4]")
    backward = backward.replace("2 offload s:u\n2 free s:u", "\n".join(
        f"2 {word} s:u[{rows}]" for rows in ("0:2", "2:4") for word in ("offload", "free")
    ))  # fmt: skip
    whole = tiny_schedule()
    sizes = {item: size for item, size in whole.item_bytes.items() if item != "s:u"} | {"s:u[0:2]": 20, "s:u[2:4]": 20}
    schedule = tiny_schedule(backward=backward, item_bytes=sizes)
    walks = walked(schedule)
    taken = {one.action: one for walk in walks for one in walk}
    update = next(a for a in schedule.backward if a.kind is Kind.UPDATE_DEVICE)
    copies = [a for a in schedule.backward if a.kind is Kind.PREFETCH and a.name.startswith("s:")]
    start = taken[update].start_s
    jobs = tuple(BusySpan(copy, Resource.IN, start - 4, start + 1 + i, 20) for i, copy in enumerate(copies))
    timeline = measured_timeline(Recording(schedule, 7, walks, (), jobs), 200)
    assert [(wait.cause, wait.end_s - wait.start_s) for wait in timeline.waits] == [(Resource.IN, 2)]


def test_sums_of_gradients_are_work_of_the_device():
    schedule = micro_schedule(2)
    recording = Recording(schedule, 7, walked(schedule), (), ())
    timeline = measured_timeline(recording, 200)
    sums = [bar for bar in timeline.bars if "the total" in bar.word]
    words = ["begin the total", "add to the total"]
    assert [(bar.row, bar.word, bar.name) for bar in sums] == [(Resource.COMPUTE, word, "u") for word in words]
    predicted = build_timeline(schedule, simulate(schedule))
    assert [bar.word for bar in predicted.bars if bar.name == "u" and bar.row is Resource.COMPUTE][:2] == words
