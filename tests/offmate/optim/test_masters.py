"""`offmate.with_master_weights`: edits, loaded states, copies of the optimizer, and states from construction."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import offmate
from offmate.optim import chunks

from ..loops import CPU_BUDGET

ADAMW = offmate.with_master_weights(torch.optim.AdamW)
SETTINGS: dict[str, Any] = {"device": "emulated", "cpu_budget": CPU_BUDGET}


def parameter(size: tuple[int, ...] = (8, 6)) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16())


def gradient(step: int, size: tuple[int, ...] = (8, 6)) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step + 1)).bfloat16()


def stepped(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, steps: int, low: bool = True) -> None:
    for step in range(steps):
        param.grad = gradient(step) if low else gradient(step).float()
        optimizer.step()


def halve(param: torch.nn.Parameter) -> None:
    with torch.no_grad():
        param[1].mul_(0.7)


def replace(param: torch.nn.Parameter) -> None:
    param.data = torch.cat([param.data[:1], param.data[1:2] * 0.7, param.data[2:]])


def write_through_data(param: torch.nn.Parameter) -> None:
    param.data[1].mul_(0.7)


@pytest.mark.parametrize("edit", [halve, replace, write_through_data])
@pytest.mark.parametrize("chunk_elements", [16, 2**21])
def test_an_edited_element_is_trained_on_and_the_others_keep_their_float32_values(
    edit: Any, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk_elements)
    param = parameter()
    by_hand = torch.nn.Parameter(param.detach().float())
    optimizer, plain = ADAMW([param], lr=0.1, fused=True), torch.optim.AdamW([by_hand], lr=0.1, fused=True)
    stepped(optimizer, param, 2)
    stepped(plain, by_hand, 2, low=False)
    edit(param)
    by_hand.data[1] = param.detach()[1]
    stepped(optimizer, param, 2)
    stepped(plain, by_hand, 2, low=False)
    assert torch.equal(optimizer.state[param]["master"], by_hand)
    assert torch.equal(param, by_hand.bfloat16())


def test_an_edited_copy_is_trained_on() -> None:
    param = parameter()
    by_hand = torch.nn.Parameter(param.detach().float())
    optimizer, plain = ADAMW([param], lr=0.1), torch.optim.AdamW([by_hand], lr=0.1)
    for one, own, low in ((optimizer, param, True), (plain, by_hand, False)):
        stepped(one, own, 2, low)
        (one.state[own]["master"] if low else by_hand.data).mul_(0.7)
        stepped(one, own, 2, low)
    assert torch.equal(optimizer.state[param]["master"], by_hand)


class Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(3))
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return {"loss": x.float().pow(2).mean()}


@pytest.mark.parametrize("updates", ["host", "device", "not planned"])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("edit", [halve, replace, write_through_data])
def test_edits_count_in_a_plan_as_outside_it(updates: Any, gate: bool, edit: Any) -> None:
    losses, copies = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        own = Halves()
        optimizer = ADAMW(own.parameters(), lr=1e-2, fused=True)
        planned = compiled and updates != "not planned"
        if compiled:
            config = offmate.Config(cache_dir=None, updates=updates if planned else "auto")
            more = {"max_grad_norm": float("inf")} if gate and planned else {}
            given = optimizer if planned else None
            offmate.compile(own, "1GiB", optimizer=given, config=config, **more, **SETTINGS)
        found = []
        for step in range(4):
            if step == 2:
                edit(own.layers[1].weight)
            loss = own(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).bfloat16())["loss"]
            loss.backward()
            if step == 3 and gate:
                edit(own.layers[0].weight)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().clone())
        losses.append(found)
        copies.append([optimizer.state[p]["master"].clone() for p in own.parameters()])
        assert all(torch.equal(p, c.bfloat16()) for p, c in zip(own.parameters(), copies[-1]))
    assert all(map(torch.equal, *losses)) and all(map(torch.equal, *copies))


def evaluated_with_others(own: Halves, optimizer: Any) -> None:
    """Put other weights in for an evaluation, as with a running mean of weights, and the trained ones back."""
    kept = [p.detach().clone() for p in own.parameters()]
    with torch.no_grad():
        for param in own.parameters():
            param.mul_(0.9)
        own(torch.ones(4, 32).bfloat16())
        for param, values in zip(own.parameters(), kept):
            param.copy_(values)


def copy_replaced(own: Halves, optimizer: Any) -> None:
    state = optimizer.state[own.layers[0].weight]
    state["master"] = state["master"] * 1.5


def both_written(own: Halves, optimizer: Any) -> None:
    optimizer.state[own.layers[0].weight]["master"].mul_(1.5)
    halve(own.layers[0].weight)


def written_after_loading(own: Halves, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.state[own.layers[0].weight]["master"].mul_(1.5)


def written_before_another_is_frozen(own: Halves, optimizer: Any) -> None:
    optimizer.state[own.layers[0].weight]["master"].mul_(1.5)
    own.layers[2].weight.requires_grad_(False)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    "edit",
    [evaluated_with_others, copy_replaced, both_written, written_after_loading, written_before_another_is_frozen],
)
def test_which_of_weight_and_copy_counts_is_the_same_in_a_plan(edit: Any, gate: bool) -> None:
    copies = []
    for compiled in (False, True):
        torch.manual_seed(0)
        own = Halves()
        optimizer = ADAMW(own.parameters(), lr=1e-2)
        if compiled:
            more = {"max_grad_norm": float("inf")} if gate else {}
            config = offmate.Config(cache_dir=None)
            offmate.compile(own, "1GiB", optimizer=optimizer, config=config, **more, **SETTINGS)
        for step in range(4):
            own(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).bfloat16())["loss"].backward()
            if gate and step == 2 and edit is evaluated_with_others:
                edit(own, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                edit(own, optimizer)
        copies.append([optimizer.state[p]["master"].clone() for p in own.parameters()])
    assert all(map(torch.equal, *copies))


@pytest.mark.parametrize("drops", [False, True])
def test_behind_a_gate_copies_follow_at_the_step_as_in_plain_pytorch(drops: bool) -> None:
    """A copy that is read before the step has not followed; an edit that is taken back before the step is none."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        own = Halves()
        optimizer = ADAMW(own.parameters(), lr=1e-2)
        if compiled:
            config = offmate.Config(cache_dir=None)
            offmate.compile(own, "1GiB", optimizer=optimizer, config=config, max_grad_norm=float("inf"), **SETTINGS)
        weight = own.layers[0].weight
        for step in range(5):
            before = weight.detach().clone()
            if step == 2:
                halve(weight)
            own(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).bfloat16())["loss"].backward()
            if step == 2:
                seen.append([optimizer.state[weight]["master"].clone()])
            if step == 2 and drops:
                optimizer.zero_grad()
                with torch.no_grad():
                    weight.copy_(before)
                continue
            optimizer.step()
            optimizer.zero_grad()
        seen.append([optimizer.state[p]["master"].clone() for p in own.parameters()])
    assert all(map(torch.equal, seen[0] + seen[1], seen[2] + seen[3]))


