"""A frozen base that RAM has no room for comes from its checkpoint: plain PyTorch's numbers, whatever the user does."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offmate.runtime.devices import ring as ring_buffers
from offmate.runtime.devices import streams
from offmate.runtime.storage.engine import Engine
from offmate.solver.items import ItemKind
from offmate.solver.resources import Resource
from offmate.solver.schedule import Kind
from safetensors.torch import load_file, save_file

import offmate
from offmate.machines import mapped_files
from offmate.session import checkpoint_files

from ...accelerator.loops import without_allocator
from ...fuzz.figures import from_hardware_file
from ...runtime.storage.faulty import Faulty, once

WIDTH, LAYERS = 192, 8
GPU_BUDGET, CPU_BUDGET = 620_000, 700_000
STEPS = 3


class Adapted(torch.nn.Module):
    """Frozen layers, each with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.adapters = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 4) for _ in range(LAYERS))
        self.back = torch.nn.ModuleList(torch.nn.Linear(4, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for base, adapter, back in zip(self.base, self.adapters, self.back):
            x = x + torch.tanh(base(x) + back(adapter(x)))
        return {"loss": x.square().mean(), "x": x}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(Adapted().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small buffers beside a small model, and seconds that do not depend on the machine."""
    monkeypatch.setattr(checkpoint_files, "Engine", functools.partial(Engine, n_threads=2, request_bytes=1 << 14))
    monkeypatch.setattr(checkpoint_files, "read_rate", lambda path, n_bytes: 1e9)
    with from_hardware_file():
        yield


def mapped(path: Path) -> tuple[Adapted, torch.optim.Optimizer]:
    """The model with its weights mapped from the file, and an optimizer of what is trained."""
    with torch.device("meta"):
        model = Adapted()
    model.load_state_dict(load_file(path), assign=True)
    model.base.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():  # they have memory of their own, as an adapter's
        for param in trained:
            param.data = param.data.clone()
    return model, torch.optim.AdamW(trained, lr=1e-2, fused=True)


def compiled(path: Path, device: str = "emulated", **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = mapped(path)
    settings = {"cpu_budget": CPU_BUDGET, "config": offmate.Config(cache_dir=None), **settings}
    return offmate.compile(model, GPU_BUDGET, optimizer=optimizer, device=device, **settings), optimizer


def batch(step: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, rows: int = 16) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step, rows))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(model: Any, other: torch.nn.Module) -> None:
    theirs = other.state_dict()
    assert not [name for name, value in model.state_dict().items() if not torch.equal(value, theirs[name])]


def from_files(model: Any) -> int:
    """The bytes that a step reads from files."""
    schedule = model.offmate.plan.schedule
    read = [a.item for a in schedule.actions if a.kind is Kind.PREFETCH and a.item in schedule.homes]
    assert all(item.kind is ItemKind.PARAMETER for item in read)
    return sum(schedule.item_bytes[item] for item in read)


def disk(model: Any) -> Any:
    (use,) = model._offmate_session.files._engine.use()
    return use


def test_losses_and_weights_are_plain_pytorchs(checkpoint):
    model, optimizer = compiled(checkpoint)
    plain = mapped(checkpoint)
    assert train(model, optimizer, range(STEPS)) == train(*plain, range(STEPS))
    assert_same(model, plain[0])
    assert from_files(model) > WIDTH * WIDTH * 4
    assert model.offmate.plan.host_bytes <= CPU_BUDGET < sum(p.nbytes for p in model.parameters())
    assert model.offmate.peak_bytes <= GPU_BUDGET
    for step in range(3, 6):
        assert train(model, optimizer, range(step, step + 1)) == train(*plain, range(step, step + 1))


def test_as_many_bytes_are_read_as_planned(checkpoint):
    """Nothing is read twice, and nothing through the pages of the mapping; a request reads the whole blocks around."""
    model, optimizer = compiled(checkpoint)
    train(model, optimizer, range(1))
    before = read_bytes(model)
    train(model, optimizer, range(1, 3))
    read, blocks = read_bytes(model) - before, 2 * mapped_files_blocks(model)
    assert 2 * from_files(model) <= read <= 2 * from_files(model) + blocks * 4096


def read_bytes(model: Any) -> int:
    """The bytes that have been read, with those that the next step needs: their reads may still be under way."""
    for buffer in model._offmate_session.residence.active.executor._contents.params.values():
        buffer.synchronize()
    return disk(model).read_bytes


def mapped_files_blocks(model: Any) -> int:
    """The most blocks that a step reads beyond the bytes of its tensors: two a tensor, and some for the header."""
    schedule = model.offmate.plan.schedule
    return 16 + 2 * sum(a.kind is Kind.PREFETCH and a.item in schedule.homes for a in schedule.actions)


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.01}, {"accumulation_steps": 3, "max_grad_norm": 0.5}])
def test_behind_a_gate(checkpoint, settings):
    model, optimizer = compiled(checkpoint, **settings)
    plain, own = mapped(checkpoint)
    many = settings.get("accumulation_steps", 1)
    for step in range(3):
        ours, theirs = [], []
        for m in range(many):
            x = batch(10 * step + m)
            for one, losses in ((model, ours), (plain, theirs)):
                loss = one(x)["loss"] / many
                loss.backward()
                losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), settings["max_grad_norm"])
        for one in (optimizer, own):
            one.step()
            one.zero_grad()
        assert ours == theirs
    assert_same(model, plain)
    assert from_files(model)


def test_with_room_in_ram_no_file_is_read(checkpoint):
    model, optimizer = compiled(checkpoint, cpu_budget=1 << 30)
    plain = mapped(checkpoint)
    assert train(model, optimizer, range(2)) == train(*plain, range(2))
    assert not model.offmate.plan.schedule.homes and not from_files(model)


def test_what_ram_keeps_is_in_memory_of_its_own(checkpoint):
    """A copy that the plan counts in RAM is no page of a file, which the system may drop at any time."""
    model, optimizer = compiled(checkpoint)
    train(model, optimizer, range(1))
    schedule, params = model.offmate.plan.schedule, {n: p.detach() for n, p in model.named_parameters()}
    come = {a.item for a in schedule.actions if a.kind is Kind.PREFETCH and a.item.kind is ItemKind.PARAMETER}
    hosted = {item.name: params[item.name] for item in come - schedule.homes.keys()}
    stay = {item.name: params[item.name] for item in schedule.homes}
    assert hosted and not mapped_files.mapped_bytes(hosted)
    assert stay and mapped_files.mapped_bytes(stay).keys() == stay.keys()


@pytest.mark.parametrize("how", ["in place", "replaced", "data", "loaded"])
def test_a_changed_parameter_is_used_as_it_is(checkpoint, how):
    """An edit of a frozen parameter counts from the next forward on, though its file has other values."""
    model, optimizer = compiled(checkpoint)
    plain, own = mapped(checkpoint)
    assert train(model, optimizer, range(2)) == train(plain, own, range(2))
    name = next(iter(model.offmate.plan.schedule.homes)).name
    for one in (model, plain):
        param = one.get_parameter(name)
        with torch.no_grad():
            if how == "in place":
                param.mul_(0.5)
            elif how == "replaced":
                param.data = param.data * 0.5
            elif how == "data":
                param.data.add_(0.25)
                param.add_(0.0)  # which is seen, unlike the line before
            else:
                one.load_state_dict({key: value * 0.9 for key, value in one.state_dict().items()})
    assert train(model, optimizer, range(2, 5)) == train(plain, own, range(2, 5))
    assert_same(model, plain)


def with_the_first_held(checkpoint: Path) -> tuple[Any, torch.optim.Optimizer, Any, torch.optim.Optimizer]:
    """A compiled model and a plain one, whose optimizers also hold the first layer of the base."""
    model, optimizer = mapped(checkpoint)
    plain, own = mapped(checkpoint)
    for one, its in ((model, optimizer), (plain, own)):
        its.add_param_group({"params": list(one.base[0].parameters())})
    config = offmate.Config(cache_dir=None)
    offmate.compile(model, GPU_BUDGET, optimizer=optimizer, device="emulated", cpu_budget=1_400_000, config=config)
    return model, optimizer, plain, own


def test_a_parameter_that_is_trained_later(checkpoint):
    """What is unfrozen is no longer read from the file, and not when it is frozen again either."""
    model, optimizer, plain, own = with_the_first_held(checkpoint)
    for number, trains in enumerate((False, True, False)):
        for one in (model, plain):
            one.base[0].requires_grad_(trains)
        steps = range(2 * number, 2 * number + 2)
        assert train(model, optimizer, steps) == train(plain, own, steps)
    assert_same(model, plain)


def test_batches_of_other_shapes(checkpoint):
    model, optimizer = compiled(checkpoint)
    plain, own = mapped(checkpoint)
    for step, rows in enumerate((16, 8, 24, 16)):
        steps = range(step, step + 1)
        assert train(model, optimizer, steps, rows) == train(plain, own, steps, rows)
    assert_same(model, plain)


def test_forwards_without_gradients(checkpoint):
    model, optimizer = compiled(checkpoint)
    plain, own = mapped(checkpoint)
    for one, its in ((model, optimizer), (plain, own)):
        train(one, its, range(1))
        one.eval()
    places = {name: param.data_ptr() for name, param in model.named_parameters()}
    with torch.no_grad():
        assert torch.equal(model(batch(5))["x"], plain(batch(5))["x"])
    assert places == {name: param.data_ptr() for name, param in model.named_parameters()}  # RAM keeps what it kept
    for one in (model, plain):
        one.train()
    assert train(model, optimizer, range(1, 3)) == train(plain, own, range(1, 3))


# -- files that are not what they were --------------------------------------------------------------------------------


def test_a_file_that_is_written_to(checkpoint):
    model, optimizer = compiled(checkpoint)
    train(model, optimizer, range(1))
    os.utime(checkpoint)
    with pytest.raises(offmate.OffmateError, match=r"model\.safetensors has changed since it was opened: it was writ"):
        train(model, optimizer, range(1, 2))


def test_a_bit_that_flips(checkpoint):
    """Other bytes in a file of the same size, time and header are noticed by their checksum."""
    model, optimizer = compiled(checkpoint)
    train(model, optimizer, range(2))
    name = next(iter(model.offmate.plan.schedule.homes)).name
    start, stat = model._offmate_session.truth.host.files[name].start, os.stat(checkpoint)
    with checkpoint.open("r+b", buffering=0) as file:
        file.seek(start + 8)
        byte = file.read(1)[0] ^ 0x10
        file.seek(start + 8)
        file.write(bytes([byte]))
    os.utime(checkpoint, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(offmate.OffmateError, match=r"gave other bytes than when they were first read"):
        train(model, optimizer, range(2, 4))


def test_a_read_that_fails_once(checkpoint, monkeypatch):
    """The step fails by name; trained from the last checkpoint on, the numbers are plain PyTorch's again."""
    failing = Faulty(preadv=once(eio, skip=40))
    engine = functools.partial(Engine, n_threads=2, request_bytes=1 << 14, files=failing)
    monkeypatch.setattr(checkpoint_files, "Engine", engine)
    model, optimizer = compiled(checkpoint)
    plain, own = mapped(checkpoint)
    with pytest.raises(offmate.OffmateError, match=r"model\.safetensors"):
        train(model, optimizer, range(20))
    for one, its in ((model, optimizer), (plain, own)):
        one.load_state_dict(mapped(checkpoint)[0].state_dict())
        its.load_state_dict(mapped(checkpoint)[1].state_dict())
    assert train(model, optimizer, range(3)) == train(plain, own, range(3))


def eio(real: Any, *args: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_is_gone(checkpoint):
    model, optimizer = compiled(checkpoint)
    train(model, optimizer, range(1))
    checkpoint.rename(checkpoint.with_name("elsewhere.safetensors"))
    with pytest.raises(offmate.OffmateError, match=r"model\.safetensors failed: No such file"):
        train(model, optimizer, range(1, 2))


# -- which tensors are a file's ---------------------------------------------------------------------------------------


def test_which_tensors_are_mapped(checkpoint):
    tensors = load_file(checkpoint)
    found = mapped_files.mapped_bytes(tensors)
    assert found.keys() == tensors.keys()
    own = found["base.0.weight"]
    with own.path.open("rb") as file:
        file.seek(own.start)
        assert file.read(own.n_bytes) == tensors["base.0.weight"].numpy().tobytes()
    others = {"copied": tensors["base.0.weight"].clone(), "gaps": tensors["base.1.weight"][:, ::2],
              "empty": torch.empty(0)}  # fmt: skip
    assert not mapped_files.mapped_bytes(others)
    assert mapped_files.mapped_bytes({"turned": tensors["base.2.weight"].t()}).keys() == {"turned"}


def test_a_tensor_that_was_written_to_is_not(checkpoint):
    """Whoever writes to a mapped tensor has pages of their own; the others on such pages are still the file's."""
    tensors = load_file(checkpoint)
    tensors["base.0.weight"].numpy()[0, 0] += 1  # which no version counter shows
    found = mapped_files.mapped_bytes(tensors)
    assert "base.0.weight" not in found and found.keys() == tensors.keys() - {"base.0.weight"}


def test_files_that_are_no_checkpoint(tmp_path):
    """Memory mapped from other files stays in RAM, and training goes on."""
    torch.manual_seed(0)
    torch.save(Adapted().state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        model = Adapted()
    model.load_state_dict(torch.load(tmp_path / "model.pt", mmap=True), assign=True)
    model.base.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = offmate.Config(cache_dir=None)
    with pytest.raises(offmate.InfeasibleBudget):
        offmate.compile(model, 600_000, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config)
        train(model, optimizer, range(1))


# -- an accelerator ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces much smaller than a tensor, in few buffers."""
    monkeypatch.setattr(ring_buffers, "_PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(ring_buffers, "_BUFFERS", 3)
    monkeypatch.setattr(streams, "BUFFERS_BYTES", 3 << 14)


@pytest.mark.parametrize("max_us", [0, 300])
def test_through_pinned_buffers(checkpoint, sim, ring, max_us):
    """On an accelerator, pieces pass buffers that are used again; a missing wait would show as other numbers."""
    sim.set_delays(1, max_us)
    plain = mapped(checkpoint)
    with without_allocator():
        model, optimizer = compiled(checkpoint, device="sim")
        assert train(model, optimizer, range(4)) == train(*plain, range(4))
    assert_same(model, plain[0])
    assert from_files(model) > WIDTH * WIDTH * 4
    model._offmate_session.device.close()


def test_ram_that_is_kept_is_pinned(checkpoint, sim, ring):
    with without_allocator():
        model, optimizer = compiled(checkpoint, device="sim")
        train(model, optimizer, range(1))
    schedule, params = model.offmate.plan.schedule, {n: p.detach() for n, p in model.named_parameters()}
    come = {a.item for a in schedule.actions if a.kind is Kind.PREFETCH and a.item.kind is ItemKind.PARAMETER}
    assert come - schedule.homes.keys()
    assert not [i for i in come - schedule.homes.keys() if not params[i.name].is_pinned()]
    model._offmate_session.device.close()


def test_with_room_everything_is_pinned(checkpoint, sim):
    """Parameters that are mapped from one file share its memory, and yet each can be moved."""
    with without_allocator():
        model, optimizer = compiled(checkpoint, device="sim", cpu_budget=1 << 30)
        train(model, optimizer, range(1))
    assert all(param.is_pinned() for param in model.parameters())
    model._offmate_session.device.close()


def test_a_read_that_fails_on_an_accelerator(checkpoint, sim, ring, monkeypatch):
    """The error names the file, nothing hangs, and the model trains on from loaded weights."""
    engine = functools.partial(Engine, n_threads=2, request_bytes=1 << 14, files=Faulty(preadv=once(eio, skip=120)))
    monkeypatch.setattr(checkpoint_files, "Engine", engine)
    plain, own = mapped(checkpoint)
    with without_allocator():
        model, optimizer = compiled(checkpoint, device="sim")
        with pytest.raises(offmate.OffmateError, match=r"model\.safetensors"):
            train(model, optimizer, range(20))
        for one, its in ((model, optimizer), (plain, own)):
            one.load_state_dict(mapped(checkpoint)[0].state_dict())
            its.load_state_dict(mapped(checkpoint)[1].state_dict())
        assert train(model, optimizer, range(3)) == train(plain, own, range(3))
    model._offmate_session.device.close()


def test_the_trace_shows_both_links(checkpoint, sim, ring):
    with without_allocator():
        model, optimizer = compiled(checkpoint, device="sim")
        train(model, optimizer, range(1))
        with model.offmate.record():
            train(model, optimizer, range(1, 3))
    trace = model.offmate.trace
    for timeline in (trace.predicted, trace.measured):
        assert {"copy in from storage", Resource.IN} <= timeline.rows.keys()
    model._offmate_session.device.close()


# -- changes that hide behind others ----------------------------------------------------------------------------------


def roomy(checkpoint: Path) -> tuple[Any, torch.optim.Optimizer, Any, torch.optim.Optimizer]:
    """A compiled model with room for a few parameters that no file has, and the plain one, both trained a bit."""
    model, optimizer = compiled(checkpoint, cpu_budget=1_150_000)
    plain, own = mapped(checkpoint)
    assert train(model, optimizer, range(2)) == train(plain, own, range(2))
    assert from_files(model)
    return model, optimizer, plain, own


HALF = ("base.4", "base.5", "base.6", "base.7")


def scale_base(model: Any) -> None:
    state = model.state_dict()
    model.load_state_dict({name: 0.5 * v if name.startswith(HALF) else v for name, v in state.items()})


def tie(model: Any) -> None:
    model.base[0].weight = model.base[1].weight


def reverse(model: Any) -> None:
    model.base = torch.nn.ModuleList(list(model.base)[::-1][:-1])
    model.adapters, model.back = model.adapters[:-1], model.back[:-1]


def freeze_and_scale(model: Any) -> None:
    scale_base(model)
    model.adapters[0].requires_grad_(False)


def freeze_and_write(model: Any) -> None:
    with torch.no_grad():
        model.base[3].weight.mul_(0.9)
    model.adapters[0].requires_grad_(False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [scale_base, tie, reverse, freeze_and_scale, freeze_and_write])
def test_a_change_of_the_set_of_parameters_hides_no_edit(checkpoint, change):
    model, optimizer, plain, own = roomy(checkpoint)
    for one in (model, plain):
        change(one)
    before = {name: param.detach().clone() for name, param in model.base.named_parameters()}
    assert train(model, optimizer, range(2, 4)) == train(plain, own, range(2, 4))
    assert not [name for name, param in model.base.named_parameters() if not torch.equal(param, before[name])]
    assert_same(model, plain)


def test_trained_and_frozen_by_turns(checkpoint):
    """What a kept plan trains is not read from the file by another kept plan, planned before it was trained."""
    model, optimizer, plain, own = with_the_first_held(checkpoint)
    for number, (trains, rate) in enumerate([(True, 0.0), (False, 0.0), (True, 1e-2), (False, 1e-2), (True, 1e-2)]):
        for one, its in ((model, optimizer), (plain, own)):
            one.base[0].requires_grad_(trains)
            for group in its.param_groups:
                group["lr"] = rate
        steps = range(number, number + 1)
        assert train(model, optimizer, steps) == train(plain, own, steps)
    assert train(model, optimizer, range(9, 10), rows=40) == train(plain, own, range(9, 10), rows=40)
    assert_same(model, plain)


def test_parameters_on_the_same_bytes(checkpoint):
    """An edit of one is one of the other, too."""
    model, optimizer = mapped(checkpoint)
    plain, own = mapped(checkpoint)
    for one in (model, plain):
        one.base[5].weight = torch.nn.Parameter(one.base[2].weight.data, requires_grad=False)
    config = offmate.Config(cache_dir=None)
    offmate.compile(model, GPU_BUDGET, optimizer=optimizer, device="emulated", cpu_budget=900_000, config=config)
    assert train(model, optimizer, range(2)) == train(plain, own, range(2))
    for one in (model, plain):
        with torch.no_grad():
            one.base[2].weight.mul_(0.5)
    assert train(model, optimizer, range(2, 4)) == train(plain, own, range(2, 4))
    assert_same(model, plain)


def test_an_edit_through_an_older_reference(checkpoint):
    """It is used where the memory is the same, and refused by name where the parameter has moved to RAM of its own."""
    model, optimizer = compiled(checkpoint)
    older = {name: param.detach() for name, param in model.named_parameters() if name.startswith("base")}
    train(model, optimizer, range(1))
    moved = {n for n, p in model.named_parameters() if n in older and p.data_ptr() != older[n].data_ptr()}
    assert moved
    with torch.no_grad():
        older[min(moved)].mul_(0.5)
    with pytest.raises(offmate.OffmateError, match=rf"{min(moved)} was changed through an older reference"):
        train(model, optimizer, range(1, 2))


def test_an_edit_before_a_step_that_is_finished_on_the_host(checkpoint):
    model, optimizer = compiled(checkpoint, max_grad_norm=1e9)
    plain, own = mapped(checkpoint)
    assert train(model, optimizer, range(2)) == train(plain, own, range(2))
    for one, its in ((model, optimizer), (plain, own)):
        one(batch(2))["loss"].backward()
        one.adapters[0].weight.square().sum().backward()
        with torch.no_grad():
            for layer in one.base:
                layer.weight.mul_(0.9)
        torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9) if one is plain else None
        its.step()
        its.zero_grad()
    assert train(model, optimizer, range(3, 5)) == train(plain, own, range(3, 5))


def test_a_parameter_whose_values_are_not_its_memorys(checkpoint):
    tensors = load_file(checkpoint)
    assert not mapped_files.mapped_bytes({"neg": torch._neg_view(tensors["base.0.weight"])})
