"""Micro-batches block by block beside the usual order, predicted: `python -m benchmarks.fat_steps [--json FILE]`.

All seconds are predictions; nothing was run on such machines. First Llama-2-7B in bf16 with float32 copies and the
rates of the RTX 4090's file, with 8 micro-batches of 2,048 tokens: with 120 GB of RAM and no drive, and with 24 GiB of
RAM and the drives of `benchmarks/storage_plans.py`. Gradients are clipped, clipped with updates before the gate
("speculated"), or not clipped; the usual order has a gate in any case. Seconds are the program's, in fractions; with
`--whole` some are simulated for whole tensors, too, and these then count. Beside them stand the computes alone, and
what the drive takes at least for the bytes that the plan moves there.

Then GreedySnake's first machine and GPT-65B (its sections 4.5 and 6, and its figure 11): how many micro-batches hide
the optimizer's storage. Blocks are whole layers, the model returns the loss alone, and parameters may lie on the drive,
too. What blocks hand on stays in RAM. "alpha" is the part of the stored states' traffic that is under way outside the
backwards (its section 4.4), with that of updates on the CPU spread as these are. "not delayed" is the least that an
update would take if all of it had to be under way in the backwards: their computes or that traffic, whichever is
longer, after the forwards' computes. Where 195 GB of RAM do not suffice, the row has as much as it needs.

Last, the same with RAM for working buffers only (its figure 12): what the updates of two layers hold, of which one is
updated while the other is on its way. Everything else may lie on the drive, what blocks hand on and keep, too. Beside
it stand 195 GB. The paper's system computes every layer again in the backward. So these rows come twice: with that, and
with what the program chooses.

Each bar that a table is checked against is printed below it, met or not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offmate.solver.fat_steps import for_all
from offmate.solver.instances.synthetic import Precision, Shape, Speeds, llama, speculating
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates, update_steps
from offmate.solver.solution import Solution
from offmate.solver.solve import least_budget, least_host_within_device, solve

from offmate.lowering.state_files import STATE_STORAGE, StateFiles
from offmate.machines.hardware import load

from .desktop import GB, gated, problem_of
from .overhead import machine
from .storage_plans import DRIVES
from .tables import show

MICRO_BATCHES = 8
TOKENS = 2048
_LIMIT_S = 300.0  # for each solve, by the clock: other work on the machine counts, too
_BUFFERS_BYTES, _CAPACITY_BYTES = 150 << 20, 2000 * GB
_AMPLE_RAM, _SHORT_RAM = 120 * GB, 24 << 30
_FIGURES = ("compute s", "drive s", "program s", "simulated s", "status", "solved in s", "planned in s")
_FIRST = (22, DRIVES[0][0])  # the case of the drives that is planned in whole tensors
_UPDATES = ("unclipped", "clipped", "speculated")


@dataclass(frozen=True)
class Bar:
    """What a figure must not exceed."""

    what: str
    figure: float | None
    most: float

    def words(self) -> str:
        """Say whether the bar is met."""
        if self.figure is None:
            return f"no plan: {self.what} (at most {self.most:g})"
        return (
            f"{'met' if self.figure <= self.most else 'NOT MET'}: {self.what} {self.figure:.3g} (at most {self.most:g})"
        )


def main() -> None:
    """Predict all tables, print them with their bars, and write them if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file, whose other tables stay")
    parser.add_argument("--only", nargs="+", choices=_TABLES, default=list(_TABLES))
    parser.add_argument("--whole", action="store_true", help="also plan some rows in whole tensors")
    arguments = parser.parse_args()
    for name in arguments.only:
        title, rows_of, bars_of = _TABLES[name]
        rows = []
        for row in rows_of(arguments.whole):
            print(json.dumps(row), flush=True)  # a row takes a while
            rows.append(row)
        bars = bars_of(rows)
        show(f"{title}, predicted", rows, ".3g", width=190)
        print("\n".join(bar.words() for bar in bars))
        if arguments.json:
            _write(arguments.json, name, {"title": title, "rows": rows, "bars": [vars(bar) for bar in bars]})


