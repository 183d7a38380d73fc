"""What was planned or measured with other kernels is not taken for this call's."""

from __future__ import annotations

import pytest
import torch

import offmate
from offmate.guards.surroundings import surroundings
from offmate.planning import fingerprint

from ..loops import AMPLE, CPU_BUDGET, adamw, batch, tiny


def planned(cache_dir):
    model = tiny()
    settings = {"optimizer": adamw(model), "device": "emulated", "cpu_budget": CPU_BUDGET}
    config = offmate.Config(cache_dir=cache_dir)
    return offmate.plan(model, AMPLE, example_inputs=batch(0), config=config, **settings)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_cached_plan_is_not_used_under_other_kernels(cache_dir, deterministic):
    own = planned(cache_dir)
    assert planned(cache_dir).from_cache
    torch.use_deterministic_algorithms(False)
    other = planned(cache_dir)
    assert other.fingerprint != own.fingerprint


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        (torch.backends.cudnn, "deterministic", True),
    ],
)
def test_settings_of_a_card_are_part_of_what_a_call_is(where, name, value):
    before, own = getattr(where, name), surroundings()
    setattr(where, name, value)
    try:
        assert surroundings() != own
    finally:
        setattr(where, name, before)
    assert surroundings() == own


def test_the_allocator_is_part_of_the_device(monkeypatch):
    request = type("Request", (), {"device": "cuda:0"})()
    monkeypatch.setattr(fingerprint, "words", lambda where: "a card")
    found = set()
    for words in ("defaults", "pinned_num_register_threads:4"):
        monkeypatch.setattr(fingerprint, "allocator_words", lambda where, words=words: words)
        found.add(repr(fingerprint._of_device(request, None)))
    assert len(found) == 2
