"""A clipping step of a 7B model with and without speculation: `python -m benchmarks.speculation [--json FILE]`.

All seconds are predictions, for the problems of `benchmarks/desktop.py`; nothing was run on such a card. "Gate": no
update starts before the last gradient. "Speculate": updates on the host may, with a log of the old values. These are
seconds of a step that clips nothing. "No gate" does not clip, and is a bound. "Endless": without the rate of the
host's memory, in fractions. The others keep to the rate of the hardware file, in fractions and in whole tensors. The
host has 512 GB; "short" has 128 GB.

`--traces` asks what `Config(speculate="auto")` makes of runs that clip: it plans both ways in whole tensors, runs a
step that undoes its updates dry, and adds up the seconds of traces (`benchmarks/clipping_traces.py`) for updates that
always wait, that never do, and for the rule, switches included. `--figures FILE` takes the plans' seconds from an
earlier file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offmate.solver import items
from offmate.solver.instances.synthetic import speculating
from offmate.solver.plan import plan
from offmate.solver.problem import Problem, update_steps
from offmate.solver.schedule import Kind
from offmate.solver.solve import solve

from offmate.machines.hardware import load
from offmate.plans.break_even import BreakEven, break_even
from offmate.session.clipping import Clipping

from .clipping_traces import against_the_rule, published, recorded
from .desktop import BATCHES, CARDS, GB, gated, problem_of
from .overhead import machine
from .tables import show

_SHORT_BYTES = 128 * GB


def main() -> None:
    """Plan every row, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cards", nargs="*", default=[card for card, _ in CARDS])
    parser.add_argument("--fractions", action="store_true", help="leave whole tensors out, which take minutes")
    parser.add_argument("--traces", action="store_true", help="what the rule makes of runs that clip")
    parser.add_argument("--figures", type=Path, help="with --traces: an earlier file, whose plans are not made again")
    arguments = parser.parse_args()
    if arguments.traces:
        _compare(arguments)
        return
    rows = list(_rows(arguments.cards, arguments.fractions))
    show("A step of Llama-2-7B that clips nothing, predicted", rows, ".2f")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _rows(cards: list[str], fractions: bool) -> Iterator[dict[str, Any]]:
    for card, budget_bytes in CARDS:
        for batch, sequence in BATCHES if card in cards else ():
            free = problem_of(load(card), batch, sequence, budget_bytes)
            behind = gated(free, update_steps(free.groups, free.device_budget_bytes))
            for name, problem in (("no gate", free), ("gate", behind), ("speculate", speculating(behind))):
                case = {"card": card, "tokens": f"{batch} x {sequence}", "updates": name}
                row = case | _solved(problem) | ({} if fractions else _planned(problem))
                print(row, flush=True)
                yield row


def _compare(arguments: argparse.Namespace) -> None:
    """Plan both ways for every card and batch, print what each trace takes, and write it if asked."""
    if arguments.figures:
        told = json.loads(arguments.figures.read_text())["figures"]
        figures = {case: _without_share(one) for case, one in told.items()}
    else:
        figures = dict(_figures(arguments.cards))
    rows = [
        {"case": case, "steps that miss pay below": f"{one.share:.0%}"} | row
        for case, one in figures.items()
        for row in _runs(one)
    ]
    show("Steps of Llama-2-7B in runs that clip, predicted: seconds per step", rows, ".3f")
    if arguments.json:
        written = {case: one.to_dict() for case, one in figures.items()}
        arguments.json.write_text(json.dumps({"machine": machine(), "figures": written, "rows": rows}, indent=1) + "\n")


def _without_share(told: dict[str, Any]) -> BreakEven:
    return BreakEven(**{name: value for name, value in told.items() if name != "share"})


def _figures(cards: list[str]) -> Iterator[tuple[str, BreakEven]]:
    for card, budget_bytes in CARDS:
        for batch, sequence in BATCHES if card in cards else ():
            free = problem_of(load(card), batch, sequence, budget_bytes)
            behind = gated(free, update_steps(free.groups, free.device_budget_bytes))
            waits, early = plan(behind).schedule, plan(speculating(behind)).schedule
            assert waits is not None and early is not None
            found = break_even(waits, early)
            print(card, batch, sequence, found, flush=True)
            yield f"{card}, {batch} x {sequence}", found


def _runs(figures: BreakEven) -> Iterator[dict[str, Any]]:
    traces = {f"recorded: {name}": trace for name, trace in recorded().items()} | published() | against_the_rule()
    for name, trace in traces.items():
        rule, total_s, switches = Clipping(), 0.0, 0
        for missed in trace:
            total_s += (figures.missed_s if missed else figures.kept_s) if rule.early else figures.gated_s
            switches += rule.note(figures, missed)
        total_s += switches * figures.switch_s
        early_s = sum(figures.missed_s if missed else figures.kept_s for missed in trace) / len(trace)
        auto_s, misses = total_s / len(trace), sum(trace) / len(trace)
        yield {
            "trace": name, "steps": len(trace), "missed": f"{misses:.1%}",
            "wait s": figures.gated_s, "early s": early_s, "auto s": auto_s, "switches": switches,
            "beyond the better": f"{auto_s / min(figures.gated_s, early_s) - 1:+.2%}",
        }  # fmt: skip


def _solved(problem: Problem) -> dict[str, Any]:
    endless = replace(problem, rates=problem.rates.with_endless_host_memory)
    short = replace(problem, host_budget_bytes=_SHORT_BYTES)
    return {
        "endless s": solve(endless).objective_s,
        "program s": solve(problem).objective_s,
        "short s": solve(short).objective_s,
    }


def _planned(problem: Problem) -> dict[str, Any]:
    planned = plan(problem)
    assert planned.simulation is not None and planned.schedule is not None
    early = (a for a in planned.schedule.actions if a.kind is Kind.SPECULATE_CPU)
    logs = sum(planned.schedule.item_bytes[items.log(a.name)] for a in early)
    return {"simulated s": planned.simulation.step_s, "log GB": logs / GB}


if __name__ == "__main__":
    main()
