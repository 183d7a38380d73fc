"""The storage engine beside a bare loop of the same requests, and beside fio where it is installed.

`python -m benchmarks.storage_engine --dir DIR [--bytes 1GiB] [--rounds 7] [--json FILE]` writes a file into DIR and
reads it in runs that take turns within one process: a loop of `preadv` with O_DIRECT on as many threads as the engine
has, and the engine, which verifies a checksum of every request. Both have the same requests under way. "aligned" is
memory that lies within a page as the file does, "unaligned" any other, which goes through the engine's staging buffers.
A core second is one of all threads of the process, those of the system's calls included.
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
from offmate.runtime.storage.disk_queue import N_THREADS, REQUEST_BYTES
from offmate.runtime.storage.engine import Engine
from offmate.runtime.storage.host_bytes import empty_aligned, view
from offmate.runtime.storage.read_only import ReadOnlyFile
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from offmate.sizes import parse_bytes

from .overhead import machine

TENSOR_BYTES = 1 << 26
DEPTH = 4  # tensors under way, of the engine
_GB = 1e9


class Run(NamedTuple):
    """The rate of one run and what it took of the cores."""

    bytes_per_s: float
    core_s_per_gb: float


def main() -> None:
    """Measure, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage_engine", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to be measured")
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30, help="size of a run (default: 1GiB)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each (default: 7)")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    arguments = parser.parse_args()
    n_bytes = max(1, arguments.bytes // TENSOR_BYTES) * TENSOR_BYTES
    with tempfile.TemporaryDirectory(prefix="offmate-benchmark-", dir=arguments.dir) as folder:
        rows = reads(Path(folder), n_bytes, arguments.rounds)
    show(rows)
    if arguments.json:
        result = {"machine": machine(), "run_bytes": n_bytes, "request_bytes": REQUEST_BYTES, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def reads(folder: Path, n_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Compare reads of one file."""
    path = folder / "weights.safetensors"
    save_file({"weight": torch.randint(0, 256, (n_bytes,), dtype=torch.uint8)}, path)
    os.sync()
    memory = empty_aligned(DEPTH * TENSOR_BYTES).zero_()
    with Engine() as engine:
        file = engine.open(path)
        contenders: dict[str, Callable[[], None]] = {
            "bare": lambda: bare(path, memory, n_bytes, os.O_RDONLY),
            "aligned": lambda: engine_reads(engine, file, memory, 0, n_bytes),
            "unaligned": lambda: engine_reads(engine, file, memory, 1, n_bytes),
        }
        found = alternating(contenders, n_bytes, rounds)
    fio_bytes_per_s = fio(path, "read", n_bytes)
    return [compared(f"read, {kind}", found["bare"], found[kind], fio_bytes_per_s) for kind in ("aligned", "unaligned")]


def bare(path: Path, memory: torch.Tensor, n_bytes: int, flags: int) -> None:
    """Transfer a file's first bytes, by threads that each take the next request."""
    handle, numbers = os.open(path, flags | os.O_DIRECT), itertools.count()
    call = os.preadv if flags == os.O_RDONLY else os.pwritev

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


def engine_reads(engine: Engine, file: ReadOnlyFile, memory: torch.Tensor, shift: int, n_bytes: int) -> None:
    """Read a file's first bytes as tensors, a few of them under way at once."""
    events = []
    for number, start in enumerate(range(0, n_bytes, TENSOR_BYTES)):
        if number >= DEPTH:
            events[number - DEPTH].synchronize()
        slot = number % DEPTH * TENSOR_BYTES
        events.append(engine.read(file, memory[slot + shift : slot + TENSOR_BYTES], start=start))
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


def compared(what: str, loop: list[Run], engine: list[Run], fio_bytes_per_s: float | None) -> dict[str, Any]:
    """Return one row: medians, and the median of the ratios of neighbouring runs."""
    return {
        "what": what,
        "loop_bytes_per_s": statistics.median(run.bytes_per_s for run in loop),
        "engine_bytes_per_s": statistics.median(run.bytes_per_s for run in engine),
        "ratio": statistics.median(one.bytes_per_s / other.bytes_per_s for one, other in zip(engine, loop)),
        "loop_core_s_per_gb": statistics.median(run.core_s_per_gb for run in loop),
        "engine_core_s_per_gb": statistics.median(run.core_s_per_gb for run in engine),
        "fio_bytes_per_s": fio_bytes_per_s,
    }


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
    """Print the table."""
    columns = ("", "loop GB/s", "engine GB/s", "ratio", "loop core s/GB", "engine core s/GB", "fio GB/s")
    table = Table(*columns, title="The engine and a bare loop; medians")
    for row in rows:
        fio_rate = row["fio_bytes_per_s"]
        rates = [f"{row[key] / _GB:.2f}" for key in ("loop_bytes_per_s", "engine_bytes_per_s")]
        cores = [f"{row[key]:.3f}" for key in ("loop_core_s_per_gb", "engine_core_s_per_gb")]
        table.add_row(row["what"], *rates, f"{row['ratio']:.3f}", *cores, f"{fio_rate / _GB:.2f}" if fio_rate else "-")
    Console(width=120).print(table)


def _core_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
