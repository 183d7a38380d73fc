"""Weights that a run trains and does not read into RAM first: mapped from their files, which they leave for others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..planning.files import ram_is_short
from ..session.parameter_files import may_leave
from ..sizes import format_bytes
from .base_cache import has_room
from .base_files import InFiles
from .base_forecast import first_with_room, stored_as_used
from .settings import Settings
from .state_folders import StateFolders


@dataclass(frozen=True)
class MappedWeights:
    """Where trained parameters lie before the first step.

    Parameters
    ----------
    leaving_bytes: of those that may lie in the folders of `--storage`. maps: whether RAM is short, so that weights are
        mapped from their files.
    other_bytes: of those that the model's files do not have as the run uses them. place: the folder that takes these.
    """

    leaving_bytes: int = 0
    maps: bool = False
    other_bytes: int = 0
    place: Path | None = None

    @property
    def in_files(self) -> InFiles | None:
        """How the weights are loaded; None reads all of them into RAM."""
        return InFiles(self.place) if self.maps else None

    def lines(self) -> list[str]:
        """Write where the weights are before the first step; nothing if they are read into RAM."""
        if not self.maps:
            return []
        found = [
            f"weights: RAM is short, so {format_bytes(self.leaving_bytes)} of parameters are mapped from their files "
            "and not read into RAM; what RAM has no room for moves to the folders of --storage before the first step"
        ]
        if self.other_bytes:
            found.append(
                f"weights: {format_bytes(self.other_bytes)} of them are not in the checkpoint as the run uses them "
                f"(another dtype, or several tensors for one parameter), so they are written to {self.place} first, "
                "unless an earlier run has done so"
            )
        return found

    def doubt(self) -> list[str]:
        """Return a sentence if no folder has room for what is to be written first."""
        if self.place is None or not self.other_bytes or has_room(self.place, self.other_bytes):
            return []
        return [
            f"{self.place}: {format_bytes(self.other_bytes)} of weights are to be written there in the run's dtype, "
            "and there is less free; free space, or name a folder on a larger drive"
        ]


def mapped_weights(
    settings: Settings,
    model: torch.nn.Module,
    folder: Path,
    checkpoint: Path | None,
    folders: StateFolders,
    host_budget_bytes: int,
) -> MappedWeights:
    """Find out whether the weights that a run trains are mapped.

    Parameters
    ----------
    model: on the meta device, with its adapter. folder: that of the model. checkpoint: from which the run is resumed,
        whose weights are as the run uses them; None at its start.
    """
    named = tuple(model.named_parameters())
    if not settings.storage_parameters or not may_leave(named):
        return MappedWeights()
    sizes = {name: param.numel() * param.element_size() for name, param in named}
    leaving = sum(sizes[name] for name, param in named if param.requires_grad)
    if settings.lora is not None or not ram_is_short(sizes, (), host_budget_bytes):
        return MappedWeights(leaving)
    if checkpoint is not None:
        return MappedWeights(leaving, maps=True)
    stored = stored_as_used(sorted(folder.glob("*.safetensors")), dict(named))
    others = sum(size for name, size in sizes.items() if name not in stored)
    place = first_with_room(folders.paths, others) if others else None
    return MappedWeights(leaving, True, others, None if place is None else Path(place.folder))
