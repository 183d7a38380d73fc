"""What a plan uses, step by step, as expressions: the rows are made from it, and so is the answer's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..linear import Terms, accumulate
from ..resources import HOST, Rates, Resource


@dataclass
class Account:
    """What every row is made of, one expression per step (bytes and seconds, unscaled).

    Most of what is on the device stays there over many steps. So its bytes are kept as changes: `rise` of a step is
    what it holds more than the step before, of step 0 all that it holds.
    """

    rise: list[Terms]
    seconds: dict[Resource, list[Terms]]  # of what does no copies
    moved: dict[Resource, list[Terms]]  # bytes over each link
    serial: dict[Resource, list[Terms]]  # of these, what cannot run beside the step's compute
    tiers: dict[str, Terms]  # bytes on each tier beside the device
    traffic: Terms = field(default_factory=dict)  # all bytes that move, for the objective

    @staticmethod
    def of(rates: Rates, n_steps: int) -> Account:
        """An empty account of a machine's resources and tiers."""

        def each(resources: Iterable[Resource]) -> dict[Resource, list[Terms]]:
            return {resource: [{} for _ in range(n_steps)] for resource in resources}

        rise: list[Terms] = [{} for _ in range(n_steps)]
        return Account(
            rise, each(rates.working), each(rates.links), each(rates.links), {tier: {} for tier in rates.paths}
        )

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

    def keep(self, amount_bytes: float, terms: Terms, tier: str = HOST) -> None:
        """Count amount * terms on a tier."""
        accumulate(self.tiers[tier], amount_bytes, terms)

    def spend(self, resource: Resource, step: int, seconds: float, terms: Terms) -> None:
        """Keep a resource that does no copies busy for seconds * terms in `step`."""
        accumulate(self.seconds[resource][step], seconds, terms)

    def move(self, link: Resource, step: int, amount_bytes: float, terms: Terms, *, serial: bool = False) -> None:
        """Send amount * terms over a link in `step`.

        Parameters
        ----------
        serial: before (in) or after (out) the step's compute, which awaits or makes it.
        """
        accumulate(self.moved[link][step], amount_bytes, terms)
        accumulate(self.traffic, amount_bytes, terms)
        if serial:
            accumulate(self.serial[link][step], amount_bytes, terms)
