"""Trains a subject three times: by plain PyTorch, and within an ample and within the least budget by offmate."""

from __future__ import annotations

import enum
import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..api import compile as compile_model
from ..config import Config
from ..errors import OffmateError
from ..plans.plan import Plan
from .subject import SEED, Batch, Subject

STEPS = 3
AMPLE_BYTES = 1 << 40
_HOST_BYTES = 1 << 40


class Outcome(enum.Enum):
    """What a check has found, as a sentence."""

    EQUAL = "equal: all numbers are plain PyTorch's, bit for bit"
    REFUSED = "refused: offmate cannot train this model"
    DIFFERENT = "different: offmate's numbers differ from plain PyTorch's. This is a bug in offmate; please report it"
    FAILED = "failed: offmate ended with an unexpected error. This is a bug in offmate; please report it"
    UNSTABLE = "unstable: plain PyTorch differs from itself when it is run twice, so nothing can be compared"
    PLAIN_FAILS = "plain PyTorch fails: the model does not train as it is given"


@dataclass(frozen=True)
class Run:
    """The numbers that a training run leaves behind.

    Parameters
    ----------
    losses: one per step. tensors: parameters, buffers, optimizer states and gradients, by name.
    random_state: of torch's generator, after training.
    """

    losses: list[torch.Tensor]
    tensors: dict[str, torch.Tensor]
    random_state: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Parameters
    ----------
    outcome: what was found. words: why and where, empty if the numbers are equal.
    budget: "ample" or "least", where it was found; empty if both budgets are equal or nothing ran.
    least_budget_bytes, ample_peak_bytes: the largest of the batches' plans, where they were made.
    n_parameters: of the model, where it could be built.
    trace: the traceback of an error that is not offmate's own.
    """

    outcome: Outcome
    words: str = ""
    budget: str = ""
    least_budget_bytes: int | None = None
    ample_peak_bytes: int | None = None
    n_parameters: int | None = None
    trace: str = field(default="", repr=False)


def check(
    subject: Subject, steps: int = STEPS, device: str = "emulated", say: Callable[[str], None] = lambda words: None
) -> Verdict:
    """Train a subject by plain PyTorch and by offmate at two budgets, and compare all numbers.

    Parameters
    ----------
    steps: of each run. device: "emulated" compares bits. say: is called with what is being done.

    Returns: the verdict. Raises: OffmateError if a function of the subject says what is wrong with it.
    """
    say("training with plain PyTorch")
    try:
        model = subject.built()
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        plain = _trained(subject, model, subject.optimizer(model), steps)
    except OffmateError:
        raise  # a function of the subject's file has failed
    except Exception as error:
        return Verdict(Outcome.PLAIN_FAILS, _first_line(error), trace=traceback.format_exc())
    del model
    peaks: dict[str, int] = {}
    least_bytes: int | None = None
    for budget in ("ample", "least"):
        say(f"planning and training within the {budget} budget")
        gc.collect()
        model = subject.built()
        try:
            run, plans = _within(subject, model, AMPLE_BYTES if least_bytes is None else least_bytes, steps, device)
        except OffmateError as error:
            found = Verdict(Outcome.REFUSED, str(error))
        except Exception as error:
            found = Verdict(Outcome.FAILED, _first_line(error), trace=traceback.format_exc())
        else:
            # Batches that take other branches, such as other experts of a router, have plans of their own.
            least_bytes = max(plan.least_budget_bytes for plan in plans)
            peaks[budget] = max(plan.predicted_peak_bytes for plan in plans)
            words = difference(plain, run)
            if not words:
                del model
                continue
            found = Verdict(_why_different(subject, plain, steps), words)
        return Verdict(
            found.outcome, found.words, budget, least_bytes, peaks.get("ample"), n_parameters, trace=found.trace
        )
    return Verdict(Outcome.EQUAL, "", "", least_bytes, peaks.get("ample"), n_parameters)


def _within(subject: Subject, model: Any, budget_bytes: int, steps: int, device: str) -> tuple[Run, list[Plan]]:
    """Train within a budget. Returns: the numbers, and each step's plan. Raises: OffmateError, or what goes wrong."""
    optimizer = subject.optimizer(model)
    model = compile_model(
        model,
        budget_bytes if device == "emulated" else "auto",
        optimizer=optimizer,
        device=device,
        cpu_budget=_HOST_BYTES if device == "emulated" else None,
        config=Config(cache_dir=None),
    )
    plans: list[Plan] = []
    run = _trained(subject, model, optimizer, steps, lambda: plans.append(model.offmate.plan))
    return run, plans


def _trained(
    subject: Subject,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    steps: int,
    after_each: Callable[[], None] = lambda: None,
) -> Run:
    """Train a model as any loop does, and return its numbers."""
    losses = []
    batches = subject.batches(steps)
    torch.manual_seed(SEED)
    for batch in batches:

        def compute(batch: Batch = batch) -> torch.Tensor:
            loss = subject.loss(subject.call(model, batch), batch)
            loss.backward()
            return loss

        loss = compute()
        losses.append(loss.detach().clone())
        if optimizer is not None:
            # This one computes losses again as it searches along a line.
            optimizer.step(compute) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
            optimizer.zero_grad()
        after_each()
    random_state = torch.get_rng_state()
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if optimizer is not None:
        tensors |= dict(_states(optimizer))
    else:
        tensors |= {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Run(losses, tensors, random_state)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer state {name} of parameter {index}", value.detach().clone()


def difference(plain: Run, run: Run) -> str:
    """Say in words what differs between two runs first; empty if nothing does."""
    for step, (expected, found) in enumerate(zip(plain.losses, run.losses)):
        if not same_bits(expected, found):
            return f"the loss of step {step + 1} is {found.item():.9g}, plain PyTorch's is {expected.item():.9g}"
    if plain.tensors.keys() != run.tensors.keys():
        names = sorted(plain.tensors.keys() ^ run.tensors.keys())
        return f"{len(names)} tensors exist on one side only, such as {names[0]}"
    odd = [name for name, expected in plain.tensors.items() if not same_bits(expected, run.tensors[name])]
    if odd:
        return (
            f"{len(odd)} of {len(plain.tensors)} tensors differ after training, {odd[0]} first{_by(plain, run, odd[0])}"
        )
    if not torch.equal(plain.random_state, run.random_state):
        return "the state of torch's random generator differs after training"
    return ""


def same_bits(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether two tensors are alike in shape, dtype and all values; not-a-number equals itself."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if torch.equal(expected, found):
        return True
    return bool(((expected == found) | ((expected != expected) & (found != found))).all())


def _by(plain: Run, run: Run, name: str) -> str:
    expected, found = plain.tensors[name], run.tensors[name]
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f" ({found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)})"
    return f" (by up to {(expected.double() - found.double()).abs().max().item():.2g})" if expected.numel() else ""


def _why_different(subject: Subject, plain: Run, steps: int) -> Outcome:
    """Tell a fault from a model whose plain run differs from itself."""
    model = subject.built()
    again = _trained(subject, model, subject.optimizer(model), steps)
    return Outcome.UNSTABLE if difference(plain, again) else Outcome.DIFFERENT


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
