"""MLP-Offload's node and its ablation, predicted: `python -m benchmarks.mlp_offload [--json FILE]`.

Nothing was run on such a machine. The node is its testbed 1 (table 1): four H100 with 55 GB/s each way, 512 GB of RAM,
an NVMe array (6.9 GB/s read, 5.3 written) and a parallel file system (3.6 and 3.6). It is planned as one device with
the sum of the cards' memory, compute and links, and with the paper's update rates (8 billion parameters per second on
its CPUs, 40 on its GPUs). Exchange between the cards is left out. Its models (table 2) have bf16 parameters and
gradients and 12 bytes of states, and each card has one sequence of 2,048 tokens. Reads and writes of a drive take
turns: that is what the paper's own figures come to (DeepSpeed's update phase of 40B moves 1,129 GB in 213 s).

**RAM.** "Charged" leaves 300 GB to a runtime, as DeepSpeed's has them (section 4.3, 250 to 350 GB). "Ours" counts what
offmate's plan counts, with 32 GB for all else.

**Measured there**: the log of the paper's artifact, with and without MLP-Offload.

**Ablation** (figures 14 and 15). Their switches in the program: gradients that are flushed in float32 and read again
are four more bytes of states per parameter; without caching, RAM holds no states; a second path is one. Their cards
hold no states, so the device has room for none here. Exclusive access is a rule between processes: it has no
counterpart in one, and changes nothing here. Published are only two gains: all three without the second path together
make up to 1.6, and the second path 1.6 again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver.instances.synthetic import Precision, Shape, Speeds, llama
from offmate.solver.plan import Planned, plan
from offmate.solver.problem import Problem, Rates
from offmate.solver.schedule import Kind, Schedule

from offmate.machines.hardware import load
from offmate.planning.storage import PathFigures, together

from .desktop import GB, MASTERS
from .overhead import machine
from .tables import show

CARDS = 4
RAM_BYTES, RUNTIME_BYTES, OTHER_BYTES = 512 * GB, 300 * GB, 32 * GB
LINK_BYTES_PER_S, BOTH_LINKS = 55 * GB, 1.8
CPU_PARAMETERS_PER_S, GPU_PARAMETERS_PER_S = 8e9, 40e9
CAPACITY_BYTES = 10_000 * GB
BUFFERS_BYTES = 2 * GB
NVME, PFS = (6.9 * GB, 5.3 * GB), (3.6 * GB, 3.6 * GB)
# Layers, width; seconds of an iteration with MLP-Offload and with DeepSpeed by the artifact's log, where it has them.
MODELS: dict[str, tuple[int, int, float, float | None]] = {
    "40B": (128, 5120, 102, 242),
    "52B": (64, 8192, 92, None),
    "70B": (80, 8192, 151, 371),
    "100B": (124, 8192, 276, None),
    "120B": (96, 10240, 288, 550),
}
ABLATED = ("40B", "70B", "100B")
_FLUSHED = replace(MASTERS, state_bytes=MASTERS.state_bytes + 4)
_LIMIT_S = 300.0  # for a solve of 130 blocks on a slow machine
_FIGURES = ("stored GB", "RAM used GB", "bound s", "program s", "simulated s", "of the program")
_NO_PLAN = "no plan"
_WORKING_BYTES = 40 * GB  # of device memory beside parameters, in the ablation


def main() -> None:
    """Plan every row, print both tables, and write them if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    nodes = [_said(row) for name in arguments.models for row in node_rows(name)]
    switches = [_said(row) for name in arguments.models if name in ABLATED for row in ablation_rows(name)]
    show("An iteration on MLP-Offload's node: theirs measured, ours predicted", nodes, ".4g")
    show("Its ablation: theirs published, ours predicted", switches, ".4g")
    if arguments.json:
        found = {"machine": machine(), "node": nodes, "ablation": switches}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def problem_of(name: str, device_bytes: int, host_bytes: int, precision: Precision = MASTERS) -> Problem:
    """Return the problem of a model on the node, without storage."""
    layers, hidden, _, _ = MODELS[name]
    card, size = load("h100"), precision.param_bytes
    link = CARDS * LINK_BYTES_PER_S
    speeds = Speeds(
        CARDS * card.flops_per_s("float16"),
        CARDS * card.memory_bytes_per_s,
        size * CPU_PARAMETERS_PER_S,
        size * GPU_PARAMETERS_PER_S,
        Rates(link, link, BOTH_LINKS * link, card.manage_s),
    )
    shape = Shape(layers, hidden, 4 * hidden, vocab=32000, batch=CARDS, sequence=2048, gated=False)
    problem = llama(shape, speeds, device_bytes, host_bytes, precision=precision, whole_layers=True)
    return replace(problem, host_in_time=True)


