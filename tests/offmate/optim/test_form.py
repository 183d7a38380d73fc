"""The form of an update: what plain PyTorch runs on a CPU unless the user says otherwise, whole or in rows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import offmate
from offmate.optim.updater import Updater, parameter_names

from ..loops import AMPLE, Loop, assert_same, batch, tiny

pytestmark = pytest.mark.as_users

optim = torch.optim
SETTINGS: dict[str, Any] = {"device": "emulated", "cpu_budget": 1 << 30, "config": offmate.Config(cache_dir=None)}

DEFAULTS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "momentum": lambda params: optim.SGD(params, momentum=0.9),
    "adagrad": optim.Adagrad,
    "adafactor": optim.Adafactor,
    "rmsprop": optim.RMSprop,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
}
BY_ROWS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "amsgrad": lambda params: optim.Adam(params, amsgrad=True, weight_decay=0.1),
    "momentum": lambda params: optim.SGD(params, momentum=0.9, nesterov=True, weight_decay=0.1),
    "nadam": lambda params: optim.NAdam(params, weight_decay=0.1),
    "radam": lambda params: optim.RAdam(params, weight_decay=0.1),
    "adamax": lambda params: optim.Adamax(params, weight_decay=0.1),
    "adadelta": lambda params: optim.Adadelta(params, weight_decay=0.1),
    "rmsprop": lambda params: optim.RMSprop(params, centered=True, momentum=0.5),
    "rprop": optim.Rprop,
}


def made(name: str) -> Loop:
    model = tiny()
    return Loop(model, DEFAULTS[name](model.parameters()))


@functools.cache
def least_bytes(name: str) -> int:
    loop = made(name)
    plan = offmate.plan(loop.model, AMPLE, example_inputs=batch(0), optimizer=loop.optimizer, **SETTINGS)
    return plan.least_budget_bytes


@pytest.mark.parametrize("budget", ["ample", "least"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_an_optimizer_as_everybody_writes_it(name: str, budget: str) -> None:
    loop, reference = made(name), made(name)
    bytes_ = AMPLE if budget == "ample" else least_bytes(name)
    offmate.compile(loop.model, bytes_, optimizer=loop.optimizer, **SETTINGS)
    assert loop.steps(0, 4) == reference.steps(0, 4)
    assert_same(loop, reference)
    assert loop.model.offmate.peak_bytes == loop.model.offmate.plan.predicted_peak_bytes


def test_the_fused_form_is_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    loop = made("adamw")
    with caplog.at_level(logging.INFO, "offmate"):
        offmate.compile(loop.model, AMPLE, optimizer=loop.optimizer, **SETTINGS)
        loop.steps(0, 2)
    (line,) = [record.getMessage() for record in caplog.records if "fused" in record.getMessage()]
    assert "AdamW updates as plain PyTorch does on a CPU" in line and "AdamW(..., fused=True), an update took" in line


@pytest.mark.parametrize("given", [{"fused": True}, {"foreach": False}])
def test_who_says_a_form_gets_it_without_a_word(given: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    loops = []
    for _ in range(2):
        model = tiny()
        loops.append(Loop(model, optim.AdamW(model.parameters(), **given)))
    loop, reference = loops
    with caplog.at_level(logging.INFO, "offmate"):
        offmate.compile(loop.model, AMPLE, optimizer=loop.optimizer, **SETTINGS)
        assert loop.steps(0, 3) == reference.steps(0, 3)
    assert "fused" not in caplog.text
    assert_same(loop, reference)


@pytest.mark.parametrize(("device", "fused"), [("emulated", None), ("cuda:0", True), ("rtx3060", True)])
def test_on_an_accelerator_the_fused_form_runs(device: str, fused: bool | None) -> None:
    model = tiny()
    optimizer = optim.AdamW(model.parameters())
    updater = Updater(optimizer, parameter_names(model, optimizer), device)
    assert {hyper["fused"] for hyper in updater.groups.values()} == {fused}


def test_forms_have_plans_of_their_own() -> None:
    found = set()
    for given in ({}, {"fused": True}, {"foreach": True}):
        model = tiny()
        optimizer = optim.AdamW(model.parameters(), **given)
        plan = offmate.plan(model, AMPLE, example_inputs=batch(0), optimizer=optimizer, **SETTINGS)
        found.add(plan.fingerprint)
    assert len(found) == 3


ROWS, WIDTH = 3011, 37  # so large that threads share a tensor, and no whole number of vectors
CUTS = (0, 64, 64 * 5, 64 * 40, ROWS)


@pytest.mark.parametrize("threads_there", [1, 2])
@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_have_the_bits_of_one_update(name: str, threads_there: int, two_threads: None) -> None:
    """In the default form, whoever updates them, and with as many threads as that one has."""
    whole, rows = (_updated(name, *how) for how in (((0, ROWS), 2), (CUTS, threads_there)))
    assert all(map(torch.equal, whole, rows))


def _updated(name: str, cuts: tuple[int, ...], n_threads: int) -> list[torch.Tensor]:
    """A tensor and its state after some updates of pieces of its rows."""
    torch.set_num_threads(n_threads)
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(ROWS, WIDTH, generator=generator)
    params = [torch.nn.Parameter(leaf[a:b].clone()) for a, b in pairwise(cuts)]
    optimizer = BY_ROWS[name](params)
    for _ in range(4):
        grad = torch.randn(ROWS, WIDTH, generator=generator)
        for param, (a, b) in zip(params, pairwise(cuts)):
            param.grad = grad[a:b].clone()
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    bulk = [k for k, v in states[0].items() if isinstance(v, torch.Tensor) and v.dim()]
    return [torch.cat([p.detach() for p in params]), *(torch.cat([s[k] for s in states]) for k in bulk)]


LOW = {
    "momentum": lambda params: optim.SGD(params, momentum=0.9, nesterov=True),
    "adafactor": lambda params: optim.Adafactor(params),
    "amsgrad": lambda params: optim.Adam(params, amsgrad=True, weight_decay=0.1),
}


@pytest.mark.parametrize("name", LOW)
def test_in_low_precision_the_host_computes_with_as_many_threads(
    name: str, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the last elements of each thread's part are rounded in another way."""
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Wide().to(torch.bfloat16)
        loops.append(Loop(model, LOW[name](model.parameters())))
    loop, reference = loops
    updater = Updater(loop.optimizer, parameter_names(loop.model, loop.optimizer))
    assert not updater.by_rows("layers.0.weight", torch.bfloat16)
    cost = updater.cost(loop.model.layers[0].weight, updater.groups["layers.0.weight"])
    assert cost.cpu_update_s == cost.device_update_s
    monkeypatch.setattr(Updater, "cost", lambda *given: replace(cost, device_update_s=1.0))
    offmate.compile(loop.model, AMPLE, optimizer=loop.optimizer, **SETTINGS)
    assert loop.steps(0, 4) == reference.steps(0, 4)
    assert loop.model.offmate.plan.schedule.update_cpu_s
    assert_same(loop, reference)


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 255)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(255, 255) for _ in range(2))
        self.last = torch.nn.Linear(255, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x.to(torch.bfloat16))
        for layer in self.layers:
            h = torch.nn.functional.gelu(layer(h))
        return {"loss": torch.nn.functional.cross_entropy(self.last(h).float(), y)}
