"""Loops that leave the usual order: batches skipped, evaluation in between, backward() for some inputs only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offmate
from offmate import ProtocolError

from ..loops import AMPLE, CPU_BUDGET, Loop, adamw, assert_same, batch, plain, tiny, trained

BUDGETS = ("ample", "middle", "least")


def refused(match: str):
    return pytest.raises(ProtocolError, match=match)


def gated(**gate: Any) -> Loop:
    model = tiny()
    optimizer = adamw(model)
    config = offmate.Config(cache_dir=None)
    offmate.compile(model, AMPLE, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config, **gate)
    return Loop(model, optimizer)


def evaluated(loop: Loop, step: int = 9) -> float:
    with torch.no_grad():
        return loop.model(**batch(step))["loss"].item()


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_batch_that_is_skipped(budget: str, planned: bool) -> None:
    """The old loss is still bound when the model is called again."""
    ours, reference = trained(budget, planned=planned), plain()
    for loop in (ours, reference):
        for step in range(5):
            loss = loop.forward(step)
            if step in (0, 2, 3):
                continue
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert_same(ours, reference)
    assert ours.model.offmate.peak_bytes == ours.model.offmate.plan.predicted_peak_bytes


def test_a_micro_batch_that_is_skipped() -> None:
    ours, reference = gated(accumulation_steps=2, max_grad_norm=float("inf")), plain()
    for loop in (ours, reference):
        for step in range(3):
            for micro in range(3):
                loss = loop.forward(3 * step + micro)
                if micro == 1:
                    continue
                (loss / 2).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert_same(ours, reference)


def test_an_exception_between_forward_and_backward() -> None:
    ours, reference = trained(steps=1), plain(1)
    for loop in (ours, reference):
        with pytest.raises(ArithmeticError):
            interrupted(loop)
        loop.steps(1, 3)
    assert_same(ours, reference)


def interrupted(loop: Loop) -> None:
    loss = loop.forward(5)
    raise ArithmeticError(loss)


@pytest.mark.parametrize("budget", BUDGETS)
def test_backward_through_a_forward_that_was_given_up(budget: str) -> None:
    loop = trained(budget, steps=1)
    first = loop.forward(1)
    second = loop.forward(2)
    for both in (first + second, second + first, first):
        with refused(r"discarded, because the model was called again.*no update was made"):
            both.backward(retain_graph=True)
    del both
    loop.forward(1).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    reference = plain(2)
    assert loop.steps(2, 4) == reference.steps(2, 4)
    assert_same(loop, reference)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
def test_evaluation_between_forward_and_backward(budget: str, planned: bool) -> None:
    """As preference losses do: the policy, then the reference, then the policy's backward."""
    ours, reference = trained(budget, planned=planned), plain()
    seen: list[list[float]] = []
    for loop in (ours, reference):
        seen.append([])
        for step in range(4):
            loss = loop.forward(step)
            loop.model.eval()
            seen[-1].append(evaluated(loop, step + 5))
            loop.model.train()
            seen[-1].append(evaluated(loop, step + 6))
            (loss * 2).backward()
            seen[-1].append(loss.item())
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert seen[0] == seen[1]
    assert_same(ours, reference)
    assert ours.model.offmate.peak_bytes <= ours.model.offmate.plan.budget_bytes


