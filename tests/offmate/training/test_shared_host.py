"""RAM that items share: the same numbers, within what the plan says, whatever happens in the middle of a step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import offmate

from ...fuzz.figures import from_hardware_file

STEPS = 4
AMPLE_BYTES = 1 << 32
NO_CACHE = offmate.Config(cache_dir=None)


@pytest.fixture(scope="module", autouse=True)
def rates() -> Any:
    """What shares RAM is not left to how busy the machine was."""
    with from_hardware_file():
        yield


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def text(step: int, rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (rows, 48), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@functools.cache
def budgets(clip: float | None, device: str) -> tuple[int, int]:
    """A device budget a little above the least, and 85 % of the RAM that a plan then takes."""
    model = llama()
    settings: dict[str, Any] = {
        "example_inputs": text(0), "optimizer": adamw(model), "max_grad_norm": clip, "cpu_budget": AMPLE_BYTES,
        "config": NO_CACHE, "device": device,
    }  # fmt: skip
    least = offmate.plan(model, "1GiB", **settings).least_budget_bytes
    device_bytes = int(1.5 * least) + (24 << 20 if device == "sim" else 0)
    return device_bytes, offmate.plan(model, device_bytes, **settings).host_bytes * 17 // 20


def compiled(clip: float | None, device: str = "emulated") -> tuple[Any, torch.optim.Optimizer]:
    model = llama()
    optimizer = adamw(model)
    device_bytes, host_bytes = budgets(clip, device)
    offmate.compile(
        model, device_bytes, optimizer=optimizer, max_grad_norm=clip, cpu_budget=host_bytes, config=NO_CACHE,
        device=device,
    )  # fmt: skip
    return model, optimizer


Pause = Callable[[Any, int], None]


def train(
    model: Any, optimizer: torch.optim.Optimizer, clip: float | None, pause: Pause, batch: Callable[[int], Any] = text
) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step))["loss"]
        loss.backward()
        losses.append(loss.item())
        pause(model, step)
        if clip is not None and not hasattr(model, "offmate"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharing(model: Any) -> Any:
    """The layout of the plan's RAM; some of it is shared, or nothing here would be tested."""
    layout = model.offmate.plan.schedule.host_layout
    assert any(layout.neighbours.values())
    return layout


def nothing(model: Any, step: int) -> None: ...


def read(model: Any, step: int) -> None:
    model.state_dict()


def evaluate(model: Any, step: int) -> None:
    with torch.no_grad():
        model.eval()(**text(99))
    model.train()


def wait(model: Any, step: int) -> None:
    if hasattr(model, "offmate"):
        model.offmate.sync()


PAUSES = [(None, nothing), (None, wait), *((0.5, pause) for pause in (nothing, read, evaluate, wait))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("clip", "pause"), PAUSES, ids=lambda given: getattr(given, "__name__", str(given)))
def test_numbers(clip: float | None, pause: Pause) -> None:
    plain = llama()
    expected = train(plain, adamw(plain), clip, nothing)
    model, optimizer = compiled(clip)
    assert train(model, optimizer, clip, pause) == expected
    sharing(model)
    for (name, ours), other in zip(model.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(ours, other), name


@pytest.mark.parametrize("clip", [None, 0.5])
def test_batches_of_several_shapes(clip: float | None) -> None:
    """Each shape has its own plan, and a plan that comes next shares nothing with the one before."""

    def batch(step: int) -> dict[str, torch.Tensor]:
        return text(step, rows=4 if step % 2 == 0 else 2)

    plain = llama()
    expected = train(plain, adamw(plain), clip, nothing, batch)
    model, optimizer = compiled(clip)
    assert train(model, optimizer, clip, nothing, batch) == expected


def host_bytes_held(model: Any) -> int:
    """Bytes of RAM, apart from parameters and the states of the optimizer, that the plan's items take now."""
    session = model._offmate_session
    executor = session.training.executor
    handlers = executor._by_kind
    homes = [home for kind in handlers._activations for home in kind._homes._of.values()]
    tensors = [*session.truth.host.grads.values(), *(tensor for home in homes for tensor in home.values())]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_memory_is_what_the_plan_says(clip: float | None) -> None:
    """The RAM of gradients and activations is one piece of the planned size."""
    model, optimizer = compiled(clip)
    train(model, optimizer, clip, nothing)
    layout = sharing(model)
    assert model._offmate_session.training.executor.world.shared_host.bytes == layout.shared_bytes
    assert host_bytes_held(model) == layout.shared_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
def test_a_step_that_is_interrupted(clip: float | None, share: float) -> None:
    """After an interrupt anywhere the values are those after whole updates, or the message says which are not."""
    model, optimizer = compiled(clip)
    train(model, optimizer, clip, nothing)
    executor = model._offmate_session.training.executor
    left = int(share * len(executor.schedule.actions))

    def interrupt(action: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            executor.on_action = None
            raise KeyboardInterrupt

    executor.on_action = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(**text(STEPS))["loss"].backward()
        optimizer.step()
        model(**text(STEPS))
    executor.on_action = None
    after = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain = llama()
    own = adamw(plain)
    plain.load_state_dict(after[0])
    own.load_state_dict(after[1])
    optimizer.zero_grad()
    model.load_state_dict(after[0])
    optimizer.load_state_dict(copy.deepcopy(after[1]))
    assert train(model, optimizer, clip, nothing) == train(plain, own, clip, nothing)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_on_an_accelerator_with_delays(sim: Any, clip: float | None) -> None:
    """Copies come late and at random; a place that is written too early would show in the losses."""
    plain = llama().to("sim")
    expected = train(plain, adamw(plain), clip, nothing, lambda s: {k: v.to("sim") for k, v in text(s).items()})
    model, optimizer = compiled(clip, "sim")
    sim.set_delays(seed=3, max_us=300)
    assert train(model, optimizer, clip, nothing) == expected
    sharing(model)
    model._offmate_session.residence.bring_home()
    model._offmate_session.device.close()
