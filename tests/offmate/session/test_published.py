"""Optimizer states that the user reads, clears, replaces and writes into: as in plain PyTorch, or refused."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

import offmate
from offmate import ProtocolError

from ..loops import AMPLE, CPU_BUDGET, Loop, adamw, assert_same, compiled, plain, tiny, trained

BUDGETS = ("ample", "middle", "least")


def clear(loop: Loop) -> None:
    loop.optimizer.state.clear()


def replace_all(loop: Loop) -> None:
    loop.optimizer.state = defaultdict(dict)


def pop_one(loop: Loop) -> None:
    loop.optimizer.state.pop(loop.model.layers[2].weight)


def clear_one(loop: Loop) -> None:
    loop.optimizer.state[loop.model.last.bias].clear()


def zero(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def scale_raw(loop: Loop) -> None:
    for param in loop.model.parameters():
        loop.optimizer.state[param]["exp_avg"].mul_(0.1)


def replace_tensors(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2
        state["step"] = torch.zeros_like(state["step"])


def restart(loop: Loop) -> None:
    """As ReLoRA does."""
    for param in loop.model.parameters():
        state = loop.optimizer.state[param]
        state["exp_avg"].data.mul_(0.01)
        state["exp_avg_sq"].data.mul_(0.01)


EDITS = (clear, replace_all, pop_one, clear_one, zero, scale_raw, replace_tensors, restart)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("edit", EDITS)
def test_changes_between_steps_are_honoured(edit: Callable[[Loop], None], budget: str) -> None:
    ours, reference = trained(budget), plain()
    for step in range(4):
        assert ours.step(step) == reference.step(step)
        if step in (0, 2):
            if step == 2:
                offmate_sync(ours)
            edit(ours)
            edit(reference)
    assert_same(ours, reference)
    assert ours.model.offmate.peak_bytes == ours.model.offmate.plan.predicted_peak_bytes


def offmate_sync(loop: Loop) -> None:
    loop.model.offmate.sync()


@pytest.mark.parametrize("budget", BUDGETS)
def test_raw_reads_are_current(budget: str) -> None:
    ours, reference = trained(budget), plain()
    for step in range(3):
        ours.step(step)
        reference.step(step)
        for a, b in zip(ours.model.parameters(), reference.model.parameters(), strict=True):
            own, expected = ours.optimizer.state[a], reference.optimizer.state[b]
            assert own.keys() == expected.keys()
            assert all(torch.equal(own[key], expected[key]) for key in own)


def test_references_that_are_kept_follow() -> None:
    ours, reference = trained(steps=2), plain(2)
    kept = [[s["exp_avg"] for s in loop.optimizer.state.values()] for loop in (ours, reference)]
    for loop in (ours, reference):
        loop.steps(2, 4)
    ours.model.offmate.sync()
    assert all(map(torch.equal, *kept))
    for one in (*kept[0], *kept[1]):
        one.mul_(0.5)
    assert ours.steps(4, 6) == reference.steps(4, 6)
    assert_same(ours, reference)


def test_a_change_while_newer_ones_are_under_way_is_refused() -> None:
    loop = trained(steps=1)
    kept = loop.optimizer.state[loop.model.last.weight]["exp_avg"]
    loop.step(1)
    kept.zero_()
    with pytest.raises(ProtocolError, match=r"state of last.weight was changed through an older reference.*sync\(\)"):
        loop.forward(2)
    model, optimizer = plain(2), plain(2).optimizer.state_dict()
    loop.model.load_state_dict(model.model.state_dict())
    loop.optimizer.load_state_dict(optimizer)
    assert loop.steps(2, 4) == model.steps(2, 4)


def test_a_change_between_forward_and_backward_gives_the_forward_up() -> None:
    loop, reference = trained(steps=1), plain(1)
    loss = loop.forward(1)
    zero(loop)
    with pytest.raises(ProtocolError, match=r"state of first.weight was changed between the forward and backward"):
        loss.backward()
    zero(reference)
    assert loop.steps(1, 3) == reference.steps(1, 3)
    assert_same(loop, reference)


def test_a_change_between_backward_and_step() -> None:
    loop, reference = trained(steps=1), plain(2)
    loop.forward(1).backward()
    zero(loop)
    with pytest.raises(ProtocolError, match=r"between backward\(\) and optimizer.step\(\).*max_grad_norm"):
        loop.optimizer.step()
    zero(reference)
    loop.optimizer.zero_grad()
    assert loop.steps(2, 4) == reference.steps(2, 4)
    assert_same(loop, reference)


def test_a_change_between_backward_and_step_behind_a_gate_is_honoured() -> None:
    ours, reference = gated(), plain()
    for loop in (ours, reference):
        loop.step(0)
        for step in (1, 2):
            loop.forward(step).backward()
            zero(loop)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert_same(ours, reference)


def gated() -> Loop:
    model = tiny()
    optimizer = adamw(model)
    config = offmate.Config(cache_dir=None)
    offmate.compile(
        model, AMPLE, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config,
        max_grad_norm=float("inf"),
    )  # fmt: skip
    return Loop(model, optimizer)


def test_a_state_of_another_size_is_refused() -> None:
    loop = trained(steps=1)
    state = loop.optimizer.state[loop.model.last.weight]
    state["exp_avg"] = state["exp_avg"].double()
    with pytest.raises(ProtocolError, match=r"last.weight 'exp_avg' became torch.float64 \(4, 32\) where it was"):
        loop.forward(1)
    reference = plain(1)
    assert loop.steps(1, 3) == reference.steps(1, 3)
    assert_same(loop, reference)


def test_momentum_that_was_cleared() -> None:
    def sgd(compiles: bool) -> Loop:
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        if compiles:
            config = offmate.Config(cache_dir=None)
            offmate.compile(
                model, "96KiB", optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config
            )
        return Loop(model, optimizer)

    ours, reference = sgd(True), sgd(False)
    for loop in (ours, reference):
        loop.steps(0, 2)
        for state in loop.optimizer.state.values():
            state.pop("momentum_buffer")
    assert ours.steps(2, 5) == reference.steps(2, 5)
    assert_same(ours, reference)


@pytest.mark.parametrize("way", ["set", "loaded"])
def test_one_tensor_as_the_state_of_two_parameters_is_refused_by_name(way: str) -> None:
    loop, reference = trained(steps=2), plain(2)
    params = [layer.weight for layer in loop.model.layers[:2]]
    states = [loop.optimizer.state[param] for param in params]
    order = [id(param) for param in loop.optimizer.param_groups[0]["params"]]
    numbers = [order.index(id(param)) for param in params]
    if way == "set":
        states[0]["exp_avg"] = states[1]["exp_avg"]
        with pytest.raises(ProtocolError, match=r"states 'exp_avg' of .* and 'exp_avg' of .* are the same memory"):
            loop.forward(2)
    else:
        saved = loop.optimizer.state_dict()
        first, second = (saved["state"][number] for number in numbers)
        wrong = {**saved, "state": {**saved["state"], numbers[0]: {**first, "exp_avg": second["exp_avg"]}}}
        with pytest.raises(ProtocolError, match="are the same memory"):
            loop.optimizer.load_state_dict(wrong)
        loop.optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
    assert loop.steps(2, 4) == reference.steps(2, 4)
    assert_same(loop, reference)


@pytest.mark.parametrize("fused", [True, False])
def test_states_with_gaps_are_refused_where_fused_updates_overlook_them(fused: bool) -> None:
    """Plain PyTorch's fused update takes their memory as if it had none, and other forms of it do not."""

    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    loops = [Loop(model, adam(model)) for model in (tiny(), tiny())]
    for loop in loops:
        loop.steps(0, 2)
        state = loop.optimizer.state[loop.model.first.weight]
        state["exp_avg"] = torch.zeros(32, 32)[:, ::2].copy_(state["exp_avg"])
    ours, reference = loops
    settings = {"device": "emulated", "cpu_budget": CPU_BUDGET, "config": offmate.Config(cache_dir=None)}
    if fused:
        with pytest.raises(ProtocolError, match=r"'exp_avg' of first\.weight has gaps or repeats in memory"):
            offmate.compile(ours.model, "96KiB", optimizer=ours.optimizer, **settings)
        return
    offmate.compile(ours.model, "96KiB", optimizer=ours.optimizer, **settings)
    assert ours.steps(2, 5) == reference.steps(2, 5)
    assert_same(ours, reference)


def test_before_the_first_step() -> None:
    ours, reference = compiled(), plain()
    for loop in (ours, reference):
        for param in loop.model.parameters():
            loop.optimizer.state[param] = {
                "step": torch.tensor(5.0), "exp_avg": torch.ones_like(param), "exp_avg_sq": torch.ones_like(param),
            }  # fmt: skip
    assert ours.steps(0, 3) == reference.steps(0, 3)
    assert_same(ours, reference)
