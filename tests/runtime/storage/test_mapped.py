"""Tensors in files are CPU tensors whose bytes the engine transfers, take no RAM, and give their space back."""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
import pickle
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offmate.runtime.events import LaneEvent
from offmate.runtime.storage.host_bytes import empty_aligned
from offmate.runtime.storage.mapped import MappedStore

from offmate.errors import ArgumentValueError, StorageError

from ...fuzz.examples import examples
from .faulty import CHUNK, PAGE, Faulty, engine_on, flipped, once, random_bytes, refused, without_direct
from .forked import forked

WAYS = pytest.mark.parametrize("direct", [True, False], ids=["direct", "through the cache"])
PATHS = pytest.mark.parametrize("n_paths", [1, 2])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def store_on(tmp_path, n_paths=1, direct=True, files=None, **given):
    files = files or (None if direct else Faulty(open=without_direct))
    engine = engine_on(*(tmp_path / str(k) for k in range(n_paths)), files=files, **given)
    return engine, MappedStore(engine)


def files_in(tmp_path):
    return list(tmp_path.glob("*/*.tensor"))


def bytes_like(tensor):
    """Memory for a tensor's bytes."""
    return torch.zeros(tensor.nbytes, dtype=torch.uint8)


def read(store, tensor):
    """A tensor's values as the engine reads them."""
    target = bytes_like(tensor)
    store.bytes_of(tensor).read(target, 0).synchronize()
    return target.view(tensor.dtype).view(tensor.shape)


def write(store, tensor, values):
    store.bytes_of(tensor).write(values.contiguous().view(-1).view(torch.uint8), 0).synchronize()


def random_like(tensor, seed=0):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(2))
@given(st.data())
def test_any_order_of_writes_and_reads_on_either_way_equals_a_tensor_in_ram(tmp_path, data):
    n_rows, n_columns = data.draw(st.integers(1, 12), "rows"), data.draw(st.sampled_from([3, 1024, 2048, 2500]), "cols")
    like = torch.empty(n_rows, n_columns, dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype"))
    cuts = [row * like.stride(0) * like.element_size() for row in data.draw(st.sets(st.integers(0, n_rows)), "cuts")]
    engine, store = store_on(tmp_path, data.draw(st.integers(1, 2), "paths"), data.draw(st.booleans(), "direct"))
    with engine:
        mapped, plain = store.empty("exp_avg", like, cuts), torch.zeros_like(like)
        mapped.zero_()
        store.forget_all()
        for seed in range(data.draw(st.integers(1, 12), "steps")):
            first = data.draw(st.integers(0, n_rows - 1), "first row")
            rows = slice(first, data.draw(st.integers(first + 1, n_rows), "last row"))
            match data.draw(st.sampled_from(["engine writes", "user writes", "engine reads", "user reads"]), "step"):
                case "engine writes":
                    plain[rows] = random_like(plain[rows], seed)
                    write(store, mapped[rows], plain[rows])
                case "user writes":
                    plain[rows] = mapped[rows] = random_like(plain[rows], seed)
                    store.forget(mapped[rows])
                case "engine reads":
                    assert torch.equal(read(store, mapped[rows]), plain[rows])
                case "user reads":
                    assert torch.equal(mapped[rows], plain[rows])
        assert torch.equal(read(store, mapped), plain) and torch.equal(mapped, plain)
        del mapped
        assert files_in(tmp_path) == []


@WAYS
@PATHS
@DTYPES
def test_the_engine_and_the_user_see_what_the_other_one_wrote(tmp_path, direct, n_paths, dtype):
    engine, store = store_on(tmp_path, n_paths, direct)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(20, 3000, dtype=dtype), cuts=[4 * PAGE])
        assert len(files_in(tmp_path)) == n_paths
        for seed in range(3):
            values = random_like(mapped, seed)
            write(store, mapped, values)
            assert torch.equal(mapped, values)
            mapped[7:11] = values[7:11] = random_like(values[7:11], seed + 10)
            store.forget(mapped[7:11])
            assert torch.equal(read(store, mapped), values)
            write(store, mapped[9:15], random_like(values[9:15], seed + 20))
            values[9:15] = random_like(values[9:15], seed + 20)
            assert torch.equal(mapped, values) and torch.equal(read(store, mapped[6:16]), values[6:16])


