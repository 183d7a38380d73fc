"""One process of `benchmarks.gpu`: runs a case, or describes the machine, and writes its results to a file.

A cap on the bytes that torch's allocator may reserve lets a large card stand in for a small one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from offmate.cli import shapes
from offmate.errors import InfeasibleBudget
from offmate.files import write_whole
from offmate.machines import devices
from offmate.machines.links import measure_link

from .gpu_cases import MODELS, WARM_UP_STEPS, WAYS, Batch, Case, Training, batches
from .overhead import machine

_LINK_BUDGET_BYTES = 1 << 30


def main() -> None:
    """Run a case or describe the machine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_run", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", type=json.loads, metavar="JSON", help="the fields of a case")
    what.add_argument("--describe", metavar="DEVICE", help="describe the machine with this device")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file for the results")
    arguments = parser.parse_args()
    record = Record(arguments.out)
    attach(arguments.describe or arguments.case["device"])
    if arguments.describe:
        record.add(**describe(arguments.describe))
        return
    _build_aside(arguments.out.parent / "extensions")
    try:
        run(Case(**arguments.case), record)
    except Exception as error:  # any error is a reason to show in the table
        record.add(**verdict(error))


class Record:
    """The results of a case so far, on disk after every change: a case that is stopped still tells how far it came.

    Parameters
    ----------
    path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}

    def add(self, **found: Any) -> None:
        """Add results."""
        self._found |= found
        write_whole(self._path, json.dumps(self._found))


def attach(device: str) -> None:
    """Make the tests' simulated accelerator known to torch, if it is asked for; call this before the first backward."""
    if device.split(":")[0] == "sim":
        importlib.import_module("tests.accelerator").load()


def _build_aside(folder: Path) -> None:
    """Have extensions built in a folder of this run: a process that is ended leaves a lock that others wait for."""
    for lock in folder.rglob("lock"):
        lock.unlink()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def verdict(error: Exception) -> dict[str, str]:
    """Return the reason why a case has no figures, as status and reason; of a fault, all that Python says."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "does not fit", "reason": f"out of device memory: {message.split('. ')[0]}"}
    if isinstance(error, InfeasibleBudget):
        return {"status": "does not fit", "reason": message}
    if isinstance(error, ImportError):
        return {"status": "cannot run", "reason": f"cannot be imported: {message}"}
    trace = "".join(traceback.format_exception(error))
    return {"status": "failed", "reason": f"{type(error).__name__}: {message}", "trace": trace}


def run(case: Case, record: Record) -> None:
    """Train, and record seconds, losses and peaks as they become known."""
    deadline = time.monotonic() + case.seconds
    way, where = WAYS[case.way], case.where
    importlib.import_module(way.needs)
    _join_no_one()
    record.add(phase="weights")
    on_card = where.type != "cpu"
    if on_card and case.budget_bytes is not None:
        total = torch.accelerator.get_memory_info(where)[1]
        torch.get_device_module(where).set_per_process_memory_fraction(min(1.0, case.budget_bytes / total), where)
    model = shapes.build(MODELS[case.model].shape, case.dtype)
    vocabulary = model.config.vocab_size
    training = way.make(model, case)
    if on_card:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(where)
    record.add(phase="first step, planning included" if case.way == "offmate" else "first step")
    _train(training, batches(MODELS[case.model], vocabulary, where), where, record, deadline)
    record.add(status="measured")


def _train(training: Training, given: list[Batch], where: torch.device, record: Record, deadline: float) -> None:
    """Train on every batch, or until the deadline is near, and record every step."""
    losses: list[float] = []
    seconds: list[float] = []
    for batch in given:
        start = time.perf_counter()
        losses.append(training.step(batch))
        seconds.append(time.perf_counter() - start)
        measured = seconds[WARM_UP_STEPS:]
        record.add(phase="steps", losses=losses, first_step_s=seconds[0], steps_s=measured)
        record.add(**{**training.found(), **_peaks(where)})
        if measured:
            tokens = batch["input_ids"].numel()
            step_s = statistics.median(measured)
            record.add(step_s=step_s, tokens_per_s=tokens / step_s)
        if measured and time.monotonic() + seconds[-1] > deadline:
            break
    else:
        record.add(**training.watched(given[-1]))
    training.finish()


def _peaks(where: torch.device) -> dict[str, Any]:
    """Return the most bytes that this process has held: reserved on the device, resident and pinned on the host."""
    found: dict[str, Any] = {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if where.type != "cpu":
        found["peak_device_bytes"] = torch.accelerator.max_memory_reserved(where)
        found["peak_allocated_bytes"] = torch.accelerator.max_memory_allocated(where)
    if where.type == "cuda":
        found["pinned_bytes"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    return found


def _join_no_one() -> None:
    """Set the environment that distributed libraries expect, for a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }  # fmt: skip


def describe(device: str) -> dict[str, Any]:
    """Describe the machine: processor, memory, card, versions, and the link's rates with pinned memory."""
    kind = devices.device_kind(device)
    where = devices.accelerator(kind)
    found: dict[str, Any] = {
        **machine(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": kind,
        "card": "emulated device" if where is None else devices.words(where),
        "card_bytes": None if where is None else torch.accelerator.get_memory_info(where)[1],
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "cudnn": torch.backends.cudnn.version(),
    }
    runtime = devices.make_device(kind, _LINK_BUDGET_BYTES)
    try:
        return found | measure_link(runtime).figures()
    finally:
        runtime.close()


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return told[0].strip() if told else None


if __name__ == "__main__":
    sys.exit(main())
