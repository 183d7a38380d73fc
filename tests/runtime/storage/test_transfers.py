"""Transfers as events: what they wait for, who goes first, and what becomes of those that fail, hang or are closed."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref

import pytest
import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.runtime.events import ActionFailed, LaneEvent, UnderWay
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.transfers import Transfer

from offmate.errors import ArgumentValueError, LibraryError, StorageError

from .faulty import PAGE, Faulty, at_most, checkpoint, content, engine_on, once, refused

LONG_S = 20


@pytest.fixture
def weights(tmp_path):
    return checkpoint(tmp_path / "model.safetensors")


class Gate:
    """A fault that keeps reads from beginning until it is open."""

    def __init__(self):
        self.waiting, self.open = threading.Event(), threading.Event()

    def __call__(self, real, *args):
        self.waiting.set()
        assert self.open.wait(LONG_S)
        return real(*args)


def target_of(n_bytes=PAGE):
    return torch.zeros(n_bytes, dtype=torch.uint8)


def test_a_transfer_waits_for_its_events_and_only_for_them(weights):
    with Engine() as running:
        file, first, second = running.open(weights), LaneEvent(), LaneEvent()
        late, early = target_of(), target_of()
        waits = running.read(file, late, after=(first, second), start=0)
        running.read(file, early, start=0).synchronize()
        first.settle()
        assert not waits.done() and not waits.ready() and not late.any()
        second.settle()
        waits.wait()
        assert waits.done() and torch.equal(late, early)


class Polled:
    """An event that notifies nobody, as those in streams of a device."""

    def __init__(self):
        self.happened = False

    def done(self):
        return self.happened

    def synchronize(self):
        assert self.happened


def test_events_that_notify_nobody_are_polled(weights):
    with Engine(poll_s=0.001) as running:
        event = Polled()
        waits = running.read(running.open(weights), target_of(), after=(event,), start=0)
        assert not waits.done()
        event.happened = True
        waits.synchronize()


def test_polling_begins_with_the_first_event_that_needs_it(weights):
    start_s = time.monotonic()
    with Engine(poll_s=0.001) as running:
        file = running.open(weights)
        for _ in range(12):  # looking once a second would take as many seconds
            event = Polled()
            waits = running.read(file, target_of(), after=(event,), start=0)
            event.happened = True
            waits.synchronize()
    assert time.monotonic() - start_s < 5


class Broken:
    """An event whose device has failed."""

    def done(self):
        raise RuntimeError("the device is lost")

    synchronize = done


@pytest.mark.parametrize("how", ["at once", "later", "of a device"])
def test_a_transfer_fails_as_what_it_waited_for(weights, how):
    with Engine() as running:
        event = Broken() if how == "of a device" else LaneEvent()
        if how == "at once":
            event.settle(RuntimeError("the device is lost"))
        target = target_of()
        done = running.read(running.open(weights), target, after=(event,), start=0)
        if how == "later":
            event.settle(RuntimeError("the device is lost"))
        with pytest.raises(RuntimeError, match="the device is lost"):
            done.synchronize()
        assert not target.any()


def test_a_failure_names_the_item_that_it_belongs_to(weights):
    files = Faulty()
    with Engine(files=files) as running:
        file = running.open(weights)
        files.faults["preadv"] = refused(errno.EIO)
        under_way = UnderWay("reading p:embedding", (running.read(file, target_of(), start=0),))
        with pytest.raises(ActionFailed, match=r"reading p:embedding failed: .*Input/output error"):
            under_way.synchronize()


def test_the_oldest_ready_transfer_goes_first(weights):
    order, gate = [], Gate()
    files = Faulty()
    with Engine(files=files, n_threads=1, request_bytes=PAGE) as running:
        file = running.open(weights)
        files.faults["preadv"] = once(gate)
        blocker = running.read(file, target_of(), start=0)
        assert gate.waiting.wait(LONG_S)
        held = LaneEvent()
        old = running.read(file, target_of(2 * PAGE), after=(held,), start=PAGE)
        young = running.read(file, target_of(2 * PAGE), start=4 * PAGE)
        held.settle()
        deadline_s = time.monotonic() + LONG_S
        while running._dispatcher._waiting and time.monotonic() < deadline_s:
            time.sleep(0.001)  # the event belongs to no condition, so the engine finds it by looking

        def noted(real, handle, buffers, offset):
            order.append(offset // PAGE)
            return real(handle, buffers, offset)

        files.faults["preadv"] = noted
        gate.open.set()
        for event in (blocker, old, young):
            event.synchronize()
    assert order == [1, 2, 4, 5]


def test_a_check_of_a_file_does_not_wait_for_transfers_that_have_not_begun(weights):
    files, gate, order = Faulty(), Gate(), []
    with Engine(files=files, n_threads=1, request_bytes=PAGE) as running:
        file = running.open(weights)
        files.faults["preadv"] = once(gate)
        reads = [running.read(file, target_of(), start=i * PAGE) for i in range(1, 4)]
        assert gate.waiting.wait(LONG_S)

        def noted(real, handle, buffers, offset):
            order.append(offset)
            return real(handle, buffers, offset)

        files.faults["preadv"] = noted
        checking = threading.Thread(target=file.check)
        checking.start()
        deadline_s = time.monotonic() + LONG_S
        while len(running._disks.all()[0]._parts) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        gate.open.set()
        checking.join(LONG_S)
        for event in reads:
            event.synchronize()
    assert order == [0, 0, 2 * PAGE, 3 * PAGE]  # length and header, then the rest


def test_lanes_and_transfers_wait_for_each_other(weights):
    device = EmulatedDevice(1 << 30)
    with Engine(changed=device.changed) as running:
        file, host, there, back = running.open(weights), target_of(), target_of(), target_of()
        again = running.read(file, host, start=0)
        copied = device.copy_in(there, host, (again,))
        overwritten = running.read(file, host, after=(copied,), start=8 * PAGE)
        device.copy_out(back, host, (overwritten,)).synchronize()
        assert torch.equal(there, content(weights)[:PAGE])
        assert torch.equal(back, content(weights)[8 * PAGE : 9 * PAGE])
    device.close()


def test_nothing_of_a_failed_transfer_is_written_after_its_event(weights):
    files, gate = Faulty(), Gate()
    with Engine(files=files, n_threads=2, request_bytes=PAGE) as running:
        file, target = running.open(weights), target_of(8 * PAGE)

        def fault(real, handle, buffers, offset):
            if offset == 0:
                return gate(real, handle, buffers, offset)
            gate.waiting.wait(LONG_S)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        files.faults["preadv"] = fault
        done = running.read(file, target, start=0)
        assert gate.waiting.wait(LONG_S)
        time.sleep(0.05)
        assert not done.done()  # the first request is still under way
        gate.open.set()
        with pytest.raises(StorageError, match="Input/output error"):
            done.synchronize()
        assert torch.equal(target[:PAGE], content(weights)[:PAGE]) and not target[2 * PAGE :].any()


def test_a_hanging_disk_fails_by_name_and_close_does_not_wait_for_it(weights):
    files, gate = Faulty(), Gate()
    running = Engine(files=files, n_threads=2, request_bytes=PAGE, deadline_s=0.2)
    file = running.open(weights)
    files.faults["preadv"] = gate
    event = LaneEvent()
    hangs, queued, waits = (
        running.read(file, target_of(4 * PAGE), after=after, start=0) for after in ((), (), (event,))
    )
    for done in (hangs, queued):
        with pytest.raises(StorageError, match=r"model.safetensors has done nothing for .* s, though 2 requests"):
            done.synchronize()
    event.settle()
    with pytest.raises(StorageError, match="has done nothing"):
        waits.synchronize()
    with pytest.raises(StorageError, match="has done nothing"):
        running.read(file, target_of(), start=0).synchronize()
    with pytest.raises(StorageError, match="has done nothing"):
        file.check()
    start_s = time.monotonic()
    running.close()
    assert time.monotonic() - start_s < LONG_S / 2
    assert "close" not in files.calls  # the system may still use the handle
    gate.open.set()


def test_a_disk_that_opens_for_ever_counts_as_hanging_too(weights, monkeypatch):
    gate = Gate()
    running = Engine(n_threads=1, deadline_s=0.2)
    file = running.open(weights)
    (part,) = file.parts(target_of(4 * PAGE), 0)
    part._open_file = lambda: gate(lambda: None)
    monkeypatch.setattr(file, "parts", lambda target, start: [part])
    with pytest.raises(StorageError, match="has done nothing"):
        running.read(file, target_of(4 * PAGE), start=0).synchronize()
    running.close()
    gate.open.set()


@pytest.mark.parametrize("request_pages", [1, 10])
def test_a_slow_disk_does_not_count_as_hanging(weights, request_pages):
    def slow(real, *args):
        time.sleep(0.12)
        return at_most(PAGE)(real, *args)

    files = Faulty()
    with Engine(files=files, n_threads=1, request_bytes=request_pages * PAGE, deadline_s=1) as running:
        file = running.open(weights)
        files.faults["preadv"] = slow
        running.read(file, target_of(10 * PAGE), start=0).synchronize()


def test_closing_fails_what_has_not_begun_and_waits_for_the_rest(weights):
    files, gate = Faulty(), Gate()
    running = Engine(files=files, n_threads=1, request_bytes=PAGE)
    file = running.open(weights)
    files.faults["preadv"] = gate
    target = target_of(2 * PAGE)
    begun = running.read(file, target, start=0)
    assert gate.waiting.wait(LONG_S)
    queued, waits = (running.read(file, target_of(), after=after, start=0) for after in ((), (LaneEvent(),)))
    closing = threading.Thread(target=running.close)
    closing.start()
    for done in (queued, waits):
        with pytest.raises(StorageError, match="was closed before the transfer had ended"):
            done.synchronize()
    assert closing.is_alive() and not begun.done()
    gate.open.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    with pytest.raises(StorageError, match="was closed"):
        begun.synchronize()
    assert torch.equal(target[:PAGE], content(weights)[:PAGE]) and not target[PAGE:].any()
    with pytest.raises(StorageError, match="was closed"):
        running.read(file, target, start=0)
    with pytest.raises(StorageError, match="was closed"):
        file.check()
    running.close()


def test_a_transfer_that_another_thread_submits_while_the_engine_closes_fails(weights):
    running = Engine()
    file = running.open(weights)
    queue = running._disks.all()[0]
    (part,) = file.parts(target_of(), 0)
    transfer = Transfer(1, [part], (), threading.Condition())
    running.close()
    queue.add(part, transfer)
    with pytest.raises(StorageError, match="was closed"):
        transfer.event.synchronize()


def test_an_engine_that_nobody_needs_ends_its_threads(weights):
    before = set(threading.enumerate())
    running = Engine()
    running.read(running.open(weights), target_of(), start=0).synchronize()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 5
    del running
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)


def test_what_nobody_closed_and_cannot_be_removed_is_a_line_of_the_log(tmp_path, caplog):
    """An error could be caught by nobody, and would be a traceback at the end of the process."""
    faulty = Faulty()
    running = engine_on(tmp_path / "disk", files=faulty)
    faulty.faults["unlink"] = refused(errno.EROFS)
    del running
    gc.collect()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "Read-only file system" in record.getMessage()


def test_memory_is_free_when_the_event_has_happened(weights):
    with Engine() as running:
        file, target = running.open(weights), target_of(50_000)
        known, alive = weakref.ref(target), []
        done = running.read(file, target, start=0)
        settle = done.settle
        done.settle = lambda error=None: (alive.append(known() is not None), settle(error))
        del target
        done.synchronize()
        if alive:  # else it was done before it was watched
            assert alive == [False]


def test_nobody_keeps_a_transfer_that_failed(weights):
    """Its error has the frames of those who waited for it, and with them a model and its memory on the device."""
    with Engine() as running:
        first = LaneEvent()
        failed = running.read(running.open(weights), target_of(), start=0, after=(first,))
        first.settle(ValueError("the job before it failed"))
        with pytest.raises(ValueError, match="the job before it failed"):
            failed.synchronize()
        known = weakref.ref(failed)
        del failed, first
        end_s = time.monotonic() + LONG_S
        while known() is not None and time.monotonic() < end_s:
            gc.collect()
            time.sleep(0.01)
        assert known() is None


def test_a_forked_process_cannot_use_it(weights):
    with Engine() as running:
        file = running.open(weights)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                running.read(file, target_of(), start=0)
            except StorageError as error:
                code = 0 if "works only in the process that made it" in str(error) else 2
            running.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        running.read(file, target_of(), start=0).synchronize()


def test_a_missing_library_is_named(monkeypatch):
    def missing():
        raise LibraryError("xxhash is not installed")

    monkeypatch.setattr("offmate.runtime.storage.engine.xxh3", missing)
    with pytest.raises(LibraryError):
        Engine()


@pytest.mark.parametrize("given", [{"request_bytes": 1000}, {"request_bytes": 0}, {"n_threads": 0}, {"deadline_s": 0}])
def test_limits_that_cannot_work_are_refused(given):
    ((name, _),) = given.items()
    with pytest.raises(ArgumentValueError, match=name):
        Engine(**given)


def test_what_has_failed_in_part_ends_with_its_last_part():
    """Until then, the memory of the other parts is in use."""
    failed, other = LaneEvent(), LaneEvent()
    failed.settle(OSError("no"))
    ended = []

    def wait() -> None:
        with pytest.raises(ActionFailed, match="reading failed: OSError: no"):
            UnderWay("reading", (failed, other)).synchronize()
        ended.append(other.done())

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    other.settle()
    waiting.join()
    assert ended == [True]
