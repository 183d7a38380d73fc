"""Blocks compiled with Inductor: plain PyTorch's numbers up to rounding, its draws, and the plan's bytes."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from offmate.runtime.memory.pools import pool_peaks
from offmate.runtime.replay.program import BlockProgram, Instruction
from offmate.runtime.replay.rehearsal import Updated, rehearse
from torch import nn

import offmate
from offmate.capture.model import trace_model
from offmate.lowering import inductor
from offmate.lowering.inductor import check_inductor
from offmate.programs.outline import Unfit
from offmate.programs.programs import ClassGraph

from ..loops import CPU_BUDGET, Loop, adamw, batch, plain, plan, tiny
from ..parity import HALF, LEAST, check
from ..training.test_parity_language import text_case
from ..training.test_parity_models import Decoder, momentum, token_case

INDUCTOR = {"backend": "inductor"}
TOLERANCE = 1e-5


@functools.cache
def why_not() -> str:
    """Why nothing can be compiled here; empty if it can."""
    try:
        check_inductor("emulated")
    except offmate.DeviceError as error:
        return str(error)
    return ""


@pytest.fixture
def compiler() -> None:
    """Skips the test where there is no compiler; `offmate.compile` asks for one."""
    if why_not():
        pytest.skip(why_not())


def fused(binding: Any) -> list[Any]:
    """What was compiled, per block and direction."""
    programs = [program for block in binding.blocks for program in (block.forward, block.backward)]
    return [program.fused for program in programs if program.fused is not None]


def binding_of(model: Any) -> Any:
    return model._offmate_session.training.prepared.binding


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have compiled, or pretended to, is not taken."""
    monkeypatch.setattr(inductor, "_known", {})


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be compiled runs operator by operator instead, one function per program all the same; its calls."""
    calls = []

    def compile_function(function: Any, *more: Any) -> Any:
        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            given = list(tensors)
            tensors.clear()
            return function(*given)

        calls.append(function)
        return run

    monkeypatch.setattr(inductor, "compile_function", compile_function)
    monkeypatch.setattr(inductor, "measure_peak", lambda *a: 0)
    return calls


@pytest.mark.usefixtures("compiler")
def test_llama(cache_dir: str) -> None:
    case = text_case("llama", "no_mask", "-inductor", config=INDUCTOR, optimizer=momentum)
    run = check(case, LEAST, cache_dir, tolerance=TOLERANCE)
    assert len(set(map(id, fused(binding_of(run.model))))) >= 4


@pytest.mark.usefixtures("compiler")
def test_dropout_draws_as_plain_pytorch(cache_dir: str) -> None:
    case = token_case("dropout-inductor", lambda: Decoder(dropout=0.2), config=INDUCTOR, optimizer=momentum)
    run = check(case, LEAST, cache_dir, tolerance=TOLERANCE)
    assert any(block.forward.fused is not None for block in binding_of(run.model).blocks)


@pytest.mark.usefixtures("compiler")
def test_one_function_per_program_is_exact(cache_dir: str, uncompiled: list[Any]) -> None:
    case = token_case("dropout-uncompiled", lambda: Decoder(dropout=0.2, tied=True), config=INDUCTOR, micro=2)
    run = check(case, HALF, cache_dir)
    assert len(fused(binding_of(run.model))) > len(uncompiled), "a class is compiled once, however many blocks it has"


def draws_more(function: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.rand(1)
    return function(*tensors)


def takes_more(function: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack([t, t]).select(0, 0) for t in function(*tensors)]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("run", "words"),
    [(draws_more, "since its code draws other random numbers"), (takes_more, r"came back in \d+ bytes instead of")],
)
def test_other_results_are_not_taken(
    run: Any, words: str, cache_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inductor, "compile_function", lambda function, *more: functools.partial(run, function))
    monkeypatch.setattr(inductor, "measure_peak", lambda *a: 0)
    case = token_case("dropout-spoiled", lambda: Decoder(dropout=0.2), config=INDUCTOR)
    with caplog.at_level(logging.INFO, "offmate"):
        check(case, LEAST, cache_dir)
    assert re.search(words, caplog.text)


def started(steps: int) -> tuple[Any, list[float]]:
    """The tiny model, compiled, after some steps as the least plan has it, which was made without a backend."""
    model = tiny()
    optimizer = adamw(model)
    known, config = plan("least"), offmate.Config(cache_dir=None, backend="inductor")
    offmate.compile(
        model, known.budget_bytes, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, plan=known,
        config=config,
    )  # fmt: skip
    return model, Loop(model, optimizer).steps(0, steps)


@pytest.mark.usefixtures("compiler", "uncompiled")
def test_a_plan_serves_every_backend() -> None:
    model, losses = started(2)
    assert losses == plain().steps(0, 2)
    assert fused(binding_of(model))
    assert model.offmate.peak_bytes == plan("least").predicted_peak_bytes
    reference = plain(2).model.eval()
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch(5))["scores"], reference(**batch(5))["scores"])
    assert model._offmate_session.residence.active is not model._offmate_session.training
    assert fused(model._offmate_session.residence.active.prepared.binding)


@pytest.mark.usefixtures("compiler", "uncompiled")
def test_what_holds_more_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(inductor, "measure_peak", lambda *a: 3 << 30)
    with caplog.at_level(logging.INFO, "offmate"):
        model, losses = started(2)
    assert not fused(binding_of(model))
    assert losses == plain().steps(0, 2)
    lines = [r.getMessage() for r in caplog.records if "not compiled" in r.getMessage()]
    assert any("the forward of blocks 1, 2" in line and "hold 3 GiB, but the plan counts" in line for line in lines)


@pytest.mark.usefixtures("compiler")
def test_what_inductor_cannot_do_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> Any:
        raise NotImplementedError("no lowering")

    monkeypatch.setattr(inductor, "compile_function", fails)
    with caplog.at_level(logging.WARNING, "offmate"):
        _, losses = started(2)
    assert losses == plain().steps(0, 2)
    assert "since Inductor failed (NotImplementedError: no lowering)" in caplog.text


@pytest.mark.usefixtures("compiler", "uncompiled")
def test_an_allocator_rehearses_what_is_compiled() -> None:
    binding, schedule = binding_of(started(1)[0]), plan("least").schedule
    single = replace(
        binding,
        blocks=tuple(
            replace(b, forward=replace(b.forward, fused=None), backward=replace(b.backward, fused=None))
            for b in binding.blocks
        ),
    )

    def left(how: Any) -> tuple[int, int]:
        rehearsal = rehearse(schedule, how, lambda n: Updated((schedule.item_bytes.get(f"s:{n}", 0),)), fresh=False)
        changes = list(chain(*rehearsal.stretches))
        ended = {change.number for change in changes if not change.bytes}
        return sum(change.bytes for change in changes if change.number not in ended), sum(pool_peaks(changes))

    assert left(binding) == left(single)


class Gated(nn.Module):
    """Takes one of its columns, by which is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden + torch.gather(self.second(hidden), 1, hidden.argmax(1, keepdim=True))
        return self.last(torch.tanh(hidden)).sum()