def _write(path: Path, name: str, table: dict[str, Any]) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, "machine": machine(), name: table}, indent=1) + "\n")


# -- Llama-2-7B -------------------------------------------------------------------------------------------------------


def _ram_rows(whole: bool) -> Iterator[dict[str, Any]]:
    for gpu_gb in (22, 10):
        plain = problem_of(load("rtx4090"), 1, TOKENS, gpu_gb * GB)
        plain = replace(plain, host_budget_bytes=_AMPLE_RAM)
        endless = replace(plain, rates=plain.rates.with_endless_host_memory)
        for rate, problem in (("file's", plain), ("endless", endless)):
            for order, updates in (("block", _UPDATES[0]), ("block", _UPDATES[1]), ("batch", _UPDATES[1])):
                case = {"GPU GB": gpu_gb, "RAM rate": rate, "order": order, "updates": updates}
                yield case | _figures(_ordered(problem, order, updates), whole and rate == "file's")


def _drive_rows(whole: bool) -> Iterator[dict[str, Any]]:
    for gpu_gb in (22, 10):
        for drive, *rates in DRIVES:
            # Whole layers as blocks: their solves take seconds.
            plain = problem_of(load("rtx4090"), 1, TOKENS, gpu_gb * GB, whole_layers=gpu_gb > 10)
            plain = _with_drive(plain, *(rate * GB for rate in rates), ram_bytes=_SHORT_RAM)
            for order, updates in (
                *(("block", one) for one in _UPDATES),
                ("batch", "clipped"),
                ("batch", "speculated"),
            ):
                case = {"GPU GB": gpu_gb, "drive": drive, "order": order, "updates": updates}
                problem = _ordered(plain, order, updates)
                least = least_budget(problem, time_limit_s=_LIMIT_S).bytes
                if least > problem.device_budget_bytes:  # a search would take minutes to find that out
                    nothing = dict.fromkeys(_FIGURES, None) | {"status": "does not fit"}
                    yield case | {"least GPU GB": least / GB} | nothing
                    continue
                yield case | {"least GPU GB": least / GB} | _figures(problem, whole and (gpu_gb, drive) == _FIRST)


def _with_drive(problem: Problem, read: float, write: float, both: float, *, ram_bytes: int) -> Problem:
    tier = StateFiles(read, write, both, _CAPACITY_BYTES, _BUFFERS_BYTES).tier
    rates = replace(problem.rates, tiers=(tier,))
    return replace(problem, rates=rates, host_budget_bytes=ram_bytes, host_in_time=True)


def _ordered(one: Problem, order: str, updates: str) -> Problem:
    """Return the problem of an update of several micro-batches."""
    if order == "batch" or updates != "unclipped":
        one = gated(one, update_steps(one.groups, one.device_budget_bytes))
    if updates == "speculated":
        one = speculating(one)
    return replace(one, micro_batches=MICRO_BATCHES) if order == "batch" else for_all(one, MICRO_BATCHES)


def _figures(problem: Problem, whole: bool) -> dict[str, Any]:
    started = time.perf_counter()
    found = solve(problem, time_limit_s=_LIMIT_S)
    solved_s = time.perf_counter() - started
    simulation = plan(problem, time_limit_s=_LIMIT_S).simulation if whole else None
    figures = (
        problem.all_computes_s,
        _drive_s(problem, found),
        found.objective_s if found.options else None,
        simulation.step_s if simulation is not None else None,
        found.status.name.lower(),
        solved_s,
        time.perf_counter() - started - solved_s if whole else None,
    )
    return dict(zip(_FIGURES, figures))