def stored_on(problem: Problem, *paths: tuple[float, float]) -> Problem:
    """Return the problem with storage paths, given as rates of reads and writes that take turns.

    Where RAM cannot hold all parameters, they may lie there, too.
    """
    figures = [PathFigures("", read, write, 2 / (1 / read + 1 / write), CAPACITY_BYTES) for read, write in paths]
    params = sum(group.param_bytes for group in problem.groups)
    files = replace(together(figures, BUFFERS_BYTES), for_parameters=params > problem.host_budget_bytes)
    return replace(problem, rates=replace(problem.rates, tiers=(files.tier,)))


def node_rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield a model's rows: with a runtime's memory charged, and with what offmate's plan counts."""
    device_bytes = CARDS * load("h100").default_budget_bytes
    for words, other_bytes in (("charged", RUNTIME_BYTES), ("ours", OTHER_BYTES)):
        problem = stored_on(problem_of(name, device_bytes, RAM_BYTES - other_bytes), NVME, PFS)
        row = {"model": name, "RAM": words} | _predicted(problem, plan(problem, time_limit_s=_LIMIT_S))
        _, _, ours, theirs = MODELS[name]
        yield row | {"MLP-Offload s": ours, "DeepSpeed s": theirs or ""}


def ablation_rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield a model's rows, each with one more of their switches on."""
    layers, hidden, _, _ = MODELS[name]
    param_bytes = 2 * (12 * layers * hidden**2)
    device_bytes = param_bytes + _WORKING_BYTES
    cached, uncached = RAM_BYTES - RUNTIME_BYTES, param_bytes // 2
    cases = (
        ("DeepSpeed ZeRO-3", uncached, _FLUSHED, (NVME,), ""),
        ("+ caching", cached, _FLUSHED, (NVME,), ""),
        ("+ no flushed gradients", cached, MASTERS, (NVME,), ""),
        ("+ exclusive access", cached, MASTERS, (NVME,), "up to 1.6"),
        ("+ second path", cached, MASTERS, (NVME, PFS), "2.5"),
    )
    first_s = None
    for words, host_bytes, precision, paths, published in cases:
        problem = stored_on(problem_of(name, device_bytes, host_bytes, precision), *paths)
        row = {"model": name, "switches": words} | _predicted(problem, plan(problem, time_limit_s=_LIMIT_S))
        planned = row["simulated s"] != _NO_PLAN
        first_s = first_s or (row["simulated s"] if planned else None)
        yield row | {"gain so far": first_s / row["simulated s"] if planned else _NO_PLAN, "published": published}


def _said(row: dict[str, Any]) -> dict[str, Any]:
    print(row, flush=True)
    return row


def _predicted(problem: Problem, found: Planned) -> dict[str, Any]:
    if found.schedule is None or found.simulation is None:
        return dict.fromkeys(_FIGURES, _NO_PLAN)
    ((_, host_bytes), (_, stored)) = found.schedule.tiers
    (tier,) = problem.rates.tiers
    program_s, simulated_s = found.solution.objective_s, found.simulation.step_s
    stored -= _resting_bytes(found.schedule)
    bound_s = 2 * stored / tier.path.alike_bytes_per_s
    figures = (stored / GB, host_bytes / GB, bound_s, program_s, simulated_s, simulated_s / program_s)
    return dict(zip(_FIGURES, figures, strict=True))


def _resting_bytes(schedule: Schedule) -> int:
    """Return the bytes of parameters whose homes are in files while they are always on the device."""
    moving = {action.item for action in schedule.actions if action.kind in (Kind.PREFETCH, Kind.OFFLOAD)}
    resting = {item for item in schedule.trained_homes - moving if item.name not in schedule.updated_from_files}
    return sum(schedule.item_bytes[item] for item in resting)


if __name__ == "__main__":
    main()
