import gc
import threading
import time
import weakref

import pytest
import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.runtime.events import ActionFailed, UnderWay

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def device():
    made = EmulatedDevice(1 << 30)
    yield made
    made.close()


def boom() -> None:
    raise OSError("boom")


def test_copies_wait_for_what_they_are_given(device):
    gate = threading.Event()
    source, middle, back = torch.arange(6.0), torch.zeros(6), torch.zeros(6)
    opened = device.update_on_host(gate.wait, ())
    first = device.copy_in(middle, source, (opened,))
    second = device.copy_out(back, middle, (first,))
    assert not second.done()
    gate.set()
    second.wait()
    assert first.done() and torch.equal(back, source)


def test_what_is_ready_goes_first(device):
    gate, order = threading.Event(), []
    device._copy = lambda link, target, source: order.append(int(source))
    opened = device.update_on_host(gate.wait, ())
    numbers = [torch.tensor(float(i)) for i in range(3)]
    waiting = device.copy_in(numbers[0], numbers[0], (opened,))
    for number in numbers[1:]:
        device.copy_in(number, number, ()).wait()
    assert not waiting.done()
    gate.set()
    device.drain()
    assert waiting.done() and order == [1, 2, 0]


def test_of_what_is_ready_the_oldest_goes_first(device):
    gate, order = threading.Event(), []
    opened = device.update_on_host(gate.wait, ())
    device._copy = lambda link, target, source: order.append(int(source))
    for i in range(5):
        number = torch.tensor(float(i))
        device.copy_out(number, number, (opened,) if i % 2 else (opened, opened))
    gate.set()
    device.drain()
    assert order == [0, 1, 2, 3, 4]


def test_what_is_under_way_is_done_when_it_closes(device):
    done = []
    first = device.update_on_host(lambda: time.sleep(0.05), ())
    middle = device.copy_in(torch.zeros(1), torch.ones(1), (first,))
    device.update_on_host(lambda: done.append(True), (middle,))
    device.close()
    assert done == [True]


def test_layout_is_kept(device):
    host = torch.arange(6.0).reshape(2, 3).t()
    assert device.empty_like(host).stride() == host.stride() == device.empty_host_like(host).stride()


def test_failures_travel_along_events(device):
    target = torch.zeros(2)
    failed = device.update_on_host(boom, ())
    after = device.copy_in(target, torch.ones(2), (failed,))
    with pytest.raises(OSError, match="boom"):
        after.wait()
    device.drain()
    assert after.done() and torch.equal(target, torch.zeros(2))
    device.copy_in(target, torch.ones(2), ()).wait()
    assert torch.equal(target, torch.ones(2))


def test_any_part_that_fails_fails_the_whole(device):
    bad = device.update_on_host(boom, ())
    good = device.update_on_host(lambda: None, ())
    with pytest.raises(ActionFailed, match="the move of x failed: OSError: boom") as caught:
        UnderWay("the move of x", (bad, good)).wait()
    assert isinstance(caught.value.__cause__, OSError)
    outer = UnderWay("the use of x", (UnderWay("the move of x", (bad,)),))
    with pytest.raises(ActionFailed, match="the move of x"):
        outer.wait()


def test_lanes_run_at_once(device):
    """Two jobs that each wait for the other to have begun end only if they run side by side."""
    here, there = threading.Event(), threading.Event()
    given = torch.ones(2)

    def meet(mine: threading.Event, other: threading.Event):
        def copy(target, source):
            mine.set()
            assert other.wait(30)

        return copy

    device._copy = lambda link, target, source: (meet(here, there) if target.numel() == 2 else meet(there, here))(
        target, source
    )
    first, second = device.copy_in(given, given, ()), device.copy_out(torch.ones(3), torch.ones(3), ())
    first.wait()
    second.wait()


def test_link_rates_bound_from_below():
    device = EmulatedDevice(1 << 30, link_bytes_per_s=1e6)
    data = torch.zeros(5000)
    start = time.perf_counter()
    for event in [device.copy_in(torch.empty(5000), data, ()), device.copy_in(torch.empty(5000), data, ())]:
        event.wait()
    assert time.perf_counter() - start >= 2 * data.numel() * 4 / 1e6
    device.close()


def test_workers_leave_other_threads_alone(two_threads):
    device, seen = EmulatedDevice(1), []
    device.update_on_host(lambda: seen.append(torch.get_num_threads()), ()).wait()
    device.close()
    assert seen == [1] and torch.get_num_threads() == 2


def test_threads_end_with_the_device():
    device = EmulatedDevice(1)
    threads = [lane._thread for lane in device._lanes.values()]
    gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None and not any(thread.is_alive() for thread in threads)
