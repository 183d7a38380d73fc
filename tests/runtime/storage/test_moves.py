"""Chunks move to other paths at their next write: the same bytes, to the engine and to whoever holds a tensor."""

from __future__ import annotations

import errno
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offmate.runtime.events import LaneEvent
from offmate.runtime.storage import layout
from offmate.runtime.storage.mapped import MappedStore

from offmate.errors import StorageError

from ...fuzz.examples import examples
from .faulty import CHUNK, PAGE, Faulty, engine_on, flipped, once, random_bytes, refused

SHARES = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)


def store_on(tmp_path, n_paths=2, files=None, proportions=None, **given):
    engine = engine_on(*(tmp_path / str(k) for k in range(n_paths)), files=files, **given)
    return engine, MappedStore(engine, proportions)


def bytes_in(tensor):
    return tensor.view(-1).view(torch.uint8)


def write(store, tensor, values, **given):
    return store.bytes_of(tensor).write(bytes_in(values), 0, **given)


def read(store, tensor, **given):
    target = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    store.bytes_of(tensor).read(target, 0, **given).synchronize()
    return target.view(tensor.dtype).view(tensor.shape)


def random_like(tensor, seed):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def stored_in(store, tensor):
    return store.bytes_of(tensor).stored


def paths_of(store, tensor):
    """The path that each chunk's bytes are on."""
    return [int(place.file.path.parent.name) for place in stored_in(store, tensor).places]


def files_bytes(tmp_path, path):
    return sum(file.stat().st_size for file in (tmp_path / str(path)).glob("*.tensor"))


def drawn(data, store):
    """Two tensors of the store, of any size and with any cuts, and the same in RAM."""
    n_rows, n_columns = data.draw(st.integers(1, 10), "rows"), data.draw(st.sampled_from([3, 1024, 2048, 2500]), "cols")
    like = torch.empty(n_rows, n_columns)
    cuts = [row * like.stride(0) * 4 for row in data.draw(st.sets(st.integers(0, n_rows)), "cuts")]
    held = [store.empty(name, like, cuts) for name in ("exp_avg", "exp_avg_sq")]
    for one in held:
        one.zero_()
    store.forget_all()
    return held, [torch.zeros_like(like) for _ in held]


def end(gates, under_way):
    """Open the gates in order, and wait until all that is under way has ended."""
    while gates:
        gates.pop(0).settle()
    while under_way:
        under_way.pop().synchronize()


