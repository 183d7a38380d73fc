"""The whole tensors that need the fewest bytes on the host, whatever they cost in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from ..backends import default, get
from ..problem import Problem
from ..program.model import state_program
from ..solution import Solution
from .settle import Resolver
from .whole import COUNTED, counts, in_whole_tensors

_NODES = 100  # of the search tree
_GAP = 1e-3  # to the fewest bytes


def settle_least_host(
    problem: Problem,
    solution: Solution,
    budgets_bytes: Iterable[int],
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    backend: str | None = None,
) -> Iterator[Solution]:
    """Yield, for each of some host budgets, the best flows of the whole tensors with the fewest bytes on the host.

    The program in whole tensors is solved once for the fewest bytes on the host within the device's budget, with
    choices of its own. Its integers are then held, and the flows are solved for the least seconds.

    Parameters
    ----------
    solution: an answer to the problem, whose bound is kept. budgets_bytes: of the host, descending; the first that
        is too small ends the sequence. time_limit_s, gap, backend: as in `solve`; the limit applies to each solve.

    Returns: nothing if there is no plan of whole tensors, or if these are too many to solve for in a short time.
    Raises: BackendError if the backend is not installed.
    """
    if problem.update == "external" or counts(problem) > COUNTED:
        return
    lean = in_whole_tensors(problem, state_program(problem, "host within device"), inf, whole_states=True)
    solver = get(backend) if backend else default()
    answer = solver.solve(lean, time_limit_s, _GAP, nodes=_NODES)
    if not answer.values:
        return
    # Solvers return integers with an error of up to a millionth.
    found = {name: float(round(v)) for name, v, whole in zip(lean.names, answer.values, lean.integer) if whole}
    for host_bytes in budgets_bytes:
        tried = replace(problem, host_budget_bytes=host_bytes)
        resolver = Resolver(tried, solution, time_limit_s=time_limit_s, gap=gap, backend=backend)
        settled = resolver.solve_in_whole_tensors(found)
        if settled is None:
            return
        yield settled
