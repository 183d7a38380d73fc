"""What a plan is of, for people: nothing that is planned depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from ..reports.units import format_count


@dataclass(frozen=True)
class About:
    """The model, batch and machine of a plan, in words; empty where they are not known, as in older files.

    Parameters
    ----------
    model: name of its class or shape. n_parameters: number of its parameters. dtype: theirs. optimizer: name of its
        class. batch: its shape. machine: the card, or the machine that was measured. made: the date, as 2026-01-31.
    """

    model: str = ""
    n_parameters: int = 0
    dtype: str = ""
    optimizer: str = ""
    batch: str = ""
    machine: str = ""
    made: str = ""

    @property
    def title(self) -> str:
        """Return the model and the machine, such as "llama2-7b on RTX 3060 12 GB"."""
        return " on ".join(part for part in (self.model, self.machine) if part)

    def words(self) -> str:
        """Return all that is known on one line; empty if nothing is."""
        count = f"{format_count(self.n_parameters)} parameters" if self.n_parameters else ""
        of = ", ".join(part for part in (count, self.dtype, self.optimizer, self.batch) if part)
        model = ": ".join(part for part in (self.model, of) if part)
        machine = f"on {self.machine}" if self.machine else ""
        made = f"planned {self.made}" if self.made else ""
        return ", ".join(part for part in (model, machine, made) if part)
