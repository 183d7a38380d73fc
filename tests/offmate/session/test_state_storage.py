"""Optimizer states that RAM has no room for lie in files: plain PyTorch's numbers, whatever the user does."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offmate.runtime.devices import ring as ring_buffers
from offmate.runtime.devices import streams
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.files import SystemFiles
from offmate.runtime.storage.measure import PathRates

import offmate
from offmate.lowering import float32_copies
from offmate.session import state_storage

from ...accelerator.loops import without_allocator
from ...fuzz.figures import from_hardware_file
from ...runtime.storage.faulty import Faulty, once
from .disks import broken, flip_a_bit, use_faulty_files

WIDTH, LAYERS = 192, 8
GPU_BUDGET, CPU_BUDGET = 1_600_000, 2_400_000
STEPS = 3

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Deep(torch.nn.Module):
    """Layers with residuals, dropout and a bias."""

    dropout = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.drop = torch.nn.Dropout(self.dropout)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return {"loss": x.float().square().mean(), "x": x}


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small requests beside a small model, and seconds that do not depend on the machine."""
    monkeypatch.setattr(state_storage, "Engine", functools.partial(Engine, n_threads=2, request_bytes=1 << 14))
    with from_hardware_file():
        yield


@pytest.fixture(autouse=True, scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans are made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFMATE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def path(tmp_path: Path) -> offmate.StoragePath:
    (tmp_path / "disk").mkdir()
    return offmate.StoragePath(tmp_path / "disk", read="1GB/s", write="1GB/s")


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def made(make: Make = adamw, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Deep().to(dtype)
    return model, make(model)


def compiled(
    path: Any, make: Make = adamw, dtype: torch.dtype = torch.float32, device: str = "emulated", **settings: Any
) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = made(make, dtype)
    budget = settings.pop("gpu_budget", GPU_BUDGET)
    settings = {"cpu_budget": CPU_BUDGET, "config": offmate.Config(), "storage": path, **settings}
    return offmate.compile(model, budget, optimizer=optimizer, device=device, **settings), optimizer


def batch(step: int, dtype: torch.dtype = torch.float32, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype = torch.float32
) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(batch(step, dtype))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(pair: tuple[Any, torch.optim.Optimizer], other: tuple[Any, torch.optim.Optimizer]) -> None:
    """Parameters and all of the optimizer's states are equal to the bit."""
    theirs = other[0].state_dict()
    assert not [name for name, value in pair[0].state_dict().items() if not torch.equal(value, theirs[name])]
    own, plain = pair[1].state_dict()["state"], other[1].state_dict()["state"]
    assert own.keys() == plain.keys()
    for number, state in plain.items():
        assert own[number].keys() == state.keys()
        assert not [
            key for key in state if not torch.equal(torch.as_tensor(own[number][key]), torch.as_tensor(state[key]))
        ]


def stored_bytes(model: Any) -> tuple[int, int]:
    read, written = model.offmate.plan.stored_bytes
    assert read == written > 0
    return read, written


def disk(model: Any) -> Any:
    (use,) = model._offmate_session.storage._engine.use()
    return use


MASTERS = functools.partial(offmate.with_master_weights, torch.optim.AdamW)
KINDS: dict[str, tuple[Make, torch.dtype]] = {
    "adamw": (adamw, torch.float32),
    "amsgrad": (lambda m: torch.optim.Adam(m.parameters(), amsgrad=True), torch.float32),
    "momentum": (lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9), torch.float32),
    "bf16": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True), torch.bfloat16),
    "masters": (lambda m: MASTERS()(m.parameters(), lr=1e-2, fused=True), torch.bfloat16),
}
BUDGETS = {"amsgrad": (1_900_000, 3_000_000), "momentum": (1_400_000, 1_500_000), "bf16": (800_000, 1_200_000),
           "masters": (2_000_000, 1_600_000)}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_weights_and_states_are_plain_pytorchs(path, kind):
    make, dtype = KINDS[kind]
    gpu_budget, cpu_budget = BUDGETS.get(kind, (GPU_BUDGET, CPU_BUDGET))
    pair = compiled(path, make, dtype, gpu_budget=gpu_budget, cpu_budget=cpu_budget)
    plain = made(make, dtype)
    assert train(*pair, range(STEPS), dtype) == train(*plain, range(STEPS), dtype)
    stored_bytes(pair[0])
    assert pair[0].offmate.plan.host_bytes <= cpu_budget
    assert pair[0].offmate.peak_bytes <= gpu_budget
    assert_same(pair, plain)
    for step in range(3, 6):
        assert train(*pair, range(step, step + 1), dtype) == train(*plain, range(step, step + 1), dtype)
        assert_same(pair, plain)


