"""Inference mode around calls, profilers, threads, and children that were forked."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import offmate

from ...warm import run
from ..loops import CPU_BUDGET, Loop, assert_same, batch, compiled, plain, tensors, tiny, trained

pytestmark = pytest.mark.as_users

BUDGETS = ("ample", "least")


def evaluated(loop: Loop) -> torch.Tensor:
    loop.model.eval()
    with torch.inference_mode():
        made = {k: v.clone() for k, v in batch(9).items()}
        loss = loop.model(**made)["loss"]
    loop.model.train()
    return loss.clone()


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("first", [True, False])
def test_evaluation_in_inference_mode(budget: str, planned: bool, first: bool) -> None:
    ours, reference = compiled(budget, planned=planned), plain()
    seen: list[list[Any]] = []
    for loop in (ours, reference):
        seen.append([evaluated(loop).item()] if first else [])
        for step in range(4):
            seen[-1] += [loop.step(step), evaluated(loop).item()]
    assert seen[0] == seen[1]
    assert_same(ours, reference)


@pytest.mark.parametrize("planned", [True, False])
def test_states_read_in_inference_mode(planned: bool) -> None:
    ours, reference = trained(steps=1, planned=planned), plain(1)
    for loop in (ours, reference):
        loop.step(1)
        with torch.inference_mode():
            loop.model.state_dict()
            loop.optimizer.state_dict()
            loop.model.last.weight.norm().item()
            _ = [s["exp_avg"].sum().item() for s in loop.optimizer.state.values()]
        loop.step(2)
    assert_same(ours, reference)


def test_edits_in_inference_mode() -> None:
    ours, reference = trained(steps=1), plain(1)
    for loop in (ours, reference):
        with torch.inference_mode():
            loop.model.last.weight.mul_(0.5)
            loop.model.first.weight.data.mul_(0.5)
            loop.optimizer.state[loop.model.last.bias]["exp_avg"].zero_()
    assert ours.steps(1, 3) == reference.steps(1, 3)
    assert_same(ours, reference)


def test_a_batch_made_in_inference_mode_trains() -> None:
    ours, reference = trained(steps=1), plain(1)
    with torch.inference_mode():
        made = {k: v.clone() for k, v in batch(1).items()}
    ours.model(**made)["loss"].backward()
    ours.optimizer.step()
    ours.optimizer.zero_grad()
    reference.step(1)
    assert ours.steps(2, 4) == reference.steps(2, 4)
    assert_same(ours, reference)


# -- profilers --------------------------------------------------------------------------------------------------------


class Scores(torch.nn.Module):
    """Its loss is computed outside, so that what the loop holds between forward and backward is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def scoring(compiles: bool) -> tuple[Scores, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Scores()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if compiles:
        offmate.compile(
            model, 1 << 30, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
            config=offmate.Config(cache_dir=None),
        )  # fmt: skip
    return model, optimizer


def test_two_models_in_one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is measured while the first one's loop is: a thread has one profiler."""
    monkeypatch.setattr("offmate.profile.store._kept", {})
    losses = []
    for compiles in (True, False):
        pairs = [scoring(compiles), scoring(compiles)]
        torch.manual_seed(1)
        for _ in range(4):
            loss = torch.stack([model(torch.randn(3, 8)).pow(2).mean() for model, _ in pairs]).sum()
            loss.backward()
            losses.append(loss.item())
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
    assert losses[:4] == losses[4:]


def test_a_model_forgotten_in_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop is being measured then, and autograd restores the profiler's state afterwards."""
    monkeypatch.setattr("offmate.profile.store._kept", {})
    held: list[Any] = [scoring(True)]
    held[0][0](torch.randn(3, 8))
    value = torch.ones(1, requires_grad=True)

    def forget(_: torch.Tensor) -> None:
        held.clear()
        gc.collect()

    value.register_hook(forget)
    value.sum().backward()
    monkeypatch.setattr("offmate.profile.store._kept", {})
    model, optimizer = scoring(True)
    model(torch.randn(3, 8)).mean().backward()
    optimizer.step()
    assert not torch.autograd._profiler_enabled()


def test_a_first_call_under_the_users_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offmate.profile.store._kept", {})
    model, optimizer = scoring(True)
    with torch.profiler.profile(), pytest.raises(offmate.ProtocolError, match="Train one iteration first"):
        model(torch.randn(3, 8))
    with contextlib.ExitStack() as stack:
        for step in range(3):
            model(torch.randn(3, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                found = stack.enter_context(torch.profiler.profile())
    assert found.events()


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
def test_many_threads_evaluate(budget: str) -> None:
    """They take turns, once the model was planned."""
    ours, reference = compiled(budget), plain()
    for loop in (ours, reference):
        loop.model.eval()

    def answers(loop: Loop) -> list[torch.Tensor]:
        def answer(step: int) -> torch.Tensor:
            with torch.no_grad():
                loss: torch.Tensor = loop.model(**batch(step))["loss"]
            return loss

        answer(0)
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(answer, range(100)))

    assert all(map(torch.equal, answers(ours), answers(reference)))


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(3, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def quiet_evaluation(model: torch.nn.Module) -> float:
    with torch.no_grad():
        value: float = model(torch.ones(3, 8)).sum().item()
    return value


def test_evaluation_in_another_thread_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user's code updates, too: what it holds is measured until its optimizer steps."""
    monkeypatch.setattr("offmate.profile.store._kept", {})
    seen = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = Scores()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if compiles:
            offmate.compile(
                model, 1 << 30, device="emulated", cpu_budget=CPU_BUDGET, config=offmate.Config(cache_dir=None)
            )
        seen.append([one_step(model, optimizer), in_thread(lambda m=model: quiet_evaluation(m))])
        seen[-1] += [one_step(model, optimizer), one_step(model, optimizer)]
    assert seen[0] == seen[1]


def test_a_first_call_while_another_thread_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offmate.profile.store._kept", {})
    model = Scores()
    offmate.compile(model, 1 << 30, device="emulated", cpu_budget=CPU_BUDGET, config=offmate.Config(cache_dir=None))
    model(torch.ones(3, 8)).sum().backward()
    with pytest.raises(offmate.ProtocolError, match=r"in thread 'MainThread' is being measured.*offmate.sync\(\)"):
        in_thread(lambda: quiet_evaluation(model))
    model.offmate.sync()
    assert in_thread(lambda: quiet_evaluation(model)) == quiet_evaluation(model)


# -- forks ------------------------------------------------------------------------------------------------------------


EXPECTED: dict[str, torch.Tensor] = {}


def reads(loop: Loop) -> None:
    found = tensors(loop)
    assert all(torch.equal(value, EXPECTED[name]) for name, value in found.items())
    assert torch.equal(loop.model.last.weight, EXPECTED["last.weight"])
    twin = copy.deepcopy(loop.model)
    with torch.no_grad():
        assert torch.equal(twin(**batch(1))["loss"], EXPECTED["loss"])


def evaluates(loop: Loop) -> None:
    evaluated(loop)


def trains(loop: Loop) -> None:
    loop.step(2)


def steps(loop: Loop) -> None:
    loop.optimizer.step()


def clears(loop: Loop) -> None:
    loop.optimizer.zero_grad()


def loads(loop: Loop) -> None:
    loop.model.load_state_dict(tiny().state_dict())


def state_dict(loop: Loop) -> None:
    loop.model.state_dict()


def reads_weight(loop: Loop) -> None:
    loop.model.first.weight.sum()


CASES: dict[bool, dict[Callable[[Loop], None], str]] = {
    True: {
        reads: "",
        evaluates: "sync() before forking",
        trains: "sync() before forking",
        steps: "sync() before forking",
        clears: "sync() before forking",
        loads: "sync() before forking",
    },
    False: {state_dict: "before forking", reads_weight: "before forking", evaluates: "before forking"},
}
"""What a child may try and the words that refuse it, by whether the parent waited for its updates before the fork."""


def in_child(work: Callable[[Loop], None], words: str, loop: Loop) -> int:
    """What the child of a test does; 0 if it went as it should."""
    # OpenMP's threads do not come along either: with several, plain PyTorch's matrix products hang in a forked child.
    torch.set_num_threads(1)
    try:
        work(loop)
    except Exception as error:
        if words and words in str(error):
            return 0
        print(work.__name__, type(error), error)
        return 1
    return 1 if words else 0


def forks(waits: bool, way: str) -> None:
    """Runs in a process of its own: train, fork, and look at what each child says."""
    reference = plain(2)
    EXPECTED.update(tensors(reference), loss=reference.forward(1).detach())
    loop = compiled("least", steps=2)
    if waits:
        loop.model.offmate.sync()
    failed = [work.__name__ for work, words in CASES[waits].items() if fork(way, work, words, loop) != 0]
    print("failed in the child:", *failed)
    assert loop.steps(2, 4) == reference.steps(2, 4)
    assert_same(loop, reference)
    sys.exit(bool(failed))


def fork(way: str, work: Callable[[Loop], None], words: str, loop: Loop) -> int | None:
    """Return the exit code of a child; None if it hangs."""
    if way == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(in_child(work, words, loop)))
        child.start()
        child.join(60)
        return child.exitcode
    number = os.fork()
    if number == 0:
        sys.exit(in_child(work, words, loop))
    return os.waitpid(number, 0)[1]


@pytest.mark.parametrize("way", ["fork", "multiprocessing"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_forked_child_never_hangs(waits: bool, way: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert run(said, forks, waits, way) == 0, said.read_text()
