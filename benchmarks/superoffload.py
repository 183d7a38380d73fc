"""SuperOffload on a GH200: its casting roads and its table 2, predicted.

`python -m benchmarks.superoffload [--json FILE]`; nothing was run on such a machine. The problems are synthetic chains
of whole layers with the rates of `offmate/machines/gh200.json`, for the paper's models of 5 and 25 billion parameters
(table 4; MLPs four times as wide, 50,304 tokens, fused attention).

**Tokens.** The paper states a batch of 8 and no sequence length. Its tables do: GraceAdam makes a step of the 5B model
shorter by (1/116.20 - 1/128.23) s for each TFLOP of it (table 2), and by 0.098 s (table 3). That is a step of about
4,000 tokens, thus 512 per sequence.

**Roads.** A road is a way to cast the gradient and one to cast the parameter (`solver/instances/casting.py`). All use
the same update kernel, the file's. "Free" lets the program choose where each parameter is updated; "host" updates all
there, as SuperOffload does but for its last buckets. "No gate" is what a speculation that never misses comes to.
offmate casts within the chunks of an update, at the file's rate. That rate is an assumption, so its road is also
counted at 0.55 of the fp32 rate, which was measured on two cores that memory does not limit. offmate's other road is
that of a model in float32 under autocast: gradients move in half precision and are cast within the chunks, parameters
move in single precision, and the device casts them at "each use", in every forward and backward. Seconds of roads with
casts on the device are lower bounds (`on_road`).

**Table 2.** Its switches in the program: the seconds of the host's Adam by table 3, between 4 and 8 billion parameters;
casts apart on the host, or on the device; a gate, or none; all updates on the host, or where the program chooses. One
figure is taken from the paper: computes are scaled so that they alone run at its last row's rate, since the GPU is
always busy in it (figure 15). TFLOP/s count 6 operations per parameter and token. Behind our gate host updates continue
into the next forward, while the paper's baseline waits for all of them (equation 6).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, get_args

from offmate.solver.instances.casting import (
    FULL_BYTES,
    LOW_BYTES,
    OURS,
    Casts,
    Exact,
    Road,
    casting_at_every_use,
    on_road,
)
from offmate.solver.instances.synthetic import Shape, Speeds, llama
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, Rates, Side, update_steps

from offmate.machines.hardware import Hardware, load

from .desktop import MASTERS, gated
from .low_copies import GRADIENTS
from .overhead import machine
from .tables import show

MACHINE = "gh200"
BATCH, SEQUENCE, VOCAB = 8, 512, 50304
LAYERS = {"5B": (44, 3072), "25B": (30, 8192)}  # layers and width
_MEASURED_SHARE = 0.55  # of the fp32 rate, that updates with casts within chunks reached
_OPERATIONS = 6  # per parameter and token
_TERA = 1e12
_ADAM_S = {"CPU-Adam": (0.393, 0.769), "GraceAdam": (0.316, 0.608)}  # table 3: 4 and 8 billion parameters


@dataclass(frozen=True)
class Switches:
    """A row of table 2: the host's Adam, whether casts run on the device, and the paper's TFLOP/s.

    Parameters
    ----------
    speculates: whether updates wait for no gate. repartitions: whether some updates run on the device.
    """

    adam: str
    casts_on_device: bool
    speculates: bool
    repartitions: bool
    tera_per_s: float


@dataclass(frozen=True)
class Predicted:
    """A step's seconds in whole tensors and in fractions, and the mean part of a group that the host updates."""

    step_s: float
    program_s: float
    host_part: float


TABLE_2 = (
    Switches("CPU-Adam", False, False, False, 116.20),
    Switches("GraceAdam", False, False, False, 128.23),
    Switches("GraceAdam", True, False, False, 144.49),
    Switches("GraceAdam", True, True, False, 209.36),
    Switches("GraceAdam", True, True, True, 238.92),
)
PLACES: tuple[tuple[str, Side, bool], ...] = (
    ("free, no gate", "any", False),
    ("free, gate", "any", True),
    ("host, no gate", "host", False),
    ("host, gate", "host", True),
)
AUTOCAST = Road("chunks", "device")
CPU_CASTS, GPU_CASTS = Road("apart", "apart"), Road("device", "device")
# The paper's two roads, theirs mixed, and each of its casts on the device with offmate's for the other direction.
ROADS = (
    CPU_CASTS,
    GPU_CASTS,
    Road("apart", "device"),
    Road("device", "apart"),
    Road("chunks", "device"),
    Road("device", "chunks"),
)