class Dropping(torch.nn.Module):
    """Draws random numbers and writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.3, self.training)
        return self.last(h)


def test_a_buffer_replaced_between_forward_and_evaluation() -> None:
    def run(compiles: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = Dropping()
        if compiles:
            config = offmate.Config(cache_dir=None)
            offmate.compile(model, AMPLE, device="emulated", cpu_budget=CPU_BUDGET, config=config)
        loss = model(**batch(0)).sum()
        model.norm.running_mean = model.norm.running_mean + 1.0
        model.eval()
        with torch.no_grad():
            scores = model(**batch(1))
        loss.backward()
        return scores

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("planned", [True, False])
def test_a_buffer_edited_between_forward_and_backward(planned: bool) -> None:
    """Plain PyTorch refuses it where the backward needs the buffer."""
    torch.manual_seed(0)
    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters())
    offmate.compile(
        model, AMPLE, optimizer=optimizer if planned else None, device="emulated", cpu_budget=CPU_BUDGET,
        config=offmate.Config(cache_dir=None),
    )  # fmt: skip
    loss = model(**batch(0)).sum()
    model.norm.running_var.add_(0.25)
    with pytest.raises(offmate.ProtocolError, match=r"norm.running_var was edited in place.*after optimizer.step"):
        loss.backward()
    model(**batch(1)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("planned", [True, False])
def test_a_weight_edited_by_data_between_forward_and_backward(planned: bool) -> None:
    """Plain PyTorch's backward would read the new values, the plan's the old ones."""
    torch.manual_seed(0)
    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters())
    offmate.compile(
        model, AMPLE, optimizer=optimizer if planned else None, device="emulated", cpu_budget=CPU_BUDGET,
        config=offmate.Config(cache_dir=None),
    )  # fmt: skip
    loss = model(**batch(0)).sum()
    model.last.weight.data.add_(0.1)
    with pytest.raises(offmate.ProtocolError, match=r"last.weight was edited between"):
        loss.backward()
    model(**batch(1)).sum().backward()
    optimizer.step()


class Echo(torch.nn.Module):
    """Returns an input as it is, and what depends on nothing else, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.last(torch.relu(self.first(x)))
        return {"loss": torch.nn.functional.cross_entropy(scores, y), "copy": x.clone(), "double": 2 * x, "y": y}


