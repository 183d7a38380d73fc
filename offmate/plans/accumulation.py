"""How many micro-batches a plan was chosen for, and what was predicted for others."""

from __future__ import annotations

from collections.abc import Sequence

from ..solver.accumulation import MOST, AccumulationTrial
from ..solver.resources import HOST


def chosen_words(trials: Sequence[AccumulationTrial], count: int) -> str:
    """Say why so many micro-batches per update were chosen, in a sentence without a full stop.

    Parameters
    ----------
    trials: all that were tried. count: the number that was chosen.
    """
    if count == 1:
        said, are = "one micro-batch per update", "is"
    else:
        said, are = f"{count} micro-batches per update", "are"
    fitting = [one.micro_batches for one in trials if one.fits]
    larger = [one.micro_batches for one in trials if one.micro_batches > count]
    if larger and (not fitting or count >= max(fitting)):
        (above, *_) = (one for one in trials if one.micro_batches == min(larger))
        return f"{said} {are} the most of those tried for which a plan was found; {min(larger)}: {unfit_words(above)}"
    if count >= MOST and not larger:
        return f"{said} {are} the most that are tried; more may train more tokens/s"
    why = "" if larger else ", since computing takes longest"
    return f"{said} {are} the fewest after which one more adds less than 1 % of tokens/s{why}"


def order_name(trial: AccumulationTrial) -> str:
    """Return the order of a trial's micro-batches in two words or three."""
    return f"{trial.per_pass} per pass" if trial.per_pass else trial.order


def unfit_words(trial: AccumulationTrial) -> str:
    """Say why there is no plan for what was tried."""
    return "no plan in time" if trial.timed_out else "does not fit"


def path_name(tier: str) -> str:
    """Return the name of the path between the device and a tier, as people read it."""
    return "the link" if tier == HOST else tier
