"""What a plan is of, for people: nothing that is planned depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from ..lowering.state_files import StatePath
from ..reports.units import format_count


@dataclass(frozen=True)
class About:
    """The model, batch and machine of a plan, in words; empty where they are not known, as in older files.

    Parameters
    ----------
    model: name of its class or shape. n_parameters: number of its parameters. dtype: theirs. optimizer: name of its
        class. batch: its shape. machine: the card, or the machine that was measured. made: the date, as 2026-01-31.
    storage: the storage paths that optimizer states may leave to. tokens: that one step sees.
    """

    model: str = ""
    n_parameters: int = 0
    dtype: str = ""
    optimizer: str = ""
    batch: str = ""
    machine: str = ""
    made: str = ""
    storage: tuple[StatePath, ...] = ()
    tokens: int = 0

    def title(self, shown: str) -> str:
        """Return the title of a picture, such as "llama2-7b on RTX 3060 12 GB: one step in 10 GiB".

        Parameters
        ----------
        shown: what the picture shows, such as "one step in 10 GiB".
        """
        whose = " on ".join(part for part in (self.model, self.machine) if part)
        return f"{whose}: {shown}" if whose else f"{shown[:1].upper()}{shown[1:]}"

    def words(self) -> str:
        """Return all that is known on one line; empty if nothing is."""
        model = ": ".join(part for part in (self.model, self._training) if part)
        machine = f"on {self.machine}" if self.machine else ""
        return ", ".join(part for part in (model, machine, self._made) if part)

    def below_title(self) -> str:
        """Return what `title` does not say, on one line; empty if nothing is known."""
        return ", ".join(part for part in (self._training, self._made) if part)

    @property
    def _training(self) -> str:
        count = f"{format_count(self.n_parameters)} parameters" if self.n_parameters else ""
        stored = " in ".join(part for part in (count, self.dtype) if part)
        return ", ".join(part for part in (stored, self.optimizer, self.batch) if part)

    @property
    def _made(self) -> str:
        return f"planned {self.made}" if self.made else ""


UNKNOWN = About()
