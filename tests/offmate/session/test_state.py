"""States in and out of a compiled model: distributed checkpoints, safetensors, plans, generation, and no leaks."""

from __future__ import annotations

import copy
import gc
import pickle

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model, save_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import offmate
from offmate import ProtocolError

from ..loops import AMPLE, CPU_BUDGET, Loop, adamw, assert_same, batch, compiled, plain, tiny, trained


def both(fresh: Loop, saved: str) -> None:
    """Load as the documentation of torch.distributed.checkpoint does."""
    model, optimizer = get_state_dict(fresh.model, fresh.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=saved)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("ours_saves", [True, False])
def test_distributed_checkpoints_pass_both_ways(ours_saves, tmp_path):
    source = trained("least", steps=2) if ours_saves else plain(2)
    model, optimizer = get_state_dict(source.model, source.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    expected = plain(2).steps(2, 4)
    for fresh in (plain(), compiled("least")):
        both(fresh, str(tmp_path))
        assert fresh.steps(2, 4) == expected


def test_safetensors_pass_both_ways(tmp_path):
    ours, reference = trained("least", steps=2), plain(2)
    for source in (ours, reference):
        save_model(source.model, str(tmp_path / "model.safetensors"))
        for fresh in (plain(), compiled("least")):
            load_model(fresh.model, tmp_path / "model.safetensors")
            fresh.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
            assert fresh.steps(2, 4) == plain(2).steps(2, 4)


@pytest.mark.parametrize("budget", ["ample", "middle", "least"])
@pytest.mark.parametrize("earlier", [False, True], ids=["now", "before"])
def test_what_numpy_writes_into_weights_between_steps_counts(budget, earlier):
    """Into an array of now, or after a `sync()` into one from before: copies that the device has are renewed."""
    ours, reference = compiled(budget), plain()
    for loop in (ours, reference):
        arrays = [param.detach().numpy() for param in loop.model.parameters()]
        loop.steps(0, 2)
        if earlier and loop is ours:
            loop.model.offmate.sync()
        for array in arrays if earlier else [param.detach().numpy() for param in loop.model.parameters()]:
            array *= 1.5
    assert ours.steps(2, 5) == reference.steps(2, 5)
    assert_same(ours, reference)


@pytest.mark.parametrize("updates", ["host", "device"])
def test_float32_copies_follow_what_numpy_writes(updates):
    loops = []
    for planned in (True, False):
        model = tiny().half()
        optimizer = offmate.with_master_weights(torch.optim.AdamW)(model.parameters(), lr=1e-2)
        if planned:
            config = offmate.Config(cache_dir=None, updates=updates)
            offmate.compile(model, AMPLE, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config)
        loops.append(Loop(model, optimizer))
    for loop in loops:
        for number in range(4):
            given = batch(number)
            loop.model(x=given["x"].half(), y=given["y"])["loss"].backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if number == 1:
                for param in loop.model.parameters():
                    param.detach().numpy()[...] *= 1.5
    assert_same(*loops)


def test_gradients_assigned_between_iterations():
    ours, reference = trained("least", steps=2), plain(2)
    for loop in (ours, reference):
        for param in loop.model.parameters():
            param.grad = torch.full_like(param, 0.5)
        assert torch.equal(loop.model.last.weight.grad, torch.full((4, 32), 0.5))
        loop.optimizer.step()
    with pytest.raises(ProtocolError, match=r"16 parameters hold gradients that were assigned.*zero_grad"):
        ours.forward(2)
    ours.optimizer.zero_grad()
    reference.optimizer.zero_grad()
    assert ours.steps(2, 4) == reference.steps(2, 4)
    assert_same(ours, reference)


def test_plans_travel_with_a_checkpoint(tmp_path, monkeypatch):
    first = compiled("least", steps=1)
    first.model.offmate.save_plans(tmp_path)
    (tmp_path / "damaged.json").write_text("{")
    model = plain().model
    optimizer = adamw(model)
    budget = first.model.offmate.plan.budget_bytes
    config = offmate.Config(cache_dir=None)
    offmate.compile(model, budget, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config)
    model.offmate.load_plans(tmp_path)
    monkeypatch.setattr("offmate.planning.planner.solve_problem", lambda *_, **__: pytest.fail("solved anew"))
    assert Loop(model, optimizer).steps(0, 2) == plain().steps(0, 2)
    assert model.offmate.plans[0].schedule == first.model.offmate.plan.schedule


def test_generate():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    ids = torch.arange(3, 15)[None]

    def run(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        optimizer = adamw(model)
        if compiles:
            offmate.compile(
                model, "1MiB", optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None)
            )
        seen = []
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            seen.append(model.generate(ids, max_new_tokens=8, do_sample=False))
            model.train()
        return [*seen, *model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


def test_parameters_and_states_outlive_their_model():
    loop, reference = compiled("least", steps=2), plain(2)
    parameters, optimizer = list(loop.model.parameters()), loop.optimizer
    del loop
    gc.collect()
    assert all(map(torch.equal, parameters, reference.model.parameters()))
    states = zip(optimizer.state_dict()["state"].values(), reference.optimizer.state_dict()["state"].values())
    assert all(torch.equal(a[key], b[key]) for a, b in states for key in a)


def test_a_hundred_mixed_steps_leak_nothing():
    loop = trained("least", steps=1)
    device, process = loop.session.device, psutil.Process()

    def some(first: int, end: int) -> tuple[int, int, int]:
        for step in range(first, end):
            loop.step(step)
            if step % 3 == 0:
                loop.model.eval()
                with torch.no_grad():
                    loop.model(**{k: v[: 8 - 2 * (step % 2)] for k, v in batch(step).items()})
                loop.model.train()
            if step % 10 == 0:
                pickle.dumps((loop.model.state_dict(), loop.optimizer.state_dict()))
        gc.collect()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        return device.ledger.level_bytes, tensors, process.memory_info().rss

    level, tensors, memory_bytes = some(1, 31)
    after = some(31, 151)
    assert after[0] == level
    assert after[1] <= tensors
    assert after[2] - memory_bytes < 2 << 20


@pytest.mark.parametrize("replaces", ["memory", "parameter"])
def test_a_frozen_weight_that_the_optimizer_does_not_hold_may_be_replaced(replaces):
    losses = []
    for compiles in (False, True):
        model = tiny()
        model.layers[1].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        loop = Loop(model, optimizer)
        if compiles:
            config = offmate.Config(cache_dir=None)
            offmate.compile(model, AMPLE, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config)
        found = [loop.step(0)]
        halved = model.layers[1].weight.detach() * 0.5
        if replaces == "memory":
            model.layers[1].weight.data = halved
        else:
            model.layers[1].weight = torch.nn.Parameter(halved, requires_grad=False)
        losses.append([*found, loop.step(1), loop.step(2)])
    assert losses[0] == losses[1]


def test_a_trained_parameter_that_the_optimizer_does_not_hold():
    """Plain PyTorch trains it no more, even if it has the old one's memory; a plan refuses it by name."""
    ours, theirs = compiled("ample"), plain()
    assert ours.steps(0, 2) == theirs.steps(0, 2)
    for loop in (ours, theirs):
        loop.model.load_state_dict(loop.model.state_dict(), assign=True)
    before = copy.deepcopy(theirs.model.state_dict())
    theirs.step(2)
    assert not [name for name, value in theirs.model.state_dict().items() if not torch.equal(value, before[name])]
    with pytest.raises(offmate.OffmateError, match="was replaced by another parameter, which is not in the opt"):
        ours.step(2)
