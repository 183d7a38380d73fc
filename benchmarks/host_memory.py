"""Host updates beside copies: measured, and as the model of a shared host memory says.

`python -m benchmarks.host_memory [--json FILE] [--rounds 7]` runs updates in one thread and copies in another, as the
emulated device does. Each copy reads and writes the same memory, so it counts twice. Both are timed alone and then
together, with as many copies as take the time of the updates: this gives the memory's rate, as `offmate profile` finds
it. Then copies take a quarter to four times the time of the updates, and what is measured stands beside the simulator's
time for that rate. "alone" is the time without a shared memory: the longer of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.solver.machine import Machine
from offmate.solver.resources import Rates, Resource

from .overhead import machine
from .tables import show

_ELEMENTS, _UPDATES = 2**24, 4
_COPY_BYTES = 2**26
_UPDATE_BYTES = 28  # of memory per float32 parameter
_PASSES = 2  # of a copy over this memory
_MIXES = (0.25, 0.5, 1.0, 2.0, 4.0)  # time of the copies alone, in that of the updates alone


def main() -> None:
    """Measure, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = _Found(arguments.rounds)
    rows = list(map(found.row, _MIXES))
    title = f"Updates beside copies; memory {found.memory_bytes_per_s / 1e9:.1f} GB/s, 0 for no limit"
    show(title, rows, width=120)
    if arguments.json:
        result = {"machine": machine(), "memory_bytes_per_s": found.memory_bytes_per_s, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


class _Found:
    """What a machine's updates and copies take, alone and together, in seconds and bytes of memory per second."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._device = rounds, EmulatedDevice(1 << 40)
        params = [torch.nn.Parameter(torch.ones(_ELEMENTS)) for _ in range(_UPDATES)]
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        self._steps = [torch.optim.AdamW([param], fused=True).step for param in params]
        self._source, self._target = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
        self.updates_s, copies = self.timed(0, True), 16
        self.copy_s = self.timed(copies, False) / copies
        even = self.copies(1.0)
        together_s = self.timed(even, True)
        moved = _UPDATE_BYTES * _ELEMENTS * _UPDATES + _PASSES * even * _COPY_BYTES
        undisturbed = together_s <= 1.05 * max(self.updates_s, even * self.copy_s)
        self.memory_bytes_per_s = 0.0 if undisturbed else moved / together_s

    def copies(self, mix: float) -> int:
        """Return how many copies take that share of the updates' time."""
        return max(1, round(mix * self.updates_s / self.copy_s))

    def timed(self, copies: int, updates: bool) -> float:
        """Return the median seconds of updates and copies that start together."""
        taken = []
        for _ in range(self._rounds + 1):
            start = time.perf_counter()
            events = [self._device.update_on_host(step, ()) for step in self._steps if updates]
            events += [self._device.copy_in(self._target, self._source, ()) for _ in range(copies)]
            for event in events:
                event.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def simulated(self, copies: int) -> float:
        """Return the simulator's seconds; a link's bytes are those of memory."""
        link = _PASSES * _COPY_BYTES / self.copy_s
        updated = _UPDATE_BYTES * _ELEMENTS * _UPDATES / self.updates_s
        one = Machine(
            Rates(link, link, 2 * link, host_memory_bytes_per_s=self.memory_bytes_per_s, worker_bytes_per_s=updated)
        )
        jobs = [one.submit(Resource.CPU, self.updates_s), one.submit(Resource.IN, copies * self.copy_s)]
        one.wait(jobs)
        return one.now

    def row(self, mix: float) -> dict[str, Any]:
        """Measure one mix, and predict it."""
        copies = self.copies(mix)
        measured_s, simulated_s = self.timed(copies, True), self.simulated(copies)
        return {
            "copies' time in the updates'": copies * self.copy_s / self.updates_s,
            "alone s": max(self.updates_s, copies * self.copy_s),
            "measured s": measured_s,
            "simulated s": simulated_s,
            "simulated / measured": simulated_s / measured_s,
        }


if __name__ == "__main__":
    main()
