"""On a device with memory, streams and an allocator of its own: the same numbers, within what it may reserve.

The device is simulated; its kernels give the CPU's bits. Delays are random, and memory that is let go is poisoned, so
that whatever is read too early or written too late shows in the losses.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.runtime.devices import staging
from offmate.runtime.memory.arena import Arena
from offmate.runtime.memory.compaction import Stretch, gaps_between
from offmate.runtime.memory.pools import large_sizes
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import offmate
from offmate.planning.placement import fitted, holdings, rehearsals

from ...fuzz.figures import from_hardware_file

pytestmark = pytest.mark.timeout(300)
STEPS = 4
HOST_BYTES = 4 << 30
AMPLE_BYTES = 1 << 30
NO_CACHE = offmate.Config(cache_dir=None)

Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def rates() -> Iterator[None]:
    """What a plan moves, and whether anything has to move aside for it, is not left to how busy the machine was."""
    with from_hardware_file(workspaces=True):
        yield


def llama() -> torch.nn.Module:
    """With grouped heads; one layer's parameters are a few MiB, as large as an allocator's large pieces."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=640, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def wide() -> torch.nn.Module:
    """Nearly all of it in tensors of several MiB."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=768, intermediate_size=2560, num_hidden_layers=2, num_attention_heads=8,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> torch.nn.Module:
    """Tied embeddings and dropout."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=256, n_layer=3, n_head=4, n_positions=64))


class Convolutions(torch.nn.Module):
    """Batch normalisation writes buffers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
            torch.nn.Conv2d(64, 128, 3, padding=1), torch.nn.BatchNorm2d(128), torch.nn.ReLU(),
            torch.nn.Conv2d(128, 128, 3, padding=1), torch.nn.BatchNorm2d(128), torch.nn.ReLU(),
        )  # fmt: skip
        self.last = torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.last(self.layers(x).mean((2, 3)))
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def text(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 1000, (2, 48), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(8, 3, 24, 24, generator=generator),
        "labels": torch.randint(0, 10, (8,), generator=generator),
    }


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[int], Batch]]] = {
    "llama": (llama, text), "wide": (wide, text), "gpt2": (gpt2, text), "convolutions": (Convolutions, images),
}  # fmt: skip


def built(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def steps(
    name: str, model: Any, optimizer: torch.optim.Optimizer, micro: int = 1, max_norm: float | None = None
) -> list[float]:
    """Losses of a few steps; the batches come from the host."""
    torch.manual_seed(7)
    losses = []
    for step in range(STEPS):
        for m in range(micro):
            batch = {k: v.to("sim") for k, v in MODELS[name][1](step * micro + m).items()}
            loss = model(**batch)["loss"] / micro
            loss.backward()
            losses.append(loss.item())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


_plain: dict[tuple[Any, ...], tuple[list[float], dict[str, torch.Tensor]]] = {}


def plain(name: str, *settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of plain PyTorch on the device."""
    key = (name, *settings)
    if key not in _plain:
        model = built(name).to("sim")
        if name == "gpt2":
            model.tie_weights()  # to() makes two parameters of a tied one where devices are not torch's own
        losses = steps(name, model, adamw(model), *settings)
        _plain[key] = losses, {k: v.cpu() for k, v in model.state_dict().items()}
        del model
        gc.collect()
    return _plain[key]


_least: dict[tuple[Any, ...], int] = {}


def budget_of(name: str, level: str, **settings: Any) -> int:
    """Ample, or so little above the least budget that an allocator can place a plan in it."""
    key = (name, *sorted(settings.items()))
    if level == "ample":
        return AMPLE_BYTES
    if key not in _least:
        model = built(name)
        plan = offmate.plan(
            model, AMPLE_BYTES, example_inputs=MODELS[name][1](0), optimizer=adamw(model), device="sim",
            cpu_budget=HOST_BYTES, config=NO_CACHE, **settings,
        )  # fmt: skip
        _least[key] = plan.least_budget_bytes
    return _least[key] * (120 if level == "tight" else 160) // 100 + (24 << 20)


