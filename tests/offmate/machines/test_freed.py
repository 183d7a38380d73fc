"""Memory that was freed goes back to the system, and training gives it back once plans have moved everything."""

import ctypes
from pathlib import Path

import pytest
import torch

import offmate
from offmate.machines.freed import return_freed
from offmate.session import residence

MIB = 1 << 20


def own_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(status["RssAnon"].split()[0]) << 10


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps freed memory to itself")
def test_freed_memory_leaves_the_process() -> None:
    large = torch.zeros(24 * MIB, dtype=torch.uint8)
    del large  # from now on glibc takes blocks of this size from its heap
    blocks, between = [], []
    for _ in range(12):
        blocks.append(torch.ones(8 * MIB, dtype=torch.uint8))
        between.append(torch.ones(64 << 10, dtype=torch.uint8))  # so that no block is at the heap's end
    del blocks
    return_freed()
    before = own_bytes()
    blocks = [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(12)]
    taken = own_bytes() - before
    del blocks
    return_freed()
    assert taken > 90 * MIB
    assert own_bytes() - before < 16 * MIB


def test_training_gives_memory_back_before_its_first_two_iterations_only(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[float] = []
    times: list[int] = []
    monkeypatch.setattr(residence, "return_freed", lambda: times.append(len(done)))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    offmate.compile(model, "1GiB", optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None))
    for _ in range(4):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done.append(loss.item())
    assert times == [0, 1]
