"""Train a model twice, by plain PyTorch and by offmate in a budget, and compare everything bit for bit."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

import offmate
from offmate.machines.reference import ReferenceMeter
from offmate.session.maker import Maker

STEPS = 5
AMPLE = "ample"
HALF = "half_or_least"  # half of plain PyTorch's peak, or the least feasible budget where that is larger
LEAST = "least"
BUDGETS = (AMPLE, HALF, LEAST)
AMPLE_BYTES = 1 << 40
HOST_BYTES = 8 << 30

Batch = dict[str, Any]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """What the matrix trains with."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, fused=True)


def own_loss(output: Any, batch: Batch) -> torch.Tensor:
    """The loss that a Hugging Face model returns."""
    return output.loss


@dataclass(frozen=True)
class Case:
    """A model with its batches and its loop; `name` identifies the reference run.

    Parameters
    ----------
    build: makes the model, after the seed has been set. batches: one per step, used in turn.
    inputs: what of a batch the model is called with. around: context of the forward and the loss.
    loss: of the model's output and the batch.
    optimizer: makes it. scheduler: makes one, or None. planned: whether offmate is given the optimizer.
    before_step: what the loop does between backward and step. micro: backwards per step.
    max_grad_norm: gradients are clipped to it; their norms are compared with the losses.
    compares_outputs: whether every output is compared, not only losses.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    batches: Callable[[], list[Batch]]
    inputs: Callable[[Batch], dict[str, Any] | tuple[Any, ...]] = lambda batch: batch
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    loss: Callable[[Any, Batch], torch.Tensor] = own_loss
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = adamw
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    planned: bool = True
    before_step: Callable[[torch.nn.Module], None] | None = None
    micro: int = 1
    max_grad_norm: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    compares_outputs: bool = True


@dataclass(frozen=True)
class Run:
    """What a training run leaves behind; `predicted_bytes` is the largest peak that a plan in it predicts."""

    losses: list[torch.Tensor]
    outputs: list[list[torch.Tensor]]
    state: dict[str, torch.Tensor]
    optimizer_state: list[torch.Tensor]
    random_state: torch.Tensor
    peak_bytes: int
    plan: offmate.Plan | None = None
    model: torch.nn.Module | None = None
    predicted_bytes: int = 0


_references: dict[str, Run] = {}
_least: dict[str, int] = {}


def built(case: Case) -> torch.nn.Module:
    """The case's model, the same every time, in training mode."""
    torch.manual_seed(0)
    return case.build().train()


def reference(case: Case) -> Run:
    """The case under plain PyTorch, run once per session."""
    if case.name not in _references:
        _references[case.name] = _plain(case)
    return _references[case.name]


def _plain(case: Case) -> Run:
    model = built(case)
    optimizer = case.optimizer(model)
    meter = ReferenceMeter(model, optimizer)
    losses, outputs = _train(case, model, optimizer, meter)
    return _run(model, optimizer, losses, outputs, meter.peak_bytes)


def _train(
    case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer, meter: ReferenceMeter | None = None
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    batches = case.batches()
    losses: list[torch.Tensor] = []
    outputs: list[list[torch.Tensor]] = []
    torch.manual_seed(7)
    for step in range(STEPS):
        measured = meter is not None and step == 1
        if measured:
            meter.__enter__()
        for micro in range(case.micro):
            batch = batches[(step * case.micro + micro) % len(batches)]
            loss = _forward_backward(case, model, batch, outputs, keep=not measured)
            losses.append(loss)
        if case.before_step is not None:
            case.before_step(model)
        planned = hasattr(model, "offmate") and case.planned
        if case.max_grad_norm is not None and not planned:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm))
        optimizer.step()
        if case.max_grad_norm is not None and planned:
            losses.append(model.offmate.grad_norm.clone())
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if measured:
            meter.__exit__(None, None, None)
    return losses, outputs