@contextlib.contextmanager
def compiled(name: str, budget_bytes: int, **settings: Any) -> Any:
    """The model and its optimizer, planned; closed afterwards, since memory of one test must not be seen by another."""
    model = built(name)
    optimizer = adamw(model)
    offmate.compile(
        model, budget_bytes, optimizer=optimizer, device="sim", cpu_budget=HOST_BYTES, config=NO_CACHE, **settings
    )
    try:
        yield model, optimizer
    finally:
        model._offmate_session.residence.bring_home()
        model._offmate_session.device.close()
        gc.collect()


def assert_same(model: Any, expected: dict[str, torch.Tensor]) -> None:
    actual = model.state_dict()
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key].cpu(), value), key


@pytest.mark.parametrize("level", ["ample", "middle", "tight"])
@pytest.mark.parametrize("name", ["convolutions", "gpt2", "llama"])
def test_numbers_and_budget(sim, name, level):
    """Losses, parameters and buffers are plain PyTorch's; the allocator reserves no more than was predicted."""
    losses, state = plain(name)
    budget = budget_of(name, level)
    sim.reset_peak_memory_stats()
    with compiled(name, budget) as (model, optimizer):
        sim.set_delays(1, 200)
        assert steps(name, model, optimizer) == losses
        sim.set_delays(0, 0)
        assert_same(model, state)
        plan = model.offmate.plan
        assert model.offmate.peak_bytes == plan.predicted_peak_bytes
        assert sim.max_memory_reserved() <= plan.predicted_peak_bytes <= budget
        assert next(model.parameters()).device == torch.device("sim:0")


def test_an_iteration_allocates_what_was_rehearsed(sim, monkeypatch):
    """Whatever is larger than the user's own numbers and batches, and besides what moved, which depends on timing."""
    moved = []
    monkeypatch.setattr(Arena, "_empty", lambda *given, own=Arena._empty: moved.append(given[1]) or own(*given))
    monkeypatch.setattr(
        Arena, "_has_moved", lambda *given, own=Arena._has_moved: moved.append(given[1].bytes) or own(*given)
    )
    with compiled("llama", budget_of("llama", "tight")) as (model, optimizer):
        forward, seen = functools.partial(model, **text(0)), []
        for _ in range(3):
            moved.clear()
            with sim.watched() as changes:
                forward()["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(large(size for _, size in changes))
            seen[-1].subtract(large(moved))
        session = model._offmate_session
        held = holdings(model, session.updater, torch.device("sim:0"))
        fresh, _ = rehearsals(session.training.prepared, model, held)
        _, _, *rehearsed = [large(change.bytes for change in stretch) for stretch in fresh.played(3)]
        assert seen[1:] == rehearsed  # planning is in the first one


def large(sizes: Iterable[int]) -> Counter[int]:
    return Counter(size for size in sizes if size > 4096)


def test_memory_is_laid_out_anew(sim, monkeypatch):
    """Where small pieces have drifted apart everything leaves the device and returns; no number changes."""

    def drifting(*given):
        prepared, place = fitted(*given)
        return prepared, replace(place, reserved_bytes=0)

    taken, take = [], Arena.take
    monkeypatch.setattr("offmate.session.maker.fitted", drifting)
    monkeypatch.setattr("offmate.session.residence._LASTS", 1)
    monkeypatch.setattr(Arena, "take", lambda arena, size: (taken.append(size), take(arena, size)))
    losses, state = plain("gpt2")
    with compiled("gpt2", budget_of("gpt2", "tight")) as (model, optimizer):
        assert steps("gpt2", model, optimizer) == losses
        assert_same(model, state)
        assert len(taken) == STEPS


def shaken(room: Callable[[Arena, tuple[int, ...]], None]) -> Callable[[Arena, tuple[int, ...]], None]:
    """Before anything is allocated, something else moves, whether that makes room or not."""
    chance = random.Random(0)

    def shake(arena: Arena, sizes: tuple[int, ...]) -> None:
        if large_sizes(sizes) and arena._anchor is not None:
            extents = arena._extents(waits=chance.random() < 0.5)
            gaps = gaps_between(extents, arena.start, arena._end)
            edges = [arena.start, *(one.end for one in extents)], [*(one.start for one in extents[1:]), arena._end]
            alone = [Stretch(low, high, (one,)) for one, low, high in zip(extents, *edges) if one.movable]
            runs = [run for run in alone if any(
                high - low >= run.extents[0].end - run.extents[0].start and (high <= run.start or low >= run.end)
                for low, high in gaps
            )]  # fmt: skip
            if runs:
                arena._clear(chance.choice(runs))
        room(arena, sizes)

    return shake


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "settings"), [
    ("convolutions", ()), ("llama", ()), ("llama", (2, 0.1)), ("wide", ()), ("wide", (3,)),
])  # fmt: skip
def test_tensors_move_aside(sim, monkeypatch, name, settings):
    """Between kernels, beside copies and updates under way, at every allocation; no number changes."""
    losses, state = plain(name, *settings)
    planned = dict(zip(("accumulation_steps", "max_grad_norm"), settings))
    budget = 2 * budget_of(name, "tight", **planned)
    monkeypatch.setattr(Arena, "room", shaken(Arena.room))
    with compiled(name, budget, **planned) as (model, optimizer):
        sim.set_delays(1, 200)
        assert steps(name, model, optimizer, *settings[:1]) == losses
        sim.set_delays(0, 0)
        assert_same(model, state)
        assert model._offmate_session.device.arena.moved_bytes > 1 << 20
        assert sim.max_memory_reserved() <= model.offmate.plan.predicted_peak_bytes <= budget


