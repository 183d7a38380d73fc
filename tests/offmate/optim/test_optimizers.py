"""Any optimizer that updates each parameter by itself is planned, bit for bit; others are refused with the reason."""

from __future__ import annotations

import pytest
import torch

import offmate
from offmate import OffmateError

from ..loops import CPU_BUDGET, Loop, Tiny, assert_same, tiny

optim = torch.optim


class Lion(optim.Optimizer):
    """Sign of an interpolated momentum, as a user would write it."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                param.mul_(1 - group["lr"] * group["decay"])
                update = state["average"].mul(first).add(param.grad, alpha=1 - first).sign_()
                param.add_(update, alpha=-group["lr"])
                state["average"].mul_(second).add_(param.grad, alpha=1 - second)


def groups(model: torch.nn.Module) -> list[dict]:
    """Biases without decay, at a rate of their own, as fine-tuning scripts have it."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights}, {"params": biases, "lr": 3e-3}]


MAKERS = {
    "adamw": lambda params: optim.AdamW(params, lr=1e-2, fused=True),
    "adam-amsgrad": lambda params: optim.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1, fused=True),
    "sgd-nesterov": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "sgd-maximize": lambda params: optim.SGD(params, lr=1e-4, momentum=0.9, maximize=True, fused=True),
    "rmsprop": lambda params: optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda params: optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1, foreach=False),
    "adafactor": lambda params: optim.Adafactor(params, lr=1e-2),
    "nadam": lambda params: optim.NAdam(params, lr=1e-2),
    "radam": lambda params: optim.RAdam(params, lr=1e-2),
    "lion": lambda params: Lion(params, lr=1e-3, decay=0.1),
}


def loop(name: str, budget: int | None = None) -> tuple[Loop, optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = Tiny(layers=2)
    optimizer = MAKERS[name](groups(model))
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if budget is not None:
        offmate.compile(
            model, budget, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
            config=offmate.Config(cache_dir=None),
        )  # fmt: skip
    return Loop(model, optimizer), scheduler


def run(made: tuple[Loop, optim.lr_scheduler.LRScheduler], steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(made[0].step(step))
        made[1].step()
    return losses


@pytest.mark.parametrize("name", MAKERS)
def test_parity(name):
    ours, reference = loop(name, 19 << 10), loop(name)
    assert run(ours) == run(reference)
    assert_same(ours[0], reference[0])
    plan = ours[0].model.offmate.plan
    assert ours[0].model.offmate.peak_bytes == plan.predicted_peak_bytes
    assert any(plan.moved_bytes)


class Normalised(optim.SGD):
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1e-3)
        return super().step()


class Counting(optim.SGD):
    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step()


class CountingByGroup(optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step()


class Noisy(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=1e-3)
        return super().step()


class Around(optim.SGD):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.inner = optim.SGD(self.param_groups, **settings)

    def step(self, closure=None):
        return self.inner.step()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (optim.LBFGS, "LBFGS calls the model again.*closure"),
        (optim.SparseAdam, "SparseAdam cannot update a dense tensor"),
        (Normalised, "Normalised combines parameters"),
        (Counting, r"Counting keeps state that belongs to no single parameter \(steps changes"),
        (CountingByGroup, "CountingByGroup keeps state.*steps of group 0"),
        (Noisy, "Noisy draws random numbers"),
        (Around, r"Around wraps another optimizer \(inner\)"),
    ],
)
def test_refused_with_the_reason(kind, reason):
    model = tiny()
    before = [p.clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(OffmateError, match=rf"{reason}.*compile without optimizer="):
        offmate.compile(model, "1GiB", optimizer=optimizer, device="emulated")
    assert type(model) is type(tiny()) and not optimizer.state_dict()["state"]
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(torch.get_rng_state(), random_state)
