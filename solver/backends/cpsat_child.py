"""CP-SAT in a separate process: questions are lines of JSON on stdin, answers are lines of JSON on stdout.

ortools and highspy each ship a libhighs.so.1, and a process can load only one of them: the one imported second fails.
So this file runs as its own process and imports nothing from the package.
"""

from __future__ import annotations

import json
import sys
from typing import Any

try:
    from ortools.sat.python import cp_model
except (ImportError, OSError) as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(78)  # `cpsat.ABSENT`

EFFORT = 0.1  # in CP-SAT's deterministic time, so that the answer does not depend on the machine's speed


def answer(question: dict[str, Any]) -> dict[str, list[int]]:
    """Choose the storages to keep and those to offload; the question's fields are those of `cpsat.CpSat`."""
    model = cp_model.CpModel()
    sizes, maker = dict(question["sizes"]), dict(question["maker"])
    keep = {j: model.new_bool_var(f"keep{j}") for j in sizes}
    leave = {j: model.new_bool_var(f"offload{j}") for j, _ in question["offload_costs"]}
    again = {a: model.new_bool_var(f"again{a}") for a, _, _ in question["again"]}

    def ways(j: int) -> list[cp_model.IntVar]:
        return [keep[j], *([leave[j]] if j in leave else []), *([again[maker[j]]] if maker[j] in again else [])]

    for j in question["saved"]:
        model.add_bool_or(ways(j))
    for a, _, reads in question["again"]:
        for j in reads:
            model.add_bool_or([*ways(j), ~again[a]])
    kept_bytes = sum(sizes[j] * column for j, column in keep.items())
    if question["keep_at_most_bytes"] is None:
        model.minimize(kept_bytes)
    else:
        model.add(kept_bytes <= question["keep_at_most_bytes"])
        copies = sum(cost * leave[j] for j, cost in question["offload_costs"])
        model.minimize(sum(cost * again[a] for a, cost, _ in question["again"]) + copies)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = EFFORT
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:
        # A large block; the effort has ended before any choice was found.
        return dict(question["otherwise"])
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(f"CP-SAT found no choice: {solver.status_name(status)}")
    return {
        "keep": [j for j, column in keep.items() if solver.value(column)],
        "offload": [j for j, column in leave.items() if solver.value(column)],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