def test_a_choice_is_not_made_again_otherwise() -> None:
    config = offmate.Config(cache_dir=None)
    traced = trace_model(Gated().train(), (torch.randn(4, 8),), {}, config, True, lambda phase, share: None)
    found = []
    for block in traced.blocks:
        graph = ClassGraph(block.joint)
        everything = frozenset(graph.number.values()) - graph.resting
        assert inductor._decided_again(graph, graph.programs(frozenset())) is None
        found.append(inductor._decided_again(graph, graph.programs(everything)))
    assert "argmax" in found


def test_a_missing_compiler_is_named_at_once() -> None:
    from torch._inductor import config

    words = r'needs a C\+\+ compiler .* install g\+\+ .* backend at "eager"'
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(offmate.DeviceError, match=words):
        offmate.compile(tiny(), "1GiB", device="emulated", config=offmate.Config(**INDUCTOR))


@pytest.mark.parametrize(
    ("kind", "words"), [("hpu:0", "writes no code for 'hpu'"), ("cuda:0", "needs Triton on cuda:0")]
)
def test_a_device_without_code_is_named(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(offmate.DeviceError, match=f'{words}.*leave backend at "eager"'):
        check_inductor(kind)


def test_what_writes_without_saying_so_is_not_compiled() -> None:
    """cuDNN's batch normalisation, for which Inductor has a formula of its own."""
    step = Instruction(torch.ops.aten.cudnn_batch_norm.default, (), {}, ((0, 0),), True, (), (), 0, (), ())
    with pytest.raises(Unfit, match="writes running statistics"):
        inductor._check_operators(BlockProgram(1, (step,), {}, 0, 0, 0.0))