def _forward_backward(
    case: Case, model: torch.nn.Module, batch: Batch, outputs: list[list[torch.Tensor]], keep: bool
) -> torch.Tensor:
    given = case.inputs(batch)
    with case.around():
        output = model(*given) if isinstance(given, tuple) else model(**given)
        loss = case.loss(output, batch)
    (loss / case.micro if case.micro > 1 else loss).backward()
    if keep and case.compares_outputs:
        outputs.append([t.detach().clone() for t in tensors_of(output)])
    return loss.detach().clone()


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output, caches left out."""
    if isinstance(output, Mapping):
        output = {k: v for k, v in output.items() if k != "past_key_values"}
    return [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]


def _run(model: Any, optimizer: Any, losses: Any, outputs: Any, peak_bytes: int, plan: Any = None) -> Run:
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    moments = [
        t.clone()
        for _, entry in sorted(optimizer.state_dict()["state"].items())
        for _, t in sorted(entry.items())
        if isinstance(t, torch.Tensor)
    ]
    return Run(losses, outputs, state, moments, torch.get_rng_state(), peak_bytes, plan, model)


def budgeted(case: Case, budget: str | int, cache_dir: str | None) -> Run:
    """The case under offmate."""
    budget_bytes = budget if isinstance(budget, int) else _bytes_of(case, budget, cache_dir)
    model = built(case)
    optimizer = case.optimizer(model)
    random_state = torch.get_rng_state()
    model = offmate.compile(
        model,
        budget_bytes,
        optimizer=optimizer if case.planned else None,
        **gate_of(case),
        device="emulated",
        cpu_budget=HOST_BYTES,
        config=offmate.Config(cache_dir=cache_dir, **case.config),
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    # A plan is made again once the user's code was seen to hold more than the first one reserves.
    used: list[Any] = []
    bound = Maker._bound
    with mock.patch.object(Maker, "_bound", lambda *given: (used.append(given[1].plan), bound(*given))[1]):
        losses, outputs = _train(case, model, optimizer)
    plan = model.offmate.plan
    _least.setdefault(case.name, plan.least_budget_bytes)
    run = _run(model, optimizer, losses, outputs, model.offmate.peak_bytes, plan)
    return replace(run, predicted_bytes=max(one.predicted_peak_bytes for one in used))


def gate_of(case: Case) -> dict[str, Any]:
    """What compile and plan are told of clipping and accumulation."""
    if not case.planned:
        return {}
    return {"max_grad_norm": case.max_grad_norm, "accumulation_steps": case.micro}


def _bytes_of(case: Case, budget: str, cache_dir: str | None) -> int:
    if budget == AMPLE:
        return AMPLE_BYTES
    least = least_bytes(case, cache_dir)
    return least if budget == LEAST else max(least, reference(case).peak_bytes // 2)


def least_bytes(case: Case, cache_dir: str | None) -> int:
    """The least feasible budget, as a plan reports it."""
    if case.name not in _least:
        model = built(case)
        plan = offmate.plan(
            model,
            AMPLE_BYTES,
            example_inputs=case.inputs(case.batches()[0]),
            optimizer=case.optimizer(model) if case.planned else None,
            **gate_of(case),
            device="emulated",
            cpu_budget=HOST_BYTES,
            config=offmate.Config(cache_dir=cache_dir, **case.config),
        )
        _least[case.name] = plan.least_budget_bytes
    return _least[case.name]


def check(case: Case, budget: str | int, cache_dir: str | None, tolerance: float = 0.0) -> Run:
    """Train both ways and assert that all numbers are the same, and that the budget was kept as predicted.

    Parameters
    ----------
    tolerance: largest difference allowed; 0 asks for the same bits.
    """
    plain, run = reference(case), budgeted(case, budget, cache_dir)
    same = same_bits if tolerance == 0 else functools.partial(within, tolerance)
    same("loss", plain.losses, run.losses)
    if tolerance == 0:
        # The step that is measured returns no outputs, so that the reference's peak is that of a training loop.
        kept = [o for i, o in enumerate(run.outputs) if i // case.micro != 1]
        for step, (a, b) in enumerate(zip(plain.outputs, kept, strict=True)):
            same(f"outputs of call {step}", a, b)
        same("optimizer state", plain.optimizer_state, run.optimizer_state)
    assert list(plain.state) == list(run.state)
    for name, value in plain.state.items():
        same(name, [value], [run.state[name]])
    assert torch.equal(plain.random_state, run.random_state), "the random state differs after training"
    assert run.plan is not None
    peak, predicted = run.peak_bytes, run.predicted_bytes
    assert peak == predicted, f"{peak:,} bytes on the device at most, {predicted:,} predicted"
    assert run.peak_bytes <= run.plan.budget_bytes
    return run


def same_bits(what: str, expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Assert that two lists of tensors are the same, bit for bit."""
    assert len(expected) == len(found), f"{what}: {len(expected)} tensors expected, {len(found)} found"
    for index, (a, b) in enumerate(zip(expected, found)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what} {index}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        if not torch.equal(a.nan_to_num(), b.nan_to_num()):
            differs = (a.double() - b.double()).abs()
            raise AssertionError(
                f"{what} {index}: {int((a != b).sum())} of {a.numel()} elements differ by up to {differs.max():.1e}"
            )


def within(tolerance: float, what: str, expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Assert that two lists of tensors differ by no more than `tolerance`."""
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert (a.double() - b.double()).abs().max() <= tolerance, f"{what} {index}"


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """A model that shares nothing with this one."""
    return copy.deepcopy(model)