def main() -> None:
    """Plan every row, print both tables, and write them if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    roads = [row for name in LAYERS for row in road_rows(name, shape_of(name))]
    switches = list(switch_rows(shape_of("5B")))
    show("A step on a GH200 by casting road, in predicted seconds", roads, width=190)
    show("SuperOffload's table 2, 5B: theirs measured, ours predicted", switches, width=190)
    if arguments.json:
        found = {"machine": machine(), "roads": roads, "table 2": switches}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def shape_of(name: str) -> Shape:
    """Return the shape of one of the paper's models."""
    layers, hidden = LAYERS[name]
    return Shape(layers, hidden, 4 * hidden, VOCAB, BATCH, SEQUENCE, gated=False, tied=True)


def problem_of(shape: Shape, hardware: Hardware, compute_s: float | None = None) -> Problem:
    """Return the problem on a machine's rates, with the casts as offmate makes them.

    Parameters
    ----------
    compute_s: seconds of all forwards and backwards, to which computes are scaled; None for what the rates give.
    """
    casts, device_s = casts_of(hardware), hardware.update_s(1, masters=True)[1]
    moved, size = hardware.memory_bytes_per_s, MASTERS.param_bytes
    speeds = Speeds(hardware.flops_per_s("float16"), moved, size / casts.update_s, size / device_s, _rates(hardware))
    where = (shape, speeds, hardware.default_budget_bytes, hardware.host_memory_bytes)
    plain = llama(*where, precision=MASTERS, whole_layers=True)
    if compute_s is not None:
        updates_s = sum(group.device_update_s for group in plain.groups)
        plain = llama(*where, precision=MASTERS, whole_layers=True, iteration_s=compute_s + updates_s)
    return on_road(plain, OURS, casts)


def _rates(hardware: Hardware) -> Rates:
    return Rates(
        hardware.in_bytes_per_s,
        hardware.out_bytes_per_s,
        hardware.both_bytes_per_s,
        hardware.manage_s,
        host_memory_bytes_per_s=hardware.host_memory_bytes_per_s,
    )


def casts_of(hardware: Hardware) -> Casts:
    """Return a machine's seconds for updates and casts; a cast on the device reads one size and writes the other."""
    alone_s, both_s = (hardware.update_s(1, masters=masters)[0] for masters in (False, True))
    device_s = (LOW_BYTES + FULL_BYTES) / hardware.memory_bytes_per_s
    return Casts(alone_s, both_s - alone_s, FULL_BYTES / hardware.out_bytes_per_s, device_s)


def placed(problem: Problem, side: Side, gate: bool) -> Problem:
    """Return the problem with all updates on a side, or any, behind a gate or not."""
    problem = replace(problem, groups=tuple(replace(group, side=side) for group in problem.groups))
    return gated(problem, update_steps(problem.groups, problem.device_budget_bytes)) if gate else problem


def predicted(problem: Problem, road: Road, casts: Casts) -> Predicted:
    """Plan a step on a road; if the device casts, the slower of the two problems that bound it."""
    bounds = get_args(Exact) if road.casts_on_device else ("link",)
    plans = [plan(on_road(problem, road, casts, exact)) for exact in bounds]
    steps = [planned.simulation.step_s if planned.simulation else inf for planned in plans]
    flows = plans[0].solution.groups.values()
    host_part = sum(flow.cpu_part for flow in flows) / max(1, len(flows))
    return Predicted(max(steps), max(planned.solution.objective_s for planned in plans), host_part)


