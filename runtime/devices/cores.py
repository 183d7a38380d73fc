"""The host's cores: how many there are, and how many a worker beside an accelerator may take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_LEFT = 2  # cores for the thread that launches on the device, and for autograd's


def physical_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return on how many cores this process may run; two threads of one core count once.

    Parameters
    ----------
    cpus: the system's description of them. What it leaves out counts as a core of its own.
    """
    return len({_siblings(cpus / f"cpu{number}") or str(number) for number in os.sched_getaffinity(0)})


def worker_threads() -> int:
    """Return with how many threads a worker on the host computes while an accelerator is kept busy."""
    return max(1, min(torch.get_num_threads(), physical_cores() - _LEFT))


@contextlib.contextmanager
def as_a_worker() -> Iterator[None]:
    """Compute with as many threads as a worker inside, so that what is timed is what a worker takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(worker_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _siblings(cpu: Path) -> str:
    try:
        return (cpu / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return ""
