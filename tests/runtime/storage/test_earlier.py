"""Writes that leave what was there: put back, it is the same to the byte, whatever came between."""

from __future__ import annotations

import contextlib
import errno
import functools
from pathlib import PurePath

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offmate.runtime.events import LaneEvent
from offmate.runtime.storage.earlier import Earlier
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.pieces import check_pieces, tensor_of

import offmate

from ...fuzz.examples import examples
from .faulty import CHUNK, Faulty, once, refused
from .test_moves import SHARES, drawn, drawn_rows, end, files_bytes, random_like, read, store_on, write
from .test_moves_and_links import digests


def tried(store, mapped, values, earlier, after=()):
    """Write beside what is there."""
    stored = store.bytes_of(mapped)
    return stored.write(values.contiguous().view(torch.uint8).reshape(-1), 0, after, earlier)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(2))
@given(st.data())
def test_any_order_of_tries_moves_writes_edits_and_checkpoints(tmp_path, data):
    """Tries of some rows, chunks that two of them share among these, are dropped early or late, or put back."""
    engine, store = store_on(tmp_path, 3, proportions=data.draw(SHARES, "shares"))
    with engine:
        held, plain = drawn(data, store)
        under_way, gates, kept, number = [], [], [], 0

        done = functools.partial(end, gates, under_way)

        for seed in range(data.draw(st.integers(1, 12), "steps")):
            which = data.draw(st.integers(0, 1), "tensor")
            mapped, own, rows = held[which], plain[which], drawn_rows(data, plain[which])
            steps = ["move", "write", "try", "try", "try", "user writes", "keep", "room", "twice"]
            match data.draw(st.sampled_from(steps), "step"):
                case "move":
                    store.move(data.draw(SHARES, "new shares"))
                case "twice":
                    store.reserve_twice(mapped)
                case "write":
                    own[rows] = random_like(own[rows], seed)
                    under_way.append(write(store, mapped[rows], own[rows].clone()))
                case "try":
                    earlier, before = Earlier(), own.clone()
                    gates += [LaneEvent()] if data.draw(st.booleans(), "waits") else []
                    for one in [rows, *(drawn_rows(data, own) for _ in range(data.draw(st.integers(0, 2), "more")))]:
                        own[one] = random_like(own[one], seed + 100)
                        under_way.append(tried(store, mapped[one], own[one].clone(), earlier, gates[-1:]))
                    match data.draw(st.sampled_from(["drop early", "drop late", "put back"]), "fate"):
                        case "drop early":
                            earlier.drop()
                        case "drop late":
                            done()
                            earlier.drop()
                        case "put back":
                            done()
                            assert torch.equal(mapped, own)
                            earlier.put_back()
                            own.copy_(before)
                            assert torch.equal(mapped, own)
                    del earlier
                case "user writes":
                    done()
                    own[rows] = mapped[rows] = random_like(own[rows], seed)
                    store.forget(mapped[rows])
                case "keep":
                    done()
                    below, number = PurePath("kept", str(number)), number + 1
                    linked = store.link(held, below)
                    files = {path: found for path, found in digests(tmp_path).items() if path.match(f"{below}/*")}
                    kept.append((linked, [one.clone() for one in plain], files))
                case "room":
                    store.make_room()
            done()
            assert torch.equal(read(store, mapped), own) and torch.equal(mapped, own)
        for pieces, values, before in kept:
            assert before.items() <= digests(tmp_path).items()
            for one, expected in zip(pieces, values):
                check_pieces(SystemFiles(), one)
                assert torch.equal(tensor_of(SystemFiles(), "kept", one, expected), expected)
        del held, mapped
        assert [files_bytes(tmp_path, path) for path in range(3)] == [0, 0, 0]


def one_tensor(tmp_path, n_rows=4, **given):
    engine, store = store_on(tmp_path, 1, **given)
    held = store.empty("exp_avg", torch.empty(n_rows, CHUNK // 4))
    store.reserve_twice(held)
    values = random_like(held, 0)
    write(store, held, values).synchronize()
    return engine, store, held, values


def test_two_places_are_enough_for_any_number_of_tries(tmp_path):
    engine, store, held, values = one_tensor(tmp_path)
    with engine:
        for seed in range(1, 6):
            earlier, new = Earlier(), random_like(values, seed)
            tried(store, held, new, earlier).synchronize()
            if seed % 2:
                earlier.put_back()
            else:
                earlier.drop()
                values = new
            assert torch.equal(read(store, held), values) and torch.equal(held, values)
            assert files_bytes(tmp_path, 0) == 2 * 4 * CHUNK


def test_what_is_put_back_after_a_checkpoint_does_not_change_it(tmp_path):
    """The place that is put back is the checkpoint's, so that what the user writes then goes elsewhere."""
    engine, store, held, values = one_tensor(tmp_path)
    with engine:
        (pieces,) = store.link([held], PurePath("kept", "1"))
        earlier = Earlier()
        tried(store, held, random_like(values, 1), earlier).synchronize()
        earlier.put_back()
        held[1] = 7
        store.forget(held[1])
        check_pieces(SystemFiles(), pieces)
        assert torch.equal(tensor_of(SystemFiles(), "kept", pieces, values), values)
        values[1] = 7
        assert torch.equal(read(store, held), values) and torch.equal(held, values)


@pytest.mark.parametrize("skip", range(4))
def test_a_write_that_fails_leaves_what_was_there(tmp_path, skip):
    faulty = Faulty()
    engine, store, held, values = one_tensor(tmp_path, files=faulty)
    with engine:
        faulty.faults["pwritev"] = once(refused(errno.EIO), skip)
        earlier = Earlier()
        with pytest.raises(offmate.StorageError):
            tried(store, held, random_like(values, 1), earlier).synchronize()
        earlier.put_back()
        assert torch.equal(read(store, held), values) and torch.equal(held, values)


def test_what_cannot_be_shown_again_is_said(tmp_path):
    """Then nobody reads it as if it were right, and the other chunks are put back."""
    faulty = Faulty()
    engine, store, held, values = one_tensor(tmp_path, files=faulty)
    with engine:
        earlier = Earlier()
        tried(store, held, random_like(values, 1), earlier).synchronize()
        faulty.faults["map"] = once(refused(errno.ENOMEM), 1)
        with pytest.raises(offmate.StorageError):
            earlier.put_back()
        with pytest.raises(offmate.StorageError, match="never written, or writing it failed"):
            read(store, held)
        again = []
        for row in range(4):  # the chunks were written side by side, so that the one refused may be any of them
            with contextlib.suppress(offmate.StorageError):
                again.append(torch.equal(read(store, held[row]), values[row]))
        assert again == [True] * 3


def test_no_space_for_second_places_takes_none(tmp_path):
    faulty = Faulty()
    engine, store = store_on(tmp_path, 1, files=faulty)
    with engine:
        held = store.empty("exp_avg", torch.empty(4, CHUNK // 4))
        before = files_bytes(tmp_path, 0)
        faulty.faults["fallocate"] = refused(errno.ENOSPC)
        with pytest.raises(offmate.StorageError):
            store.reserve_twice(held)
        assert files_bytes(tmp_path, 0) == before
