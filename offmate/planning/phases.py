"""The phases of the solver's search, as a progress bar names them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..progress import FURTHER_SEARCHES, Progress
from ..solver.refine import Gain

log = logging.getLogger("offmate")

_ROUNDING = "algorithm 1"  # the solver's name of the first pass of a search


def searching(say: Progress) -> Callable[[Gain], None]:
    """Report the phases of planning in the solver.

    It searches again where the RAM's rate limits copies and updates, if RAM is full, and if more may lie in files.

    Returns: what takes note of the gain of a pass; the first pass of a search rounds the solution.
    """
    say("solving and rounding", 0.0)
    improving = iter(("improving the schedule", *FURTHER_SEARCHES))

    def note(gain: Gain) -> None:
        log.debug("%s", gain)
        if gain.name == _ROUNDING and (phase := next(improving, None)):
            say(phase, 0.0)

    return note
