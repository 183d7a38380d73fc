"""Random numbers of blocks that run for several micro-batches in turn, drawn in plain PyTorch's order.

Plain PyTorch draws what all blocks of the first micro-batch need, then what those of the second need. So before the
first forward all draws are made once in that order, without the work between them, to learn the generator's state
before each block of each micro-batch. Every forward then starts from its own state.
"""

from __future__ import annotations

import torch

from ..ledger import Ledger
from .shapes import Shapes


class Draws:
    """Places the generator before each forward of a fat step.

    State: `begins`, by micro-batch of the step, the generator's state before its first draw, for whoever drops the
    others; `_states`, by micro-batch and block, the state before its forward; `_end`, the state after all of them.

    Parameters
    ----------
    several: whether steps run several micro-batches.
    """

    def __init__(self, shapes: Shapes, ledger: Ledger, *, several: bool) -> None:
        self._draws = several and bool(shapes.own.binding.drawing)
        self._shapes, self._ledger = shapes, ledger
        self.begins: tuple[torch.Tensor, ...] = ()
        self._states: dict[tuple[int, int], torch.Tensor] = {}
        self._end: torch.Tensor | None = None

    def foresee(self, slots: int) -> None:
        """Draw once, before the first forward, what the forwards of so many micro-batches will draw."""
        if not self._draws:
            return
        self._states, begins = {}, []
        for slot in range(slots):
            begins.append(torch.get_rng_state())
            for block, drawing in self._shapes.binding(slot).drawing.items():
                self._states[slot, block] = torch.get_rng_state()
                for one in drawing:
                    size = one.target(*one.args, **one.kwargs).untyped_storage().nbytes()
                    self._ledger.made(0, size)
        self._end, self.begins = torch.get_rng_state(), tuple(begins)

    def before(self, block: int, slot: int) -> None:
        """Place the generator before a block's forward."""
        state = self._states.pop((slot, block), None)
        if state is not None:
            torch.set_rng_state(state)

    def after_all(self) -> None:
        """Place the generator where plain PyTorch leaves it after all forwards."""
        if self._end is not None:
            torch.set_rng_state(self._end)
            self._end = None
