"""Benchmarks of this machine: the figures of a hardware file, each with its source."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ..progress import Progress
from ..runtime.devices.device import Device
from .curve import fitted
from .devices import EMULATED, accelerator, make_device, words
from .figures import with_source
from .hardware import FORMAT
from .host_memory import available_host_bytes
from .links import LinkRates, measure_copies, measure_host_memory
from .replaying import replaying_s
from .stopwatch import clock_of, launching_s

_UNLIMITED_BYTES = 2**62
_MIB = 1 << 20
_REPEATS = 7
_HOST_CLOCK = clock_of(torch.device("cpu"))


@dataclass(frozen=True)
class Sizes:
    """The sizes of the operations that are timed.

    Parameters
    ----------
    copies_bytes: sizes of the timed copies, ascending; rates and seconds per copy are those of a line through them.
    matrix: rows and columns of the square matrices that are multiplied.
    elements: float32 parameters of the timed updates and of the timed elementwise operation.
    """

    copies_bytes: tuple[int, ...] = (_MIB // 64, _MIB // 16, _MIB, 16 * _MIB, 128 * _MIB)
    matrix: int = 1024
    elements: int = 1 << 24


_CARD_SIZES = Sizes(copies_bytes=(*Sizes.copies_bytes, 1 << 30), matrix=4096, elements=1 << 26)


def measure_machine(
    say: Progress, sizes: Sizes | None = None, kind: str = EMULATED, masters: Any = None
) -> dict[str, Any]:
    """Measure a device of this machine: its copies, updates, matrix products and memory.

    Parameters
    ----------
    say: reports progress. sizes: None takes larger ones for a card. kind: of device, from `device_kind`.
    masters: the class of AdamW that updates float32 copies; None to measure float32 parameters only.

    Returns: a hardware file as JSON types. Every figure is the best of a few repeats, after one to warm up: other
    programs on the machine can only slow it down.
    """
    card = accelerator(kind)
    where = torch.device("cpu") if card is None else card
    sizes = sizes or (Sizes() if card is None else _CARD_SIZES)
    how = f"best of {_REPEATS}, measured on {machine_words()}, {date.today().isoformat()}"
    device = make_device(kind, _UNLIMITED_BYTES)
    try:
        copies, on_host = _host_figures(device, sizes, card, masters, how, say)
    finally:
        device.close()
    in_place = _update(where, sizes.elements)
    say("matrix products", 0.7)
    products = {name: _products(dtype, sizes.matrix, where) for name, dtype in _dtypes().items()}
    say("memory", 0.9)
    memory, launch_s = _memory(sizes.elements, where), _launch_s(where)
    by = "all threads" if card is None else words(card)
    figures = {
        **_capacities(card),
        "memory_bytes_per_s": (memory, f"two float32 vectors added into a third, {by}; {how}"),
        "launch_s": (launch_s, f"an operation on one element; {how}"),
        **_instruction(card, how),
        **on_host,
        "device_update_bytes_per_s": (in_place, f"fused AdamW on {by}; {how}"),
    }
    return {
        "format": FORMAT,
        "name": f"{'emulated device' if card is None else words(card)} on {machine_words()}",
        "basis": "measured",
        "shared_cores": card is None,
        **{name: with_source(value, source) for name, (value, source) in figures.items()},
        "matrix_flops_per_s": {
            name: with_source(rate, f"product of two matrices of {sizes.matrix} x {sizes.matrix}, {by}; {how}")
            for name, rate in products.items()
        },
        "copies": copies,
    }


def _host_figures(
    device: Device, sizes: Sizes, card: torch.device | None, masters: Any, how: str, say: Progress
) -> tuple[list[dict[str, Any]], dict[str, tuple[float, str]]]:
    """Measure copies and the host's updates: the copies by size, and figures with their sources."""
    threads = "one thread" if device.update_threads == 1 else f"{device.update_threads} threads"
    say("copies", 0.0)
    curve = measure_copies(device, sizes.copies_bytes, _REPEATS)
    copies = [{**asdict(copy), "bytes_per_s": round(copy.bytes_per_s)} for copy in curve]
    rates = LinkRates(**asdict(fitted(curve)))
    fit = "of a line through the copies below"
    say("updates", 0.5)
    on_worker = _update_on_worker(device, sizes.elements, torch.optim.AdamW, torch.float32)
    figures = {
        "in_bytes_per_s": (rates.in_bytes_per_s, f"slope {fit}, alone; {how}"),
        "out_bytes_per_s": (rates.out_bytes_per_s, f"slope {fit}, alone; {how}"),
        "both_bytes_per_s": (rates.both_bytes_per_s, f"slope {fit}, both directions at once, added up; {how}"),
        "per_copy_s": (rates.per_copy_s, f"height {fit}, mean of both directions alone; {how}"),
        "cpu_update_bytes_per_s": (on_worker, f"fused AdamW on the update worker's {threads}; {how}"),
    }
    # Where the CPU emulates the device, cores are what is short, and not memory.
    together = measure_host_memory(device, rates) if card is not None else 0.0
    if together:
        source = f"fused AdamW on {threads} and copies in both directions at once, added up; {how}"
        figures["host_memory_bytes_per_s"] = together, source
    if masters is not None:
        source = f"fused AdamW on float32 copies of bfloat16 parameters on the update worker's {threads}; {how}"
        rate = _update_on_worker(device, sizes.elements, masters, torch.bfloat16)
        figures["cpu_master_update_bytes_per_s"] = rate, source
    return copies, figures


