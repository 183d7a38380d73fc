"""What a plan uses, step by step, as expressions: the rows are made from it, and so is the answer's table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .linear import Terms, accumulate


@dataclass
class Account:
    """What every row is made of, one expression per step (bytes and seconds, unscaled)."""

    memory: list[Terms]
    compute: list[Terms]  # seconds
    cpu: list[Terms]  # seconds
    link_in: list[Terms]
    link_out: list[Terms]
    serial_in: list[Terms]
    serial_out: list[Terms]
    start: Terms = field(default_factory=dict)  # memory while what precedes the first block runs
    user: Terms = field(default_factory=dict)  # memory while the user's code runs
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
        accumulate(self.memory[step], amount_bytes, terms)

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
