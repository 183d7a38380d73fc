"""What leaves any device for a file and comes back has the same bits, in an order that events give."""

from __future__ import annotations

import errno
import random
import threading
import time
from itertools import pairwise

import pytest
import torch
from offmate.runtime.clocks import HostClock, StreamClock
from offmate.runtime.devices import ring
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.runtime.devices.stream_events import StreamEvent
from offmate.runtime.devices.streams import StreamDevice
from offmate.runtime.events import ActionFailed, LaneEvent, UnderWay
from offmate.runtime.trace import Recorder
from offmate.solver.resources import Resource
from offmate.solver.schedule import Action, Kind

from offmate.errors import ArgumentValueError, StorageError

from ..storage.faulty import once, random_bytes, refused
from .files import INTO, OUT_OF, Drive, Gate, flat

PIECE = 1 << 14

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    """Tensors of many pieces, in few buffers."""
    monkeypatch.setattr(ring, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(ring, "_BUFFERS", 3)


def settle(drive, event, error=None):
    """Let an event of a thread happen, or fail."""
    event.settle(error)
    with drive.device.changed:
        drive.device.changed.notify_all()


class OnAnyDevice:
    """What every device promises."""

    @pytest.fixture
    def drive(self, device, tmp_path):
        with Drive(device, tmp_path) as made:
            yield made

    @pytest.mark.parametrize("start", [0, 5, 4096, PIECE - 3])
    @pytest.mark.parametrize("n_bytes", [1, 4096, PIECE, PIECE + 1, 7 * PIECE + 9])
    def test_the_bytes_come_back(self, drive, n_bytes, start):
        source, place = drive.device.bring(random_bytes(n_bytes)), drive.place(n_bytes, start)
        left, written = drive.write(place, source)
        back, arrived = drive.read(place, source, after=(written,))
        arrived.synchronize()
        assert written.done() and left.done()
        assert torch.equal(flat(back), random_bytes(n_bytes))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_every_dense_layout_comes_back(self, drive, dtype):
        host = random_bytes(120 * 90 * dtype.itemsize).view(dtype).reshape(90, 120).t()
        source, place = drive.device.bring(host), drive.place(host.nbytes)
        _, written = drive.write(place, source)
        back, arrived = drive.read(place, source, after=(written,))
        arrived.synchronize()
        assert back.stride() == host.stride() and torch.equal(flat(back), flat(host))

    def test_a_tensor_without_elements(self, drive):
        source, place = drive.device.bring(torch.empty(0)), drive.place(1)
        _, written = drive.write(place, source)
        drive.read(place, source, after=(written,))[1].synchronize()

    def test_a_file_has_what_the_device_had_even_if_that_is_overwritten_or_freed_afterwards(self, drive):
        places = [drive.place(n * PIECE) for n in range(1, 9)]
        written = []
        for seed, place in enumerate(places):
            source = drive.device.bring(random_bytes(place.stored.n_bytes, seed))
            left, event = drive.write(place, source)
            written.append(event)
            left.wait()
            source.zero_()
            del source, left
        for seed, (place, event) in enumerate(zip(places, written)):
            event.synchronize()
            assert torch.equal(drive.content(place), random_bytes(place.stored.n_bytes, seed))

    def test_a_write_waits_for_what_it_is_given(self, drive):
        source, place, before = drive.device.bring(torch.zeros(PIECE)), drive.place(4 * PIECE), LaneEvent()
        left, written = drive.write(place, source, after=(before,))
        other = drive.place(4 * PIECE)
        drive.write(other, source)[1].synchronize()  # the one that waits delays no other
        assert not left.done() and not left.ready() and not written.done()
        source.fill_(3.0)
        flat(source)  # waits for the stream
        settle(drive, before)
        written.synchronize()
        assert torch.equal(drive.content(place).view(torch.float32), torch.full((PIECE,), 3.0))
        assert not drive.content(other).any()

    def test_a_read_that_waits_for_a_write_delays_no_other(self, drive):
        source, place = drive.device.bring(random_bytes(5 * PIECE)), drive.place(5 * PIECE)
        later, before = drive.place(5 * PIECE), LaneEvent()
        drive.write(place, source)[1].synchronize()
        _, written = drive.write(later, source, after=(before,))
        waiting, arrives = drive.read(later, source, after=(written,))
        others = [drive.read(place, source) for _ in range(4)]
        for other, arrived in others:
            arrived.synchronize()
            assert torch.equal(flat(other), random_bytes(5 * PIECE))
        assert not arrives.done() and not arrives.ready()
        settle(drive, before)
        arrives.synchronize()
        assert torch.equal(flat(waiting), random_bytes(5 * PIECE))

    def test_random_transfers(self, drive):
        """Values of random sizes leave and return in any order; what has left is freed at once."""
        rng = random.Random(1)
        places = [drive.place(rng.choice([100, PIECE, 3 * PIECE + 11, 6 * PIECE]), rng.randrange(9000)) for _ in "abcd"]
        seeds, last, reads, found = [0] * 4, [()] * 4, [()] * 4, []
        for seed in range(200):
            i = rng.randrange(4)
            n_bytes = places[i].stored.n_bytes - places[i].start
            if not last[i] or rng.random() < 0.5:
                source = drive.device.bring(random_bytes(n_bytes, seed))
                left, written = drive.write(places[i], source, after=(*last[i], *reads[i]))
                left.wait()
                del source, left
                seeds[i], last[i], reads[i] = seed, (written,), ()
            else:
                target, arrived = drive.read(places[i], torch.empty(n_bytes, dtype=torch.uint8), after=last[i])
                reads[i] = (*reads[i], arrived)
                found.append((target, arrived, n_bytes, seeds[i]))
        for target, arrived, n_bytes, seed in found:
            arrived.wait()
            assert torch.equal(flat(target), random_bytes(n_bytes, seed))

    @pytest.mark.parametrize("skip", [0, 3, 20])
    def test_a_write_that_fails_raises_for_everybody_who_waits(self, device, tmp_path, skip):
        with Drive(device, tmp_path, pwritev=once(refused(errno.EIO), skip)) as drive:
            source, place = device.bring(random_bytes(12 * PIECE)), drive.place(12 * PIECE)
            left, written = drive.write(place, source)
            _, arrived = drive.read(place, source, after=(written,))
            assert left is written or left.synchronize() is None  # the copies were made
            for _ in range(2):
                with pytest.raises(ActionFailed, match=rf"the copy of s:w failed: .*{tmp_path}.*error"):
                    UnderWay("the copy of s:w", (written,)).synchronize()
            for event in (written, arrived):
                with pytest.raises(StorageError, match=r"Input/output error"):
                    event.wait()
                assert event.done() and event.ready()
            self.goes_on(drive)

    def test_a_read_that_fails_raises_for_everybody_who_waits(self, device, tmp_path):
        with Drive(device, tmp_path, preadv=once(refused(errno.EIO), 3)) as drive:
            source, place = device.bring(random_bytes(12 * PIECE)), drive.place(12 * PIECE)
            _, written = drive.write(place, source)
            written.synchronize()
            _, arrived = drive.read(place, source)
            for _ in range(2):
                with pytest.raises(StorageError, match=r"Input/output error"):
                    arrived.synchronize()
            self.goes_on(drive)

    def test_what_the_engine_refuses_at_once_raises_from_the_events(self, drive):
        source, place = drive.device.bring(random_bytes(12 * PIECE)), drive.place(6 * PIECE)
        left, written = drive.write(place, source)
        assert left is written or left.synchronize() is None  # the copies were made
        _, arrived = drive.read(place, source)
        for event in (written, arrived):
            with pytest.raises(ArgumentValueError, match=r"are not within tensor 1"):
                event.synchronize()
        _, arrived = drive.read(drive.place(PIECE), drive.device.bring(random_bytes(PIECE)))
        with pytest.raises(StorageError, match=r"of tensor 2 was read .* never written"):
            arrived.synchronize()
        self.goes_on(drive)

    def test_a_transfer_fails_as_what_it_waited_for(self, drive):
        source, place, before = drive.device.bring(random_bytes(PIECE)), drive.place(PIECE), LaneEvent()
        left, written = drive.write(place, source, after=(before,))
        _, arrived = drive.read(place, source, after=(written,))
        settle(drive, before, OSError("boom"))
        for event in (left, written, arrived):
            with pytest.raises(OSError, match="boom"):
                event.synchronize()
            assert event.done() and event.ready()
        self.goes_on(drive)

    def goes_on(self, drive):
        """More transfers than there are buffers work as if nothing had failed."""
        source, places = drive.device.bring(random_bytes(2 * PIECE, 7)), [drive.place(2 * PIECE) for _ in range(5)]
        reads = [drive.read(place, source, after=drive.write(place, source)[1:]) for place in places]
        for target, arrived in reads:
            arrived.synchronize()
            assert torch.equal(flat(target), random_bytes(2 * PIECE, 7))

    def test_draining_waits_for_the_bytes_to_be_in_their_files(self, device, tmp_path):
        def late(real, *args):
            time.sleep(0.02)
            return real(*args)

        with Drive(device, tmp_path, pwritev=late) as drive:
            written = [drive.write(drive.place(n), device.bring(random_bytes(n)))[1] for n in (PIECE, 5 * PIECE)]
            device.drain()
            assert all(event.done() for event in written)

    def test_closing_ends_what_is_under_way_and_then_the_threads(self, device, tmp_path):
        with Drive(device, tmp_path) as drive:
            before = set(threading.enumerate())
            source, place = device.bring(random_bytes(9 * PIECE)), drive.place(9 * PIECE)
            _, written = drive.write(place, source)
            back, arrived = drive.read(place, source, after=(written,))
            threads = set(threading.enumerate()) - before
            device.close()
            assert threads and not any(thread.is_alive() for thread in threads)
            arrived.synchronize()
            assert torch.equal(flat(back), random_bytes(9 * PIECE))

    def test_a_recording_has_both_links(self, drive):
        device, size = drive.device, 5 * PIECE
        clock = HostClock() if device.arena is None else StreamClock(device.torch_device)
        recorder, action, place = Recorder(device.ledger, clock), Action(0, Kind.OFFLOAD, "s:w"), drive.place(size)
        device.recorder, tie = recorder, clock.tie()
        recorder.take(action, lambda action: drive.write(place, device.bring(random_bytes(size)))[1].synchronize())
        recorder.take(action, lambda action: drive.read(place, device.bring(random_bytes(size)))[1].synchronize())
        device.drain()
        spans = [job.ran(tie, 0.0) for job in recorder._jobs]
        moved = {link: sum(span.bytes for span in spans if span.resource == link) for link in ALL_LINKS}
        assert moved == dict.fromkeys(ALL_LINKS, size)


ALL_LINKS = (Resource.IN, Resource.OUT, INTO, OUT_OF)


class TestEmulated(OnAnyDevice):
    """The device whose memory is the host's."""

    @pytest.fixture
    def device(self):
        made = EmulatedDevice(1 << 30)
        yield made
        made.close()

    def test_it_has_no_buffers(self, drive):
        drive.write(drive.place(8), drive.device.bring(torch.zeros(2)))[1].synchronize()
        assert drive.device.file_buffers_bytes == 0


class TestStreams(OnAnyDevice):
    """An accelerator, whose copies pass pinned buffers; kernels, copies and events happen late."""

    @pytest.fixture
    def device(self, sim):
        sim.set_delays(3, 300)
        made = StreamDevice(torch.device("sim:0"), 1 << 30)
        yield made
        made.close()

    def test_what_has_left_does_not_wait_for_the_drive(self, device, tmp_path):
        gate = Gate()
        with Drive(device, tmp_path, pwritev=gate) as drive:
            place = drive.place(2 * PIECE)
            left, written = drive.write(place, device.bring(random_bytes(2 * PIECE)))
            left.synchronize()
            assert not written.done() and not written.ready()
            gate.open.set()
            written.synchronize()
            assert written.done() and written.ready()

    @pytest.mark.parametrize("waits", [False, True])
    def test_memory_that_is_freed_before_it_has_left(self, drive, sim, waits):
        source, place = drive.device.bring(torch.ones(PIECE // 2)), drive.place(2 * PIECE)
        torch.accelerator.synchronize()
        with sim.held(drive.device._ways[Resource.OUT].stream):
            left, written = drive.write(place, source)
            drive.wait_until(left.ready)
            assert not left.done()  # its copies are launched, and wait in their stream
            if waits:
                left.wait()
            del source
            if not waits:
                torch.accelerator.current_stream().synchronize()
        written.synchronize()
        found = drive.content(place).view(torch.float32)
        assert bool((found == 1).all()) is waits
        assert waits or found.isnan().all()

    def test_a_read_does_not_write_to_memory_that_is_in_use(self, drive, sim):
        place, ones = drive.place(2 * PIECE), drive.device.bring(torch.ones(PIECE // 2))
        drive.write(place, ones)[1].synchronize()
        target = drive.device.bring(torch.zeros(PIECE // 2))
        torch.accelerator.synchronize()
        with sim.held(torch.accelerator.current_stream()):
            before = target + 2
            arrived = drive.device.read_in(target, place, INTO)
        arrived.wait()
        assert torch.equal(before.cpu(), torch.full((PIECE // 2,), 2.0)) and torch.equal(target.cpu(), ones.cpu())

    def test_a_write_takes_what_was_computed_before(self, drive, sim):
        source, place = drive.device.bring(torch.ones(PIECE // 2)), drive.place(2 * PIECE)
        torch.accelerator.synchronize()
        with sim.held(torch.accelerator.current_stream()):
            source.add_(2)
            _, written = drive.write(place, source)
        written.synchronize()
        assert torch.equal(drive.content(place).view(torch.float32), torch.full((PIECE // 2,), 3.0))

    @pytest.mark.parametrize("into", [False, True])
    def test_a_transfer_waits_for_events_in_streams(self, drive, sim, into):
        """A stream notifies nobody when it reaches a point."""
        stream, place = torch.Stream(device="sim:0"), drive.place(2 * PIECE)
        source = drive.device.bring(torch.ones(PIECE // 2))
        drive.write(place, source)[1].synchronize()
        with sim.held(stream):
            with stream:
                source.zero_()
            point = StreamEvent(stream)
            event = drive.read(place, source, after=(point,))[1] if into else drive.write(place, source, (point,))[1]
            assert not event.done()
        event.synchronize()
        assert into or not drive.content(place).any()

    def test_the_arena_knows_of_the_copies(self, drive, monkeypatch):
        device, known = drive.device, []
        monkeypatch.setattr(device.arena, "copied", lambda tensor, event: known.append((tensor, event)))
        source, place = device.bring(random_bytes(PIECE)), drive.place(PIECE)
        left, written = drive.write(place, source)
        target, arrived = drive.read(place, source, after=(written,))
        assert [(id(tensor), event) for tensor, event in known] == [(id(source), left), (id(target), arrived)]

    def test_its_buffers_are_those_of_reads_until_something_is_written(self, drive):
        assert drive.device.file_buffers_bytes == ring.BUFFERS_BYTES
        drive.write(drive.place(8), drive.device.bring(torch.zeros(2)))
        assert drive.device.file_buffers_bytes == 2 * ring.BUFFERS_BYTES

    def test_memory_that_cannot_be_pinned(self, drive, sim):
        sim.let_pin(0)
        self.goes_on(drive)

    def test_a_device_that_is_lost(self, drive, sim):
        source, place = drive.device.bring(random_bytes(PIECE)), drive.place(PIECE)
        before = LaneEvent()
        left, written = drive.write(place, source, after=(before,))
        torch.accelerator.synchronize()
        sim.lose()
        settle(drive, before)
        for event in (left, written):
            with pytest.raises(torch.AcceleratorError):
                event.synchronize()
        sim.lose(False)
        self.goes_on(drive)


@pytest.mark.parametrize("start", [0, 1, 4096, PIECE - 1, PIECE, 5 * PIECE + 7])
@pytest.mark.parametrize("n_bytes", [0, 1, 4096, PIECE, PIECE + 1, 3 * PIECE])
def test_pieces_end_where_blocks_of_the_file_do(start, n_bytes):
    pieces = ring.pieces_of(start, n_bytes)
    assert pieces[0][0] == 0 and pieces[-1][1] == n_bytes
    assert all(end == begin and (start + end) % PIECE == 0 for (_, end), (begin, _) in pairwise(pieces))
    assert all(end - begin <= PIECE for begin, end in pieces)
