"""Gradients of planned parameters that come from outside the model's forward: added exactly, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offmate
from offmate import ProtocolError

from ..loops import CPU_BUDGET, Loop, adamw, assert_same, batch, plain, plan, tiny, trained


def refused(match: str):
    return pytest.raises(ProtocolError, match=match)


def regular(loop: Loop) -> torch.Tensor:
    return 0.1 * loop.model.layers[1].weight.pow(2).sum()


def head(loop: Loop) -> torch.Tensor:
    """A submodule called by itself."""
    return loop.model.last(torch.ones(2, 32)).square().mean()


def both(loop: Loop) -> torch.Tensor:
    return regular(loop) + head(loop)


def gated(budget: str, **gate: Any) -> Loop:
    model = tiny()
    optimizer = adamw(model)
    config = offmate.Config(cache_dir=None)
    budget_bytes = plan(budget).budget_bytes * (1 if budget == "ample" else 2)
    offmate.compile(
        model, budget_bytes, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config, **gate
    )
    return Loop(model, optimizer)


def before(loop: Loop, step: int, micro: int, term: Callable[[Loop], torch.Tensor]) -> None:
    term(loop).backward()
    for i in range(micro):
        (loop.forward(step + i) / micro).backward()


def after(loop: Loop, step: int, micro: int, term: Callable[[Loop], torch.Tensor]) -> None:
    for i in range(micro):
        (loop.forward(step + i) / micro).backward()
    term(loop).backward()


def waiting(loop: Loop, step: int, micro: int, term: Callable[[Loop], torch.Tensor]) -> None:
    """The term's backward between the forward and its backward."""
    loss = loop.forward(step)
    term(loop).backward()
    loss.backward()


@pytest.mark.parametrize("budget", ["ample", "middle"])
@pytest.mark.parametrize("term", [regular, head, both])
@pytest.mark.parametrize(("order", "micro"), [(before, 1), (after, 1), (waiting, 1), (after, 2)])
def test_added_behind_a_gate(
    order: Callable[..., None], micro: int, term: Callable[[Loop], torch.Tensor], budget: str
) -> None:
    ours, reference = gated(budget, max_grad_norm=0.3, accumulation_steps=micro), plain()
    norms: list[torch.Tensor] = []
    for loop in (ours, reference):
        for step in range(3):
            order(loop, step, micro, term)
            if loop is reference:
                norms.append(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3))
            loop.optimizer.step()
            if loop is ours:
                norms.append(ours.model.offmate.grad_norm.clone())
            loop.optimizer.zero_grad()
    assert all(map(torch.equal, norms[:3], norms[3:]))
    assert_same(ours, reference)


def test_in_the_same_backward() -> None:
    loop = gated("ample", max_grad_norm=0.3)
    (loop.forward(0) + regular(loop)).backward()
    with refused(
        r"layers.1.weight has a gradient .*same backward\(\).*no update was made, and the gradients are dropped. "
        r"Call backward\(\) on that term of the loss by itself, after the model's"
    ):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert loop.model.layers[1].weight.grad is None
    expected = plain()
    for each in (loop, expected):
        each.forward(0).backward()
        if each is expected:
            torch.nn.utils.clip_grad_norm_(each.model.parameters(), 0.3)
        each.optimizer.step()
        each.optimizer.zero_grad()
    assert_same(loop, expected)


def test_between_micro_batches() -> None:
    loop = gated("ample", accumulation_steps=2)
    loop.forward(0).backward()
    regular(loop).backward()
    with refused(r"micro-batches of one update.*made no update; drop the gradient with zero_grad\(\)"):
        loop.forward(1).backward()
    loop = gated("ample", accumulation_steps=2)
    regular(loop).backward()
    loop.forward(0).backward()
    with refused(r"micro-batches of one update"):
        loop.forward(1).backward()


def test_several_after_the_last() -> None:
    loop = gated("ample", max_grad_norm=0.3)
    loop.forward(0).backward()
    for _ in range(2):
        regular(loop).backward()
    with refused(r"several backward\(\) calls.*no update was made.*Add these terms up"):
        loop.optimizer.step()


