"""What of a run's frozen base can stay in files, found and said before anything of the weights is read."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import LibraryError, StorageError
from ..lowering.frozen_files import FrozenFiles
from ..machines.devices import EMULATED
from ..machines.mapped_files import lists_mappings
from ..planning.files import frozen_files, ram_is_short
from ..progress import working
from ..runtime.storage.folders import StoragePath
from ..runtime.storage.measure import read_rate
from ..sizes import format_bytes
from .base_cache import has_room
from .base_files import InFiles
from .weight_files import DAMAGE, DTYPES_IN_FILES, entries_of

_PROBE_BYTES = 1 << 28  # read of a file to measure its rate
_ASSUMED_BYTES_PER_S = 3e9


@dataclass(frozen=True)
class BaseForecast:
    """Where the parameters of a frozen base can lie.

    Parameters
    ----------
    stored_bytes: of those that the checkpoint has as the run uses them. other_bytes: of those in another dtype, or
        that are joined from several tensors. names: of those that can lie in files.
    read_bytes_per_s: at which files are read. rate_is: where that is known from.
    place: the folder that takes the others; None leaves them in RAM. reason: why all of the base is read into RAM.
    """

    stored_bytes: int = 0
    other_bytes: int = 0
    names: frozenset[str] = frozenset()
    read_bytes_per_s: float = 1.0
    rate_is: str = ""
    place: Path | None = None
    reason: str = ""

    @property
    def file_bytes(self) -> int:
        """Bytes of the parameters that can lie in files."""
        return self.stored_bytes + (self.other_bytes if self.place is not None else 0)

    @property
    def in_files(self) -> InFiles | None:
        """How the weights are loaded; None reads all of them into RAM."""
        return InFiles(self.place) if self.names else None

    def files(self, kind: str) -> FrozenFiles:
        """Return what a plan has to know; no names if all of the base is read into RAM.

        Parameters
        ----------
        kind: the device, as `device_kind` returns it.
        """
        return frozen_files(self.names, self.read_bytes_per_s, emulated=kind == EMULATED)

    def lines(self) -> list[str]:
        """Write what of the base can stay in files, and their rate; nothing if RAM has room for all."""
        found = [f"base: {self.reason}"] if self.reason else []
        rate = f"{format_bytes(int(self.read_bytes_per_s))}/s ({self.rate_is})"
        if self.stored_bytes:
            found.append(
                f"base: RAM is short, so {format_bytes(self.stored_bytes)} of the base stay in the checkpoint's files; "
                f"what RAM has no room for is read from there in every step, at {rate}"
            )
        if self.other_bytes:
            others = (
                f"base: {format_bytes(self.other_bytes)} are not in the checkpoint as the run uses them (another "
                "dtype, or several tensors for one parameter)"
            )
            if self.place is None:
                found.append(f"{others}, so they stay in RAM; name --storage DIR to keep them in a file there")
            else:
                found.append(
                    f"{others}, so they are written to {self.place}, unless an earlier run has done so, and read from "
                    f"there{'' if self.stored_bytes else f' at {rate}'}"
                )
        return found

    def doubt(self) -> list[str]:
        """Return a sentence if no folder has room for what is to be written."""
        if self.place is None or not self.other_bytes or has_room(self.place, self.other_bytes):
            return []
        free = format_bytes(shutil.disk_usage(self.place).free)
        return [
            f"{self.place}: the base needs {format_bytes(self.other_bytes)} there, and {free} are free; free space, or "
            "name a folder on a larger drive"
        ]


def base_forecast(
    model: torch.nn.Module, folder: Path, paths: tuple[StoragePath, ...], host_budget_bytes: int
) -> BaseForecast:
    """Find out what of a frozen base can lie in files where RAM is short of room for all parameters.

    Parameters
    ----------
    model: on the meta device, with its adapter. folder: that of the base. paths: of `--storage`, with their rates.
    """
    sizes = {name: param.numel() * param.element_size() for name, param in model.named_parameters()}
    frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
    if not frozen or not ram_is_short(sizes, frozen.keys(), host_budget_bytes):
        return BaseForecast()
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    try:
        rate, rate_is = _rate(files, paths)
        if not lists_mappings():
            raise StorageError("this system does not say which memory is mapped from files")
    except (StorageError, LibraryError) as error:
        return BaseForecast(reason=f"RAM is short, but the base cannot be read from files: {error}")
    stored = stored_as_used(files, frozen)
    others = {name: sizes[name] for name in frozen if name not in stored}
    place = first_with_room(paths, sum(others.values()))
    if place is not None and place.rates is not None and sum(others.values()) > sum(sizes[name] for name in stored):
        rate, rate_is = place.rates[0], "as measured"
    return BaseForecast(
        sum(sizes[name] for name in stored),
        sum(others.values()),
        frozenset(frozen) if place is not None else frozenset(stored),
        rate,
        rate_is,
        None if place is None else Path(place.folder),
    )


def _rate(files: list[Path], paths: tuple[StoragePath, ...]) -> tuple[float, str]:
    """Return at which rate files of a checkpoint are read, and where that is known from. Raises: as `read_rate`."""
    if not files:
        known = [path.rates[0] for path in paths if path.rates is not None]
        return (known[0], "as --storage") if known else (_ASSUMED_BYTES_PER_S, "assumed, since it is not here yet")
    with working("measuring the checkpoint's drive"):
        return read_rate(files[-1], _PROBE_BYTES), "as measured"


def stored_as_used(files: list[Path], params: dict[str, torch.nn.Parameter]) -> set[str]:
    """Return the parameters that a checkpoint has as they are, to judge by shapes and dtypes; all if it is not here."""
    if not files:
        return set(params)
    left: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
    for file in files:
        try:
            left.update((tuple(e["shape"]), DTYPES_IN_FILES[e["dtype"]]) for e in entries_of(file).values())
        except DAMAGE:
            continue  # loading names the fault
    found = set()
    for name, param in params.items():
        kind = (tuple(param.shape), param.dtype)
        if left[kind]:
            left[kind] -= 1
            found.add(name)
    return found


def first_with_room(paths: tuple[StoragePath, ...], n_bytes: int) -> StoragePath | None:
    """Return the first folder with room for a file; the first one if none has, None if there is none."""
    return next((path for path in paths if has_room(Path(path.folder), n_bytes)), paths[0] if paths else None)
