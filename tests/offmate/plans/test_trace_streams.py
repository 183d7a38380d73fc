"""What was recorded on an accelerator: when its streams did what, not when that was launched."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from offmate.runtime.clocks import StreamClock
from offmate.runtime.trace import RecordedJob
from offmate.solver.effects import effect
from offmate.solver.resources import Resource

from ...accelerator.loops import on_sim
from ..loops import batch, plain

pytestmark = pytest.mark.timeout(120)
SLOW_S = 0.2
COPIES = (Resource.IN, Resource.OUT)


@pytest.fixture
def loop(sim, cache_dir):
    """A loop in the least budget after a step; kernels and copies run beside the host, at random moments."""
    with on_sim(100, cache_dir=cache_dir, inputs=batch(0)) as loop:
        sim.set_delays(0, 20)
        loop.steps(0, 1)
        yield loop
        sim.set_delays(0, 0)


def waited_for(loop, action) -> bool:
    """Whether something later in the same iteration has to wait for a copy; others only concern the next iteration."""
    schedule = loop.model.offmate.plan.schedule
    copied = effect(action, schedule)
    later = [effect(other, schedule) for other in schedule.actions[schedule.actions.index(action) + 1 :]]
    return any({*copied.brings} & {*one.reads} or {*copied.reads} & {*one.releases} for one in later)


@pytest.mark.parametrize("resource", COPIES)
def test_a_slow_copy_is_long_in_the_trace_and_its_launch_is_not(sim, loop, monkeypatch, resource):
    holds, slow, launched = threading.Event(), [], threading.Event()

    def lets_go(stream_is_held):
        """Long after the launch, however late the executor's thread is on a busy machine."""
        launched.wait(10 * SLOW_S)
        time.sleep(5 * SLOW_S)
        stream_is_held.close()

    def begins(job, stream, own=RecordedJob.begins):
        own(job, stream)
        if holds.is_set() and job.resource == resource and not slow and waited_for(loop, job.action):
            slow.append(job)
            stack = contextlib.ExitStack()
            stack.enter_context(sim.held(stream))
            threading.Thread(target=lets_go, args=(stack,)).start()

    def goes_on(action):
        if slow and action is not slow[0].action:
            launched.set()

    monkeypatch.setattr(RecordedJob, "begins", begins)
    monkeypatch.setattr(loop.executor, "on_action", goes_on)
    with loop.model.offmate.record():
        loop.steps(1, 2)  # an update's copy of it may come after the held one in the stream, and be what is waited for
        holds.set()
        loop.steps(2, 3)
    trace = loop.model.offmate.trace
    action = slow[0].action
    (launch,) = [one for walk in trace.recording.walks for one in walk if one.action is action]
    spans = [job for job in trace.recording.jobs if job.action is action]
    assert launch.launch_end_s + SLOW_S < max(job.end_s for job in spans)
    assert max(job.end_s - job.start_s for job in spans) >= SLOW_S
    bar = max((b for b in trace.measured.bars if b.row is resource), key=lambda b: b.end_s - b.start_s)
    assert bar.name == action.name
    longest = max(trace.measured.waits, key=lambda wait: wait.end_s - wait.start_s)
    assert longest.cause is resource
    assert SLOW_S < longest.end_s - longest.start_s <= trace.stall_s[resource] <= trace.step_s


def test_every_action_and_byte_of_the_schedule_is_in_it(loop):
    with loop.model.offmate.record():
        losses = loop.steps(1, 3)
    plan, recording = loop.model.offmate.plan, loop.model.offmate.trace.recording
    taken = [one for walk in recording.walks for one in walk]
    assert tuple(one.action for one in taken) == plan.schedule.actions
    for resource, moved_bytes in zip(COPIES, plan.moved_bytes):
        assert sum(job.bytes for job in recording.jobs if job.resource == resource) == moved_bytes
    assert {j.action.name for j in recording.jobs if j.resource == Resource.CPU} == plan.schedule.update_cpu_s.keys()
    assert losses == plain().steps(0, 3)[1:]


