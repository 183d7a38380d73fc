"""Whether the CPU updates before the gate, where that is left to what happens: two plans, and which one runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from ..errors import InfeasibleBudget, StorageError
from ..plans.break_even import BreakEven, alone, break_even
from ..reports.units import format_seconds
from .clipping import Clipping
from .preparer import Preparer
from .state_storage import TooFull
from .variants import Call, Variant

log = logging.getLogger("offmate")


class Choice:
    """Finds variants as its preparer does, of the two kinds of plans that are kept with `Config(speculate="auto")`.

    It changes from one kind to the other between two updates only, so that all micro-batches of an update run alike.

    State: `clipping`, the rule and what it has seen; None if there is nothing to choose. Changed by one thread at a
    time. No checkpoint holds it: a resumed run begins with updates that wait, and looks at its own steps.
    """

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer
        self.clipping = Clipping() if preparer.request.chooses else None

    def variant_for(
        self, model: torch.nn.Module, call: Call, make_room: Callable[[], None]
    ) -> tuple[Variant, list[torch.Tensor | None]]:
        """Return the variant for a call and its leaves, as `Preparer.variant_for` does."""
        if self.clipping is None or not call.trains:
            return self._preparer.variant_for(model, call, make_room)
        gated = self._preparer.known(call)
        figures = gated.figures if gated is not None else None
        if figures is None:
            figures = self._compare(model, call, make_room)
        variant, leaves = self._preparer.variant_for(model, self._own(call), make_room)
        if variant.figures is None:  # made again, since there was no room to keep it
            _note(variant, figures)
        return variant, leaves

    def known(self, call: Call) -> Variant | None:
        """Return the variant that is kept for a call; None if it would have to be planned."""
        return self._preparer.known(self._own(call))

    def updated(self, variant: Variant, *, kept: bool) -> None:
        """Note that an update is made, or left out, and choose for the next one.

        Parameters
        ----------
        variant: whose it is. kept: whether its gate has kept the updates before it, or would have kept them.
        """
        figures = variant.figures
        if self.clipping is None or figures is None or not self.clipping.note(figures, missed=not kept):
            return
        misses, seen = self.clipping.steps
        log.info(
            "of the last %d steps, %d were clipped, skipped or looked into; updates before the gate are faster if "
            "fewer than %.0f %% are. From the next step on, %s",
            seen, misses, 100 * figures.share, self._next(figures),
        )  # fmt: skip

    def waits_again(self, variant: Variant | None, error: StorageError) -> bool:
        """Let updates wait for the gate again if the plan whose updates do not cannot begin, for want of space; say so.

        Returns: whether they do wait now, so that the call can go on with another variant.
        """
        if self.clipping is None or variant is None or not variant.kind.early:
            return False
        self.clipping.wait()
        log.warning("updates wait for the gate again, since the plan with earlier ones cannot begin: %s", error)
        return True

    def _next(self, figures: BreakEven) -> str:
        assert self.clipping is not None
        gated_s = format_seconds(figures.gated_s)
        if not self.clipping.early:
            return f"updates wait for it again, and a step takes {gated_s} as predicted"
        return (
            f"the CPU updates before it: {format_seconds(figures.kept_s)} predicted, and "
            f"{format_seconds(figures.missed_s)} for a step that has to undo it, instead of {gated_s}"
        )

    def _own(self, call: Call) -> Call:
        """Return the call of the plan that runs now; where updates before the gate gain nothing, they wait."""
        if self.clipping is None or not (self.clipping.early and call.trains):
            return call
        gated = self._preparer.known(call)
        gains = gated is not None and gated.figures is not None and gated.figures.share > 0
        return replace(call, early=gains)

    def _compare(self, model: torch.nn.Module, call: Call, make_room: Callable[[], None]) -> BreakEven:
        """Plan both ways, note in each plan how they compare, and return that."""
        gated, _ = self._preparer.variant_for(model, call, make_room)
        variants, usual = [gated], gated.prepared.plan.schedule
        try:
            early, _ = self._preparer.variant_for(model, replace(call, early=True), make_room)
            variants.append(early)
            figures = break_even(usual, early.prepared.plan.schedule)
        except (InfeasibleBudget, TooFull) as error:
            log.info("no plan updates before the gate: %s", error)
            figures = alone(usual)
        for variant in variants:
            _note(variant, figures)
        log.info("%s", figures.words())
        return figures


def _note(variant: Variant, figures: BreakEven) -> None:
    """Note in a plan how the two ways compare."""
    variant.figures = figures
    variant.prepared = replace(variant.prepared, plan=replace(variant.prepared.plan, break_even=figures))
