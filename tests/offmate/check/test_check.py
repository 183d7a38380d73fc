"""`offmate.check`: a model is trained beside plain PyTorch, and the verdict says what was found and where."""

from __future__ import annotations

import itertools

import pytest
import torch

from offmate.check import compare
from offmate.check.compare import Outcome, Run, check, difference
from offmate.check.subject import Subject, WithLoss, own_loss

ONE_STEP = 1


def _perceptron() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def _vectors(step: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 8),)


def test_a_model_that_trains_with_the_same_numbers_is_equal() -> None:
    verdict = check(Subject("perceptron", _perceptron, _vectors))

    assert verdict.outcome is Outcome.EQUAL
    assert verdict.n_parameters == 8 * 16 + 16 + 16 * 4 + 4
    assert verdict.ample_peak_bytes is not None and verdict.least_budget_bytes is not None
    assert verdict.least_budget_bytes < verdict.ample_peak_bytes


def test_the_least_budget_is_that_of_the_batch_that_needs_most() -> None:
    """Batches of other shapes, or that a router sends to other experts, have plans of their own."""

    def shrinking(step: int) -> tuple[torch.Tensor]:
        return (torch.randn(64 >> 2 * step, 8),)

    whole = check(Subject("largest", _perceptron, lambda step: (torch.randn(64, 8),)))
    verdict = check(Subject("shrinking", _perceptron, shrinking))

    assert (verdict.outcome, verdict.words) == (Outcome.EQUAL, "")
    assert verdict.least_budget_bytes == whole.least_budget_bytes
    assert verdict.ample_peak_bytes == whole.ample_peak_bytes


def test_a_model_that_offmate_refuses_is_refused_with_its_words() -> None:
    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            return h[h > 0].sum()

    verdict = check(Subject("chosen", Chosen, _vectors), ONE_STEP)

    assert verdict.outcome is Outcome.REFUSED and verdict.budget == "ample"
    assert "h[h > 0]" in verdict.words


calls: list[int] = []


class _Counting(torch.nn.Module):
    """Its loss depends on a global, which no capture can follow; a new model begins to count anew."""

    def __init__(self) -> None:
        super().__init__()
        calls.clear()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return self.layer(x).square().mean() * len(calls)


def test_other_numbers_are_different_and_the_first_difference_is_named() -> None:
    verdict = check(Subject("counting", _Counting, _vectors))

    assert verdict.outcome is Outcome.DIFFERENT
    assert verdict.words.startswith("the loss of step ") and "plain PyTorch's is " in verdict.words


def test_a_model_that_differs_from_itself_is_unstable() -> None:
    numbers = itertools.count(1)

    def build() -> torch.nn.Module:
        model = torch.nn.Linear(8, 1)
        torch.nn.init.constant_(model.weight, next(numbers))
        return model

    assert check(Subject("restless", build, _vectors), ONE_STEP).outcome is Outcome.UNSTABLE


def test_a_model_that_fails_in_plain_pytorch_says_so() -> None:
    verdict = check(Subject("misfit", _perceptron, lambda step: (torch.randn(4, 7),)), ONE_STEP)

    assert verdict.outcome is Outcome.PLAIN_FAILS
    assert verdict.words.startswith("RuntimeError: mat1 and mat2 shapes")


def test_an_error_that_is_not_offmates_own_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("inside")

    monkeypatch.setattr(compare, "compile_model", broken)
    verdict = check(Subject("perceptron", _perceptron, _vectors), ONE_STEP)

    assert verdict.outcome is Outcome.FAILED
    assert verdict.words == "KeyError: 'inside'"
    assert "in broken" in verdict.trace


def test_without_an_optimizer_gradients_are_compared() -> None:
    subject = Subject("perceptron", _perceptron, _vectors, optimizer=lambda model: None)

    assert check(subject, ONE_STEP).outcome is Outcome.EQUAL


def test_an_optimizer_that_computes_losses_itself_is_given_them() -> None:
    subject = Subject(
        "perceptron", _perceptron, _vectors, optimizer=lambda model: torch.optim.LBFGS(model.parameters())
    )

    verdict = check(subject, ONE_STEP)

    assert verdict.outcome is Outcome.REFUSED
    assert "LBFGS" in verdict.words


def _run(losses: list[float], **tensors: torch.Tensor) -> Run:
    return Run([torch.tensor(loss) for loss in losses], tensors, torch.zeros(2))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (_run([1.0], w=torch.ones(2)), ""),
        (_run([2.0], w=torch.ones(2)), "the loss of step 1 is 2, plain PyTorch's is 1"),
        (_run([1.0], w=torch.tensor([1.0, 1.5])), "1 of 1 tensors differ after training, w first (by up to 0.5)"),
        (_run([1.0], v=torch.ones(2)), "2 tensors exist on one side only, such as v"),
        (
            _run([1.0], w=torch.ones(3)),
            "1 of 1 tensors differ after training, w first (torch.float32 (3,) instead of torch.float32 (2,))",
        ),
    ],
)
def test_differences_in_words(found: Run, words: str) -> None:
    assert difference(_run([1.0], w=torch.ones(2)), found) == words


def test_not_a_number_equals_itself() -> None:
    odd = torch.tensor([float("nan"), 1.0])
    assert difference(_run([1.0], w=odd), _run([1.0], w=odd.clone())) == ""


def test_a_loss_of_all_outputs_is_the_same_with_and_without_gradients() -> None:
    class Two(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), x

    model = WithLoss(Two(4, 4))
    x = torch.randn(3, 4)
    with torch.no_grad():
        without = model(x)["loss"]
    assert torch.equal(model(x)["loss"].detach(), without)


def test_the_loss_of_a_model_that_returns_one_is_that_one() -> None:
    loss = torch.tensor(3.0)
    assert own_loss({"loss": loss, "logits": torch.ones(2)}, ()) is loss
