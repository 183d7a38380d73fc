"""Optimizers of one parameter, which workers build while the loop goes on."""

from __future__ import annotations

import sys
import threading

import torch

from offmate.optim.lone import lone


def test_attributes_may_be_added_meanwhile() -> None:
    """As schedulers and scalers do to the optimizer that it stands in for."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    done, interval = threading.Event(), sys.getswitchinterval()

    def add() -> None:
        while not done.is_set():
            for number in range(200):
                setattr(optimizer, f"added_{number}", number)
            for number in range(200):
                delattr(optimizer, f"added_{number}")

    adding = threading.Thread(target=add)
    sys.setswitchinterval(1e-6)
    adding.start()
    try:
        built = [lone(torch.optim.SGD, optimizer.__dict__, [], {}) for _ in range(2000)]
    finally:
        done.set()
        adding.join()
        sys.setswitchinterval(interval)
    assert all(one.defaults is optimizer.defaults for one in built)
