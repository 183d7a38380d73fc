"""Workers beside a device: how many cores they take, at which priority, in which order."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from offmate.runtime.devices import cores
from offmate.runtime.devices.lanes import Lane
from offmate.runtime.devices.streams import StreamDevice
from offmate.runtime.events import LaneEvent


def machine(folder, siblings):
    for number, text in enumerate(siblings):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")


def test_two_threads_of_a_core_count_once(tmp_path, monkeypatch):
    machine(tmp_path, ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert cores.physical_cores(tmp_path) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4})
    assert cores.physical_cores(tmp_path) == 2
    assert cores.physical_cores(tmp_path / "nothing") == 3


@pytest.mark.parametrize(("threads", "physical", "expected"), [(16, 16, 14), (4, 16, 4), (2, 2, 1), (1, 16, 1)])
def test_a_worker_leaves_cores_to_the_threads_that_launch(monkeypatch, threads, physical, expected):
    monkeypatch.setattr(cores, "physical_cores", lambda: physical)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert cores.worker_threads() == expected


def test_what_is_timed_as_a_worker_has_its_threads(monkeypatch, two_threads):
    monkeypatch.setattr(cores, "physical_cores", lambda: 3)
    with cores.as_a_worker():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_the_worker_of_a_device_has_a_lower_priority_and_fewer_threads(sim, monkeypatch, two_threads):
    monkeypatch.setattr(cores, "physical_cores", lambda: 3)
    device, seen = StreamDevice(torch.device("sim:0"), 1 << 28), []

    def work():
        seen.append((torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    device.update_on_host(work, ()).synchronize()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == [(1, own + 5)] and device.update_threads == 1 and torch.get_num_threads() == 2
    device.close()


class Asked(LaneEvent):
    """Counts how often somebody has asked for it."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def done(self):
        self.times += 1
        return super().done()


def test_a_lane_that_polls_asks_for_its_first_job_only():
    lane, first, second, done = Lane("test", 1, threading.Condition(), poll_s=1e-4), Asked(), Asked(), []
    events = [lane.submit(lambda: done.append(1), (first,)), lane.submit(lambda: done.append(2), (second,))]
    second.settle()
    while first.times < 10:
        assert second.times == 0
    first.settle()
    for event in events:
        event.synchronize()
    assert done == [1, 2] and second.times == 1
    lane.close()
