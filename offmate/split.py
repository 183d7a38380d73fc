"""The split of updates: which side updates which parameter, to be kept from one plan to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import ArgumentTypeError, ArgumentValueError
from .solver.problem import Side

Updates = Literal["auto", "host", "device"]


@dataclass(frozen=True)
class Split:
    """The parameters that the CPU (host) and the GPU (device) update; the planner decides about all others.

    CPU and GPU kernels round differently, so numbers stay the same from one plan to another only if each parameter is
    updated on the same side. To keep the sides, pass `plan.split` or `model.offmate.split` as `Config(updates=...)`.

    Parameters
    ----------
    host, device: names of parameters, as in `model.named_parameters()`; they are stored sorted.

    Raises: ArgumentTypeError if these are not names, ArgumentValueError if one is on both sides.
    """

    host: tuple[str, ...] = ()
    device: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for side in ("host", "device"):
            names = getattr(self, side)
            if (
                isinstance(names, str)
                or not isinstance(names, Iterable)
                or not all(isinstance(name, str) for name in names)
            ):
                raise ArgumentTypeError(f"{side} is {names!r}; it must be a tuple of parameter names")
            object.__setattr__(self, side, tuple(sorted(set(names))))
        both = set(self.host) & set(self.device)
        if both:
            raise ArgumentValueError(f"{min(both)} is on both sides of a split")

    def side_of(self, name: str) -> Side:
        """Return the side that updates a parameter; "any" leaves it to the planner."""
        return "host" if name in self.host else "device" if name in self.device else "any"

    def agrees(self, other: Split) -> bool:
        """Return whether no parameter is on opposite sides of the two splits."""
        return not set(self.host) & set(other.device) and not set(self.device) & set(other.host)

    def joined(self, newer: Split) -> Split:
        """Merge both splits; where they disagree, the newer one counts."""
        known = {*newer.host, *newer.device}
        host, device = (set(names) - known for names in (self.host, self.device))
        return Split((*host, *newer.host), (*device, *newer.device))

    def among(self, names: tuple[str, ...]) -> Split:
        """Restrict the split to these parameters."""
        known = set(names)
        return Split(tuple(known & set(self.host)), tuple(known & set(self.device)))

    def to_dict(self) -> dict[str, list[str]]:
        """Convert the split to JSON types."""
        return {"host": list(self.host), "device": list(self.device)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Split:
        """Rebuild a split from the output of `to_dict`. Raises: KeyError, TypeError, ValueError if it is damaged."""
        return cls(tuple(data["host"]), tuple(data["device"]))


def side_of(updates: Updates | Split, name: str) -> Side:
    """Return the side that may update a parameter under a setting of `Config.updates`."""
    if isinstance(updates, Split):
        return updates.side_of(name)
    return "any" if updates == "auto" else updates