def drawn_rows(data, tensor):
    first = data.draw(st.integers(0, len(tensor) - 1), "first row")
    return slice(first, data.draw(st.integers(first + 1, len(tensor)), "last row"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(2))
@given(st.data())
def test_whatever_moves_between_writes_values_are_those_of_a_tensor_in_ram(tmp_path, data):
    engine, store = store_on(tmp_path, 3, proportions=data.draw(SHARES, "shares"))
    with engine:
        held, plain = drawn(data, store)
        under_way, gates, reads = [], [], []

        done = functools.partial(end, gates, under_way)

        for seed in range(data.draw(st.integers(1, 12), "steps")):
            which = data.draw(st.integers(0, 1), "tensor")
            mapped, own, rows = held[which], plain[which], drawn_rows(data, plain[which])
            match data.draw(st.sampled_from(["move", "write", "write", "user writes", "read", "look"]), "step"):
                case "move":
                    store.move(data.draw(SHARES, "new shares"))
                case "write":
                    own[rows] = random_like(own[rows], seed)
                    gates += [LaneEvent()] if data.draw(st.booleans(), "waits") else []
                    under_way.append(write(store, mapped[rows], own[rows].clone(), after=gates[-1:]))
                case "user writes":
                    done()
                    for event, *_ in reads:
                        event.synchronize()
                    own[rows] = mapped[rows] = random_like(own[rows], seed)
                    store.forget(mapped[rows])
                case "read":
                    target, expected = torch.zeros(own[rows].nbytes, dtype=torch.uint8), own[rows].clone()
                    reads.append((store.bytes_of(mapped[rows]).read(target, 0), target, bytes_in(expected)))
                case "look":
                    done()
                    assert torch.equal(mapped[rows], own[rows])
        done()
        for event, target, expected in reads:
            event.synchronize()
            assert torch.equal(target, expected)
        for mapped, own in zip(held, plain):
            assert torch.equal(mapped, own) and torch.equal(read(store, mapped), own)
        places = [stored_in(store, one).places for one in held]
        for path in range(3):
            assert files_bytes(tmp_path, path) == sum(one.reserved_bytes[path] for one in places)
        del held, mapped, places
        assert [files_bytes(tmp_path, path) for path in range(3)] == [0, 0, 0]


def test_a_write_of_whole_chunks_moves_them_and_reads_nothing(tmp_path):
    files = Faulty()
    engine, store = store_on(tmp_path, files=files)
    with engine:
        held = store.empty("exp_avg", torch.empty(8, CHUNK // 4))
        write(store, held, random_like(held, 0)).synchronize()
        assert paths_of(store, held) == [0, 1] * 4 and engine.bytes_by_path == [4 * CHUNK, 4 * CHUNK]
        assert store.move([3, 1]) == 2 * CHUNK
        assert engine.bytes_by_path == [6 * CHUNK, 2 * CHUNK]
        assert paths_of(store, held) == [0, 1] * 4  # nothing moves by itself
        assert torch.equal(held, random_like(held, 0)) and torch.equal(read(store, held), held)
        files.calls.clear()
        write(store, held, random_like(held, 1)).synchronize()
        assert files.calls.count("pwritev") == 8 and "preadv" not in files.calls
        assert paths_of(store, held).count(0) == 6
        assert torch.equal(held, random_like(held, 1)) and torch.equal(read(store, held), held)


def test_a_write_of_a_part_of_a_chunk_leaves_it_where_it_is(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        held = store.empty("exp_avg", torch.empty(8, CHUNK // 4))
        write(store, held, random_like(held, 0)).synchronize()
        store.move([1, 0])
        write(store, held[:, : CHUNK // 8][1], torch.ones(CHUNK // 8)).synchronize()
        assert paths_of(store, held) == [0, 1] * 4
        assert torch.equal(held[1, : CHUNK // 8], torch.ones(CHUNK // 8)) and torch.equal(read(store, held), held)


def test_every_path_keeps_a_chunk_and_gets_its_share_back_without_more_space(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        tensors = [store.empty(name, torch.empty(8, CHUNK // 4)) for name in ("exp_avg", "exp_avg_sq")]
        store.move([1, 0])
        assert engine.bytes_by_path == [15 * CHUNK, CHUNK]
        for number, one in enumerate(tensors):
            write(store, one, random_like(one, number)).synchronize()
        reserved = [files_bytes(tmp_path, path) for path in range(2)]
        assert reserved == [15 * CHUNK, 8 * CHUNK]  # the old places are kept
        store.move([1, 1])
        assert engine.bytes_by_path == [8 * CHUNK, 8 * CHUNK]
        for number, one in enumerate(tensors):
            write(store, one, random_like(one, number + 2)).synchronize()
            assert torch.equal(one, random_like(one, number + 2)) and torch.equal(read(store, one), one)
        store.move([0, 1])
        store.move([1, 1])
        assert [files_bytes(tmp_path, path) for path in range(2)] == [15 * CHUNK, 15 * CHUNK]


def test_reads_that_were_submitted_before_find_the_old_bytes_and_later_ones_the_new(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        held, gate = store.empty("exp_avg", torch.empty(4, CHUNK // 4)), LaneEvent()
        write(store, held, random_like(held, 0)).synchronize()
        targets = [torch.zeros(held.nbytes, dtype=torch.uint8) for _ in range(2)]
        events = [store.bytes_of(held).read(targets[0], 0, after=(gate,))]
        store.move([1, 0])
        events.append(write(store, held, random_like(held, 1)))
        store.move([0, 1])  # while the write waits
        events.append(store.bytes_of(held).read(targets[1], 0))
        gate.settle()
        for event in events:
            event.synchronize()
        assert [torch.equal(t, bytes_in(random_like(held, k))) for k, t in enumerate(targets)] == [True, True]
        assert torch.equal(held, random_like(held, 1))


def test_a_chunk_that_moves_away_and_back_is_read_where_the_last_write_puts_it(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        held, gates = store.empty("exp_avg", torch.empty(4, CHUNK // 4)), [LaneEvent(), LaneEvent()]
        write(store, held, random_like(held, 0)).synchronize()
        events, targets = [], []
        for number, shares in enumerate(([1, 0], [1, 1])):
            store.move(shares)
            events.append(write(store, held, random_like(held, number + 1), after=(gates[number],)))
            targets.append(torch.zeros(held.nbytes, dtype=torch.uint8))
            events.append(store.bytes_of(held).read(targets[-1], 0))
        gates[0].settle()
        events[0].synchronize()
        targets.append(torch.zeros(held.nbytes, dtype=torch.uint8))
        events.append(store.bytes_of(held).read(targets[-1], 0))
        gates[1].settle()
        for event in events:
            event.synchronize()
        for target, seed in zip(targets, (1, 2, 2)):
            assert torch.equal(target, bytes_in(random_like(held, seed)))
        assert torch.equal(held, random_like(held, 2)) and paths_of(store, held) == [0, 1, 0, 1]


def test_a_move_whose_write_never_begins_leaves_the_old_bytes(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        held, gate = store.empty("exp_avg", torch.empty(4, CHUNK // 4)), LaneEvent()
        write(store, held, random_like(held, 0)).synchronize()
        store.move([1, 0])
        event = write(store, held, random_like(held, 1), after=(gate,))
        gate.settle(RuntimeError("the device was lost"))
        with pytest.raises(RuntimeError, match="lost"):
            event.synchronize()
        assert torch.equal(read(store, held), random_like(held, 0)) and torch.equal(held, random_like(held, 0))


@pytest.mark.parametrize("call", ["pwritev", "map"])
def test_a_move_that_fails_is_a_failed_write(tmp_path, call):
    files = Faulty()
    engine, store = store_on(tmp_path, files=files, n_threads=1)
    with engine:
        held = store.empty("exp_avg", torch.empty(4, CHUNK // 4))
        write(store, held, random_like(held, 0)).synchronize()
        store.move([1, 0])
        (chunk,) = (c for c, (a, b) in enumerate(zip([0, 1, 0, 1], stored_in(store, held).places.paths)) if a != b)
        files.faults[call] = once(refused(errno.EIO))
        with pytest.raises(StorageError, match=rf"{tmp_path}/0/offmate-.*Input/output error.*look at the system's log"):
            write(store, held[chunk], random_like(held[chunk], 1)).synchronize()
        with pytest.raises(StorageError, match="never written, or writing it failed"):
            read(store, held[chunk])
        write(store, held[chunk], random_like(held[chunk], 2)).synchronize()
        assert torch.equal(held[chunk], random_like(held[chunk], 2))
        assert torch.equal(read(store, held[chunk]), held[chunk])


def test_a_moved_chunk_is_verified(tmp_path):
    files = Faulty()
    engine, store = store_on(tmp_path, files=files)
    with engine:
        held = store.empty("exp_avg", torch.empty(4, CHUNK // 4))
        store.move([1, 0])
        write(store, held, random_like(held, 0)).synchronize()
        for chunk in range(4):
            files.faults["preadv"] = once(flipped)
            with pytest.raises(StorageError, match="does not hold what was written"):
                read(store, held[chunk])


@pytest.mark.parametrize(
    "faults", [{"fallocate": refused(errno.ENOSPC)}, {"free_bytes": lambda real, path: CHUNK}], ids=["taken", "full"]
)
def test_what_a_path_has_no_space_for_stays_and_training_goes_on(tmp_path, faults):
    files = Faulty()
    engine, store = store_on(tmp_path, files=files)
    with engine:
        held = store.empty("exp_avg", torch.empty(8, CHUNK // 4))
        files.faults.update(faults)
        assert store.move([1, 0]) == 0 and engine.bytes_by_path == [4 * CHUNK, 4 * CHUNK]
        write(store, held, random_like(held, 0)).synchronize()
        assert torch.equal(held, random_like(held, 0)) and torch.equal(read(store, held), held)
        files.faults.clear()
        assert store.move([1, 0]) == 3 * CHUNK


def test_nothing_moves_where_the_system_may_not_map_so_many_pieces(tmp_path, monkeypatch):
    (tmp_path / "max_map_count").write_text("9\n")
    monkeypatch.setattr(layout, "_MAPPINGS", tmp_path / "max_map_count")
    engine, store = store_on(tmp_path)
    with engine:
        held = store.empty("exp_avg", torch.empty(8, CHUNK // 4))
        assert store.move([1, 0]) == 0 and held.numel()


def test_tensors_that_are_made_or_dropped_later_keep_the_shares(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        first = [store.empty("exp_avg", torch.empty(4, CHUNK // 4)) for _ in range(4)]
        store.move([3, 1])
        assert engine.bytes_by_path == [12 * CHUNK, 4 * CHUNK]
        first.pop(), first.pop(0)
        first += [store.empty("exp_avg", torch.empty(4, CHUNK // 4)) for _ in range(6)]
        assert engine.bytes_by_path == [24 * CHUNK, 8 * CHUNK]


def test_a_tensor_that_died_meanwhile_is_not_mapped_again(tmp_path):
    """Its addresses may be somebody else's by then."""
    files = Faulty()
    engine, store = store_on(tmp_path, files=files)
    with engine:
        held, gate = store.empty("exp_avg", torch.empty(4, CHUNK // 4)), LaneEvent()
        place = store.bytes_of(held)
        store.move([1, 0])
        event = place.write(random_bytes(4 * CHUNK), 0, after=(gate,))
        del held
        files.calls.clear()
        gate.settle()
        event.synchronize()
        assert "map" not in files.calls
        target = torch.zeros(4 * CHUNK, dtype=torch.uint8)
        place.read(target, 0).synchronize()
        assert torch.equal(target, random_bytes(4 * CHUNK))


# -- space that is taken before it is asked for -----------------------------------------------------------------------


def test_what_was_reserved_is_what_is_asked_for(tmp_path):
    engine, store = store_on(tmp_path)
    like, cuts = torch.empty(4, CHUNK // 4, device="meta"), (PAGE,)
    with engine:
        store.reserve({"a": (like, cuts), "b": (like, cuts)})
        assert sum(files_bytes(tmp_path, path) for path in range(2)) == 8 * CHUNK
        one, other = store.empty("a", like, cuts), store.empty("a", like, cuts)
        assert sum(files_bytes(tmp_path, path) for path in range(2)) == 12 * CHUNK
        assert one.data_ptr() != other.data_ptr() and one.device.type == "cpu"
        with pytest.raises(StorageError, match="never written"):
            read(store, one)
        store.reserve({"c": (like, cuts)})  # of another plan: b is needed no longer
        assert sum(files_bytes(tmp_path, path) for path in range(2)) == 12 * CHUNK
        store.empty("c", torch.empty(8), ())  # of another form: what was reserved for it is given back
        assert sum(files_bytes(tmp_path, path) for path in range(2)) == 8 * CHUNK
        assert one.numel() == other.numel()