@pytest.mark.parametrize("budget", ["ample", "least"])
def test_without_a_gate(budget: str) -> None:
    loop, reference = trained(budget, steps=1), plain(1)
    regular(loop).backward()
    assert loop.model.layers[1].weight.grad is not None
    loss = loop.forward(1)
    with refused(
        r"layers.1.weight has a gradient.*made no update.*drop the gradient with zero_grad\(\).*without optimizer="
    ):
        loss.backward()
    loop.optimizer.zero_grad()
    assert loop.model.layers[1].weight.grad is None
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    reference.step(1)
    (loop.forward(2) + regular(loop)).backward()
    with refused(r"updates of this step were made without it; the step is done.*max_grad_norm=float\('inf'\), .* and"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    reference.step(2)
    assert loop.steps(3, 5) == reference.steps(3, 5)
    assert_same(loop, reference)


def test_without_an_optimizer_all_is_in_grad() -> None:
    ours, reference = trained(steps=1, planned=False), plain(1)
    for loop in (ours, reference):
        for step in range(3):
            (loop.model(**batch(step))["loss"] + regular(loop)).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert_same(ours, reference)


class Tied(torch.nn.Module):
    """A weight that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.inner = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.inner(self.embed(x))) @ self.embed.weight.T).logsumexp(-1).mean()


def free(model: torch.nn.Module) -> torch.nn.Module:
    """Compiled without an optimizer, so that gradients are the user's."""
    config = offmate.Config(cache_dir=None)
    return offmate.compile(model, "1GiB", device="emulated", cpu_budget=CPU_BUDGET, config=config)


def same_gradients(ours: torch.nn.Module, reference: torch.nn.Module) -> None:
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, param in ours.named_parameters():
        assert param.grad is not None and torch.equal(param.grad, expected[name]), name


def twins(build: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(4)
        made.append(build())
    return free(made[0]), made[1]


TOKENS = torch.arange(48).reshape(2, 24)


def test_without_an_optimizer_autograd_adds_up() -> None:
    """Twice, so that what is in .grad meets a sum: .grad + (term + gradient)."""

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 3))

    ours, reference = twins(build)
    seen: dict[torch.nn.Module, list[torch.Tensor]] = {ours: [], reference: []}
    for model in (ours, reference):
        model[1].weight.register_hook(lambda grad, model=model: seen[model].append(grad.clone()))
        model[2].weight.register_hook(lambda grad: grad * 0.5)
        for _ in range(3):
            loss = model(TOKENS).square().mean()
            (loss + 0.1 * sum(p.pow(2).sum() for p in model.parameters())).backward()
    same_gradients(ours, reference)
    assert all(map(torch.equal, seen[ours], seen[reference])) and len(seen[ours]) == 3


def twice(param: torch.nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def test_hooks_may_come_between_forward_and_backward_without_an_optimizer() -> None:
    """Those of one parameter: in which order those of several are called has to be known before."""
    ours, reference = twins(Tied)
    for model in (ours, reference):
        loss = model(TOKENS)
        model.embed.weight.register_hook(lambda grad: grad * 3)
        model.embed.weight.register_post_accumulate_grad_hook(twice)
        loss.backward()
    same_gradients(ours, reference)
    ours, _ = twins(Tied)
    loss = ours(TOKENS)
    for param in ours.parameters():
        param.register_hook(lambda grad: grad * 3)
    with refused("got a hook on its gradient between the forward and backward.*Register hooks before the forward"):
        loss.backward()


class Recurrent(torch.nn.Module):
    """Its weights are read once per token by an operator that is one node of the graph."""

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.layer = kind(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0].square().mean()


class Likeness(torch.nn.Module):
    """`cosine_similarity` reads its argument several times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 5))
        self.inner = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cosine_similarity(self.weight, self.inner(x[0, :5]), dim=-1).square().mean()


@pytest.mark.parametrize(
    "build",
    [lambda: Recurrent(torch.nn.GRU), lambda: Recurrent(torch.nn.RNN), Likeness],
    ids=["GRU", "RNN", "cosine similarity"],
)
def test_operators_that_read_a_weight_several_times_are_seen(build: Callable[[], torch.nn.Module]) -> None:
    ours, _ = twins(build)
    with refused("several places.*another order"):
        (ours(torch.randn(4, 7, 6)) + 0.1 * sum(p.pow(3).sum() for p in ours.parameters())).backward()


@pytest.mark.parametrize("after", [False, True])
def test_hooks_of_several_parameters_are_called_in_plain_pytorchs_order(after: bool) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv1d(6, 8, 3), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Flatten(),
            torch.nn.Linear(40, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 4, bias=False),
        )  # fmt: skip

    ours, reference = twins(build)
    order: dict[torch.nn.Module, list[str]] = {ours: [], reference: []}
    for model in (ours, reference):
        for name, param in model.named_parameters():

            def noise(grad: torch.Tensor, model: torch.nn.Module = model, name: str = name) -> torch.Tensor:
                order[model].append(name)
                return grad + 0.1 * torch.randn_like(grad)

            def noted(param: torch.Tensor, model: torch.nn.Module = model, name: str = name) -> None:
                order[model].append(name)

            param.register_post_accumulate_grad_hook(noted) if after else param.register_hook(noise)
        torch.manual_seed(8)
        for _ in range(2):
            model(torch.randn(4, 6, 7)).square().mean().backward()
    assert order[ours] == order[reference] and len(order[ours]) == 2 * len(list(ours.parameters()))
    same_gradients(ours, reference)


def test_a_sum_that_plain_pytorch_makes_in_another_order_is_refused() -> None:
    ours, reference = twins(Tied)
    loss = ours(TOKENS)
    with refused(r"embed.weight.*several places.*another order.*zero_grad\(\)"):
        (loss + 0.1 * ours.embed.weight.pow(2).sum()).backward()
    ours.zero_grad()
    for model in (ours, reference):
        term = 0.1 * model.embed.weight.pow(2).sum()  # before the forward: it is added last
        (model(TOKENS) + term).backward()
        (0.1 * model.embed.weight.pow(2).sum()).backward()
        (model(TOKENS) + 0.1 * model.inner.weight.pow(2).sum()).backward()
    same_gradients(ours, reference)


def test_gradients_are_not_copied() -> None:
    ours = free(Tied())
    made: list[int] = []
    loss = ours(TOKENS)
    session = ours._offmate_session
    take = session.residence.active.executor.take_host_grads

    def noted() -> dict[str, torch.Tensor]:
        grads = take()
        made.extend(grad.data_ptr() for grad in grads.values())
        return grads

    session.residence.active.executor.take_host_grads = noted
    loss.backward()
    assert sorted(made) == sorted(p.grad.data_ptr() for p in ours.parameters() if p.grad is not None)