def test_what_is_written_into_a_loaded_copy_counts() -> None:
    param = parameter()
    optimizer = ADAMW([param], lr=0.0, weight_decay=0.0)
    stepped(optimizer, param, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.state[param]["master"].fill_(3.0)
    stepped(optimizer, param, 1)
    assert param.eq(3.0).all()


@pytest.mark.parametrize("form", [{}, {"fused": True}, {"initial_accumulator_value": 0.1}])
@pytest.mark.parametrize("loaded", [False, True])
def test_sums_of_adagrad_are_float32(form: dict[str, Any], loaded: bool) -> None:
    param = parameter()
    by_hand = torch.nn.Parameter(param.detach().float())
    kind = offmate.with_master_weights(torch.optim.Adagrad)
    optimizer, plain = kind([param], lr=0.1, **form), torch.optim.Adagrad([by_hand], lr=0.1, **form)
    if loaded:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(optimizer, param, 3)
    stepped(plain, by_hand, 3, low=False)
    assert torch.equal(optimizer.state[param]["master"], by_hand)
    assert torch.equal(optimizer.state[param]["sum"], plain.state[by_hand]["sum"])


def test_adagrad_is_planned_with_the_same_numbers() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        own = Halves()
        optimizer = offmate.with_master_weights(torch.optim.Adagrad)(own.parameters(), initial_accumulator_value=0.1)
        if compiled:
            optimizer.state.clear()
            offmate.compile(own, "1GiB", optimizer=optimizer, config=offmate.Config(cache_dir=None), **SETTINGS)
        for step in range(2):
            own(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).bfloat16())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([value for p in own.parameters() for value in (p.detach(), *optimizer.state[p].values())])
    assert sorted(len(one) for one in found) == [9 + 3, 9 + 3]
    assert all(any(torch.equal(a, b) for b in found[1]) for a in found[0])


