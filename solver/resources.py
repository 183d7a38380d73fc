"""What takes time: compute, one link each way, and the host's CPU; and the rates at which links carry bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum


class Resource(Enum):
    """What takes time; the value is the word for tables."""

    COMPUTE = "compute"
    IN = "copy in"  # from the host to the device
    OUT = "copy out"  # from the device to the host
    CPU = "cpu"

    __hash__ = object.__hash__  # members are keys of what the simulator touches most


LINKS = (Resource.IN, Resource.OUT)


@dataclass(frozen=True)
class Rates:
    """Link rates in bytes per second, and seconds of management per step.

    Parameters
    ----------
    both_bytes_per_s: total rate when both directions are busy.
    manage_s: H, seconds of the CPU per step for the management of everything else.
    shared_cores: compute, copies and CPU updates share the same cores (the emulated device): their sum bounds a step.
    """

    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float
    manage_s: float = 0.0
    shared_cores: bool = False

    @property
    def not_above_0(self) -> dict[str, float]:
        """The link rates with which no copy would ever end, by name."""
        rates = {one.name: getattr(self, one.name) for one in fields(self) if one.name.endswith("bytes_per_s")}
        return {name: rate for name, rate in rates.items() if not rate > 0}

    def bytes_per_s(self, link: Resource) -> float:
        """The rate of a link that is busy alone; raises KeyError for what is no link."""
        return {Resource.IN: self.in_bytes_per_s, Resource.OUT: self.out_bytes_per_s}[link]

    def copy_s(self, amount_bytes: float, link: Resource) -> float:
        """Seconds of a copy over a link that is busy alone."""
        return amount_bytes / self.bytes_per_s(link)

    @property
    def slowest_bytes_per_s(self) -> float:
        """The rate of the slowest link."""
        return min(map(self.bytes_per_s, LINKS))

    @property
    def together(self) -> float:
        """The part of its own rate that a link has while all are busy; above 1 if nothing holds them up."""
        return self.both_bytes_per_s / sum(map(self.bytes_per_s, LINKS))

    def faster(self, factor: float) -> Rates:
        """Links that carry so many times the bytes."""
        return replace(
            self,
            in_bytes_per_s=factor * self.in_bytes_per_s,
            out_bytes_per_s=factor * self.out_bytes_per_s,
            both_bytes_per_s=factor * self.both_bytes_per_s,
        )
