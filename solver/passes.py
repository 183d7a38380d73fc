"""How many micro-batches a pass should run, beside one and all of an update.

More of them copy parameters and totals less often, and need memory for what lies between the blocks. If that is short,
blocks have to compute again or to move what they keep. So the seconds of an update fall with their number while copies
limit it, and rise once computes do. The number at which this turns is estimated without a solve: the least one for
which the copies of parameters, gradients and totals, all of them streamed, and the host's additions take no longer than
the computes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from .fat_steps import in_passes
from .problem import Problem
from .program.streamed import streaming_solution
from .resources import Resource
from .rounding.spilled import whole_schedule
from .scheduling.validate import ScheduleError
from .sharing import least_seconds
from .simulate import keeps_budgets

MOST = 64  # micro-batches per pass that are tried
WORTH = 1.01  # an update must be able to become faster by this factor


def between(problem: Problem, best_s: float, *, all_fit: bool) -> int | None:
    """Return a number of micro-batches per pass, other than one and all, that may give a faster update.

    Parameters
    ----------
    problem: of an update in the usual order. best_s: seconds of the best plan so far; infinite if there is none.
    all_fit: whether there is a plan for one pass of all.

    Returns: a power of two; None if none can be faster, or if the estimate is one or all.
    Source: GreedySnake, section 4.2, for what a pass copies.
    """
    count = problem.per_update
    one = replace(problem, micro_batches=1)
    numbers = [2**i for i in range(1, count.bit_length()) if 2**i < count and 2**i <= MOST]
    if not numbers or best_s <= WORTH * (problem.all_computes_s + problem.gate_s):
        return None
    if _streamed_s(problem, 1) <= problem.all_computes_s:
        return None
    for number in numbers:
        if _streamed_s(problem, number) <= problem.all_computes_s:
            break
    else:
        if all_fit:
            return None
        number = numbers[-1]
    fitting = (k for k in reversed(numbers) if k <= number and _fits(in_passes(one, count, k)))
    return number if all_fit else next(fitting, None)


def _streamed_s(problem: Problem, per_pass: int) -> float:
    """Return the seconds in which parameters come for every use, and gradients leave and are added up."""
    passes, rates = -(-problem.per_update // per_pass), problem.rates
    n, busy_s = problem.n_blocks, defaultdict[Resource, float](float)

    def move(link: Resource, size_bytes: float) -> None:
        busy_s[link] += size_bytes / rates.bytes_per_s(link)

    for group in problem.groups:
        often = len({step < n for step in group.uses})  # a block's forward and backward; neighbours share it
        sources = problem.sources(group) if not group.trainable else ()
        move(sources[0].path.into if sources else Resource.IN, passes * often * group.param_bytes)
        if not group.trainable:
            continue
        move(Resource.OUT, passes * group.grad_bytes)
        if per_pass > 1:  # the total comes back, and the device adds
            move(Resource.IN, (passes - 1) * group.grad_bytes)
        else:
            busy_s[rates.worker("accumulate-cpu")] += (passes - 1) * group.cpu_add_s
    together = (sum(weight * busy_s[one] for one, weight in weights.items()) for _, weights in least_seconds(rates))
    return max((*busy_s.values(), *together), default=0.0)


def _fits(problem: Problem) -> bool:
    """Return whether the safe plan, which needs about the least memory, stays within the budgets."""
    try:
        return keeps_budgets(problem, whole_schedule(problem, problem, streaming_solution(problem)))
    except (ValueError, ScheduleError):
        return False
