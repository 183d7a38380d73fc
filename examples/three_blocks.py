"""Three blocks as a problem of the solver: stated, solved for three budgets, drawn, and given one more constraint.

python examples/three_blocks.py                 # needs no model and no GPU
python examples/three_blocks.py --lp three.lp   # also write one program in the LP format
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

from offmate.solver.backends import default
from offmate.solver.linear import LinearModel, Row
from offmate.solver.plan import Planned, plan
from offmate.solver.problem import Block, Group, Option, Output, Problem, Rates, TensorSize, Value
from offmate.solver.program.model import state_program
from offmate.solver.program.readback import read_solution
from offmate.solver.program.search import search
from offmate.solver.resources import Resource
from offmate.solver.schedule import Action, Kind
from offmate.solver.simulate import Simulation
from offmate.solver.solve import least_budget

MB = 10**6
N_BLOCKS = 3
LP_BUDGET = 24 * MB
COLUMN_S = 0.25  # seconds that a character of the drawing stands for
ROWS = {
    Resource.COMPUTE: "compute", Resource.IN: "copies in", Resource.OUT: "copies out", Resource.CPU: "CPU updates",
}  # fmt: skip


def three_blocks(device_budget_bytes: int) -> Problem:
    """State the problem: blocks A, B and C, each with 2 MB of parameters, and links of 2 MB per second."""
    seconds = {"forward_s": 1.0, "forward_peak_bytes": 5 * MB, "backward_peak_bytes": 8 * MB}
    options = (
        Option("keep", saved_bytes=4 * MB, offloaded_bytes=0, backward_s=2.0, **seconds),
        Option("recompute", saved_bytes=0, offloaded_bytes=0, backward_s=3.0, **seconds),
        Option("offload", saved_bytes=0, offloaded_bytes=4 * MB, backward_s=2.0, **seconds),
    )
    last = 2 * N_BLOCKS - 1  # the step of the first block's backward
    groups = tuple(
        Group(
            name=name,
            tensors=(TensorSize(name, param_bytes=2 * MB, grad_bytes=2 * MB, state_bytes=4 * MB),),
            uses=(i, last - i),
            grad_steps=(last - i,),
            cpu_update_s=1.0,
            device_update_s=0.25,
        )
        for i, name in enumerate("ABC")
    )
    values = tuple(
        Value(f"h{i}", bytes=MB, made=i, uses=(i + 1, last - i - 1), grad_bytes=MB, grad_steps=(last - i - 1,))
        for i in range(N_BLOCKS - 1)
    )
    return Problem(
        blocks=tuple(Block(name, options) for name in "ABC"),
        groups=groups,
        values=values,
        shared=(),
        outputs=(Output("loss", 4, made=N_BLOCKS - 1, grad_bytes=4),),
        rates=Rates(in_bytes_per_s=2 * MB, out_bytes_per_s=2 * MB, both_bytes_per_s=4 * MB),
        device_budget_bytes=device_budget_bytes,
        host_budget_bytes=100 * MB,
    )


def describe(problem: Problem, found: Planned) -> Iterator[str]:
    """Yield a plan's lines: seconds, options, the host's part of each update, the bars of each resource, and bytes."""
    if found.schedule is None or found.simulation is None:
        yield f"{problem.device_budget_bytes / MB:.0f} MB: no schedule, {found.solution.status.value}"
        return
    solution, simulation = found.solution, found.simulation
    on_host = {span.action.name for span in simulation.timeline if span.action.kind is Kind.UPDATE_CPU}
    yield (
        f"{problem.device_budget_bytes / MB:.0f} MB: in fractions {solution.objective_s:.2f} s per step; "
        f"as a schedule {simulation.step_s:.2f} s and at most {simulation.peak_bytes / MB:.0f} MB"
    )
    chosen = (block.options[o].name for block, o in zip(problem.blocks, found.schedule.options))
    yield "  options      " + ", ".join(f"{block.name} {name}" for block, name in zip(problem.blocks, chosen))
    parts = (f"{name} {flow.cpu_part:.2f}" for name, flow in solution.groups.items())
    yield f"  x            {', '.join(parts)}; whole, updated on the CPU: {', '.join(sorted(on_host)) or 'none'}"
    width = round(simulation.step_s / COLUMN_S)
    for resource, word in ROWS.items():
        yield f"  {word:<12} |{_bars(simulation, resource, width)}|"


def _bars(simulation: Simulation, resource: Resource, width: int) -> str:
    """Draw what a resource does over one step, a character for each COLUMN_S seconds; a dot where it is idle."""
    drawn = ["."] * width
    for span in simulation.timeline:
        if span.resource == resource:
            for column in range(round(span.start_s / COLUMN_S), round(span.end_s / COLUMN_S)):
                drawn[column % width] = _letter(span.action)
    return "".join(drawn)


def _letter(action: Action) -> str:
    """Return an action's letter.

    A, B and C are the forward, the parameter or the CPU's update of a block, and a, b and c its backward. g is a
    gradient, s an optimizer state, o what a block offloads, v an interface value, + an update on the device.
    """
    if action.kind is Kind.COMPUTE:
        letter = "ABC"[int(action.name[1:])]  # start, user code and gate take no time here
        return letter if action.name[0] == "F" else letter.lower()
    prefix, colon, name = action.name.partition(":")
    if not colon:
        return "+" if action.kind is Kind.UPDATE_DEVICE else prefix
    return name if prefix == "p" else {"a": "o"}.get(prefix, prefix)


def as_lp(model: LinearModel) -> str:
    """Return a linear model in the LP format, which HiGHS, CBC and other solvers read."""
    columns = [_plain(name) for name in model.names]

    def total(terms: Iterable[tuple[int, float]]) -> str:
        return " ".join(f"{a:+.9g} {columns[c]}" for c, a in terms)

    costs = total((c, cost) for c, cost in enumerate(model.costs) if cost)
    rows = [
        f" r{i}_{_plain(row.name)}: {total(zip(row.columns, row.coefficients))} "
        f"{'=' if row.equal else '<='} {row.bound:.9g}"
        for i, row in enumerate(model.rows)
    ]
    bounds = [f" 0 <= {column} <= {upper:.9g}" for column, upper in zip(columns, model.upper) if upper < float("inf")]
    whole = [f" {column}" for column, integer in zip(columns, model.integer) if integer]
    lines = ("Minimize", f" seconds: {costs}", "Subject To", *rows, "Bounds", *bounds, "General", *whole, "End")
    return "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    """A name without the characters that the format keeps for itself."""
    return name.translate(str.maketrans("[] ", "()_"))


def constrained_s(problem: Problem, most: float) -> float:
    """Solve in fractions with one more row: the CPU updates at most so many groups. Return the seconds of a step."""
    program = state_program(problem)
    parts = tuple(program.model.names.index(f"x[{group.name}]") for group in problem.groups)
    row = Row("updates on the CPU", parts, (1.0,) * len(parts), bound=most)
    program = replace(program, model=replace(program.model, rows=(*program.model.rows, row)))
    answer = search(problem, program, default(), time_limit_s=10.0, gap=0.0)
    return read_solution(program, answer).objective_s if answer.values else inf


def main() -> None:
    """Print what the page "Extending the solver" shows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lp", type=Path, help=f"write the program of {LP_BUDGET // MB} MB to this file")
    args = parser.parse_args()
    least = least_budget(three_blocks(100 * MB))
    print(f"least budget: {least.bytes / MB:.1f} MB, needed in step {least.step}, in which {least.block} computes")
    for budget in (40 * MB, LP_BUDGET, 16 * MB):
        problem = three_blocks(budget)
        print("", *describe(problem, plan(problem, gap=0.0)), sep="\n")
    problem = three_blocks(LP_BUDGET)
    model = state_program(problem).model
    print(f"\nprogram of {LP_BUDGET // MB} MB: {len(model.names)} columns, {len(model.rows)} rows")
    for most in (3, 1, 0):
        print(f"  with x[A] + x[B] + x[C] <= {most}: {constrained_s(problem, most):.2f} s")
    if args.lp:
        args.lp.write_text(as_lp(model))


if __name__ == "__main__":
    main()