@WAYS
@pytest.mark.parametrize("shift", [0, 1, PAGE, CHUNK - 3])
def test_bytes_are_transferred_from_an_offset_within_a_tensor(tmp_path, direct, shift):
    engine, store = store_on(tmp_path, 2, direct)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(4 * CHUNK, dtype=torch.uint8))
        part = mapped[100 : 3 * CHUNK]
        place = store.bytes_of(part)
        assert place.start == 100 and place.path in files_in(tmp_path)
        memory = empty_aligned(CHUNK, 100 + shift)
        memory.copy_(random_bytes(CHUNK))
        written = place.write(memory, shift)
        target = torch.zeros(CHUNK, dtype=torch.uint8)
        place.read(target, shift, after=(written,)).synchronize()
        assert torch.equal(target, memory) and torch.equal(part[shift : shift + CHUNK], memory)


def test_transfers_wait_for_the_events_before_them(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(CHUNK, dtype=torch.uint8))
        gate, content = LaneEvent(), torch.zeros(CHUNK, dtype=torch.uint8)
        place = store.bytes_of(mapped)
        written = place.write(content, 0, after=(gate,))
        content.fill_(7)
        gate.settle()
        written.synchronize()
        assert mapped.eq(7).all()


def test_pieces_at_whole_pages_are_written_without_reading_their_neighbours(tmp_path):
    files = Faulty()
    engine, store = store_on(tmp_path, files=files)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(6, PAGE // 4), cuts=[PAGE * row for row in range(6)])
        mapped.fill_(3)
        store.forget_all()
        files.calls.clear()
        write(store, mapped[2:4], torch.ones(2, PAGE // 4))
        assert files.calls.count("pwritev") == 2 and "preadv" not in files.calls
        assert mapped[:, 0].tolist() == [3, 3, 1, 1, 3, 3]


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(5, 7).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(10, 10, dtype=torch.bfloat16, device="meta")[:, :4],
        torch.empty((), dtype=torch.int64),
        torch.empty(3000, 5, dtype=torch.complex64)[1:],
    ],
    ids=["transposed", "channels last", "with gaps, on meta", "one number", "a view"],
)
def test_shape_strides_and_dtype_are_those_asked_for(tmp_path, like):
    engine, store = store_on(tmp_path)
    with engine, torch.device("meta"):  # a default device of the user's
        mapped = store.empty("exp_avg", like)
        assert (mapped.shape, mapped.stride(), mapped.dtype) == (like.shape, like.stride(), like.dtype)
        assert mapped.device.type == "cpu" and mapped.is_leaf and not mapped.requires_grad
        assert store.holds(mapped) and mapped.data_ptr() % PAGE == 0


def test_a_tensor_without_elements_takes_no_file(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(0, 5))
        assert mapped.shape == (0, 5) and files_in(tmp_path) == []
        assert not store.holds(mapped) and store.bytes_of(mapped) is None


def test_only_memory_of_the_store_is_found(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        other = MappedStore(engine)
        tensors = [store.empty("exp_avg", torch.empty(n, 10)) for n in (5, 500, 50)]  # of the same name
        assert len({store.bytes_of(tensor).path for tensor in tensors}) == 3
        assert [store.bytes_of(tensor[2:3]).start for tensor in tensors] == [80] * 3
        for foreign in (torch.ones(5), torch.empty(5, device="meta"), other.empty("exp_avg", torch.empty(5)),
                        torch.ones(5).to_sparse(), tensors[0].clone(), copy.deepcopy(tensors[0])):  # fmt: skip
            assert not store.holds(foreign) and store.bytes_of(foreign) is None
            store.forget(foreign)


def test_a_view_with_gaps_is_held_and_forgotten_but_not_transferred(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(8, 8))
        write(store, mapped, torch.zeros(8, 8))
        assert store.holds(mapped[:, 1])
        with pytest.raises(
            ArgumentValueError, match=r"view of exp_avg .* has gaps: its shape is \(8,\) .* \(8,\)\. .*rows"
        ):
            store.bytes_of(mapped[:, 1])
        mapped[:, 1] = 1
        store.forget(mapped[:, 1])
        assert read(store, mapped)[:, 1].eq(1).all()


def test_bytes_that_nobody_has_written_cannot_be_read(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(8, 8))
        with pytest.raises(StorageError, match=r"byte 0 of exp_avg .* never written"):
            read(store, mapped)
        mapped[:4] = 1
        store.forget(mapped[:4])
        assert read(store, mapped[:4]).eq(1).all()
        with pytest.raises(StorageError, match=r"byte 128 of exp_avg .* never written"):
            read(store, mapped)


def test_a_flipped_bit_is_caught_unless_the_user_may_have_written_the_chunk(tmp_path):
    files = Faulty()
    engine, store = store_on(tmp_path, files=files)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(4, CHUNK // 4))
        write(store, mapped, torch.zeros(4, CHUNK // 4))
        store.forget(mapped[1])
        files.faults["preadv"] = once(flipped)
        assert not torch.equal(read(store, mapped[1]), mapped[1])
        for row in (0, 2, 3):
            files.faults["preadv"] = once(flipped)
            with pytest.raises(StorageError, match="does not hold what was written"):
                read(store, mapped[row])
        write(store, mapped[1], torch.zeros(CHUNK // 4))
        files.faults["preadv"] = once(flipped)
        with pytest.raises(StorageError, match="does not hold what was written"):
            read(store, mapped[1])


def test_direct_writes_that_were_not_forgotten_are_noticed(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(8, 8))
        write(store, mapped, torch.zeros(8, 8))
        mapped[3, 3] = 1
        with pytest.raises(StorageError, match="does not hold what was written"):
            read(store, mapped)
        store.forget_all()
        assert read(store, mapped)[3, 3] == 1


def test_nothing_is_forgotten_while_it_is_transferred(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped, gate = store.empty("exp_avg", torch.empty(CHUNK, dtype=torch.uint8)), LaneEvent()
        written = store.bytes_of(mapped[:10]).write(random_bytes(10), 0, after=(gate,))
        for forget in (store.forget_all, lambda: store.forget(mapped[20:])):
            with pytest.raises(StorageError, match=r"of exp_avg .* while the engine wrote bytes 0 to 10"):
                forget()
        gate.settle()
        written.synchronize()
        store.forget_all()


def test_the_space_is_given_back_with_the_last_tensor_on_it(tmp_path):
    engine, store = store_on(tmp_path, 2)
    with engine:
        for _ in range(3):
            mapped = store.empty("exp_avg", torch.empty(3 * CHUNK))
            row = mapped.view(3, CHUNK)[1]
            del mapped
            assert len(files_in(tmp_path)) == 2 and store.holds(row)
            memory = weakref.ref(row.untyped_storage())
            del row
            assert memory() is None and files_in(tmp_path) == []
            assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_memory_dies_though_a_write_of_it_failed(tmp_path):
    """The error has the frames of those who waited, and with them the tensor, by whose memory its place is known."""
    engine, store = store_on(tmp_path)

    def fails():
        mapped, gate = store.empty("exp_avg", torch.empty(CHUNK, dtype=torch.uint8)), LaneEvent()
        written = store.bytes_of(mapped).write(random_bytes(CHUNK), 0, after=(gate,))
        gate.settle(ValueError("the job before it failed"))
        with pytest.raises(ValueError, match="the job before it failed"):
            written.synchronize()
        return weakref.ref(mapped.untyped_storage())

    with engine:
        memory, end_s = fails(), time.monotonic() + 5
        while memory() is not None and time.monotonic() < end_s:
            gc.collect()
        assert memory() is None and files_in(tmp_path) == []


def test_a_transfer_ends_before_the_space_of_a_dropped_tensor_is_given_back(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped, gate = store.empty("exp_avg", torch.empty(4 * CHUNK, dtype=torch.uint8)), LaneEvent()
        content, target = random_bytes(4 * CHUNK), torch.zeros(4 * CHUNK, dtype=torch.uint8)
        place = store.bytes_of(mapped)
        place.write(content, 0, after=(gate,))
        found = place.read(target, 0)
        del mapped, place
        gate.settle()
        found.synchronize()
        assert torch.equal(target, content) and files_in(tmp_path) == []


def test_tensors_that_die_on_other_threads_are_not_found_at_their_address_again(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        kept = [store.empty("kept", torch.empty(CHUNK, dtype=torch.uint8)) for _ in range(5)]

        def make_and_drop():
            for _ in range(50):
                one = store.empty("dropped", torch.empty(CHUNK, dtype=torch.uint8))
                cycle = [one]
                cycle.append(cycle)
                assert store.bytes_of(one).start == 0
                del one, cycle

        threads = [threading.Thread(target=make_and_drop) for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            gc.collect()
            assert all(map(store.holds, kept)) and not store.holds(torch.empty(CHUNK))
        gc.collect()
        assert len(files_in(tmp_path)) == len(kept)
        store.forget_all()


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_values_outlive_the_engine_and_do_not_keep_it(tmp_path, close):
    engine, store = store_on(tmp_path, 2)
    mapped = store.empty("exp_avg", torch.empty(8, CHUNK))
    values = random_like(mapped)
    write(store, mapped, values)
    if close:
        engine.close()
    del engine, store
    gc.collect()
    assert [list(folder.iterdir()) for folder in tmp_path.iterdir()] == [[], []]
    assert torch.equal(mapped, values)
    mapped.add_(1)
    assert torch.equal(mapped, values + 1) and torch.equal(pickle.loads(pickle.dumps(mapped)), values + 1)


def test_dropping_a_store_keeps_its_tensors_and_then_gives_their_space_back(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped = store.empty("exp_avg", torch.empty(CHUNK))
        del store
        gc.collect()
        assert len(files_in(tmp_path)) == 1
        del mapped
        assert files_in(tmp_path) == []


def test_a_forked_process_removes_nothing(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        mapped = [store.empty("exp_avg", torch.empty(8, 8))]
        write(store, mapped[0], torch.ones(8, 8))

        def drop():
            assert mapped[0].eq(1).all()
            mapped.clear()
            gc.collect()

        assert forked(drop) == 0
        assert len(files_in(tmp_path)) == 1 and read(store, mapped[0]).eq(1).all()


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"fallocate": refused(errno.ENOSPC)}, r"needs 32 KiB, and 24 KiB are free in"),
        ({"map": once(refused(errno.ENOMEM), skip=1)}, r"mapping .*\.tensor at offset \d+ failed: .*vm\.max_map_count"),
        ({"map": refused(errno.ENODEV)}, r"mapping .*\.tensor at offset 0 failed: No such device; .*another folder"),
    ],
)
def test_what_cannot_be_reserved_or_mapped_leaves_nothing(tmp_path, faults, words):
    files = Faulty(free_bytes=lambda real, path: 6 * PAGE, **faults)
    engine, store = store_on(tmp_path, 2, files=files)
    with engine:
        handles = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StorageError, match=words) as found:
            store.empty("exp_avg", torch.empty(8 * CHUNK, dtype=torch.uint8))
        assert files_in(tmp_path) == [] and len(os.listdir("/proc/self/fd")) == handles
        files.faults.clear()
        assert store.holds(store.empty("exp_avg", torch.empty(8 * CHUNK, dtype=torch.uint8)))
        del found


def test_larger_pages_than_files_are_cut_for_are_refused(tmp_path, monkeypatch):
    engine, store = store_on(tmp_path)
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)
    with engine:
        with pytest.raises(StorageError, match=r"exp_avg .* pages of this system have 65536 bytes.* multiples of 4096"):
            store.empty("exp_avg", torch.empty(5))
        assert files_in(tmp_path) == []


def own_bytes():
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) << 10


@WAYS
def test_a_tensor_in_files_takes_no_memory_of_the_process(tmp_path, direct):
    n_bytes, piece_bytes = 64 << 20, 4 << 20
    engine, store = store_on(tmp_path, 2, direct, request_bytes=1 << 20)
    with engine:
        piece = empty_aligned(piece_bytes).fill_(5)
        before_bytes = own_bytes()
        mapped = store.empty("exp_avg", torch.empty(n_bytes, dtype=torch.uint8, device="meta"))
        place = store.bytes_of(mapped)
        for start in range(0, n_bytes, piece_bytes):
            place.write(piece, start).synchronize()
            place.read(piece, start).synchronize()
        mapped.add_(1)
        assert mapped[-1] == mapped[0] == 6
        assert own_bytes() - before_bytes < 2 * piece_bytes + engine.staging_bytes
