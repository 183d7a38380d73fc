"""Kernels that lay out their results otherwise than their fake kernels promise."""

from __future__ import annotations

import logging

import pytest
import torch
from offmate.runtime.replay import program
from torch import nn

import offmate
from offmate.capture import true_strides
from tests.offmate import parity


class Transposed(nn.Module):
    """A batch norm, a softplus and a layer norm of sequences whose channels are not last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(6, 4)
        self.batch, self.layer = nn.BatchNorm1d(16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.batch(self.first(x).transpose(1, 2))
        h = torch.nn.functional.softplus(h.transpose(1, 2)) * h.transpose(1, 2)
        h = self.layer(h.flip(1).transpose(1, 2).contiguous().transpose(1, 2))
        return {"loss": self.last(h.transpose(1, 2)).square().mean()}


def _batches() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(seed))} for seed in range(5)]


CASE = parity.Case("transposed", Transposed, _batches, loss=lambda output, batch: output["loss"])


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
def test_trains_with_the_strides_of_the_real_kernels(budget: str, caplog: pytest.LogCaptureFixture) -> None:
    parity.check(CASE, budget, None)
    assert "fake kernel" not in caplog.text


def test_a_layout_that_was_not_foreseen_is_copied_into_the_promised_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_warned", set())
    plain = parity.reference(CASE)
    model = parity.built(CASE)
    optimizer = parity.adamw(model)
    with true_strides.fake_kernels_believed(), caplog.at_level(logging.WARNING, logger="offmate"):
        model = offmate.compile(
            model, parity.AMPLE_BYTES, optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None)
        )
        losses, _ = parity._train(CASE, model, optimizer)
    parity.within(1e-5, "loss", plain.losses, losses)
    assert model.offmate.peak_bytes == model.offmate.plan.predicted_peak_bytes
    said = [r.getMessage() for r in caplog.records if "its fake kernel promised" in r.getMessage()]
    assert len(said) == len(set(said)) > 0
    assert any("are copied into that layout" in line for line in said)


def test_a_plan_for_another_machine_runs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(true_strides, "_ask", lambda *call: pytest.fail("a kernel ran"))
    model = parity.built(CASE)
    plan = offmate.plan(
        model, "1GiB", example_inputs=_batches()[0], optimizer=parity.adamw(model), hardware="rtx3060",
        cpu_budget="8GiB", config=offmate.Config(cache_dir=None),
    )  # fmt: skip
    assert plan.least_budget_bytes > 0
