"""The storage engine beside a bare loop of the same requests, and beside fio where it is installed.

`python -m benchmarks.storage_engine --dir DIR [--bytes 1GiB] [--rounds 7] [--json FILE]` reads and writes files in DIR,
in runs that take turns within one process: a loop of `preadv` or `pwritev` with O_DIRECT on as many threads as the
engine has, and the engine, which computes and verifies a checksum of every request. All files have been written before.
The loop runs over memory as torch allocates it, and again over the engine's own memory, which is in huge pages where
the system has them. "aligned" is the engine's own memory, which lies within a page as the file does, "unaligned" any
other, which goes through the engine's staging buffers. A core second is one of all threads of the process, those of the
system's calls included.

Then two paths are held to given rates, as disks that read and write in turn, and the engine stands beside the sum of
these rates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from offmate.runtime.events import Event, UnderWay
from offmate.runtime.storage.disk_queue import N_THREADS, REQUEST_BYTES
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.folders import StoragePath
from offmate.runtime.storage.host_bytes import ALIGNMENT_BYTES, empty_aligned, view
from offmate.runtime.storage.throttle import Throttle
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from offmate.sizes import parse_bytes

from .overhead import machine

TENSOR_BYTES = 1 << 26
DEPTH = 4  # tensors under way, of the engine
PATH_RATES = ((400e6, 300e6), (200e6, 150e6))  # of reads and writes
_GB = 1e9

Submit = Callable[[torch.Tensor, int], Event]
"""Submits a transfer between memory and the bytes of a file from an offset."""


class Run(NamedTuple):
    """The rate of one run and what it took of the cores."""

    bytes_per_s: float
    core_s_per_gb: float


def main() -> None:
    """Measure, print the tables, and write them if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage_engine", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to be measured")
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30, help="size of a run (default: 1GiB)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each, at least 2 (default: 7)")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    arguments = parser.parse_args()
    n_bytes = max(1, arguments.bytes // TENSOR_BYTES) * TENSOR_BYTES
    with tempfile.TemporaryDirectory(prefix="offmate-benchmark-", dir=arguments.dir) as name:
        folder, rounds = Path(name), arguments.rounds
        beside_a_loop = [*reads(folder, n_bytes, rounds), *writes(folder, n_bytes, rounds)]
        throttled = two_paths(folder, n_bytes, rounds)
    show(beside_a_loop)
    show_throttled(throttled)
    if arguments.json:
        sizes = {"run_bytes": n_bytes, "request_bytes": REQUEST_BYTES, "threads": N_THREADS, "rounds": rounds}
        result = {"machine": machine(), **sizes, "beside_a_loop": beside_a_loop, "two_throttled_paths": throttled}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def reads(folder: Path, n_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Compare reads of one file."""
    path = folder / "weights.safetensors"
    save_file({"weight": torch.randint(0, 256, (n_bytes,), dtype=torch.uint8)}, path)
    os.sync()
    with Engine() as engine:
        file = engine.open(path)
        rows = beside_a_loop("read", path, n_bytes, rounds, lambda part, start: engine.read(file, part, start=start))
    path.unlink()
    return rows


def writes(folder: Path, n_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Compare writes to one file of each."""
    path, home = folder / "plain", folder / "home"
    home.mkdir()
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    with Engine([StoragePath(home)]) as engine:
        stored = engine.store("weight", n_bytes)
        rows = beside_a_loop(
            "write", path, n_bytes, rounds, lambda part, start: engine.write(stored, part, start=start)
        )
    path.unlink()
    return rows


def beside_a_loop(kind: str, path: Path, n_bytes: int, rounds: int, submit: Submit) -> list[dict[str, Any]]:
    """Compare the engine with a loop on a file, with both kinds of memory."""
    memory, plain = _buffers(), _plain_buffers()
    found = alternating(
        {
            "loop": lambda: bare(path, plain, n_bytes, kind),
            "same memory": lambda: bare(path, memory, n_bytes, kind),
            "aligned": lambda: by_tensor(n_bytes, memory, submit),
            "unaligned": lambda: by_tensor(n_bytes, memory, submit, shift=1),
        },
        n_bytes,
        rounds,
    )
    fio_bytes_per_s = fio(path, kind, n_bytes)
    loops = {"loop": found["loop"], "same_memory": found["same memory"]}
    return [compared(f"{kind}, {name}", loops, found[name], fio_bytes_per_s) for name in ("aligned", "unaligned")]


def two_paths(folder: Path, n_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Compare transfers over two throttled paths with the sum of their rates."""
    folders = [folder / "faster", folder / "slower"]
    for one in folders:
        one.mkdir()
    incoming, outgoing = _buffers(), _buffers()
    mixed = [2 / (1 / reads_at + 1 / writes_at) for reads_at, writes_at in PATH_RATES]
    sums = {"read": sum(rates[0] for rates in PATH_RATES), "write": sum(rates[1] for rates in PATH_RATES)}
    throttles = [Throttle(*rates) for rates in PATH_RATES]
    with Engine([StoragePath(one) for one in folders], throttles=throttles) as engine:
        first, second = (engine.store(name, n_bytes, mixed) for name in ("first", "second"))

        def both(part: torch.Tensor, start: int) -> Event:
            slot = start // TENSOR_BYTES % DEPTH * TENSOR_BYTES
            written = engine.write(second, outgoing[slot : slot + part.numel()], start=start)
            return UnderWay("a tensor", (written, engine.read(first, part, start=start)))

        work: dict[str, tuple[float, float, Submit]] = {
            "read": (1, sums["read"], lambda part, start: engine.read(first, part, start=start)),
            "write": (1, sums["write"], lambda part, start: engine.write(second, part, start=start)),
            "both": (2, sum(mixed), both),
        }
        by_tensor(n_bytes, outgoing, lambda part, start: engine.write(first, part, start=start))
        runs = {name: _run(n_bytes, incoming, submit) for name, (_, _, submit) in work.items()}
        found = alternating(runs, n_bytes, rounds)
    rows = []
    for name, (times, bound, _) in work.items():
        rate = times * statistics.median(run.bytes_per_s for run in found[name])
        rows.append({"what": name, "sum_bytes_per_s": bound, "engine_bytes_per_s": rate, "ratio": rate / bound})
    return rows


def _run(n_bytes: int, memory: torch.Tensor, submit: Submit) -> Callable[[], None]:
    return lambda: by_tensor(n_bytes, memory, submit)


def _buffers() -> torch.Tensor:
    return empty_aligned(DEPTH * TENSOR_BYTES).random_(0, 256)


def _plain_buffers() -> torch.Tensor:
    """Return memory of the same size that is aligned, and otherwise as torch allocates it."""
    spare = torch.empty(DEPTH * TENSOR_BYTES + ALIGNMENT_BYTES, dtype=torch.uint8)
    first = -spare.data_ptr() % ALIGNMENT_BYTES
    return spare[first : first + DEPTH * TENSOR_BYTES].random_(0, 256)


def bare(path: Path, memory: torch.Tensor, n_bytes: int, kind: str) -> None:
    """Transfer a file's first bytes, by threads that each take the next request."""
    handle, numbers = os.open(path, os.O_RDWR | os.O_DIRECT), itertools.count()
    call = os.preadv if kind == "read" else os.pwritev

    def work() -> None:
        while (offset := next(numbers) * REQUEST_BYTES) < n_bytes:
            done = call(handle, [view(memory.data_ptr() + offset % memory.numel(), REQUEST_BYTES)], offset)
            assert done == REQUEST_BYTES, f"{done} bytes at {offset}"

    threads = [threading.Thread(target=work) for _ in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(handle)


def by_tensor(n_bytes: int, memory: torch.Tensor, submit: Submit, shift: int = 0) -> None:
    """Transfer the first bytes of a file as tensors, a few of them under way at once.

    Parameters
    ----------
    shift: by how many bytes memory and file lie differently within a page, by which each tensor is shorter too.
    """
    events: list[Event] = []
    for number, start in enumerate(range(0, n_bytes, TENSOR_BYTES)):
        if number >= DEPTH:
            events[number - DEPTH].synchronize()
        slot = number % DEPTH * TENSOR_BYTES
        events.append(submit(memory[slot + shift : slot + TENSOR_BYTES], start))
    for event in events:
        event.synchronize()


def alternating(contenders: dict[str, Callable[[], None]], n_bytes: int, rounds: int) -> dict[str, list[Run]]:
    """Run all of them in turn, each first in some of the rounds, after one run each that does not count."""
    found: dict[str, list[Run]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        order = list(contenders.items())
        for name, work in order[number % len(order) :] + order[: number % len(order)]:
            before, start_s = _core_s(), time.perf_counter()
            work()
            taken_s = time.perf_counter() - start_s
            if number:
                found[name].append(Run(n_bytes / taken_s, (_core_s() - before) / (n_bytes / _GB)))
    return found


def compared(
    what: str, loops: dict[str, list[Run]], engine: list[Run], fio_bytes_per_s: float | None
) -> dict[str, Any]:
    """Return one row: medians, the ratios of neighbouring runs, and every run, since a shared disk varies."""
    row: dict[str, Any] = {"what": what}
    for name, runs in (*loops.items(), ("engine", engine)):
        row[f"{name}_bytes_per_s"] = statistics.median(run.bytes_per_s for run in runs)
        row[f"{name}_core_s_per_gb"] = statistics.median(run.core_s_per_gb for run in runs)
        row[f"{name}_runs_bytes_per_s"] = [run.bytes_per_s for run in runs]
    for name, runs in loops.items():
        ratios = [one.bytes_per_s / other.bytes_per_s for one, other in zip(engine, runs)]
        row[f"to_{name}"] = statistics.median(ratios)
        row[f"to_{name}_quartiles"] = [statistics.quantiles(ratios, n=4)[at] for at in (0, 2)]
    return {**row, "fio_bytes_per_s": fio_bytes_per_s}


def fio(path: Path, kind: str, n_bytes: int) -> float | None:
    """Return the rate of fio with the same requests; None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    command = [
        "fio", "--name=same", f"--filename={path}", f"--rw={kind}", f"--bs={REQUEST_BYTES}", "--direct=1", "--thread",
        "--ioengine=psync", f"--numjobs={N_THREADS}", f"--size={n_bytes // N_THREADS}",
        f"--offset_increment={n_bytes // N_THREADS}", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(said[said.index("{") :])["jobs"][0][kind]["bw_bytes"])


def show(rows: list[dict[str, Any]]) -> None:
    """Print the engine beside the loops."""
    rates = Table("GB/s", "loop", "same memory", "engine", "to the loop", "quartiles", "to same memory", "fio")
    cores = Table("core s per GB", "loop", "same memory", "engine")
    names = ("loop", "same_memory", "engine")
    for row in rows:
        fio_rate, quartiles = row["fio_bytes_per_s"], row["to_loop_quartiles"]
        rates.add_row(
            row["what"],
            *(f"{row[f'{name}_bytes_per_s'] / _GB:.2f}" for name in names),
            f"{row['to_loop']:.3f}",
            "–".join(f"{value:.2f}" for value in quartiles),
            f"{row['to_same_memory']:.3f}",
            f"{fio_rate / _GB:.2f}" if fio_rate else "-",
        )
        cores.add_row(row["what"], *(f"{row[f'{name}_core_s_per_gb']:.3f}" for name in names))
    for table, title in ((rates, "The engine beside bare loops; medians"), (cores, "What they take of the cores")):
        table.title = title
        Console(width=120).print(table)


def show_throttled(rows: list[dict[str, Any]]) -> None:
    """Print the engine beside the sum of two paths' rates."""
    table = Table("", "sum of the rates, GB/s", "engine GB/s", "ratio", title="Two throttled paths; medians")
    for row in rows:
        rates = [f"{row[key] / _GB:.3f}" for key in ("sum_bytes_per_s", "engine_bytes_per_s")]
        table.add_row(row["what"], *rates, f"{row['ratio']:.3f}")
    Console(width=120).print(table)


def _core_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
