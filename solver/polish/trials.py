"""Local search over the urgency of moves, under the simulator.

A schedule's moves are timed, with an urgency given by each move's place plus a random shift. A schedule that is faster
than the best so far replaces it, and the next shifts are drawn around its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ..schedule import Schedule
from ..scheduling.validate import is_valid
from ..simulate import simulate
from .in_time import taken_in_time
from .unrolled import Unrolled

_REACHES = (0.25, 0.5, 1.0, 2.0)
_SPREADS = (2.0, 5.0, 15.0, 40.0)  # standard deviations of a shift, in entries
_PARTS = (0.02, 0.1, 0.3, 1.0)  # fractions of the moves that get a new shift
_MOST = 150  # trials
_FEWEST = 50  # of long schedules there is time for a dozen; these were not seen to find anything


@dataclass(frozen=True)
class _Trial:
    """One set of urgencies, the schedule that it gives, and the seconds of an iteration of that."""

    reach: float
    shifts: Mapping[tuple[int, int], float]
    schedule: Schedule
    step_s: float


def best_of_trials(schedule: Schedule, work: int) -> Schedule | None:
    """Return the fastest schedule found by up to about 150 trials; the same one every time.

    Parameters
    ----------
    schedule: a valid schedule as it was built; the places of moves are taken from it.
    work: effort limit: simulated actions in all trials together.

    Returns: a valid schedule; None if no trial gives one, or the limit allows too few to find something.
    Source: design of rounding (improvement under the simulator).
    """
    count = min(_MOST, work // len(schedule.actions))
    if count < _FEWEST:
        return None
    rng = random.Random(0)
    keys = sorted({task.key for task in Unrolled(schedule, 1, {}).tasks})
    first = [_tried(schedule, reach, {}, None) for reach in _REACHES]
    best = min((trial for trial in first if trial), key=lambda trial: trial.step_s, default=None)
    if best is None:
        return None
    for _ in range(count - len(_REACHES)):
        spread, part = rng.choice(_SPREADS), rng.choice(_PARTS)
        shifts = dict(best.shifts) | {key: rng.gauss(0, spread) for key in keys if rng.random() < part}
        best = _tried(schedule, rng.choice((best.reach, *_REACHES)), shifts, best) or best
    return best.schedule


def _tried(
    schedule: Schedule, reach: float, shifts: Mapping[tuple[int, int], float], best: _Trial | None
) -> _Trial | None:
    """Return the result of a trial if it is valid and faster than the best so far."""
    found = taken_in_time(schedule, reach, shifts=shifts)
    if found is None:
        return None
    step_s = simulate(found).step_s
    if best is not None and step_s >= best.step_s * (1 - 1e-9):
        return None
    return _Trial(reach, shifts, found, step_s) if is_valid(found) else None
