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
    said = f"{count} micro-batch{'es' if count > 1 else ''} per update"
    fitting = [one.micro_batches for one in trials if one.fits]
    larger = [one.micro_batches for one in trials if one.micro_batches > count]
    if fitting and count < max(fitting):
        return f"{said} are the fewest after which one more adds less than 1 % of tokens/s"
    if larger:
        return f"{said} are the most that fit of those tried; {min(larger)} do not fit"
    if count >= MOST:
        return f"{said} are the most that are tried; more may be faster"
    return f"{said} are the fewest after which one more adds less than 1 % of tokens/s, since computing takes longest"


def path_name(tier: str) -> str:
    """Return the name of the path between the device and a tier, as people read it."""
    return "the link" if tier == HOST else tier