def test_a_refusal_names_a_budget_that_works(sim, tmp_path):
    """Nothing runs out of memory in a step at the least budget, in which half of the memory is of small pieces."""
    model = built("llama").bfloat16()
    settings = {"device": "sim", "cpu_budget": HOST_BYTES, "config": offmate.Config(cache_dir=str(tmp_path))}
    optimizer = adamw(model)
    with pytest.raises(offmate.InfeasibleBudget) as caught:
        offmate.plan(model, 8 << 20, example_inputs=text(0), optimizer=optimizer, **settings)
    tensors = caught.value.least_budget_bytes + (1 << 20)
    with pytest.raises(offmate.InfeasibleBudget, match=r"no plan fits a budget of .* MiB is enough") as caught:
        offmate.plan(model, tensors, example_inputs=text(0), optimizer=optimizer, **settings)
    least = caught.value.least_budget_bytes
    offmate.compile(model, least, optimizer=optimizer, **settings)
    for step in range(5):
        model(**text(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = model.offmate.plan
    assert sim.max_memory_reserved() <= plan.predicted_peak_bytes <= least
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()


@pytest.mark.parametrize("updates", ["host", "auto"])
def test_the_least_budget_that_a_plan_names_works(sim, updates):
    model = built("llama")
    settings = {"device": "sim", "cpu_budget": HOST_BYTES, "config": replace(NO_CACHE, updates=updates)}
    given = {"example_inputs": text(0), "optimizer": adamw(model), **settings}
    least = offmate.plan(model, AMPLE_BYTES, **given).least_budget_bytes
    assert offmate.plan(model, least, **given).predicted_peak_bytes <= least


@pytest.mark.parametrize(("micro", "max_norm"), [(1, 0.1), (3, None), (2, 0.1)])
def test_clipping_and_accumulation(sim, micro, max_norm):
    losses, state = plain("llama", micro, max_norm)
    settings = {"accumulation_steps": micro, "max_grad_norm": max_norm}
    budget = budget_of("llama", "tight", **settings)
    with compiled("llama", budget, **settings) as (model, optimizer):
        sim.set_delays(2, 200)
        assert steps("llama", model, optimizer, micro) == losses
        assert_same(model, state)


def test_without_an_optimizer(sim):
    """Gradients land in .grad on the host, whole when backward() returns."""
    model = built("llama")
    offmate.compile(model, AMPLE_BYTES, device="sim", cpu_budget=HOST_BYTES, config=NO_CACHE)
    sim.set_delays(3, 200)
    reference = built("llama").to("sim")
    batch = text(0)
    model(**batch).loss.backward()
    reference(**{k: v.to("sim") for k, v in batch.items()}).loss.backward()
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.grad.device.type == "cpu"
        assert torch.equal(own.grad, expected.grad.cpu())
    model._offmate_session.device.close()


def test_evaluation_between_steps(sim):
    """A forward without gradients takes everything off the device, and training goes on."""
    losses, state = plain("llama")
    with compiled("llama", AMPLE_BYTES) as (model, optimizer):
        sim.set_delays(4, 200)
        with torch.no_grad():
            before = model(**text(9)).loss.item()
        assert steps("llama", model, optimizer) == losses
        with torch.no_grad():
            assert model(**text(9)).loss.item() < before
        assert_same(model, state)
        for state in optimizer.state_dict()["state"].values():
            assert {value.device.type for value in state.values()} == {"cpu"}


@pytest.mark.parametrize("more_mib", [0, 8, 24, 64])
def test_memory_that_cannot_be_pinned(sim, more_mib):
    """Where the system pins little, the rest goes through small pinned buffers, which the pool leaves alone."""
    losses, state = plain("llama")
    budget = budget_of("llama", "tight")
    sim.let_pin(more_mib << 20)
    with compiled("llama", budget) as (model, optimizer):
        sim.set_delays(5, 200)
        assert steps("llama", model, optimizer) == losses
        assert_same(model, state)
        assert staging.INTO.exists and staging.OUT_OF.exists
        assert model._offmate_session.device.host_memory.refused


def test_refusals(sim):
    model = built("gpt2")
    sim.set_total_bytes(8 << 30)
    with pytest.raises(offmate.DeviceError, match=r"9 GiB, but .* has 8 GiB"):
        offmate.compile(model, "9GiB", device="sim")
    held = torch.empty(1 << 30, dtype=torch.uint8, device="sim")
    sim.set_total_bytes(2 << 30)
    with pytest.raises(offmate.DeviceError, match=r"no device|last device here"):
        offmate.compile(model, "1GiB", device="sim:7")
    with pytest.raises(offmate.DeviceError, match="cuda"):
        offmate.compile(model, "1GiB", device="cuda")
    del held


def test_kernels_that_are_chosen_by_time_are_warned_of_once(sim, caplog, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with compiled("gpt2", AMPLE_BYTES) as (model, _), torch.no_grad():
        model(**text(0))
        model.eval()(**text(0))
    assert sum("cudnn.benchmark is on" in one.message for one in caplog.records) == 1


def test_allocator_settings_that_are_made_after_compile_are_refused_at_the_next_plan(sim, monkeypatch):
    def refuses(where):
        raise offmate.DeviceError(f"the allocator of {where} runs with expandable_segments:True")

    with compiled("gpt2", AMPLE_BYTES) as (model, _), torch.no_grad():
        model(**text(0))
        monkeypatch.setattr("offmate.session.maker.check_allocator", refuses)
        model(**text(1))  # has a plan
        with pytest.raises(offmate.DeviceError, match="sim:0 runs with expandable_segments"):
            model(**{name: value[:1] for name, value in text(0).items()})


def test_out_of_memory_in_a_step(sim):
    """The message shows plan and real memory side by side; the state can be read."""
    with compiled("llama", budget_of("llama", "tight")) as (model, optimizer):
        model(**text(0))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.offmate.sync()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        model._offmate_session.residence.bring_home()
        held = torch.empty(model.offmate.plan.budget_bytes * 7 // 8, dtype=torch.uint8, device="sim")
        with pytest.raises(offmate.OffmateError, match=r"ran out of memory: budget .*; planned .* reserved"):
            model(**text(1))["loss"].backward()
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        del held


def test_a_lost_device(sim):
    """Training ends with an error instead of hanging, and what the host has can be read."""
    with compiled("llama", budget_of("llama", "tight")) as (model, optimizer):
        model(**text(0))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        batch = text(1)
        sim.lose()
        try:
            with pytest.raises((offmate.OffmateError, torch.AcceleratorError)):
                model(**batch)["loss"].backward()
            assert all(torch.isfinite(v).all() for v in model.state_dict().values())
        finally:
            sim.lose(False)


def test_library_workspaces_are_in_the_budget(sim):
    """What a matrix library takes for good, once per thread, is taken before the plan is placed."""
    sim.set_workspace_bytes(4 << 20)
    losses, state = plain("llama")
    with compiled("llama", budget_of("llama", "middle") + (8 << 20)) as (model, optimizer):
        sim.set_delays(6, 200)
        assert steps("llama", model, optimizer) == losses
        assert_same(model, state)
        assert sim.max_memory_reserved() <= model.offmate.plan.predicted_peak_bytes


def buffers_seen(model: Any, optimizer: torch.optim.Optimizer, when: str) -> list[torch.Tensor]:
    """What a loop that looks at batch statistics, and changes some, sees of them; then all of the state."""
    torch.manual_seed(7)
    norm, seen = model.layers[1], []
    for step in range(STEPS):
        loss = model(**{k: v.to("sim") for k, v in images(step).items()})["loss"]
        if when == "forward":
            seen.append(norm.running_mean.cpu().clone())
        loss.backward()
        if when == "backward":
            seen += [value.cpu().clone() for key, value in model.state_dict().items() if "running" in key]
        optimizer.step()
        optimizer.zero_grad()
        if when == "step":
            norm.running_var.mul_(0.5)
            seen.append(copy.deepcopy(norm).running_var.cpu())
    return [*seen, *(value.cpu() for value in model.state_dict().values())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("when", ["forward", "backward", "step"])
def test_buffers_that_forwards_write_read_current(sim, when, planned):
    """They stay on the device; whoever reads or edits one has its newest values."""
    model = built("convolutions").to("sim")
    expected = buffers_seen(model, adamw(model), when)
    model = built("convolutions")
    optimizer = adamw(model)
    offmate.compile(
        model, budget_of("convolutions", "middle"), optimizer=optimizer if planned else None, device="sim",
        cpu_budget=HOST_BYTES, config=NO_CACHE,
    )  # fmt: skip
    sim.set_delays(1, 200)
    found = buffers_seen(model, optimizer, when)
    sim.set_delays(0, 0)
    assert all(map(torch.equal, found, expected))
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()


class Masked(torch.nn.Module):
    """Reads a batch with gaps and an expanded mask, and returns something expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(x if x.is_contiguous() else x * 2).masked_fill(mask, 0).mean(0).expand(2, 64)


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_batches_with_gaps_and_repeats(sim, where):
    torch.manual_seed(0)
    model, expected = Masked(), Masked().to("sim")
    expected.load_state_dict(model.state_dict())
    batch = torch.randn(8, 128, device=where)[:, :64], (torch.rand(8, 1, device=where) > 0.5).expand(8, 64)
    offmate.compile(model, AMPLE_BYTES, device="sim", cpu_budget=HOST_BYTES, config=NO_CACHE)
    theirs = expected(torch.randn(8, 128).to("sim")[:, :64].copy_(batch[0]), batch[1].to("sim"))
    ours = model(*batch)
    assert torch.equal(ours.cpu(), theirs.cpu())
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.equal(model.layer.weight.grad.cpu(), expected.layer.weight.grad.cpu())
    assert model.offmate.peak_bytes == model.offmate.plan.predicted_peak_bytes
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()
