"""offmate on one card compared with other ways to train there: seconds per step, memory, predicted against measured.

`python -m benchmarks.gpu --out DIR [--minutes 9] [--device cuda] [--budgets 10GB 24GB ...] [--models 7b 1b]
[--ways offmate plain ...]` trains models of random weights inside budgets of device memory, each competitor in a
separate process, and writes gpu-CARD.json and gpu-CARD.md into DIR. The most informative cases come first; those that
do not fit into the minutes are listed. `python -m benchmarks.gpu --table FILE.json` prints the table of an earlier run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offmate.machines.devices import EMULATED
from offmate.machines.host_memory import available_host_bytes
from offmate.sizes import parse_bytes

from .gpu_cases import MODELS, WAYS, Case, parameter_bytes
from .gpu_table import gb, markdown

ROOT = Path(__file__).parent.parent
BUDGETS = tuple(n * 10**9 for n in (10, 16, 24, 40))
DTYPES = ("bf16", "fp32")
# The large model in the usual training dtype, then a small one that is exact in fp32; the others after them.
_TELLING = (("7b", "bf16"), ("1b", "fp32"), ("1b", "bf16"), ("7b", "fp32"))
_PAIR_WEIGHT, _BUDGET_WEIGHT = 4, 2
_WHOLE_CARD_WAYS = ("offmate", "plain", "checkpointing")
_MOST_SHARE = 0.4  # of all minutes for one case, so that a hanging case does not take the others' time
_LEAST_S = 15.0  # a process does not reach its first step in less
_GRACE_S = 10.0  # a case should end itself this long before its limit
_HOST_RESERVE_BYTES = 1 << 30
_POLL_S = 0.2
_TIME = "time"

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the table of an earlier run."""
    arguments = _arguments(argv)
    if arguments.table is not None:
        print(markdown(json.loads(arguments.table.read_text())))
        return 0
    start = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        machine = _child(["--describe", arguments.device], Path(scratch), 120.0)
        if "card" not in machine:
            print(f"{arguments.device} cannot be used: {machine['reason']}", file=sys.stderr)
            return 1
        result: Row = {
            "machine": machine,
            "minutes": arguments.minutes,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "batches": {name: asdict(MODELS[name]) for name in arguments.models},
            "rows": [],
        }
        cases = planned(arguments.models, arguments.dtypes, arguments.budgets, arguments.device, arguments.ways)
        name = re.sub(r"[^a-z0-9]+", "-", machine["card"].lower()).strip("-")
        for row in measured(cases, start + 60 * arguments.minutes, Path(scratch), machine["card_bytes"]):
            result["rows"].append(row)
            print(_line(row), file=sys.stderr, flush=True)
            # Results so far survive if the run is interrupted.
            Path(arguments.out, f"gpu-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            Path(arguments.out, f"gpu-{name}.md").write_text(markdown(result) + "\n")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    what.add_argument("--table", type=Path, metavar="FILE", help="print the table of an earlier run's JSON")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run (default: 9)")
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1", "emulated" (default: cuda)')
    parser.add_argument("--budgets", type=parse_bytes, nargs="+", default=BUDGETS, metavar="SIZE", help="such as 10GB")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["7b", "1b"], help="(default: 7b 1b)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="(default: bf16 fp32)")
    arguments = parser.parse_args(argv)
    if not arguments.minutes > 0:
        parser.error(f"--minutes is {arguments.minutes}; it must be greater than 0")
    return arguments


# -- the cases, in order ----------------------------------------------------------------------------------------------


def planned(
    models: Sequence[str], dtypes: Sequence[str], budgets: Sequence[int], device: str, ways: Sequence[str] = tuple(WAYS)
) -> list[Case]:
    """List all cases, the most informative first: steps away from the first model, budget or competitor come later."""
    every = {(model, dtype): None for model in models for dtype in dtypes}
    pairs = [pair for pair in _TELLING if pair in every] + [pair for pair in every if pair not in _TELLING]
    sizes = _telling_budgets(budgets)
    ranked = [
        (_PAIR_WEIGHT * pair + _BUDGET_WEIGHT * size + way, pair, size, way)
        for pair in range(len(pairs))
        for size in range(len(sizes))
        for way in range(len(ways))
        if _tells(sizes[size], ways[way], device)
    ]
    return [Case(*pairs[pair], sizes[size], ways[way], device, 0.0) for _, pair, size, way in sorted(ranked)]


def _tells(budget_bytes: int | None, way: str, device: str) -> bool:
    """Return whether a case is informative: offloading is for small cards; emulated budgets are for offmate only."""
    if device == EMULATED:
        return budget_bytes is None or way == "offmate"
    return budget_bytes is not None or way in _WHOLE_CARD_WAYS


def _telling_budgets(budgets: Sequence[int]) -> list[int | None]:
    """Order the budgets: the least, the one in the middle, the whole card, the largest, and then the others."""
    ordered = sorted(set(budgets))
    first: list[int | None] = [ordered[0], ordered[len(ordered) // 2], None, ordered[-1]]
    return list(dict.fromkeys([*first, *ordered]))


def measured(cases: Iterable[Case], until: float, scratch: Path, card_bytes: int | None) -> Iterator[Row]:
    """Yield one row per case: its fields, and its results, or the reason why there are none.

    Parameters
    ----------
    until: deadline on the monotonic clock. scratch: a folder for the processes' files. card_bytes: None if there is no
        card.
    """
    all_s = until - time.monotonic()
    refused: dict[tuple[str, str, str], tuple[int, str]] = {}
    for case in cases:
        left_s = until - time.monotonic()
        key = (case.model, case.dtype, case.way)
        found = _refusal(case, card_bytes, refused.get(key))
        if found is None and left_s < min(_LEAST_S, all_s / 4):
            found = {"status": "not run", "reason": _TIME}
        if found is None:
            share_s = min(left_s, max(_LEAST_S, _MOST_SHARE * all_s))
            case = replace(case, seconds=share_s - min(_GRACE_S, share_s / 4))
            found = _child(["--case", json.dumps(asdict(case))], scratch, share_s)
            if found["status"] == "does not fit" and case.budget_bytes is not None:
                refused[key] = case.budget_bytes, found["reason"]
        yield {**asdict(case), **found}


def _refusal(case: Case, card_bytes: int | None, refused: tuple[int, str] | None) -> Row | None:
    """Return the reason why a case need not be tried, if it is known beforehand."""
    way = WAYS[case.way]
    if importlib.util.find_spec(way.needs) is None:
        return {"status": "cannot run", "reason": f"{way.needs} is not installed"}
    budget = card_bytes if case.budget_bytes is None else case.budget_bytes
    if budget is None:
        return None
    if card_bytes is not None and budget > card_bytes:
        return {"status": "cannot run", "reason": f"the card has {gb(card_bytes)}"}
    if refused is not None and budget <= refused[0]:
        return {"status": "does not fit", "reason": f"not even at {gb(refused[0])}: {refused[1]}"}
    parameters = parameter_bytes(case.model, case.dtype)
    for copies, there, where in (
        (way.device_copies, budget, "the device"),
        (way.host_copies, available_host_bytes(), "the host"),
    ):
        if copies * parameters > there:
            reason = f"parameters, gradients and states take at least {gb(copies * parameters)} of {where}"
            return {
                "status": "does not fit",
                "reason": reason if where == "the device" else f"{reason}, {gb(there)} free",
            }
    return None


# -- processes --------------------------------------------------------------------------------------------------------


def _child(arguments: list[str], scratch: Path, seconds: float) -> Row:
    """Run one process, end it when its time or the host's memory is exhausted, and return its results."""
    out = scratch / "found.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_run", *arguments, "--out", str(out)]
    # Profiles for one budget serve the next; those of an earlier run would make planning look faster.
    env = {**os.environ, "OFFMATE_CACHE_DIR": str(scratch / "cache")}
    errors = scratch / "errors.txt"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        stopped = _stopped(process, time.monotonic() + seconds)
    found: Row = json.loads(out.read_text()) if out.exists() else {}
    if stopped and "status" not in found:
        status = "measured" if "step_s" in found else "not run" if stopped == _TIME else "does not fit"
        found |= {"status": status, "reason": f"{stopped} (in: {found.get('phase', 'the start')})"}
    elif process.returncode or not found:
        found |= {"status": "failed", "reason": _ending(process.returncode, errors.read_text())}
    return found


def _stopped(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait for a process, and return the reason why it was ended; empty if it ended by itself."""
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return _TIME
            if available_host_bytes() < _HOST_RESERVE_BYTES:
                return "the host's memory is used up"
            time.sleep(_POLL_S)
        return ""
    finally:
        # Also if this process is interrupted. The process group includes the child's own children.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ending(code: int, errors: str) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}; the host's memory may not have sufficed"
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {code}"


def _line(row: Row) -> str:
    budget = "whole card" if row["budget_bytes"] is None else gb(row["budget_bytes"])
    told = f"{row['step_s']:.3f} s per step" if "step_s" in row else f"{row['status']}: {row['reason']}"
    return f"{row['model']} {row['dtype']} {budget} {WAYS[row['way']].words}: {told}"


if __name__ == "__main__":
    sys.exit(main())
