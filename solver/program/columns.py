"""The expressions of one parameter group in the program."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..linear import ONE, Flow, Terms, add
from ..resources import HOST, Path
from .spans import Stay

WHOLE: Terms = {ONE: 1.0}
NONE: Terms = {}


@dataclass(frozen=True)
class Away:
    """The decision about a gap: `part` is dropped at the end of step `after`, and back from a tier before `before`."""

    stay: Stay
    part: Terms
    back: Flow
    path: Path


@dataclass(frozen=True)
class RoundTrip:
    """A part that leaves to a tier and returns unchanged: its flows out and back, with the same total."""

    tier: str
    out: Flow
    back: Flow


@dataclass(frozen=True)
class Source:
    """A tier that a part of a group can come from after it was dropped, by its path.

    Parameters
    ----------
    of_device: of a trainable group, as much of the device part; no other returns after the last read.
    """

    path: Path
    part: Terms
    of_device: Terms | None = None


@dataclass(frozen=True)
class Departure:
    """The device part's new values on their way to a tier.

    Parameters
    ----------
    drop, keep: the flows of what is released there once it has left, and of what stays on the device as well.
    back: what was released returns.
    """

    path: Path
    drop: Flow
    keep: Flow
    back: Flow

    @property
    def part(self) -> Terms:
        """The part of the group of which the tier has the values."""
        return add((1.0, self.drop.total), (1.0, self.keep.total))


@dataclass(frozen=True)
class GroupColumns:
    """The expressions of one group; a flow is None where the group has none."""

    cpu_part: Terms
    grad_out: Flow | None = None
    lead_out: Flow | None = None
    lead_back: Flow | None = None
    cpu_update: Flow | None = None
    cpu_back: Flow | None = None
    departures: tuple[Departure, ...] = ()
    wait: RoundTrip | None = None
    states: tuple[RoundTrip, ...] = ()
    away: tuple[Away, ...] = ()
    sources: tuple[Source, ...] = ()
    from_files: Terms = field(default_factory=dict)
    cast: Terms = field(default_factory=dict)


def mark(path: Path) -> str:
    """Return the suffix of columns and rows that belong to a path other than the host's."""
    return "" if path.tier == HOST else f"@{path.tier}"