def test_without_storage_it_does_not_fit():
    with pytest.raises(offmate.InfeasibleBudget):
        train(*compiled(None), range(1))


def test_where_ram_has_room_plans_are_those_without_storage(path):
    pair, other = compiled(path, cpu_budget="1GiB"), compiled(None, cpu_budget="1GiB")
    assert train(*pair, range(2)) == train(*other, range(2))
    assert pair[0].offmate.plan.schedule.actions == other[0].offmate.plan.schedule.actions
    assert pair[0].offmate.plan.stored_bytes == (0, 0)
    assert disk(pair[0]).written_bytes == 0


def test_as_many_bytes_are_read_and_written_as_planned(path):
    """Nothing is read for the first update, nothing is read twice, and nothing goes through the page cache."""
    pair = compiled(path)
    train(*pair, range(1))
    read, written = stored_bytes(pair[0])
    first = disk(pair[0])
    assert first.read_bytes == 0
    train(*pair, range(1, 4))
    schedule = pair[0].offmate.plan.schedule
    pieces = sum(len(items) for name, items in schedule.states.items() if name in schedule.states_in_files)
    blocks = 2 * 4096 * 2 * pieces  # the ends of what is not a multiple of a page
    assert 3 * read <= disk(pair[0]).read_bytes - first.read_bytes + read <= 4 * read + 3 * blocks
    assert 3 * written - written <= disk(pair[0]).written_bytes - first.written_bytes <= 4 * written + 3 * blocks


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.05}, {"accumulation_steps": 3, "cpu_budget": 2_900_000}])
def test_behind_a_gate(path, settings):
    pair = compiled(path, gpu_budget=2_000_000, **settings)
    plain = made()
    for step in range(2 * STEPS):
        for model, optimizer in (pair, plain):
            torch.manual_seed(step)
            model(batch(step))["loss"].backward()
            if (step + 1) % settings.get("accumulation_steps", 1) == 0:
                if "max_grad_norm" in settings and model is plain[0]:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
                optimizer.step()
                optimizer.zero_grad()
    stored_bytes(pair[0])
    assert_same(pair, plain)


