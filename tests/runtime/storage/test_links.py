"""What a checkpoint keeps of stored tensors is a second name of their files, which nobody writes to again."""

from __future__ import annotations

import errno
import hashlib
import logging
from pathlib import Path, PurePath

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offmate.runtime.storage import own_pages
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.mapped import MappedStore
from offmate.runtime.storage.pieces import check_pieces, tensor_of

from offmate.errors import StorageError

from ...fuzz.examples import examples
from .faulty import CHUNK, PAGE, Faulty, engine_on, once, refused, without_direct
from .test_mapped import files_in, random_like, read, write

BELOW = PurePath("kept", "step-1")
WAYS = pytest.mark.parametrize("pagemap", [True, False], ids=["pagemap", "no pagemap"])


def store_on(tmp_path, n_paths=2, **faults):
    files = Faulty(**faults)
    engine = engine_on(*(tmp_path / str(k) for k in range(n_paths)), files=files)
    return engine, MappedStore(engine), files


def digests(tmp_path, below=BELOW):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob(f"*/{below}/*")}


def kept_values(pieces, like):
    check_pieces(SystemFiles(), pieces)
    return tensor_of(SystemFiles(), "kept", pieces, like)


def written_store(tmp_path, shape=(8, CHUNK // 4), **given):
    engine, store, files = store_on(tmp_path, **given)
    mapped = store.empty("exp_avg", torch.empty(shape))
    values = random_like(mapped)
    write(store, mapped, values)
    return engine, store, files, mapped, values


def test_files_get_second_names_and_no_byte_is_copied(tmp_path):
    engine, store, files, mapped, values = written_store(tmp_path)
    with engine:
        files.calls.clear()
        (pieces,) = store.link([mapped], BELOW)
        assert not {"preadv", "pwritev", "fallocate"} & {*files.calls}
        own = {path.stat().st_ino for path in files_in(tmp_path)}
        assert {path.stat().st_ino for path in tmp_path.glob(f"*/{BELOW}/*")} == own and len(own) == 2
        assert torch.equal(kept_values(pieces, mapped), values) and torch.equal(mapped, values)


def test_the_next_writes_go_to_other_files_and_cost_no_byte(tmp_path):
    engine, store, files, mapped, values = written_store(tmp_path)
    with engine:
        (pieces,) = store.link([mapped], BELOW)
        before, old = digests(tmp_path), {*files_in(tmp_path)}
        store.make_room()
        files.calls.clear()
        address = mapped.data_ptr()
        for row in range(8):
            expected = torch.cat([values[:row] + 1, values[row:]])
            assert torch.equal(mapped, expected) and torch.equal(read(store, mapped), expected)
            files.calls.clear()
            write(store, mapped[row], values[row] + 1)
            assert files.calls.count("pwritev") == 1 and "preadv" not in files.calls
        assert torch.equal(mapped, values + 1) and mapped.data_ptr() == address
        assert digests(tmp_path) == before and len(before) == 2
        assert len(files_in(tmp_path)) == 2 and not {*files_in(tmp_path)} & old
        assert torch.equal(kept_values(pieces, mapped), values)
        mapped.add_(1)
        store.forget(mapped)
        assert torch.equal(read(store, mapped), values + 1 + 1) and digests(tmp_path) == before


@WAYS
def test_who_writes_to_a_held_tensor_changes_no_kept_file(tmp_path, monkeypatch, pagemap):
    if not pagemap:
        monkeypatch.setattr(own_pages, "_PAGEMAP", "/absent")
    engine, store, files, mapped, values = written_store(tmp_path)
    with engine:
        (pieces,) = store.link([mapped], BELOW)
        before = digests(tmp_path)
        files.calls.clear()
        mapped[3, 7] = values[3, 7] = 5
        store.forget_all()
        assert files.calls.count("pwritev") == 1, "only what was changed is written"
        assert torch.equal(mapped, values) and torch.equal(read(store, mapped), values)
        mapped[3, 8] = values[3, 8] = 6
        store.forget(mapped)
        assert files.calls.count("pwritev") == 1, "it is no longer kept, so that its file follows"
        assert torch.equal(read(store, mapped), values) and digests(tmp_path) == before
        assert not torch.equal(kept_values(pieces, mapped), values)


@WAYS
@pytest.mark.parametrize("does", ["read", "write"])
def test_writes_to_a_kept_tensor_that_were_not_forgotten_are_noticed(tmp_path, monkeypatch, pagemap, does):
    if not pagemap:
        monkeypatch.setattr(own_pages, "_PAGEMAP", "/absent")
    engine, store, _, mapped, values = written_store(tmp_path)
    with engine:
        store.link([mapped], BELOW)
        mapped[3, 7] = 5
        with pytest.raises(StorageError, match=r"does not hold what was written.*memory .* was written to"):
            read(store, mapped) if does == "read" else write(store, mapped, values)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(2))
@given(st.data())
def test_any_order_of_writes_edits_and_checkpoints(tmp_path, data):
    n_rows, n_columns = data.draw(st.integers(1, 10), "rows"), data.draw(st.sampled_from([3, 1024, 2048, 2500]), "cols")
    like = torch.empty(n_rows, n_columns)
    cuts = [row * like.stride(0) * 4 for row in data.draw(st.sets(st.integers(0, n_rows)), "cuts")]
    engine, store, _ = store_on(tmp_path, data.draw(st.integers(1, 2), "paths"))
    kept = []
    with engine:
        mapped, plain = store.empty("exp_avg", like, cuts), torch.zeros_like(like)
        mapped.zero_()
        store.forget_all()
        for seed in range(data.draw(st.integers(1, 14), "steps")):
            first = data.draw(st.integers(0, n_rows - 1), "first row")
            rows = slice(first, data.draw(st.integers(first + 1, n_rows), "last row"))
            match data.draw(st.sampled_from(["engine writes", "user writes", "engine reads", "keep", "drop"]), "step"):
                case "engine writes":
                    plain[rows] = random_like(plain[rows], seed)
                    write(store, mapped[rows], plain[rows])
                case "user writes":
                    plain[rows] = mapped[rows] = random_like(plain[rows], seed)
                    store.forget(mapped[rows])
                case "engine reads":
                    assert torch.equal(read(store, mapped[rows]), plain[rows])
                case "keep":
                    kept.append((*store.link([mapped], PurePath(f"{tmp_path.name}-{len(kept)}-{seed}")), plain.clone()))
                case "drop" if kept:
                    for piece in kept.pop(0)[0]:
                        piece.path.unlink(missing_ok=True)
            assert torch.equal(mapped, plain)
            assert all(torch.equal(kept_values(pieces, like), values) for pieces, values in kept)
        assert torch.equal(read(store, mapped), plain)
        assert len(files_in(tmp_path)) <= 2 * len({path.parent for path in files_in(tmp_path)})
        del mapped
        assert files_in(tmp_path) == []
    assert all(torch.equal(kept_values(pieces, like), values) for pieces, values in kept)
    for pieces, _ in kept:
        for piece in pieces:
            piece.path.unlink(missing_ok=True)


def test_a_write_that_fails_leaves_the_kept_file_and_is_known(tmp_path):
    engine, store, files, mapped, values = written_store(tmp_path)
    with engine:
        (pieces,) = store.link([mapped], BELOW)
        for name, fault in (("pwritev", refused(errno.EIO)), ("map", refused(errno.ENOMEM))):
            files.faults = {name: once(fault)}
            with pytest.raises(StorageError):
                write(store, mapped[2], values[2] + 1)
            with pytest.raises(StorageError, match="never written, or writing it failed"):
                read(store, mapped)
            with pytest.raises(StorageError, match="never written, or writing it failed"):
                store.link([mapped], PurePath("kept", "torn"))
            assert torch.equal(kept_values(pieces, mapped), values)
        write(store, mapped[2], values[2] + 1)
        assert torch.equal(read(store, mapped)[2], values[2] + 1)


def test_no_space_for_the_next_files_is_said_before_they_are_written(tmp_path):
    engine, store, files, mapped, values = written_store(tmp_path)
    with engine:
        store.link([mapped], BELOW)
        files.faults = {"fallocate": refused(errno.ENOSPC)}
        with pytest.raises(StorageError, match="free space there, or name a folder on a larger disk"):
            store.make_room()
        files.faults.clear()
        store.make_room()
        write(store, mapped, values + 1)
        assert torch.equal(read(store, mapped), values + 1)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK])
