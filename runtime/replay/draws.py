"""Random numbers of blocks that run for several micro-batches in turn, drawn in plain PyTorch's order.

Plain PyTorch draws what all blocks of the first micro-batch need, then what those of the second need. So before the
first forward the generator's state before each block of each micro-batch is found out, and every forward then starts
from its own. On the CPU, all draws are made once in that order, without the work between them. The generator of a card
counts: how far each block moves it was seen when the plan was bound.
"""

from __future__ import annotations

import torch

from ...errors import OffmateError
from ..devices.generator import Generator, moved, position_of
from ..ledger import Ledger
from .shapes import Shapes


class Draws:
    """Places the generator before each forward of a fat step.

    State: `begins`, by micro-batch of the step, the generator's state before its first draw, for whoever drops the
    others; `_states`, by micro-batch and block, the state before its forward; `_ends`, the position after it, of a
    generator that counts; `_end`, the state after all of them.

    Parameters
    ----------
    several: whether steps run several micro-batches.
    """

    def __init__(self, shapes: Shapes, ledger: Ledger, generator: Generator, *, several: bool) -> None:
        self._draws = several and bool(shapes.own.binding.drawing or shapes.own.binding.advances)
        self._shapes, self._ledger, self.generator = shapes, ledger, generator
        self.begins: tuple[torch.Tensor, ...] = ()
        self._states: dict[tuple[int, int], torch.Tensor] = {}
        self._ends: dict[tuple[int, int], int] = {}
        self._end: torch.Tensor | None = None

    def foresee(self, slots: int) -> None:
        """Find out, before the first forward, where those of so many micro-batches will draw from."""
        if not self._draws:
            return
        self._states, self._ends, begins = {}, {}, []
        state = self.generator.state()
        for slot in range(slots):
            begins.append(state)
            binding = self._shapes.binding(slot)
            state = self._counted(slot, binding.advances, state) if binding.advances else self._drawn(slot)
        self._end, self.begins = state, tuple(begins)

    def _counted(self, slot: int, advances: dict[int, int], state: torch.Tensor) -> torch.Tensor:
        """Note the states of a micro-batch's blocks on a generator that counts; return that after all of them."""
        for block, by in advances.items():
            self._states[slot, block], state = state, moved(state, by)
            self._ends[slot, block] = position_of(state)
        return state

    def _drawn(self, slot: int) -> torch.Tensor:
        """Draw what a micro-batch's blocks will draw, and note their states; return that after all of them."""
        for block, drawing in self._shapes.binding(slot).drawing.items():
            self._states[slot, block] = self.generator.state()
            for one in drawing:
                size = one.target(*one.args, **one.kwargs).untyped_storage().nbytes()
                self._ledger.made(0, size)
        return self.generator.state()

    def before(self, block: int, slot: int) -> None:
        """Place the generator before a block's forward."""
        state = self._states.pop((slot, block), None)
        if state is not None:
            self.generator.place(state)

    def after(self, block: int, slot: int) -> None:
        """Check after a block's forward that it has moved the generator as far as was foreseen.

        Raises: OffmateError if it has not, since the other micro-batches then draw other numbers than plain PyTorch.
        """
        expected = self._ends.pop((slot, block), None)
        found = expected if expected is None else position_of(self.generator.state())
        if found != expected:
            raise OffmateError(
                f"block {block} has drawn other random numbers than when its plan was made: the generator is at "
                f"{found} instead of {expected}. No update was made. Set dropout to 0, or compile with "
                'config=offmate.Config(accumulation_order="by batch"), and please report the model'
            )

    def after_all(self) -> None:
        """Place the generator where plain PyTorch leaves it after all forwards."""
        if self._end is not None:
            self.generator.place(self._end)
            self._end = None
