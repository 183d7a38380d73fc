"""Parameters that are cast from float32 copies on the way to a card, through pinned buffers: none is read too soon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offmate.runtime.devices import ring, streams

import offmate
from offmate.lowering import float32_copies

from .card import behaving
from .cases import WITH_MASTERS
from .loops import training

pytestmark = pytest.mark.timeout(240)
PIECE_BYTES = 1 << 18  # several for each parameter


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_PIECE_BYTES", PIECE_BYTES)
    for module in (ring, streams, float32_copies):
        monkeypatch.setattr(module, "BUFFERS_BYTES", 4 * PIECE_BYTES)


def test_nothing_is_read_before_it_is_there(cache_dir, tmp_path: Path, small_ring):
    """What arrives are the rounded copies of the last update, whoever computes with it."""
    path = offmate.StoragePath(tmp_path, read="1GB/s", write="1GB/s", parameters=True)
    settings = {"storage": path, "cpu_budget": 190 << 20, "budget": 160 << 20}
    config = offmate.Config(cache_dir=cache_dir, updates="host")
    with training(WITH_MASTERS, cache_dir, config=config, **settings) as loop:
        first = loop.step()
        names = loop.plan.schedule.cast_parameters
        assert names
        with behaving(deferred=1, link_bytes_per_s=first.bytes_in / 0.5, kernel_s=2e-5):
            assert sum(loop.step().poisoned_reads for _ in range(3)) == 0
        assert loop.plan.host_bytes <= 190 << 20
        session = loop.model._offmate_session
        session.residence.sync()
        for name, param in loop.model.named_parameters():
            if name in names:
                master = loop.optimizer.state[param]["master"]
                assert torch.equal(
                    session.truth.host.params[name].view(torch.int16), master.to(param.dtype).view(torch.int16)
                )