@pytest.mark.parametrize("direct", [True, False])
def test_where_links_fail_files_are_copied(tmp_path, code, direct):
    faults = {"link": refused(code)} | ({} if direct else {"open": without_direct})
    engine, store, _, mapped, values = written_store(tmp_path, **faults)
    with engine:
        assert len(engine.why_no_links()) == 2
        (pieces,) = store.link([mapped], BELOW)
        before, own = digests(tmp_path), files_in(tmp_path)
        write(store, mapped, values + 1)
        mapped[0] = 7
        store.forget(mapped)
        assert files_in(tmp_path) == own and digests(tmp_path) == before
        assert torch.equal(kept_values(pieces, mapped), values)


def test_a_file_with_too_many_names_is_copied_and_said(tmp_path, caplog):
    engine, store, files, mapped, values = written_store(tmp_path)
    with engine, caplog.at_level(logging.WARNING, "offmate"):
        files.faults["link"] = lambda real, *paths: (
            refused(errno.EMLINK)(real, *paths) if "kept" in str(paths[1]) else real(*paths)
        )
        assert engine.why_no_links() == {}
        (pieces,) = store.link([mapped], BELOW)
        (said,) = caplog.messages
        assert said.startswith("2 files of optimizer states were copied")
        write(store, mapped, values + 1)
        assert torch.equal(kept_values(pieces, mapped), values) and torch.equal(read(store, mapped), values + 1)


