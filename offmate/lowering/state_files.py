"""What a plan may keep in files on storage paths, as the solver sees them: states, parameters, activations."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..solver.resources import Path, Tier

STATE_STORAGE = "storage paths"


@dataclass(frozen=True)
class StatePath:
    """One of the storage paths.

    Parameters
    ----------
    folder: how it is named. read_bytes_per_s, write_bytes_per_s, both_bytes_per_s: its own rates. share: of the bytes
        that lie on it.
    """

    folder: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    share: float


@dataclass(frozen=True)
class StateFiles:
    """Files that optimizer states, activations and trained parameters leave to, over all storage paths together.

    Parameters
    ----------
    read_bytes_per_s, write_bytes_per_s: rates of reads and writes alone. both_bytes_per_s: of both together, as many
        bytes of each.
    capacity_bytes: the most bytes that they may hold. buffers_bytes: RAM that copies between them and the device pass.
    paths: each of them. No plan depends on how they share the bytes.
    for_parameters: whether trained parameters may leave to them, too.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    capacity_bytes: int
    buffers_bytes: int
    paths: tuple[StatePath, ...] = field(default=(), repr=False, compare=False)
    for_parameters: bool = False

    @property
    def tier(self) -> Tier:
        """The tier that they are."""
        rates = self.read_bytes_per_s, self.write_bytes_per_s, self.both_bytes_per_s
        path = Path(STATE_STORAGE, *rates, through_host=True).moving_alike(self.both_bytes_per_s)
        kinds = {"for_states": True, "for_values": True, "for_host_updates": True}
        return Tier(
            path, self.capacity_bytes, buffers_bytes=self.buffers_bytes, for_parameters=self.for_parameters, **kinds
        )