@pytest.mark.parametrize("micro", [0, 1, 2])
def test_outputs_that_depend_on_no_parameter(micro: int) -> None:
    """They are the user's until the next call, in training and in evaluation, in any order of the two."""

    def run(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Echo()
        optimizer = adamw(model)
        if compiles:
            gate: dict[str, Any] = {"optimizer": optimizer, "accumulation_steps": micro} if micro else {}
            config = offmate.Config(cache_dir=None)
            offmate.compile(model, AMPLE, device="emulated", cpu_budget=CPU_BUDGET, config=config, **gate)
        seen: list[torch.Tensor] = []
        for step in range(4):
            for index in range(max(micro, 1)):
                outputs = model(**batch(2 * step + index))
                outputs["loss"].backward()
                seen += outputs.values()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(step % 3):
                with torch.no_grad():
                    seen += model(**batch(step)).values()
        if compiles:
            assert model.offmate.peak_bytes == model.offmate.plan.predicted_peak_bytes
        return [*seen, *model.state_dict().values()]

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize("micro", [1, 2])
def test_random_numbers_and_buffers(micro: int) -> None:
    def run(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Dropping()
        optimizer = adamw(model)
        if compiles:
            config = offmate.Config(cache_dir=None)
            offmate.compile(
                model, "40KiB", optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config,
                accumulation_steps=micro, max_grad_norm=0.5,
            )  # fmt: skip
        torch.manual_seed(3)
        for step in range(3):
            for _ in range(micro):
                scores = model(**batch(step))
                with torch.no_grad():
                    other = model(**batch(step + 5))
                loss = torch.nn.functional.cross_entropy(scores - other, batch(step)["y"])
                loss.backward()
            if not compiles:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if compiles:
            assert model.offmate.peak_bytes <= model.offmate.plan.budget_bytes
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(map(torch.equal, run(True), run(False)))


def test_evaluation_that_does_not_fit_between_forward_and_backward() -> None:
    loop = trained("least", steps=1)
    loss = loop.forward(1)
    large = {k: v.repeat(40, *(1,) * (v.dim() - 1)) for k, v in batch(2).items()}
    with torch.no_grad(), refused(r"needs .*KiB.* too much.* Raise gpu_budget by the missing amount"):
        loop.model(**large)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    reference = plain(2)
    assert loop.steps(2, 4) == reference.steps(2, 4)
    assert_same(loop, reference)


def test_evaluation_between_backward_and_step() -> None:
    loop = trained(steps=1)
    loop.forward(1).backward()
    with torch.no_grad(), refused(r"max_grad_norm=float\('inf'\)"):
        loop.forward(2)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    ours, reference = gated(max_grad_norm=float("inf")), plain()
    for each in (ours, reference):
        for step in range(3):
            each.forward(step).backward()
            evaluated(each)
            each.optimizer.step()
            each.optimizer.zero_grad()
    assert_same(ours, reference)


def test_gradients_that_are_dropped() -> None:
    """backward(), then zero_grad() without a step: behind a gate as in plain PyTorch, else refused with the remedy."""
    ours, reference = gated(max_grad_norm=float("inf")), plain()
    for loop in (ours, reference):
        for step in range(4):
            loop.forward(step).backward()
            if step != 1:
                loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert_same(ours, reference)
    ours.forward(4).backward()
    ours.optimizer.zero_grad()
    with refused(r"zero_grad\(\) cleared the gradients, so there is nothing to update. Skip this step\(\), too"):
        ours.optimizer.step()
    ours.model.last.weight.sum().backward()
    with refused(r"without a backward"):
        ours.optimizer.step()
    ours.optimizer.zero_grad()
    assert ours.steps(5, 6) == reference.steps(5, 6)
    with refused(r"without a backward"):
        ours.optimizer.step()
    loop = trained(steps=1)
    loop.forward(1).backward()
    with refused(r"updates with them have begun.*max_grad_norm=float\('inf'\)"):
        loop.optimizer.zero_grad()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert loop.steps(2, 3) == plain(2).steps(2, 3)


def test_backward_for_some_inputs() -> None:
    loop = trained(steps=1)
    loss = loop.forward(1)
    with refused(r"inputs=...\) leaves out first.bias \(15 parameters"):
        loss.backward(inputs=[loop.model.first.weight])
    with refused(r"torch.autograd.grad"):
        torch.autograd.grad(loss, [loop.model.first.weight])
    loss.backward(inputs=list(loop.model.parameters()))
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    reference = plain(2)
    assert loop.steps(2, 4) == reference.steps(2, 4)
    assert_same(loop, reference)


def test_backward_for_some_inputs_with_gradients_on_the_host() -> None:
    ours, reference = trained(steps=1, planned=False), plain(1)
    for loop in (ours, reference):
        loop.forward(1).backward(inputs=[loop.model.last.weight, loop.model.first.bias])
        assert loop.model.last.bias.grad is None
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert ours.steps(2, 4) == reference.steps(2, 4)
    assert_same(ours, reference)


@pytest.mark.parametrize("planned", [True, False])
def test_outputs_that_no_backward_reads_may_change_in_place(planned: bool) -> None:
    loop, reference = trained(steps=1, planned=planned), plain(1)
    for each in (loop, reference):
        out = each.model(**batch(1))
        with torch.no_grad():
            out["scores"].mul_(2)
        out["loss"] *= 3
        out["loss"].backward()
        each.optimizer.step()
        each.optimizer.zero_grad()
    assert loop.steps(2, 4) == reference.steps(2, 4)
    assert_same(loop, reference)


class Bounded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


@pytest.mark.parametrize("planned", [True, False])
def test_an_output_that_the_backward_reads_may_not_change_in_place(planned: bool) -> None:
    """Plain PyTorch refuses it, too."""
    torch.manual_seed(0)
    model: Any = Bounded()
    optimizer = adamw(model)
    config = offmate.Config(cache_dir=None)
    offmate.compile(model, "1GiB", optimizer=optimizer if planned else None, device="emulated", config=config)
    before = model.layer.weight.detach().clone()
    out = model(batch(1)["x"])
    out.mul_(2)
    with refused(r"output 'output' was changed in place.*no update was made. Make a new tensor"):
        out.sum().backward()
    assert torch.equal(model.layer.weight, before)
    model(batch(1)["x"]).sum().backward()


def test_one_model_feeds_another() -> None:
    """A compiled discriminator behind a generator is refused and says what to do; the generator may be compiled."""
    loop = trained(steps=1)
    with refused(r"requires a gradient.*compile only the first"):
        loop.model(batch(1)["x"].requires_grad_(), batch(1)["y"])
    loop.optimizer.zero_grad()

    def run(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        generator, critic = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()), torch.nn.Linear(16, 1)
        optimizers = adamw(generator), adamw(critic)
        if compiles:
            config = offmate.Config(cache_dir=None)
            offmate.compile(generator, "1GiB", optimizer=optimizers[0], device="emulated", config=config)
        for step in range(3):
            x = batch(step)["x"]
            with torch.no_grad():
                made = generator(x)
            (critic(made).mean() - critic(x).mean()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            (-critic(generator(x)).mean()).backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [*generator.parameters(), *critic.parameters()]

    assert all(map(torch.equal, run(True), run(False)))
