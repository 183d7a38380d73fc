"""What this machine can do, measured: the figures of a hardware file, each with its source."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .hardware import FORMAT
from .host_memory import available_host_bytes
from .progress import Progress
from .runtime.emulated import EmulatedDevice

_UNLIMITED_BYTES = 2**62
_MIB = 1 << 20
_REPEATS = 7
_DIRECTIONS = ("in", "out", "both")


@dataclass(frozen=True)
class Sizes:
    """How much is measured at a time.

    Parameters
    ----------
    copies_bytes: sizes of the timed copies, ascending; the largest one's rates are the machine's.
    matrix: rows and columns of the square matrices that are multiplied.
    elements: float32 parameters of the timed updates and of the timed elementwise operation.
    """

    copies_bytes: tuple[int, ...] = (_MIB // 16, _MIB, 16 * _MIB, 128 * _MIB)
    matrix: int = 1024
    elements: int = 1 << 24


def measure_machine(say: Progress, sizes: Sizes | None = None) -> dict[str, Any]:
    """Measure the emulated device of this machine: its copies, updates, matrix products and memory.

    Parameters
    ----------
    say: told of progress. sizes: how much at a time.

    Returns: a hardware file as JSON's own types. Every figure is the best of a few repeats, after one to warm up:
    what else runs on the machine can only slow it down.
    """
    sizes = sizes or Sizes()
    how = f"best of {_REPEATS}, measured on {machine_words()}, {date.today().isoformat()}"
    say("copies", 0.0)
    copies = _copies(sizes.copies_bytes)
    say("updates", 0.5)
    cpu, device = _updates(sizes.elements)
    say("matrix products", 0.7)
    products = {name: _products(dtype, sizes.matrix) for name, dtype in _dtypes().items()}
    say("memory", 0.9)
    memory, launch_s = _memory(sizes.elements), _launch_s()
    largest = {row["direction"]: row["bytes_per_s"] for row in copies}
    half = available_host_bytes() // 2
    figures = {
        "device_memory_bytes": (half, "half of the host memory that was available: the CPU plays the device"),
        "host_memory_bytes": (half, "the other half"),
        "memory_bytes_per_s": (memory, f"two float32 vectors added into a third, all threads; {how}"),
        "launch_s": (launch_s, f"an operation on one element; {how}"),
        "in_bytes_per_s": (largest["in"], f"largest copy below, alone; {how}"),
        "out_bytes_per_s": (largest["out"], f"largest copy below, alone; {how}"),
        "both_bytes_per_s": (largest["both"], f"largest copy below, both directions at once, added up; {how}"),
        "cpu_update_bytes_per_s": (cpu, f"fused AdamW on the update worker's one thread; {how}"),
        "device_update_bytes_per_s": (device, f"fused AdamW on all threads; {how}"),
    }
    return {
        "format": FORMAT,
        "name": f"emulated device on {machine_words()}",
        "shared_cores": True,
        **{name: _figure(value, source) for name, (value, source) in figures.items()},
        "matrix_flops_per_s": {
            name: _figure(rate, f"product of two matrices of {sizes.matrix} x {sizes.matrix}, all threads; {how}")
            for name, rate in products.items()
        },
        "copies": copies,
    }


def _figure(value: float, source: str) -> dict[str, Any]:
    """A figure to four significant digits; more would be noise."""
    rounded = float(f"{value:.4g}")
    return {"value": int(rounded) if rounded >= 1e4 else rounded, "source": source}


def machine_words() -> str:
    """This machine's processor, its threads, and the versions that matter, for a figure's source."""
    return (
        f"{processor()} with {torch.get_num_threads()} threads (PyTorch {torch.__version__}, Python "
        f"{platform.python_version()})"
    )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system gives it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _dtypes() -> dict[str, torch.dtype]:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _copies(sizes_bytes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Rates by size and direction; "both" adds up a copy each way at once."""
    device = EmulatedDevice(_UNLIMITED_BYTES)
    try:
        return [
            {"direction": direction, "bytes": size, "bytes_per_s": round(_copy_rate(device, direction, size))}
            for size in sizes_bytes
            for direction in _DIRECTIONS
        ]
    finally:
        device.close()


def _copy_rate(device: EmulatedDevice, direction: str, size_bytes: int) -> float:
    # Written once, so that every page is memory of its own.
    host, inside, back = (torch.ones(size_bytes, dtype=torch.uint8) for _ in range(3))

    def copy() -> None:
        events = [device.copy_in(inside, host, ())] if direction != "out" else []
        events += [device.copy_out(back, inside if direction == "out" else host, ())] if direction != "in" else []
        for event in events:
            event.synchronize()

    return (2 if direction == "both" else 1) * size_bytes / _seconds(copy)


def _updates(elements: int) -> tuple[float, float]:
    """Bytes of float32 parameters per second that AdamW updates, on the update worker and on the training thread."""
    param = torch.nn.Parameter(torch.zeros(elements))
    param.grad = torch.full_like(param, 1e-3)
    optimizer = torch.optim.AdamW([param], fused=True)
    device = EmulatedDevice(_UNLIMITED_BYTES)
    try:
        on_worker = _seconds(lambda: device.update_on_host(optimizer.step, ()).synchronize())
    finally:
        device.close()
    return 4 * elements / on_worker, 4 * elements / _seconds(optimizer.step)


def _products(dtype: torch.dtype, size: int) -> float:
    a, b, c = (torch.ones(size, size, dtype=dtype) for _ in range(3))
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=c))


def _memory(elements: int) -> float:
    a, b, c = (torch.ones(elements) for _ in range(3))
    return 12 * elements / _seconds(lambda: torch.add(a, b, out=c))


def _launch_s(times: int = 1000) -> float:
    one = torch.ones(1)

    def many() -> None:
        for _ in range(times):
            torch.add(one, one, out=one)

    return _seconds(many) / times