def _drive_s(problem: Problem, found: Solution) -> float | None:
    """Return the seconds that a plan's bytes keep the drive busy, if nothing else takes time."""
    path = problem.rates.paths.get(STATE_STORAGE)
    if path is None or not found.options:
        return None
    return path.seconds(*(found.busy_s.get(link, 0.0) for link in path.links))


def _seconds(row: dict[str, Any]) -> float | None:
    found = row["program s"] if row["simulated s"] is None else row["simulated s"]
    return None if found is None else float(found)


def _of(rows: list[dict[str, Any]], **case: Any) -> float | None:
    """Return the seconds of the row with these cells; blanks stand for underscores."""
    cells = {name.replace("_", " "): value for name, value in case.items()}
    (row,) = (row for row in rows if cells.items() <= row.items())
    return _seconds(row)


def _ram_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    found = []
    for gpu_gb, most in ((22, 1.0), (10, 0.9)):
        for rate in ("file's", "endless"):
            case = {"GPU_GB": gpu_gb, "RAM_rate": rate, "updates": "clipped"}
            blocks, usual = _of(rows, order="block", **case), _of(rows, order="batch", **case)
            ratio = blocks / usual if blocks is not None and usual is not None else None
            found.append(Bar(f"block by block / usual order, clipped, {gpu_gb} GB, RAM rate {rate}:", ratio, most))
    return found


def _drive_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    limits = zip(_UPDATES, (18.0, 30.5, 19.0))
    case = {"GPU_GB": 22, "order": "block"}
    return [
        Bar(
            f"seconds with 22 GB and a drive of {drive}, {updates}:",
            _of(rows, drive=drive, updates=updates, **case),
            most,
        )
        for updates, most in limits
        for drive in (DRIVES[0][0], DRIVES[1][0])
    ]


# -- GreedySnake's first machine --------------------------------------------------------------------------------------

_SNAKE_COUNTS = (4, 8, 12, 16, 18, 20, 24, 28)
_SNAKE_GPU_BYTES, _SNAKE_RAM_BYTES = 22 * GB, 195 * GB  # of 24 and of 256: less what the system and buffers take
_SNAKE_READ, _SNAKE_WRITE = 6.5 * GB, 4.0 * GB  # a PM9A3's, which do not help each other
_SNAKE_FLOPS, _SNAKE_MEMORY = 64e12, 768 * GB  # an A5000's: 16.4 s per micro-batch of 2,048 tokens, as section 6.4 says
_SNAKE_LINK, _SNAKE_LINK_BOTH = 25 * GB, 40 * GB  # PCIe 4.0
# Where the paper's RAM does not suffice, a row has so many times the least that does, if that is not far more.
_ROOM, _FAR = 1.05, 2.0
_LEAST_GAP = 1e-2  # of the least RAM; the last parts of a percent can take minutes
_MOST_FULL = 0.97  # of RAM, beyond which a solve takes all of its time
_SNAKE_FIGURES = (
    "RAM GB", "compute s", "drive s", "program s", "not delayed s", "tokens/s", "alpha", "status", "solved in s",
)  # fmt: skip
_SNAKE_HOST_UPDATES = 200 * GB  # bytes per second of updates on two EPYC 7302, assumed


def _snake_rows(whole: bool) -> Iterator[dict[str, Any]]:
    del whole  # a plan of 80 layers and as many tensors takes too long
    one = snake_problem()
    clipped = gated(one, update_steps(one.groups, one.device_budget_bytes))
    for updates, problem in (("unclipped", one), ("clipped", clipped)):
        for count in _SNAKE_COUNTS:
            fat = for_all(problem, count)
            least = least_host_within_device(fat, time_limit_s=_LIMIT_S, gap=_LEAST_GAP) or 0
            case = {"micro-batches": count, "updates": updates, "least RAM GB": least / GB}
            if least > _FAR * fat.host_budget_bytes:
                yield case | dict.fromkeys(_SNAKE_FIGURES, None) | {"status": "does not fit"}
                continue
            if least > fat.host_budget_bytes:
                fat = replace(fat, host_budget_bytes=round(_ROOM * least))
            yield case | _snake_figures(count, *_ways(fat))


