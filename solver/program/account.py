"""What a plan uses, step by step, as expressions: the rows are made from it, and so is the answer's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..linear import Terms, accumulate


@dataclass
class Account:
    """What every row is made of, one expression per step (bytes and seconds, unscaled).

    Most of what is on the device stays there over many steps. So its bytes are kept as changes: `rise` of a step is
    what it holds more than the step before, of step 0 all that it holds.
    """

    rise: list[Terms]
    compute: list[Terms]  # seconds
    cpu: list[Terms]  # seconds
    link_in: list[Terms]
    link_out: list[Terms]
    serial_in: list[Terms]
    serial_out: list[Terms]
    host: Terms = field(default_factory=dict)
    traffic: Terms = field(default_factory=dict)  # all bytes that move, for the objective

    @staticmethod
    def of(n_steps: int) -> Account:
        """An empty account."""

        def steps() -> list[Terms]:
            return [{} for _ in range(n_steps)]

        return Account(steps(), steps(), steps(), steps(), steps(), steps(), steps())

    def hold(self, step: int, amount_bytes: float, terms: Terms) -> None:
        """Count amount * terms on the device in `step`."""
        self.hold_over((step,), amount_bytes, terms)

    def hold_over(self, steps: Sequence[int], amount_bytes: float, terms: Terms) -> None:
        """Count amount * terms on the device in `steps`, neighbours in cyclic order."""
        self.hold_sums(steps, amount_bytes, dict.fromkeys(steps, terms))

    def hold_sums(self, steps: Sequence[int], amount_bytes: float, sums: Mapping[int, Terms]) -> None:
        """Count amount * an expression by step on the device in `steps`, neighbours in cyclic order."""
        last: Terms = {}
        for step in steps:
            if step == 0:  # the cycle's end: nothing follows the last step
                last = {}
            terms = sums[step]
            if terms is not last:
                accumulate(self.rise[step], amount_bytes, terms)
                accumulate(self.rise[step], -amount_bytes, last)
            last = terms
        if steps and steps[-1] + 1 < len(self.rise):
            accumulate(self.rise[steps[-1] + 1], -amount_bytes, last)

    def keep_on_host(self, amount_bytes: float, terms: Terms) -> None:
        """Count amount * terms in host memory."""
        accumulate(self.host, amount_bytes, terms)

    def compute_in(self, step: int, seconds: float, terms: Terms) -> None:
        """Spend seconds * terms of the device in `step`."""
        accumulate(self.compute[step], seconds, terms)

    def spend_cpu(self, step: int, seconds: float, terms: Terms) -> None:
        """Spend seconds * terms of the host in `step`."""
        accumulate(self.cpu[step], seconds, terms)

    def move(self, direction: Literal["in", "out"], step: int, amount_bytes: float, terms: Terms) -> None:
        """Send amount * terms over a link in `step`."""
        accumulate((self.link_in if direction == "in" else self.link_out)[step], amount_bytes, terms)
        accumulate(self.traffic, amount_bytes, terms)

    def move_serially(self, direction: Literal["in", "out"], step: int, amount_bytes: float, terms: Terms) -> None:
        """Send it over the link before (in) or after (out) the step's compute, which makes or awaits it."""
        self.move(direction, step, amount_bytes, terms)
        accumulate((self.serial_in if direction == "in" else self.serial_out)[step], amount_bytes, terms)
