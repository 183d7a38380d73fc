"""A plan's use of bytes and seconds, step by step, as expressions: the source of the rows and of the answer's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..linear import Terms, accumulate
from ..resources import HOST, Rates, Resource


@dataclass
class Account:
    """The expressions that all rows are made of, one per step (bytes and seconds, unscaled).

    Most bytes on the device stay there over many steps, so they are stored as changes: `rise` of a step is its bytes
    minus those of the step before; of step 0, all its bytes.
    """

    rise: list[Terms]
    seconds: dict[Resource, list[Terms]]  # of resources other than links
    moved: dict[Resource, list[Terms]]  # bytes over each link, and those that it could move in its seconds per copy
    serial: dict[Resource, list[Terms]]  # of these, the bytes that cannot move while the step computes
    rates: Rates
    tiers: dict[str, Terms]  # bytes on each tier other than the device
    traffic: Terms = field(default_factory=dict)  # all bytes that move, for the objective

    @staticmethod
    def of(rates: Rates, n_steps: int) -> Account:
        """Return an empty account of a machine's resources and tiers."""

        def each(resources: Iterable[Resource]) -> dict[Resource, list[Terms]]:
            return {resource: [{} for _ in range(n_steps)] for resource in resources}

        rise: list[Terms] = [{} for _ in range(n_steps)]
        moved, serial = each(rates.links), each(rates.links)
        return Account(rise, each(rates.working), moved, serial, rates, {tier: {} for tier in rates.paths})

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
            if step == 0:  # a new cycle: changes do not carry over from the last step
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
        """Keep a resource other than a link busy for seconds * terms in `step`."""
        accumulate(self.seconds[resource][step], seconds, terms)

    def move(
        self, link: Resource, step: int, amount_bytes: float, terms: Terms, *, copies: int = 1, serial: bool = False
    ) -> None:
        """Send amount * terms over a link in `step`.

        Parameters
        ----------
        copies: number of copies that the whole amount takes; a fraction of it takes that fraction of their seconds.
        serial: whether the copy must precede (in) or follow (out) the step's compute, which reads or makes the bytes.
        """
        load_bytes = self.rates.load_bytes(amount_bytes, link, copies)
        accumulate(self.moved[link][step], load_bytes, terms)
        accumulate(self.traffic, amount_bytes, terms)
        if serial:
            accumulate(self.serial[link][step], load_bytes, terms)