def snake_problem() -> Problem:
    """Return GPT-65B's problem of one micro-batch on GreedySnake's first machine (its tables 1 and 2)."""
    precision = Precision(param_bytes=2, grad_bytes=2, state_bytes=12, activation_bytes=2)
    rates = Rates(_SNAKE_LINK, _SNAKE_LINK, _SNAKE_LINK_BOTH, 1e-3)
    moved = precision.state_bytes * 2 + precision.grad_bytes + precision.param_bytes  # of an update, per parameter
    updates = (precision.param_bytes * rate / moved for rate in (_SNAKE_HOST_UPDATES, _SNAKE_MEMORY))
    shape = Shape(80, 8192, 4 * 8192, vocab=50257, batch=1, sequence=TOKENS, gated=False)
    speeds = Speeds(_SNAKE_FLOPS, _SNAKE_MEMORY, *updates, rates)
    problem = llama(shape, speeds, _SNAKE_GPU_BYTES, _SNAKE_RAM_BYTES, precision=precision, whole_layers=True)
    both = 2 / (1 / _SNAKE_READ + 1 / _SNAKE_WRITE)
    problem = _with_drive(problem, _SNAKE_READ, _SNAKE_WRITE, both, ram_bytes=_SNAKE_RAM_BYTES)
    tiers = tuple(replace(tier, for_parameters=True, for_values=False) for tier in problem.rates.tiers)
    outputs = tuple(output for output in problem.outputs if output.name == "loss")
    return replace(problem, rates=replace(problem.rates, tiers=tiers), outputs=outputs)


def _ways(problem: Problem) -> list[Problem]:
    """Return the ways that a plan tries: what the CPU updates has its parameters in files if any parameters have."""
    in_ram = problem.with_parameters_in_ram
    least = least_host_within_device(in_ram, time_limit_s=_LIMIT_S, gap=_LEAST_GAP)
    return [problem, *([in_ram] if least is not None and least < _MOST_FULL * in_ram.host_budget_bytes else [])]


def _snake_figures(count: int, *ways: Problem) -> dict[str, Any]:
    """Return the figures of the fastest of several ways."""
    solved = [(way, solve(way, time_limit_s=_LIMIT_S)) for way in ways]
    problem, found = min(solved, key=lambda one: one[1].objective_s)
    solve_s = sum(one.solve_s for _, one in solved)
    if not found.options:
        return dict.fromkeys(_SNAKE_FIGURES, None) | {"status": found.status.name.lower(), "solved in s": solve_s}
    options = [block.options[o] for block, o in zip(problem.blocks, found.options)]
    forward_s, backward_s = sum(o.forward_s for o in options), sum(o.backward_s for o in options)
    read, written = _state_traffic(problem, found)
    path = problem.rates.paths[STATE_STORAGE]
    in_s, out_s = sum(read.values()) / path.in_bytes_per_s, sum(written.values()) / path.out_bytes_per_s
    backwards = range(problem.n_blocks, problem.first_turn_around)
    delayed = sum(size for trip in (read, written) for step, size in trip.items() if step not in backwards)
    total = sum(read.values()) + sum(written.values())
    figures = (
        problem.host_budget_bytes / GB,
        forward_s + backward_s,
        _drive_s(problem, found),
        found.objective_s,
        max(found.objective_s, forward_s + max(backward_s, path.seconds(in_s, out_s))),
        count * TOKENS / found.objective_s,
        delayed / total if total else None,
        found.status.name.lower(),
        solve_s,
    )
    return dict(zip(_SNAKE_FIGURES, figures))


