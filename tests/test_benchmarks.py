"""Benchmarks that patch offmate's own code still run; their figures are not tested."""

import torch

from benchmarks import gate


def test_slowed_steps_before_and_after_have_the_same_losses(monkeypatch):
    for name, value in {"TOKENS": 8, "LAYERS": 2, "HIDDEN": 64, "VOCAB": 32}.items():
        monkeypatch.setattr(gate, name, value)
    threads = torch.get_num_threads()

    found = gate.measured(n_steps=1, slower=1.0, budget=0.5)

    assert found["identical losses"]
    assert len(found["before"]["measured, median"]) == len(found["after"]["measured, median"]) == 1
    assert torch.get_num_threads() == threads
