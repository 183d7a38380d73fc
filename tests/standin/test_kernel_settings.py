"""Plans are for the kernels that they were measured with."""

from __future__ import annotations

import pytest
import torch

import offmate

from .cases import CASES
from .loops import AMPLE_BYTES, HOST_BYTES

pytestmark = pytest.mark.timeout(120)


def planned(cache_dir: str) -> offmate.Plan:
    case = CASES["llama in bfloat16"]
    model = case.model()
    return offmate.plan(
        model, AMPLE_BYTES, example_inputs=case.batch(), optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        device="cuda", cpu_budget=HOST_BYTES, config=offmate.Config(cache_dir=cache_dir),
    )  # fmt: skip


def test_a_plan_of_other_kernels_is_not_used(cache_dir, monkeypatch):
    """Deterministic kernels of a card are other ones, with other seconds and workspace."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    usual = planned(cache_dir)
    assert planned(cache_dir).fingerprint == usual.fingerprint, "the same request has another fingerprint"
    torch.use_deterministic_algorithms(True)
    try:
        assert planned(cache_dir).fingerprint != usual.fingerprint, "deterministic kernels have the usual fingerprint"
    finally:
        torch.use_deterministic_algorithms(False)
