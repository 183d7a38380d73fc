"""What the user's code holds between forward and backward is measured, whatever else goes meanwhile."""

import logging

import pytest
import torch

import offmate

MIB = 1 << 20


def test_what_was_kept_from_another_batch_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    offmate.compile(model, "64MiB", optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None))
    kept: list[torch.Tensor] = []
    for rows in (2, 4):
        with caplog.at_level(logging.INFO, "offmate"):
            out = model(torch.ones(rows, 8))
            kept.clear()
            kept.append(torch.zeros(3 * MIB, dtype=torch.uint8))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.offmate.sync()
    held = [record.getMessage() for record in caplog.records if "your code holds" in record.getMessage()]
    assert held == ["your code holds 3 MiB between forward and backward"] * 2
