"""What updates before the gate gain where a step clips nothing, cost where it clips, and when that pays."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..reports.units import format_seconds
from ..sizes import format_bytes
from ..solver import items
from ..solver.items import ItemKind
from ..solver.missed import missed
from ..solver.schedule import Kind, Schedule
from ..solver.simulate import simulate

_BROUGHT = (ItemKind.PARAMETER, ItemKind.STATE)  # what a plan brings to the device before its first step


@dataclass(frozen=True)
class BreakEven:
    """Two plans of the same training: one whose updates all wait for the gate, and one with updates before it.

    Parameters
    ----------
    gated_s: seconds of a step of the first. kept_s: of the second, if the gate leaves all gradients as they are.
    missed_s: of the second, if updates before the gate are undone and made again behind it.
    switch_s: seconds to take one plan's tensors off the device and bring the other's.
    log_bytes: RAM for the old values that the second keeps until its gate opens.
    """

    gated_s: float
    kept_s: float
    missed_s: float
    switch_s: float
    log_bytes: int

    @property
    def share(self) -> float:
        """The share of steps that miss at which both plans are as fast; 0 if updates before the gate gain nothing."""
        if self.gained_s <= 0:
            return 0.0
        return self.gained_s / (self.gained_s + self.lost_s)

    @property
    def gained_s(self) -> float:
        """Seconds that a step gains by updates before the gate if they are kept."""
        return self.gated_s - self.kept_s

    @property
    def lost_s(self) -> float:
        """Seconds that a step loses by them if they are undone."""
        return max(0.0, self.missed_s - self.gated_s)

    def words(self) -> str:
        """Return a sentence that says when updates before the gate pay."""
        if not self.share:
            return f"updates before the gate would gain nothing: a step takes {format_seconds(self.gated_s)} either way"
        return (
            f"if updates wait for the gate, a step takes {format_seconds(self.gated_s)}; if the CPU updates before it, "
            f"{format_seconds(self.kept_s)} where gradients stay as they are and {format_seconds(self.missed_s)} where "
            f"they are clipped or skipped, with {format_bytes(self.log_bytes)} of old values in RAM: that is faster "
            f"if fewer than {100 * self.share:.0f} % of steps are clipped or skipped"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON's own types, with the share."""
        return {**asdict(self), "share": self.share}


def break_even(gated: Schedule, early: Schedule) -> BreakEven:
    """Compare a schedule whose updates wait for the gate with one that may have updates before it."""
    names = [action.name for action in early.actions if action.kind is Kind.SPECULATE_CPU]
    if not names:
        return alone(gated)
    kept_s = simulate(early).step_s
    return BreakEven(
        gated_s=simulate(gated).step_s,
        kept_s=kept_s,
        missed_s=max(kept_s, simulate(missed(early)).step_s),
        switch_s=max(_reload_s(gated), _reload_s(early)),
        log_bytes=sum(early.item_bytes[items.log(name)] for name in names),
    )


def alone(gated: Schedule) -> BreakEven:
    """Return the comparison for training that has no plan with updates before the gate: they gain nothing."""
    step_s = simulate(gated).step_s
    return BreakEven(step_s, step_s, step_s, 0.0, 0)


def _reload_s(schedule: Schedule) -> float:
    """Return the seconds for taking what a step starts with off the device, and for bringing it."""
    held = [item for item in schedule.resident if item.kind in _BROUGHT]
    rates, sizes = schedule.rates, schedule.item_bytes
    out_s = sum(rates.copy_s(sizes[item], schedule.path_of(item).out) for item in held)
    return out_s + sum(rates.copy_s(sizes[item], schedule.path_of(item).into) for item in held)