def _capacities(card: torch.device | None) -> dict[str, tuple[int, str]]:
    """Return the memory of the device and of the host, each with its source."""
    available = available_host_bytes()
    if card is None:
        half = available // 2
        text = "half of the available RAM, since the CPU emulates the device"
        return {"device_memory_bytes": (half, text), "host_memory_bytes": (half, "the other half")}
    total = torch.accelerator.get_memory_info(card)[1]
    return {
        "device_memory_bytes": (total, "as torch reports it"),
        "host_memory_bytes": (available, "as available when it was measured"),
    }


def machine_words() -> str:
    """Describe this machine's processor, threads, and relevant versions, for a figure's source."""
    return (
        f"{processor()} with {torch.get_num_threads()} threads (PyTorch {torch.__version__}, Python "
        f"{platform.python_version()})"
    )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _dtypes() -> dict[str, torch.dtype]:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _seconds(work: Callable[[], object], clock: Callable[[Callable[[], object]], float] = _HOST_CLOCK) -> float:
    return min([clock(work) for _ in range(_REPEATS + 1)][1:])


def _stepper(elements: int, where: torch.device, kind: Any, dtype: torch.dtype) -> Any:
    """Return a function that makes one step of one parameter."""
    param = torch.nn.Parameter(torch.zeros(elements, dtype=dtype, device=where))
    param.grad = torch.full_like(param, 1e-3)
    return kind([param], fused=True).step


def _update_on_worker(device: Device, elements: int, kind: Any, dtype: torch.dtype) -> float:
    """Measure the parameters, counted as bytes of float32, that the host's update worker updates per second."""
    step = _stepper(elements, torch.device("cpu"), kind, dtype)
    return 4 * elements / _seconds(lambda: device.update_on_host(step, ()).synchronize())


def _update(where: torch.device, elements: int) -> float:
    """Measure the bytes of float32 parameters per second that AdamW updates on the device where operators run."""
    step = _stepper(elements, where, torch.optim.AdamW, torch.float32)
    return 4 * elements / _seconds(step, clock_of(where))


def _products(dtype: torch.dtype, size: int, where: torch.device) -> float:
    # Random numbers, since a card multiplies equal ones faster, at lower power.
    drawn = torch.Generator().manual_seed(0)
    a, b, c = (torch.rand(size, size, generator=drawn).to(where, dtype) for _ in range(3))
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=c), clock_of(where))


def _memory(elements: int, where: torch.device) -> float:
    a, b, c = (torch.ones(elements, device=where) for _ in range(3))
    return 12 * elements / _seconds(lambda: torch.add(a, b, out=c), clock_of(where))


def _instruction(card: torch.device | None, how: str) -> dict[str, tuple[float, str]]:
    """Measure what the host does for each operator; {} where the device is the host, whose operators take all of it."""
    if card is None:
        return {}
    one = torch.ones(1, device=card)
    launch_s = _seconds(lambda: torch.add(one, one, out=one), lambda work: launching_s(work, card))
    return {
        "instruction_s": (replaying_s() + launch_s, f"the replay of a view, and an operation on one element; {how}")
    }


def _launch_s(where: torch.device, times: int = 50) -> float:
    one = torch.ones(1, device=where)

    def many() -> None:
        for _ in range(times):
            torch.add(one, one, out=one)

    return _seconds(many, clock_of(where)) / times