def test_what_one_stream_does_does_not_overlap(loop):
    with loop.model.offmate.record():
        loop.steps(1, 3)
    trace = loop.model.offmate.trace
    taken = [one for walk in trace.recording.walks for one in walk]
    assert all(one.start_s <= one.end_s and one.launch_start_s <= one.launch_end_s for one in taken)
    assert all(a.end_s <= b.start_s for a, b in pairwise(taken))
    for resource in trace.recording.schedule.rates.resources:
        spans = sorted((j.start_s, j.end_s) for j in trace.recording.jobs if j.resource == resource)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        bars = sorted((bar.start_s, bar.end_s) for bar in trace.measured.wrapped() if bar.row is resource)
        assert all(a[1] <= b[0] for a, b in pairwise(bars))
    assert all(a.end_s == b.start_s for a, b in pairwise(trace.measured.memory))


CLOCKS_S = 1e-3  # a thread that compares the clocks of host and device may be kept waiting in between


def test_workers_and_streams_share_one_axis(loop):
    """An update on the host lies between the copy of its gradient and that of the new parameter."""
    with loop.model.offmate.record():
        loop.steps(1, 4)
    recording = loop.model.offmate.trace.recording
    by_item = {(job.resource, job.action.name): job for job in recording.jobs}
    updates = {name: job for (resource, name), job in by_item.items() if resource == Resource.CPU}
    assert updates
    for name, update in updates.items():
        leaves = by_item[Resource.OUT, f"g:{name}"]
        # An update in the forward is of the gradient before.
        assert leaves.action.step > update.action.step or leaves.end_s < update.start_s + CLOCKS_S
    for tail in recording.tails:
        brought = by_item.get((Resource.IN, f"p:{tail.action.name}"))
        assert tail.resource != Resource.CPU or brought is None or tail.end_s < brought.start_s + CLOCKS_S


def test_predicted_and_measured_are_drawn_on_one_axis(loop, tmp_path):
    with loop.model.offmate.record():
        loop.steps(1, 2)
    trace = loop.model.offmate.trace
    assert trace.measured.kinds() == trace.predicted.kinds()
    assert trace.peak_bytes == trace.measured.peak.total_bytes == trace.predicted.peak.total_bytes
    assert trace.launch_s > 0
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["predicted", "measured"]
    assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in events if "ts" in e)
    assert "<h3>measured</h3>" in trace._repr_html_()


def test_a_copy_that_is_done_before_the_computing_stream_begins_is_drawn_at_the_start(loop):
    with loop.model.offmate.record():
        loop.steps(1, 2)
    trace = loop.model.offmate.trace
    first, *others = trace.recording.jobs
    early = replace(first, start_s=-2e-3, end_s=-1e-3)
    trace = replace(trace, recording=replace(trace.recording, jobs=(early, *others)))
    bars = [bar for bar in trace.measured.bars if (bar.row, bar.name) == (early.resource, early.action.name)]
    assert (0.0, 0.0) in [(bar.start_s, bar.end_s) for bar in bars]
    assert all(bar.start_s <= bar.end_s for bar in trace.measured.bars)
    assert "<h3>measured</h3>" in trace._repr_html_()


def test_nothing_is_timed_unless_it_is_recorded(loop, monkeypatch):
    marks, timed = [], []
    mark, event = StreamClock.mark, torch.Event

    def new_event(*given, **named):
        timed.append(named.get("enable_timing", False))
        return event(*given, **named)

    monkeypatch.setattr(torch, "Event", new_event)
    monkeypatch.setattr(StreamClock, "mark", lambda *given: marks.append(None) or mark(*given))
    loop.steps(1, 2)
    assert not marks and not any(timed)
    with loop.model.offmate.record():
        loop.steps(2, 3)
    recording = loop.model.offmate.trace.recording
    n_copies = sum(job.resource in COPIES for job in recording.jobs)
    n_actions = sum(map(len, recording.walks))
    assert 2 * (n_actions + n_copies) <= len(marks) <= 2 * (n_actions + n_copies) + 3
    recorded = len(marks)
    loop.steps(3, 4)
    assert len(marks) == recorded