def under_autocast(shape: Shape, hardware: Hardware) -> Problem:
    """Return the problem of a model in float32 under autocast: gradients alone move in half precision."""
    casts, device_s = casts_of(hardware), hardware.update_s(1, masters=False)[1]
    host_s, moved_per_s = casts.host_s(AUTOCAST), hardware.memory_bytes_per_s
    rates = replace(_rates(hardware), worker_bytes_per_s=AUTOCAST.host_bytes / host_s)
    size = GRADIENTS.param_bytes
    speeds = Speeds(hardware.flops_per_s("float16"), moved_per_s, size / host_s, size / device_s, rates)
    where = (shape, speeds, hardware.default_budget_bytes, hardware.host_memory_bytes)
    return casting_at_every_use(llama(*where, precision=GRADIENTS, whole_layers=True), casts.device_s)


def road_rows(name: str, shape: Shape, hardware: Hardware | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per road: seconds of a step for each placement, without and with a gate."""
    hardware = hardware or load(MACHINE)
    plain, casts = problem_of(shape, hardware), casts_of(hardware)
    slow = replace(casts, chunks_s=casts.update_s * (1 / _MEASURED_SHARE - 1))
    cases = [(OURS, casts, "file"), (OURS, slow, "0.55"), *((road, casts, "") for road in ROADS)]
    for road, seconds, words in cases:
        row = {"model": name, "gradient cast": road.gradient, "parameter cast": road.parameter, "ours": words}
        row |= {"link bytes": sum(road.link_bytes), "host ps": 1e12 * seconds.host_s(road)}
        for where, side, gate in PLACES:
            found = predicted(placed(plain, side, gate), road, seconds)
            row |= {where: found.step_s, f"{where}: program": found.program_s}
        yield row
    row = {"model": name, "gradient cast": AUTOCAST.gradient, "parameter cast": "each use", "ours": "file"}
    row |= {"link bytes": sum(AUTOCAST.link_bytes), "host ps": 1e12 * casts.host_s(AUTOCAST)}
    for where, side, gate in PLACES:
        planned = plan(placed(under_autocast(shape, hardware), side, gate))
        step_s = planned.simulation.step_s if planned.simulation else inf
        row |= {where: step_s, f"{where}: program": planned.solution.objective_s}
    yield row


def switch_rows(shape: Shape, hardware: Hardware | None = None) -> Iterator[dict[str, Any]]:
    """Yield the paper's rows of table 2, then offmate's road with and without a gate."""
    hardware = hardware or load(MACHINE)
    problem = problem_of(shape, hardware)
    elements = sum(group.param_bytes for group in problem.groups) // MASTERS.param_bytes
    tera = _OPERATIONS * elements * shape.tokens / _TERA
    problem = problem_of(shape, hardware, compute_s=tera / TABLE_2[-1].tera_per_s)
    casts = casts_of(hardware)
    for row in TABLE_2:
        road = GPU_CASTS if row.casts_on_device else CPU_CASTS
        adam = replace(casts, update_s=adam_s(row.adam, elements) / elements)
        found = predicted(placed(problem, "any" if row.repartitions else "host", not row.speculates), road, adam)
        words = {
            "GraceAdam": row.adam == "GraceAdam", "casts on GPU": row.casts_on_device, "no gate": row.speculates,
            "free": row.repartitions,
        }  # fmt: skip
        yield {word: "x" if on else "" for word, on in words.items()} | _compared(found, tera, row.tera_per_s)
    for gate in (True, False):
        found = predicted(placed(problem, "any", gate), OURS, casts)
        words = {"GraceAdam": "", "casts on GPU": "in chunks", "no gate": "" if gate else "x", "free": "x"}
        yield words | _compared(found, tera, None)


def adam_s(name: str, elements: int) -> float:
    """Return the seconds of a kernel of table 3 for that many parameters, between its 4 and 8 billion."""
    four, eight = _ADAM_S[name]
    return four + (eight - four) * (elements - 4e9) / 4e9


def _compared(found: Predicted, tera: float, theirs: float | None) -> dict[str, Any]:
    ours = tera / found.step_s
    return {
        "paper TFLOP/s": theirs or "",
        "paper s": tera / theirs if theirs else "",
        "ours TFLOP/s": ours,
        "ours s": found.step_s,
        "ours / paper": ours / theirs if theirs else "",
        "host part": found.host_part,
    }


if __name__ == "__main__":
    main()