def test_states_are_saved_and_loaded(path):
    pair, plain = compiled(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    file = io.BytesIO()
    torch.save({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()}, file)
    train(*pair, range(2, 4))
    file.seek(0)
    saved = torch.load(file)
    pair[0].load_state_dict(saved["model"])
    pair[1].load_state_dict(saved["optimizer"])
    assert_same(pair, plain)
    assert train(*pair, range(4, 6)) == train(*plain, range(4, 6))
    assert_same(pair, plain)
    stored_bytes(pair[0])


def _written(state: dict[str, Any]) -> None:
    state["exp_avg"].mul_(2)


def _written_behind(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].data.add_(0.5)


def _replaced(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.full_like(state["exp_avg"], 0.25)


@pytest.mark.parametrize("edit", [_written, _written_behind, _replaced, dict.clear])
def test_edits_of_states_count(path, edit):
    pair, plain = compiled(path), made()
    for step in range(4):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        for model, optimizer in (pair, plain):
            for param in list(model.parameters())[step::3]:
                edit(optimizer.state[param])
    assert train(*pair, range(4, 6)) == train(*plain, range(4, 6))
    assert_same(pair, plain)


@pytest.mark.parametrize("write", [lambda t: t.data.mul_(2), lambda t: t.numpy().__imul__(2)])
def test_writes_through_tensors_that_are_held_count_after_a_sync(path, write):
    pair, plain = compiled(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    held = [[state["exp_avg"] for state in optimizer.state.values()] for _, optimizer in (pair, plain)]
    for step in range(2, 5):
        assert train(*pair, range(step, step + 1)) == train(*plain, range(step, step + 1))
        pair[0].offmate.sync()
        for tensors in held:
            for tensor in tensors:
                write(tensor)
    pair[1].state_dict()
    assert train(*pair, range(5, 7)) == train(*plain, range(5, 7))
    assert_same(pair, plain)


def test_loaded_states_move_to_the_files(path):
    """They take no RAM after the next step, even if nobody reads the optimizer's states again."""
    pair, plain = compiled(path), made()
    train(*plain, range(2))
    pair[0].load_state_dict(plain[0].state_dict())
    pair[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert train(*pair, range(2, 3)) == train(*plain, range(2, 3))
    session = pair[0]._offmate_session
    states = pair[1].__dict__["state"]  # what the user would see, without reading it
    names = {name: param for param, name in session.updater.names.items()}
    assert session.truth.host.in_store
    for name in session.truth.host.in_store:
        assert session.truth.host.store.holds(states[names[name]]["exp_avg"])
    assert_same(pair, plain)


def test_a_relative_folder_stays_where_it_was(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("offmate.planning.storage.rates", lambda path, n_bytes: PathRates(1e9, 1e9, 1e9))
    pair, plain = compiled("disk"), made()
    monkeypatch.chdir("/")
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    assert list((tmp_path / "disk").iterdir())
    pair[0]._offmate_session.storage.close()
    assert not list((tmp_path / "disk").iterdir())


def test_a_disk_that_stays_broken_is_no_silent_mixture(path, monkeypatch):
    """What could not be written is called lost, and the next states that are loaded are trained on exactly."""
    faulty = use_faulty_files(monkeypatch)
    pair, plain = compiled(path), made()
    faulty.faults["pwritev"] = broken
    with pytest.raises(offmate.StorageError, match="Input/output error"):
        train(*pair, range(1))
    assert pair[0]._offmate_session.truth.torn
    faulty.faults.clear()
    train(*plain, range(1))
    pair[0].load_state_dict(plain[0].state_dict())
    pair[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert train(*pair, range(1, 3)) == train(*plain, range(1, 3))
    assert_same(pair, plain)


@pytest.mark.parametrize("way", ["set", "loaded"])
def test_states_of_other_strides_are_refused_by_name(path, way):
    """As those of a model whose weights are transposed; PyTorch's fused update would take their memory as it lies."""
    pair, plain = compiled(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    words = r"'exp_avg' of layers.0.weight has the strides \(1, 192\), and in files it would have \(192, 1\)"
    if way == "set":
        state = next(iter(pair[1].state.values()))
        state["exp_avg"] = state["exp_avg"].t().contiguous().t()
        with pytest.raises(offmate.ProtocolError, match=words):
            train(*pair, range(2, 3))
    else:
        saved = copy.deepcopy(pair[1].state_dict())
        saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].t().contiguous().t()
        with pytest.raises(offmate.ProtocolError, match=words):
            pair[1].load_state_dict(saved)
        pair[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert train(*pair, range(2, 5)) == train(*plain, range(2, 5))
    assert_same(pair, plain)


STRIDES = {
    "transposed": (lambda state: state.t().contiguous().t(), "has the strides"),
    "gaps": (lambda state: torch.zeros(WIDTH, 2 * WIDTH)[:, ::2].copy_(state), "has the strides"),
    "gaps in one dimension": (lambda state: torch.zeros(2 * WIDTH)[::2].copy_(state), "has the strides"),
    "gaps in another shape": (lambda state: torch.zeros(2, 6)[:, ::2], "has gaps or repeats in memory"),
}


@pytest.mark.parametrize("kind", STRIDES)
def test_strides_that_no_file_can_hold_are_refused_before_training(path, kind):
    change, words = STRIDES[kind]
    model, optimizer = made()
    train(model, optimizer, range(2))
    state = optimizer.state[model.layers[0].bias if "one dimension" in kind else model.layers[0].weight]
    state["exp_avg"] = change(state["exp_avg"])
    with pytest.raises(offmate.ProtocolError, match=f"'exp_avg' of layers.0.* {words}"):
        offmate.compile(
            model, GPU_BUDGET, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, storage=path,
            config=offmate.Config(),
        )  # fmt: skip


def test_master_copies_follow_edited_weights(path):
    make, dtype = KINDS["masters"]
    pair = compiled(path, make, dtype, gpu_budget=BUDGETS["masters"][0], cpu_budget=BUDGETS["masters"][1])
    plain = made(make, dtype)
    for step in range(3):
        assert train(*pair, range(step, step + 1), dtype) == train(*plain, range(step, step + 1), dtype)
        with torch.no_grad():
            for model in (pair[0], plain[0]):
                for param in model.parameters():
                    param.mul_(0.9)
    assert train(*pair, range(3, 5), dtype) == train(*plain, range(3, 5), dtype)
    assert_same(pair, plain)


def check_interrupt(pair: Any, number: int, steps: int) -> None:
    """Interrupt a step at one of its actions, after some whole steps; then train on from plain PyTorch's values."""
    plain = made()
    train(*pair, range(steps)), train(*plain, range(steps))
    executor, left = pair[0]._offmate_session.residence.active.executor, [number]

    def stop(action: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    executor.on_action = stop
    with pytest.raises(KeyboardInterrupt):
        train(*pair, range(steps, steps + 1))
    executor.on_action = None
    if not pair[0]._offmate_session.truth.torn:
        updated = next(iter(pair[1].state_dict()["state"].values()))["step"] == steps + 1
        if updated:
            train(*plain, range(steps, steps + 1))
        assert_same(pair, plain)
    for one in pair, plain:
        one[0].load_state_dict(plain[0].state_dict())
        one[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert train(*pair, range(steps + 1, steps + 3)) == train(*plain, range(steps + 1, steps + 3))
    assert_same(pair, plain)


@pytest.mark.parametrize("number", [0, 5, 20, 45, 70, 110])
def test_an_interrupt_loses_nothing(path, number):
    """An error at any action leaves plain PyTorch's values of the one step or of the other, or they are called torn."""
    check_interrupt(compiled(path), number, steps=1)


def test_tensors_of_states_outlive_the_model(path, tmp_path):
    pair, plain = compiled(path), made()
    train(*pair, range(2)), train(*plain, range(2))
    states = pair[1].state_dict()["state"]
    pair[0]._offmate_session.storage.close()
    assert not list((tmp_path / "disk").iterdir())
    for number, state in plain[1].state_dict()["state"].items():
        assert torch.equal(states[number]["exp_avg"], state["exp_avg"])


def test_two_paths_share_the_bytes_by_their_rates(tmp_path, monkeypatch):
    folders = [tmp_path / "fast", tmp_path / "slow"]
    for folder in folders:
        folder.mkdir()
    from offmate.runtime.storage.throttle import Throttle

    throttles = [Throttle(1e9, 1e9), Throttle(1e9, 1e9)]
    monkeypatch.setattr(
        state_storage, "Engine", functools.partial(Engine, throttles=throttles, n_threads=2, request_bytes=1 << 14)
    )
    paths = [offmate.StoragePath(folder, rate, rate) for folder, rate in zip(folders, ("3GB/s", "1GB/s"))]
    pair, plain = compiled(paths), made()
    assert train(*pair, range(STEPS)) == train(*plain, range(STEPS))
    assert_same(pair, plain)
    fast, slow = (one.written_bytes for one in pair[0]._offmate_session.storage._engine.use())
    assert 2.5 <= fast / slow <= 3.5


def check_refused(pair: tuple[Any, torch.optim.Optimizer], steps: range) -> None:
    """A spoilt file ends training before a wrong number, and no step follows."""
    with pytest.raises(offmate.StorageError, match="does not hold what was written"):
        train(*pair, steps)
    with pytest.raises(offmate.OffmateError, match="Load a checkpoint"):
        train(*pair, range(steps.stop, steps.stop + 1))


def check_spoilt(pair: tuple[Any, torch.optim.Optimizer], folder: Path) -> None:
    """One bit of every tensor's file is flipped after two steps."""
    train(*pair, range(2))
    pair[0].state_dict()
    for file in folder.glob("*.tensor"):
        flip_a_bit(file, 1000)
    check_refused(pair, range(2, 4))


def test_a_spoilt_file_ends_training_before_a_wrong_number(path, tmp_path):
    check_spoilt(compiled(path), tmp_path / "disk")


def check_failing(
    pair: tuple[Any, torch.optim.Optimizer], faulty: Faulty, call: str, fault: Callable[..., Any]
) -> None:
    """What is lost is said, training on it is refused, and what is loaded then is trained on exactly."""
    plain = made()
    train(*pair, range(2)), train(*plain, range(2))
    faulty.faults[call] = fault
    with pytest.raises(offmate.StorageError, match="Input/output error"):
        train(*pair, range(2, 4))
        pair[0].offmate.sync()
    assert pair[0]._offmate_session.truth.torn
    with pytest.raises(offmate.OffmateError, match="Load a checkpoint"):
        train(*pair, range(4, 5))
    pair[0].load_state_dict(plain[0].state_dict())
    pair[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert train(*pair, range(2, 4)) == train(*plain, range(2, 4))
    assert_same(pair, plain)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_ends_training_by_name(path, monkeypatch, call):
    faulty = use_faulty_files(monkeypatch)
    pair = compiled(path)
    train(*pair, range(2))

    faulty.faults[call] = once(broken)
    with pytest.raises(offmate.StorageError, match="Input/output error"):
        train(*pair, range(2, 4))


def test_paths_that_cannot_be_used(tmp_path, path):
    with pytest.raises(offmate.StorageError, match="absent is not a folder; make it"):
        compiled(tmp_path / "absent")
    with pytest.raises(offmate.OffmateError, match=r"storage='3GB/s' is a rate, and training needs a folder"):
        compiled("3GB/s")
    with pytest.raises(offmate.OffmateError, match=r"storage= has 3, of type int; name folders as text"):
        compiled([3])
    model, _ = made()
    with pytest.raises(offmate.OffmateError, match="needs optimizer="):
        offmate.compile(model, GPU_BUDGET, device="emulated", storage=path)
    first = compiled(path)
    with pytest.raises(offmate.StorageError, match="another model of this process stores in"):
        compiled(path)
    del first


@pytest.mark.parametrize("n_paths", [1, 2])
def test_a_refusal_says_how_much_ram_the_buffers_of_drives_take(n_paths):
    model, optimizer = made()
    drives = [offmate.StoragePath(f"/mnt/{number}", "7GB/s", "5GB/s") for number in range(n_paths)]
    with pytest.raises(offmate.InfeasibleBudget) as refused:
        offmate.plan(model, GPU_BUDGET, optimizer=optimizer, cpu_budget="2MiB", storage=drives, hardware="rtx3060",
                     example_inputs=(batch(0),))  # fmt: skip
    of = {1: "the storage path take", 2: "2 storage paths take"}[n_paths]
    assert f". Copies to and from {of} " in str(refused.value)
    assert ("fewer paths take less" in str(refused.value)) == (n_paths > 1)


def test_a_model_that_nobody_holds_gives_its_folder_back(path):
    """As in a notebook whose cell runs again."""
    gc.disable()
    try:
        pair = compiled(path)
        train(*pair, range(1))
        del pair
        train(*compiled(path), range(1))
    finally:
        gc.enable()


def test_a_disk_without_room_to_be_measured_is_named(path, monkeypatch):
    monkeypatch.setattr(SystemFiles, "free_bytes", lambda self, folder: 100 << 20)
    words = r"100 MiB are free in .*, and measuring it needs 128 MiB; .*, or give its rates: offmate\.StoragePath"
    with pytest.raises(offmate.StorageError, match=words):
        compiled(path.folder)


def test_too_small_a_disk_is_named_before_the_first_step(path, monkeypatch):
    monkeypatch.setattr(state_storage, "figures_of", lambda path: real(path)._replace(free_bytes=1_000_000))
    from offmate.planning.storage import figures_of as real

    with pytest.raises(offmate.OffmateError):
        train(*compiled(path), range(1))


# -- an accelerator ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces much smaller than a tensor, in few buffers, and no random numbers, which a device draws in its own way."""
    monkeypatch.setattr(ring_buffers, "_PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(ring_buffers, "_BUFFERS", 3)
    monkeypatch.setattr(streams, "BUFFERS_BYTES", 3 << 14)
    monkeypatch.setattr(float32_copies, "BUFFERS_BYTES", 3 << 14)
    monkeypatch.setattr(Deep, "dropout", 0.0)


@pytest.mark.parametrize("max_us", [0, 300])
@pytest.mark.parametrize("kind", ["adamw", "masters"])
def test_through_pinned_buffers(path, sim, ring, kind, max_us):
    """On an accelerator, pieces pass buffers that are used again; a missing wait would show as other numbers."""
    make, dtype = KINDS[kind]
    gpu_budget, cpu_budget = BUDGETS.get(kind, (GPU_BUDGET, CPU_BUDGET))
    sim.set_delays(1, max_us)
    plain = made(make, dtype)
    with without_allocator():
        pair = compiled(path, make, dtype, "sim", gpu_budget=gpu_budget, cpu_budget=cpu_budget + 6 * (1 << 14))
        for step in range(4):
            assert train(*pair, range(step, step + 1), dtype) == train(*plain, range(step, step + 1), dtype)
            if step % 2:
                assert_same(pair, plain)
    stored_bytes(pair[0])
    pair[0]._offmate_session.device.close()


def test_a_failing_disk_under_an_accelerator(path, sim, ring, monkeypatch):
    """The error names the file and nothing hangs."""
    faulty = use_faulty_files(monkeypatch)
    with without_allocator():
        pair = compiled(path, device="sim", cpu_budget=CPU_BUDGET + 6 * (1 << 14))
        train(*pair, range(2))
        faulty.faults["pwritev"] = once(broken)
        with pytest.raises(offmate.StorageError, match="Input/output error"):
            train(*pair, range(2, 4))
    pair[0]._offmate_session.device.close()
