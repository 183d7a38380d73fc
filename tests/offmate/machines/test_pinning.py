"""Where little host memory can be pinned a plan counts with the rates of staged copies."""

from __future__ import annotations

import pytest
import torch

from offmate.machines import pinning
from offmate.machines.host_memory import is_wsl
from offmate.machines.links import LinkRates

MIB = 1 << 20
PINNED, STAGED = LinkRates(24e9, 20e9, 40e9, 90e9, 0.1, 1e-5), LinkRates(8e9, 5e9, 8e9, 0.0, 0.0, 5e-5)


@pytest.fixture(autouse=True)
def figures(sim, monkeypatch):
    """Known rates; and no WSL, wherever the tests run."""
    monkeypatch.setattr(pinning, "measure_link", lambda device: STAGED if device.host_memory.refused else PINNED)
    monkeypatch.setattr(pinning, "is_wsl", lambda: False)


def rates(params, others_bytes=0):
    return pinning.as_pinned(PINNED, params, others_bytes, torch.device("sim:0"))


def test_pinned_parameters_and_such_as_were_never_pinned_keep_the_rates(sim):
    assert rates([torch.empty(MIB, pin_memory=True)], 64 * MIB) == PINNED
    assert rates([torch.empty(MIB)]) == PINNED
    tied = torch.empty(MIB)
    assert rates([torch.empty(MIB, pin_memory=True), tied[:1], tied[1:]]) == PINNED


def test_parameters_that_could_not_be_pinned_slow_the_mean_copy_down(sim):
    found = rates([torch.empty(MIB, pin_memory=True), torch.empty(MIB)], 8 * MIB)
    share = 0.25
    assert found.in_bytes_per_s == pytest.approx(1 / (share / 24e9 + (1 - share) / 8e9))
    assert found.out_bytes_per_s == pytest.approx(1 / (share / 20e9 + (1 - share) / 5e9))
    assert found.per_copy_s == pytest.approx(share * 1e-5 + (1 - share) * 5e-5)
    assert found.host_memory_bytes_per_s == 90e9 and found.manage_s == 0.1


@pytest.mark.parametrize(("more", "staged"), [(0, True), (96, True), (1024, False)])
def test_under_wsl_the_limit_is_tried_before_planning(sim, monkeypatch, more, staged):
    monkeypatch.setattr(pinning, "is_wsl", lambda: True)
    sim.let_pin((32 + more) * MIB)
    torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    found = rates([torch.empty(32 * MIB)], 64 * MIB)
    assert (found != PINNED) is staged
    sim.native.empty_host_cache()


def test_wsl_is_known_by_its_kernel(tmp_path):
    release = tmp_path / "sys" / "kernel" / "osrelease"
    release.parent.mkdir(parents=True)
    for text, expected in (("5.15.153.1-microsoft-standard-WSL2\n", True), ("6.8.0-45-generic\n", False)):
        release.write_text(text)
        assert is_wsl(tmp_path) is expected
    assert not is_wsl(tmp_path / "nothing")
