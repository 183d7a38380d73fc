"""A plan's use of bytes and seconds, step by step, as expressions: the source of the rows and of the answer's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..linear import Flow, Terms, accumulate
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
    not_yet: list[Terms]  # bytes that are not on the device yet when a step's first micro-batch computes
    no_longer: list[Terms]  # and those that are there no longer when its last one does
    tiers: dict[str, Terms]  # bytes on each tier other than the device, for the whole iteration
    passing: list[Terms] | None  # as `rise`, of what is on the host for some steps; None if it counts in `tiers`
    traffic: Terms = field(default_factory=dict)  # all bytes that move, for the objective
    ring: Terms = field(default_factory=dict)  # 1 if the host updates whole groups from files
    casts: Terms = field(default_factory=dict)  # 1 if whole groups are cast
    cast_s: Terms = field(default_factory=dict)  # seconds of all casts of an iteration

    @staticmethod
    def of(rates: Rates, n_steps: int, host_in_time: bool = False) -> Account:
        """Return an empty account of a machine's resources and tiers.

        Parameters
        ----------
        host_in_time: whether what the host holds for some steps counts in these alone.
        """

        def each(resources: Iterable[Resource]) -> dict[Resource, list[Terms]]:
            return {resource: [{} for _ in range(n_steps)] for resource in resources}

        rise, not_yet, no_longer = ([Terms() for _ in range(n_steps)] for _ in range(3))
        passing: list[Terms] | None = [{} for _ in range(n_steps)] if host_in_time else None
        tiers: dict[str, Terms] = {tier: {} for tier in rates.paths}
        moved, serial = each(rates.links), each(rates.links)
        return Account(rise, each(rates.working), moved, serial, rates, not_yet, no_longer, tiers, passing)

    def hold(self, step: int, amount_bytes: float, terms: Terms) -> None:
        """Count amount * terms on the device in `step`."""
        self.hold_over((step,), amount_bytes, terms)

    def hold_over(self, steps: Sequence[int], amount_bytes: float, terms: Terms) -> None:
        """Count amount * terms on the device in `steps`, neighbours in cyclic order."""
        self.hold_sums(steps, amount_bytes, dict.fromkeys(steps, terms))

    def hold_sums(self, steps: Sequence[int], amount_bytes: float, sums: Mapping[int, Terms]) -> None:
        """Count amount * an expression by step on the device in `steps`, neighbours in cyclic order."""
        _change(self.rise, steps, amount_bytes, sums)

    def come_in_turn(self, step: int, amount_bytes: float, terms: Terms) -> None:
        """Count amount * terms, which `hold` counts in `step`, as made or copied there micro-batch by micro-batch.

        Parameters
        ----------
        amount_bytes: of all micro-batches of the step but the first.
        """
        accumulate(self.not_yet[step], amount_bytes, terms)

    def go_in_turn(self, step: int, amount_bytes: float, terms: Terms) -> None:
        """Count amount * terms, which `hold` counts in `step`, as released there micro-batch by micro-batch.

        Parameters
        ----------
        amount_bytes: of all micro-batches of the step but the last.
        """
        accumulate(self.no_longer[step], amount_bytes, terms)

    def pass_through(self, amount_bytes: float, out: Flow, back: Flow) -> None:
        """Count amount * a flow on the host from the step in which it comes there to the one in which it goes.

        Parameters
        ----------
        out: the flow to the host. back: the flow, of the same total, that ends its stay there: of what is used on the
            host, or comes back. Its span is the same, or begins later.
        """
        until = back.span if back.span == out.span else range(out.span[0], back.span[-1] + 1)
        self.remain(tuple(until), amount_bytes, out)
        self.leave_host(back.span, amount_bytes, back)

    def leave_host(self, steps: Sequence[int], amount_bytes: float, gone: Flow) -> None:
        """Count amount * a flow as no longer on the host, in `steps`, from the step after the one in which it goes.

        Parameters
        ----------
        steps: the last ones of the flow's span. What has gone before them is away in all of them.
        """
        if self.passing is not None:
            _change(self.passing, steps, -amount_bytes, gone.prior)

    def remain(self, steps: Sequence[int], amount_bytes: float, out: Flow) -> None:
        """Count amount * a flow on the host from the step in which it comes there to the last of `steps`.

        Parameters
        ----------
        steps: those of the flow's span, and perhaps later ones; neighbours in cyclic order.
        """
        if self.passing is None:
            self.keep(amount_bytes, out.total)
        else:
            _change(self.passing, steps, amount_bytes, {step: out.sums.get(step, out.total) for step in steps})

    @property
    def host_in_time(self) -> bool:
        """Whether what the host holds for some steps counts in these alone."""
        return self.passing is not None

    def stay(self, steps: Sequence[int], amount_bytes: float, terms: Terms) -> None:
        """Count amount * terms on the host in `steps` alone, neighbours in cyclic order."""
        self.stay_sums(steps, amount_bytes, dict.fromkeys(steps, terms))

    def stay_sums(self, steps: Sequence[int], amount_bytes: float, sums: Mapping[int, Terms]) -> None:
        """Count amount * an expression by step on the host in `steps` alone, neighbours in cyclic order."""
        assert self.passing is not None
        _change(self.passing, steps, amount_bytes, sums)

    def keep(self, amount_bytes: float, terms: Terms, tier: str = HOST) -> None:
        """Count amount * terms on a tier."""
        accumulate(self.tiers[tier], amount_bytes, terms)

    def spend(self, resource: Resource, step: int, seconds: float, terms: Terms) -> None:
        """Keep a resource other than a link busy for seconds * terms in `step`."""
        accumulate(self.seconds[resource][step], seconds, terms)

    def move(
        self,
        link: Resource,
        step: int,
        amount_bytes: float,
        terms: Terms,
        *,
        copies: int = 1,
        serial: float = 0.0,
        ends_on_host: bool = False,
    ) -> None:
        """Send amount * terms over a link in `step`, and over the host's if copies pass it.

        Parameters
        ----------
        copies: number of copies that the whole amount takes; a fraction of it takes that fraction of their seconds.
        serial: the part of it that must precede (in) or follow (out) the step's computes, which read or make the bytes.
        ends_on_host: whether the copies begin or end in the host's memory, and so do not take its link.
        """
        beyond = None if ends_on_host else self.rates.beyond(link)
        for one in (link,) if beyond is None else (link, beyond):
            load_bytes = self.rates.load_bytes(amount_bytes, one, copies)
            accumulate(self.moved[one][step], load_bytes, terms)
            accumulate(self.traffic, amount_bytes, terms)
            if serial:
                accumulate(self.serial[one][step], serial * load_bytes, terms)


def _change(rise: list[Terms], steps: Sequence[int], amount_bytes: float, sums: Mapping[int, Terms]) -> None:
    last: Terms = {}
    for step in steps:
        if step == 0:  # a new cycle: changes do not carry over from the last step
            last = {}
        terms = sums[step]
        if terms is not last:
            accumulate(rise[step], amount_bytes, terms)
            accumulate(rise[step], -amount_bytes, last)
        last = terms
    if steps and steps[-1] + 1 < len(rise):
        accumulate(rise[steps[-1] + 1], -amount_bytes, last)