def test_hooks_around_loading_see_and_change_what_is_loaded() -> None:
    param = parameter()
    saved_from = ADAMW([param], lr=0.1)
    stepped(saved_from, param, 1)
    saved = saved_from.state_dict()

    def doubled(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        given = copy.deepcopy(given)
        given["state"][0]["exp_avg"].mul_(2)
        return given

    def cleared(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            assert state["master"].dtype == torch.float32
            state["exp_avg_sq"].zero_()

    optimizer = ADAMW([param], lr=0.1)
    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(cleared)
    optimizer.load_state_dict(copy.deepcopy(saved))
    state, before = optimizer.state[param], saved["state"][0]
    assert torch.equal(state["exp_avg"], before["exp_avg"] * 2) and not state["exp_avg_sq"].any()
    assert torch.equal(state["master"], before["master"])


def test_moments_of_a_plain_optimizer_are_loaded_as_float32() -> None:
    param = parameter()
    plain = torch.optim.AdamW([param], lr=0.1, fused=True)
    stepped(plain, param, 1)
    optimizer = ADAMW([param], lr=0.1, fused=True)
    optimizer.load_state_dict(plain.state_dict())
    expected = plain.state[param]["exp_avg"].float()
    assert torch.equal(optimizer.state[param]["exp_avg"], expected)
    stepped(optimizer, param, 1)


class OwnKind(ADAMW):  # type: ignore[misc, valid-type]
    """A class that pickle finds by its name."""


@pytest.mark.parametrize("kind", [ADAMW, OwnKind])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_can_be_pickled_and_copied(kind: Any, compiled: bool, steps: int) -> None:
    own = Halves()
    optimizer = kind(own.parameters(), lr=0.1)
    for param in own.parameters():
        optimizer.state[param]["master"] = param.detach().float()
    if compiled:
        offmate.compile(own, "1GiB", optimizer=optimizer, config=offmate.Config(cache_dir=None), **SETTINGS)
    for _ in range(steps):
        own(torch.randn(4, 32).bfloat16())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(again) is kind
        one, other = optimizer.state_dict(), again.state_dict()
        assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
        for number, state in one["state"].items():
            assert all(torch.equal(value, other["state"][number][key]) for key, value in state.items())
        (param,) = again.param_groups[0]["params"][:1]
        param.grad = torch.ones_like(param)
        again.step()


def test_the_norm_that_a_user_reads_is_a_copy() -> None:
    found = []
    for edits in (False, True):
        torch.manual_seed(0)
        own = Halves().float()
        optimizer, scaler = torch.optim.SGD(own.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
        config = offmate.Config(cache_dir=None)
        offmate.compile(
            own, "1GiB", optimizer=optimizer, max_grad_norm=1e-3, grad_scaler=scaler, config=config, **SETTINGS
        )
        scaler.scale(own(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))["loss"]).backward()
        scaler.unscale_(optimizer)
        if edits:
            own.offmate.grad_norm.mul_(1e3)
        scaler.step(optimizer)
        found.append([p.detach().clone() for p in own.parameters()])
    assert all(map(torch.equal, *found))
