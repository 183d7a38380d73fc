"""A process that is killed at any call to a file, while it keeps states in a checkpoint, goes on bit for bit."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offmate.runtime.storage.files import SystemFiles

import offmate
from offmate.finetune.checkpoint import (
    Moment,
    load_moment,
    newest_checkpoint,
    remove_unfinished,
    restore_updates,
    save_checkpoint,
)
from offmate.finetune.settings import make_settings
from offmate.finetune.updates import UpdateRule
from offmate.finetune.weights import load_model
from offmate.session.linked_states import make_room, session_of

from ...fuzz.figures import from_hardware_file
from ...warm import run
from .finetune_kit import LENGTH, VOCABULARY, make_models
from .test_storage import NAMED, REPLACED

N_STEPS = 4
KEEP = 1
GPU_BUDGET, CPU_BUDGET = "250KiB", "220KiB"  # too little for all states
CALLS = [name for name, value in vars(SystemFiles).items() if callable(value) and not name.startswith("_")]
SYSTEM = ("replace", "fsync", "unlink", "rmdir")  # by which the folder with the weights is written and removed
EVERY = int(os.environ.get("OFFMATE_TESTS_EVERY", "40"))  # of what a kill may leave, which are tried; `make fuzz`: all
SAMPLES = [("link", 2), ("link", 7), ("replace", 0), ("unlink", 60), ("remove_folder", 0), ("pwritev", 5)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, cache_dir: str) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("killed")
    make_models(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFMATE_CACHE_DIR", cache_dir)
        yield folder


class Calls:
    """All calls to files, of one thread at a time.

    Parameters
    ----------
    each: is told the name of each call before it happens, while they count.
    """

    def __init__(self, each: Callable[[str], None]) -> None:
        self.names: list[str] = []
        self.count, self._each, self._lock = False, each, threading.RLock()
        for owner, names in ((SystemFiles, CALLS), (os, SYSTEM)):
            for name in names:
                setattr(owner, name, self._through(name, getattr(owner, name)))

    def _through(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **given: Any) -> Any:
            with self._lock:
                if self.count:
                    self.count = False  # what is done meanwhile is not the run's
                    self._each(name)
                    self.count = True
                    self.names.append(name)
                return real(*args, **given)

        return call


def train(base: Path, folder: Path, calls: Calls | None = None) -> tuple[Any, Any]:
    """Train from the newest checkpoint to the end, with a checkpoint of each step; return weights and states.

    The calls count from the second checkpoint to the end of the third one.
    """
    drive = folder / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder / "checkpoints")
    found = newest_checkpoint(folder / "checkpoints", [str(drive)])
    start = 0 if found is None else load_moment(found).step
    model = load_model(base / "llama" if found is None else found, torch.float32).train()
    updates = UpdateRule(model, make_settings({**NAMED, "learning_rate": 1e-2, "max_grad_norm": "none"}))
    if found is not None:
        restore_updates(found, updates, [str(drive)])
    updates.model = model = offmate.compile(
        model, GPU_BUDGET, optimizer=updates.optimizer, cpu_budget=CPU_BUDGET, device="emulated",
        storage=offmate.StoragePath(drive, "1GB/s", "1GB/s"), config=offmate.Config(outputs=("loss",)),
    )  # fmt: skip
    for step in range(start, N_STEPS):
        tokens = torch.randint(2, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        updates.step()
        if calls is not None:
            calls.count = step in (1, 2)
        moment = Moment(step + 1, "tokens", 1, torch.__version__)
        save_checkpoint(folder / "checkpoints", moment, model, updates, None, KEEP, [str(drive)])
        make_room(session_of(model))
        if calls is not None:
            calls.count = step == 1
    assert any(model.offmate.plan.stored_bytes)
    states = {number: {**own} for number, own in updates.state_dict()["state"].items()}
    return model.state_dict(), states


def check_folder(folder: Path) -> None:
    """Only the newest checkpoint is there, and the record of the folders on the drive."""
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [".states.json", "step-00000004"]
    assert len(list(folder.glob("drive/offmate-checkpoints/*/*"))) == KEEP


def small() -> Any:
    for (module, name), value in REPLACED.items():
        setattr(module, name, value)
    return from_hardware_file()


def works(base: Path, folder: Path, name: str, skip: int) -> None:
    """Train until a call of this name, after as many others, at which the process dies."""

    def die(called: str) -> None:
        if called == name and calls.names.count(name) == skip:
            os.kill(os.getpid(), signal.SIGKILL)

    calls = Calls(die)
    with small():
        train(base, folder, calls)


def goes_on(base: Path, folder: Path) -> None:
    """Train to the end, and keep weights and states."""
    with small():
        torch.save(train(base, folder), folder / "end.pt")
    check_folder(folder)


def everywhere(base: Path, folder: Path) -> None:
    """Train, keep what a process that is killed at each call would leave, and go on from many that differ."""
    seen: dict[str, Path] = {}

    def keep(name: str) -> None:
        mark = _digest(folder)
        if mark not in seen:
            seen[mark] = folder.with_name(f"{folder.name}-{len(seen)}-{name}")
            _copy(folder, seen[mark])

    calls = Calls(keep)
    with small():
        unbroken = _clones(train(base, folder, calls))
        print(len(calls.names), "calls", len(seen), "states of the folders", flush=True)
        for left in _some(tuple(seen.values())):
            gc.collect()
            shutil.rmtree(folder)
            left.rename(folder)
            assert same(train(base, folder), unbroken), left
            check_folder(folder)
    print({*calls.names})


def _some(states: tuple[Path, ...]) -> list[Path]:
    """The first state that each kind of call leaves, and one in so many of all."""
    first = {left.name.rpartition("-")[2]: left for left in reversed(states)}
    return [left for i, left in enumerate(states) if i % EVERY == 0 or left in first.values()]


def _copy(folder: Path, to: Path) -> None:
    assert os.system(f"cp -a '{folder}' '{to}'") == 0  # with links as links


def _digest(folder: Path) -> str:
    """A digest of all that the next process does not remove at once."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.parent.name != "drive":
            found.update(str(path).encode() + (path.read_bytes() if path.is_file() else b"/"))
    return found.hexdigest()


def _clones(found: tuple[Any, Any]) -> tuple[Any, Any]:
    return tuple(torch.utils._pytree.tree_map(lambda one: one.clone(), part) for part in found)  # type: ignore


def same(found: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether weights and states are equal to the bit."""
    leaves = [torch.utils._pytree.tree_leaves(part) for part in (found, other)]
    return len(leaves[0]) == len(leaves[1]) > 20 and all(map(torch.equal, *leaves))


@pytest.fixture(scope="module")
def unbroken(base: Path) -> Any:
    folder = base / "unbroken"
    assert run(base / "said", goes_on, base, folder) == 0, (base / "said").read_text()
    return torch.load(folder / "end.pt")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "skip"), SAMPLES)
def test_killed_it_goes_on_bit_for_bit(base, tmp_path, unbroken, name, skip):
    folder, said = tmp_path / "run", tmp_path / "said"
    assert run(said, works, base, folder, name, skip) == -signal.SIGKILL, said.read_text()
    assert run(said, goes_on, base, folder) == 0, said.read_text()
    assert same(torch.load(folder / "end.pt"), unbroken)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_any_call_it_goes_on_bit_for_bit(base, tmp_path):
    said = tmp_path / "said"
    assert run(said, everywhere, base, tmp_path / "run", limit_s=3500) == 0, said.read_text()
    for name in ("link", "make_folder", "sync_folder", "fallocate", "pwritev", "remove_folder", "replace"):
        assert f"'{name}'" in said.read_text()
