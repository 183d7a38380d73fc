"""Chunks move between paths while checkpoints keep their files: nothing that is kept changes, and nothing is lost."""

from __future__ import annotations

import hashlib
from pathlib import PurePath

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offmate.runtime.events import LaneEvent
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.links import remove_files
from offmate.runtime.storage.pieces import check_pieces, tensor_of

from .faulty import CHUNK
from .test_moves import SHARES, files_bytes, paths_of, random_like, read, store_on, stored_in, write


def digests(tmp_path):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("*/kept/*/*")}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_any_order_of_moves_writes_edits_and_checkpoints(tmp_path, data):
    n_rows, n_columns = data.draw(st.integers(1, 8), "rows"), data.draw(st.sampled_from([3, 1024, 2048, 2500]), "cols")
    like = torch.empty(n_rows, n_columns)
    cuts = [row * like.stride(0) * 4 for row in data.draw(st.sets(st.integers(0, n_rows)), "cuts")]
    engine, store = store_on(tmp_path, 3, proportions=data.draw(SHARES, "shares"))
    with engine:
        held = [store.empty(name, like, cuts) for name in ("exp_avg", "exp_avg_sq")]
        plain = [torch.zeros_like(like) for _ in held]
        for one in held:
            one.zero_()
        store.forget_all()
        under_way, gates, kept, number = [], [], {}, 0

        def done():
            while gates:
                gates.pop(0).settle()
            while under_way:
                under_way.pop().synchronize()

        for seed in range(data.draw(st.integers(1, 14), "steps")):
            which = data.draw(st.integers(0, 1), "tensor")
            first = data.draw(st.integers(0, n_rows - 1), "first row")
            rows = slice(first, data.draw(st.integers(first + 1, n_rows), "last row"))
            mapped, own = held[which], plain[which]
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
                assert torch.equal(tensor_of(SystemFiles(), "kept", one, like), expected)
        del held, mapped, one
        assert [files_bytes(tmp_path, path) for path in range(3)] == [0, 0, 0]


def test_a_chunk_that_moved_away_from_a_kept_file_can_come_back(tmp_path):
    engine, store = store_on(tmp_path)
    with engine:
        held = store.empty("exp_avg", torch.empty(8, CHUNK // 4))
        values = random_like(held, 0)
        write(store, held, values).synchronize()
        (pieces,) = store.link([held], PurePath("kept", "1"))
        first = values
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
    engine, store = store_on(tmp_path)
    with engine:
        held = store.empty("exp_avg", torch.empty(4, CHUNK // 4))
        values = random_like(held, 0)
        write(store, held, values).synchronize()
        (pieces,) = store.link([held], PurePath("kept", "1"))
        store.move([0.001, 0.999])
        values[1, :100] = 5
        write(store, held[1, :100], values[1, :100].clone()).synchronize()
        assert torch.equal(held, values) and torch.equal(read(store, held), values)
        assert not torch.equal(tensor_of(SystemFiles(), "kept", pieces, held), values)