def test_other_failures_of_links_are_errors(tmp_path):
    engine, store, files, mapped, values = written_store(tmp_path)
    with engine:
        files.faults["link"] = refused(errno.EIO)
        with pytest.raises(StorageError, match=r"hard link in .* failed: Input/output error"):
            store.link([mapped], BELOW)
        files.faults["link"] = once(refused(errno.EIO), skip=3)
        with pytest.raises(StorageError, match=r"linking .*\.tensor as .* failed: Input/output error"):
            store.link([mapped], BELOW)
        assert not list(tmp_path.glob(f"*/{BELOW}"))
        files.faults.clear()
        write(store, mapped, values + 1)
        assert torch.equal(read(store, mapped), values + 1)


def test_a_piece_that_is_not_as_it_was_written_is_named(tmp_path):
    engine, store, _, mapped, _ = written_store(tmp_path)
    with engine:
        (pieces,) = store.link([mapped], BELOW)
        piece = pieces[3]
        content = bytearray(piece.path.read_bytes())
        content[piece.offset + 5] ^= 1
        piece.path.write_bytes(content)
        with pytest.raises(StorageError, match=rf"{piece.path} is not as .* {piece.offset} and {piece.offset + CHUNK}"):
            check_pieces(SystemFiles(), pieces)
        piece.path.write_bytes(content[:PAGE])
        with pytest.raises(StorageError, match="too short"):
            tensor_of(SystemFiles(), "exp_avg", pieces, mapped)


def test_a_tensor_of_a_checkpoint_may_be_written_to_and_gives_its_addresses_back(tmp_path):
    engine, store, _, mapped, values = written_store(tmp_path)
    with engine:
        (pieces,) = store.link([mapped], BELOW)
    before = digests(tmp_path)
    loaded = kept_values(pieces, mapped)
    loaded.add_(1)
    assert torch.equal(loaded, values + 1) and digests(tmp_path) == before
    del loaded, mapped
    assert str(BELOW) not in Path("/proc/self/maps").read_text()


def test_a_tensor_that_died_is_not_mapped_again(tmp_path):
    """A transfer may outlive the tensor that it writes to, whose addresses then are somebody else's."""
    engine, store, files, mapped, values = written_store(tmp_path)
    with engine:
        store.link([mapped], BELOW)
        place, content = store.bytes_of(mapped), values.view(-1).view(torch.uint8)
        del mapped
        files.calls.clear()
        place.write(content, 0).synchronize()
        assert "map" not in files.calls
        del place
        assert files_in(tmp_path) == []
