"""The planner's passes, also for losses that are too small to matter to a user.

What a benchmark compares may differ by less than the loss for which offmate looks for other whole tensors.
"""

from __future__ import annotations

from dataclasses import replace

from offmate.solver.plan import LADDER
from offmate.solver.refinements import Refinement, Settle, Whole


def from_loss(worth: float, *passes: type[Settle | Whole]) -> tuple[Refinement, ...]:
    """Return the usual passes, of which some run already for a smaller loss.

    Parameters
    ----------
    worth: fraction of the program's seconds. passes: those that it holds for.
    """
    return tuple(replace(one, worth=worth) if isinstance(one, passes) else one for one in LADDER)