def _state_traffic(problem: Problem, found: Solution) -> tuple[Counter[int], Counter[int]]:
    """Return the bytes of states that are read from the drive and written there, by step."""
    read, written = Counter[int](), Counter[int]()
    for group in problem.groups:
        flow = found.groups[group.name]
        stored = flow.state_tiers.get(STATE_STORAGE, 0.0)
        for trip, steps in ((read, flow.state_in), (written, flow.state_out)):
            trip.update({step: stored * group.state_bytes * part for step, part in steps.items()})
        for step, part in flow.cpu_update.items() if flow.from_files else ():
            size = group.state_bytes * flow.from_files * part / flow.cpu_part
            read[step] += size
            written[step] += size
    return read, written


def _snake_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    found = []
    for row in rows:
        if row["updates"] == "unclipped" and row["micro-batches"] >= 20:
            what, own = f"{row['micro-batches']} micro-batches / compute:", row["least RAM GB"] * GB <= _SNAKE_RAM_BYTES
            ratio = row["program s"] / row["compute s"] if row["program s"] is not None else None
            found.append(Bar(f"GPT-65B in 195 GB of RAM, {what}", ratio if own else None, 1.01))
            if not own:
                found.append(Bar(f"GPT-65B in {row['RAM GB']:.0f} GB of RAM, {what}", ratio, 1.01))
    return found


# -- the same with RAM for working buffers only ----------------------------------------------------------------------

_PAPERS, _OWN = "all computed again", "the program's"
_AMPLE, _BUFFERS = "195 GB", "working buffers"
_SMALL = {  # numbers of micro-batches, with either RAM
    _PAPERS: {_AMPLE: (20, 28, 40), _BUFFERS: (24, 32, 40, 48, 64)},
    _OWN: {_AMPLE: (28, 40, 64), _BUFFERS: (32, 48, 64)},
}


def _small_rows(whole: bool) -> Iterator[dict[str, Any]]:
    del whole
    one = snake_problem()
    tiers = tuple(replace(tier, for_values=True) for tier in one.rates.tiers)
    own = replace(one, rates=replace(one.rates, tiers=tiers))
    again = tuple(
        replace(b, options=tuple(o for o in b.options if not o.saved_bytes + o.offloaded_bytes)) for b in own.blocks
    )
    for choice, problem in ((_PAPERS, replace(own, blocks=again)), (_OWN, own)):
        for ram, counts in _SMALL[choice].items():
            for count in counts:
                fat = for_all(problem, count)
                if ram == _BUFFERS:
                    fat = replace(fat, host_budget_bytes=_working_bytes(problem))
                yield {"layers": choice, "RAM": ram, "micro-batches": count} | _snake_figures(count, *_ways(fat))


def _working_bytes(problem: Problem) -> int:
    """Return the RAM for the update of one layer and for another one on its way."""
    return 2 * max(group.param_bytes + group.grad_bytes + group.state_bytes for group in problem.groups)


def _small_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    found = []
    for choice in (_PAPERS, _OWN):
        best = {
            ram: max(row["tokens/s"] or 0 for row in rows if (row["layers"], row["RAM"]) == (choice, ram))
            for ram in (_AMPLE, _BUFFERS)
        }
        ratio = best[_AMPLE] / best[_BUFFERS] if best[_BUFFERS] else None
        found.append(Bar(f"tokens/s with {_AMPLE} / with {_BUFFERS}, layers {choice}:", ratio, 1.03))
    return found


_Row = dict[str, Any]
_TABLES: dict[str, tuple[str, Callable[[bool], Iterator[_Row]], Callable[[list[_Row]], list[Bar]]]] = {
    "ram": ("Llama-2-7B, 8 micro-batches, 120 GB of RAM, no drive", _ram_rows, _ram_bars),
    "drives": ("Llama-2-7B, 8 micro-batches, 24 GiB of RAM and a drive", _drive_rows, _drive_bars),
    "snake": ("GPT-65B on GreedySnake's first machine", _snake_rows, _snake_bars),
    "small": ("GPT-65B on GreedySnake's first machine with little RAM", _small_rows, _small_bars),
}


if __name__ == "__main__":
    main()
