"""Chunks move between paths while checkpoints keep their files: nothing that is kept changes, and nothing is lost."""

from __future__ import annotations

import errno
import functools
import hashlib
from pathlib import PurePath

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offmate.runtime.events import LaneEvent
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.folders import Folder
from offmate.runtime.storage.links import remove_files
from offmate.runtime.storage.pieces import check_pieces, tensor_of

from ...fuzz.examples import examples
from .faulty import CHUNK, Faulty, once, refused
from .test_moves import (
    SHARES,
    drawn,
    drawn_rows,
    end,
    files_bytes,
    paths_of,
    random_like,
    read,
    store_on,
    stored_in,
    write,
)


def digests(tmp_path):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("*/kept/*/*")}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(2))
@given(st.data())
def test_any_order_of_moves_writes_edits_and_checkpoints(tmp_path, data):
    engine, store = store_on(tmp_path, 3, proportions=data.draw(SHARES, "shares"))
    with engine:
        held, plain = drawn(data, store)
        under_way, gates, kept, number = [], [], {}, 0

        done = functools.partial(end, gates, under_way)

        for seed in range(data.draw(st.integers(1, 14), "steps")):
            which = data.draw(st.integers(0, 1), "tensor")
            mapped, own, rows = held[which], plain[which], drawn_rows(data, plain[which])
            steps = ["move", "write", "write", "user writes", "read", "keep", "keep", "room", "drop"]
            match data.draw(st.sampled_from(steps), "step"):
                case "move":
                    store.move(data.draw(SHARES, "new shares"))
                case "write":
                    own[rows] = random_like(own[rows], seed)
                    gates += [LaneEvent()] if data.draw(st.booleans(), "waits") else []
                    under_way.append(write(store, mapped[rows], own[rows].clone(), after=gates[-1:]))
                case "user writes":
                    done()
                    own[rows] = mapped[rows] = random_like(own[rows], seed)
                    store.forget(mapped[rows])
                case "read":
                    done()
                    assert torch.equal(read(store, mapped), own) and torch.equal(mapped, own)
                case "keep":
                    done()
                    below, number = PurePath("kept", str(number)), number + 1
                    kept[below] = store.link(held, below), [one.clone() for one in plain], {}
                    kept[below][2].update(
                        {path: d for path, d in digests(tmp_path).items() if path.match(f"{below}/*")}
                    )
                case "room":
                    store.make_room()
                case "drop":
                    for below in [*kept][: data.draw(st.integers(0, 1), "dropped")]:
                        del kept[below]
                        for folder in tmp_path.glob(f"*/{below}"):
                            remove_files(SystemFiles(), folder)
        done()
        for mapped, own in zip(held, plain):
            assert torch.equal(mapped, own) and torch.equal(read(store, mapped), own)
        for pieces, values, before in kept.values():
            assert before.items() <= digests(tmp_path).items()
            for one, expected in zip(pieces, values):
                check_pieces(SystemFiles(), one)
                assert torch.equal(tensor_of(SystemFiles(), "kept", one, expected), expected)
        del held, mapped
        assert [files_bytes(tmp_path, path) for path in range(3)] == [0, 0, 0]


def kept_on(tmp_path, n_rows):
    """A store with a tensor of some chunks that a checkpoint keeps."""
    engine, store = store_on(tmp_path)
    held = store.empty("exp_avg", torch.empty(n_rows, CHUNK // 4))
    values = random_like(held, 0)
    write(store, held, values).synchronize()
    (pieces,) = store.link([held], PurePath("kept", "1"))
    return engine, store, held, values, pieces


def test_a_chunk_that_moved_away_from_a_kept_file_can_come_back(tmp_path):
    engine, store, held, first, pieces = kept_on(tmp_path, 8)
    with engine:
        values = first
        for shares in ([0.001, 0.999], [0.999, 0.001], [0.5, 0.5]):
            store.move(shares)
            values = values + 1
            write(store, held, values).synchronize()
            assert torch.equal(held, values) and torch.equal(read(store, held), values)
        assert {*paths_of(store, held)} == {0, 1}
        check_pieces(SystemFiles(), pieces)
        assert torch.equal(tensor_of(SystemFiles(), "kept", pieces, held), first)
        on_disk = [files_bytes(tmp_path, path) for path in range(2)]
        assert on_disk == [*stored_in(store, held).places.reserved_bytes.values()]  # no file stays that nothing is in


def test_a_write_of_a_part_of_a_kept_chunk_takes_the_rest_along(tmp_path):
    engine, store, held, values, pieces = kept_on(tmp_path, 4)
    with engine:
        store.move([0.001, 0.999])
        values[1, :100] = 5
        write(store, held[1, :100], values[1, :100].clone()).synchronize()
        assert torch.equal(held, values) and torch.equal(read(store, held), values)
        assert not torch.equal(tensor_of(SystemFiles(), "kept", pieces, held), values)


def test_who_uses_another_part_of_a_kept_chunk_waits_for_a_write_that_takes_it_along(tmp_path):
    engine, store, held, values, pieces = kept_on(tmp_path, 2)
    with engine:
        half = CHUNK // 8
        first, second, gate = held[1, :half], held[1, half:], LaneEvent()
        new = random_like(values, 1)
        writes = [write(store, first, new[1, :half].clone(), after=[gate])]
        target = torch.zeros(second.nbytes, dtype=torch.uint8)
        reads = store.bytes_of(second).read(target, 0)
        writes.append(write(store, second, new[1, half:].clone()))
        gate.settle()
        for event in (*writes, reads):
            event.synchronize()
        assert torch.equal(target.view(torch.float32), values[1, half:])
        assert torch.equal(held[1], new[1]) and torch.equal(held[0], values[0])
        assert torch.equal(tensor_of(SystemFiles(), "kept", pieces, held), values)


def test_a_move_needs_room_for_the_checkpoints_to_come(tmp_path, monkeypatch):
    engine, store = store_on(tmp_path)
    with engine:
        held = store.empty("exp_avg", torch.empty(16, CHUNK // 4))
        values = random_like(held, 0)
        write(store, held, values).synchronize()
        monkeypatch.setattr(Folder, "free_bytes", property(lambda self: 20 * CHUNK))
        store.sets = 4
        assert store.move([0.001, 0.999]) == 0, "7 chunks more, and as many in each of 4 checkpoints"
        store.sets = 1
        assert store.move([0.001, 0.999]) == 7 * CHUNK


def test_a_move_that_finds_no_room_reserves_nothing(tmp_path):
    files = Faulty()
    engine, store = store_on(tmp_path, 3, files=files, proportions=[1, 0, 0])
    with engine:
        held = store.empty("exp_avg", torch.empty(8, CHUNK // 4))
        write(store, held, random_like(held, 0)).synchronize()
        before = [files_bytes(tmp_path, path) for path in range(3)]
        files.faults["fallocate"] = once(refused(errno.ENOSPC), skip=1)
        assert store.move([0.2, 0.4, 0.4]) == 0
        assert [files_bytes(tmp_path, path) for path in range(3)] == before
