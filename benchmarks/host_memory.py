"""Host updates beside copies: measured, and as the model of a shared host memory says.

`python -m benchmarks.host_memory [--json FILE] [--rounds 25]` runs updates in one thread and copies in another, as the
emulated device does. Each copy reads and writes the same memory, so it counts twice. Copies take a quarter to four
times the time of the updates. In every round each mix is timed three times, its updates alone, its copies alone and
both together, so that a machine whose speed drifts changes all alike; medians are shown. The mix of equal times gives
the memory's rate, as `offmate profile` finds it. What is measured stands beside the simulator's time for that rate.
"alone" is the time without a shared memory: the longer of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
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
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mixes = _measured(arguments.rounds)
    memory_bytes_per_s = mixes[1.0].memory_bytes_per_s
    rows = [mix.row(memory_bytes_per_s) for mix in mixes.values()]
    title = f"Updates beside copies; memory {memory_bytes_per_s / 1e9:.1f} GB/s, 0 for no limit"
    show(title, rows, width=120)
    if arguments.json:
        result = {"machine": machine(), "memory_bytes_per_s": memory_bytes_per_s, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


@dataclass(frozen=True)
class _Mix:
    """So many copies beside the updates, and the median seconds of each alone and of both together."""

    copies: int
    updates_s: float
    copies_s: float
    together_s: float

    @property
    def alone_s(self) -> float:
        """Seconds without a shared memory."""
        return max(self.updates_s, self.copies_s)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes of memory per second with both under way; 0 if neither slows down the other."""
        moved = _UPDATE_BYTES * _ELEMENTS * _UPDATES + _PASSES * self.copies * _COPY_BYTES
        return 0.0 if self.together_s <= 1.05 * self.alone_s else moved / self.together_s

    def simulated_s(self, memory_bytes_per_s: float) -> float:
        """Return the simulator's seconds; a link's bytes are those of memory."""
        link = _PASSES * self.copies * _COPY_BYTES / self.copies_s
        updated = _UPDATE_BYTES * _ELEMENTS * _UPDATES / self.updates_s
        one = Machine(
            Rates(link, link, 2 * link, host_memory_bytes_per_s=memory_bytes_per_s, worker_bytes_per_s=updated)
        )
        one.wait([one.submit(Resource.CPU, self.updates_s), one.submit(Resource.IN, self.copies_s)])
        return one.now

    def row(self, memory_bytes_per_s: float) -> dict[str, Any]:
        """Return the mix beside the model."""
        simulated_s = self.simulated_s(memory_bytes_per_s)
        return {
            "copies' time in the updates'": self.copies_s / self.updates_s,
            "alone s": self.alone_s,
            "measured s": self.together_s,
            "simulated s": simulated_s,
            "simulated / measured": simulated_s / self.together_s,
        }


def _measured(rounds: int) -> dict[float, _Mix]:
    """Return all mixes, by the time of the copies in that of the updates."""
    work = _Work()
    updates_s, copy_s = (statistics.median(work.seconds(*one) for _ in range(3)) for one in ((0, True), (16, False)))
    counts = {mix: max(1, round(16 * mix * updates_s / copy_s)) for mix in _MIXES}
    taken: dict[float, list[tuple[float, float, float]]] = {mix: [] for mix in _MIXES}
    for _ in range(rounds):
        for mix, copies in counts.items():
            ways = ((0, True), (copies, False), (copies, True))
            alone_s, copies_s, together_s = (work.seconds(*way) for way in ways)
            taken[mix].append((alone_s, copies_s, together_s))
    return {mix: _Mix(counts[mix], *map(statistics.median, zip(*taken[mix]))) for mix in _MIXES}


class _Work:
    """Updates and copies of an emulated device."""

    def __init__(self) -> None:
        self._device = EmulatedDevice(1 << 40)
        params = [torch.nn.Parameter(torch.ones(_ELEMENTS)) for _ in range(_UPDATES)]
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        self._steps = [torch.optim.AdamW([param], fused=True).step for param in params]
        self._source, self._target = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))

    def seconds(self, copies: int, updates: bool) -> float:
        """Return the seconds of updates and copies that start together."""
        start = time.perf_counter()
        events = [self._device.update_on_host(step, ()) for step in self._steps if updates]
        events += [self._device.copy_in(self._target, self._source, ()) for _ in range(copies)]
        for event in events:
            event.synchronize()
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
