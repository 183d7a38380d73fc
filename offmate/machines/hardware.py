"""Hardware files: the rates and sizes of other machines, each figure with its source."""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import ArgumentValueError
from .curve import DIRECTIONS, Copied, fitted
from .drives import Drive, drives_of, same_folder
from .figures import LARGEST, figure

FORMAT = 1
_RATES = (
    "memory_bytes_per_s",
    "launch_s",
    "in_bytes_per_s",
    "out_bytes_per_s",
    "both_bytes_per_s",
    "cpu_update_bytes_per_s",
    "device_update_bytes_per_s",
)
BASES = ("data sheets", "paper", "measured")
_OPTIONAL = (
    "host_memory_bytes",
    "host_memory_bytes_per_s",
    "cpu_master_update_bytes_per_s",
    "manage_s",
    "per_copy_s",
    "instruction_s",
)
_KEYS = {
    *_RATES, *_OPTIONAL, "format", "name", "basis", "device_memory_bytes", "matrix_flops_per_s", "shared_cores",
    "copies", "comment", "storage",
}  # fmt: skip

# Rates of updates with float32 copies, relative to float32, where a file does not say. On a CPU that memory does not
# limit, casts take instructions: 0.62 was measured on two cores of an AMD EPYC, 0.48 on two of an Intel Xeon at
# 2.8 GHz. On a device they take memory: 40 bytes instead of 28.
_MASTERS_ON_CPU = 0.55
_MASTERS_ON_DEVICE = 28 / 40


@dataclass(frozen=True)
class Hardware:
    """A machine's rates as they are reached in practice.

    Parameters
    ----------
    device_memory_bytes, host_memory_bytes: its memory; 0 for the host if the file does not say.
    matrix_flops_per_s: of large matrix products, by dtype name.
    memory_bytes_per_s: device memory traffic. launch_s: the least seconds that a kernel takes on the device.
    in_bytes_per_s, out_bytes_per_s, both_bytes_per_s: of the link to the host, each way alone and both together.
    cpu_update_bytes_per_s, device_update_bytes_per_s: bytes of float32 parameters that Adam updates per second.
    cpu_master_update_bytes_per_s: the same on the CPU for bfloat16 parameters with float32 copies, counted as float32;
        0 if the file does not say.
    host_memory_bytes_per_s: bytes of host memory per second that copies and CPU updates together can read and write;
        0 if the file does not say, and then neither slows the other down.
    manage_s: H, seconds per step that the CPU needs for everything else.
    per_copy_s: seconds that each copy takes in addition to those of its bytes. If the file does not say, they follow
        from its copies of several sizes (`copies`), and are 0 without these.
    instruction_s: seconds of the CPU to replay and launch one operator; 0 if the file does not say, and where the
        device is the CPU.
    shared_cores: compute, copies and CPU updates share the same cores (the emulated device).
    basis: where most figures are from, in `BASES`: "data sheets" with assumed shares of their peaks, a "paper", or
        "measured" by `offmate profile`; "" if the file does not say. No plan depends on it.
    drives: folders whose drives' rates are known. A plan depends only on those that it is told to use.
    """

    name: str
    device_memory_bytes: int
    matrix_flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    launch_s: float
    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float
    cpu_update_bytes_per_s: float
    device_update_bytes_per_s: float
    host_memory_bytes: int = 0
    host_memory_bytes_per_s: float = 0.0
    cpu_master_update_bytes_per_s: float = 0.0
    manage_s: float = 0.0
    per_copy_s: float = 0.0
    instruction_s: float = 0.0
    shared_cores: bool = False
    basis: str = field(default="", repr=False, compare=False)
    drives: tuple[Drive, ...] = field(default=(), repr=False)

    @property
    def default_budget_bytes(self) -> int:
        """Device memory less a sixteenth, for the context and other processes."""
        return self.device_memory_bytes - self.device_memory_bytes // 16

    def drive(self, folder: str | os.PathLike[str]) -> Drive | None:
        """Return what is known of a folder's drive; None if the file does not list the folder."""
        return next((one for one in self.drives if same_folder(one.folder, folder)), None)

    def update_s(self, elements: int, *, masters: bool) -> tuple[float, float]:
        """Return the seconds in which the CPU and the device update that many parameters.

        Parameters
        ----------
        masters: whether the parameters are of lower precision and float32 copies of them are updated.
        """
        on_cpu, on_device = self.cpu_update_bytes_per_s, self.device_update_bytes_per_s
        if masters:
            on_cpu = self.cpu_master_update_bytes_per_s or _MASTERS_ON_CPU * on_cpu
            on_device *= _MASTERS_ON_DEVICE
        return 4 * elements / on_cpu, 4 * elements / on_device

    def flops_per_s(self, dtype: str) -> float:
        """Return the rate of matrix products in a dtype; that of float32 if the file does not name the dtype."""
        rates = dict(self.matrix_flops_per_s)
        return rates.get(dtype, rates["float32"])

    def rate_words(self, dtype: str) -> str:
        """Say that products in a 16-bit dtype are planned with float32's rate; empty if the file has their own."""
        rates = dict(self.matrix_flops_per_s)
        if dtype in rates or dtype == "float32":
            return ""
        words = (
            f"{self.name} has no matrix rate for {dtype}, so that products are planned with that of float32, "
            f"{rates['float32'] / 1e12:.3g} TFLOP/s"
        )
        other = {"bfloat16": "float16", "float16": "bfloat16"}.get(dtype, "")
        return f"{words}; in {other} it is {rates[other] / 1e12:.3g}" if other in rates else words


def names() -> tuple[str, ...]:
    """Return the names of the hardware files that come with offmate."""
    return tuple(sorted(p.name.removesuffix(".json") for p in _folder().iterdir() if p.name.endswith(".json")))


def _same_name(asked: str) -> str | None:
    """Return the name that is asked for, whatever its case, blanks and hyphens; None if there is none."""
    letters = re.sub(r"[^a-z0-9]", "", asked.lower())
    return next((name for name in names() if name.replace("-", "") == letters), None)


def load(name_or_path: str) -> Hardware:
    """Load a machine by the name of a file that comes with offmate, or by the path of a user's file.

    Raises: OffmateError naming the nearest names, or what is wrong in the file.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ArgumentValueError(
            f"hardware is {reprlib.repr(name_or_path)}; it must be a name ({', '.join(names())}) or the path of a file"
        )
    name_or_path = os.fspath(name_or_path)
    name_or_path = _same_name(name_or_path) or name_or_path
    if name_or_path in names():
        return _parse(json.loads((_folder() / f"{name_or_path}.json").read_text()), name_or_path)
    if not os.path.isfile(name_or_path):  # unlike Path.is_file, it never raises
        near = difflib.get_close_matches(name_or_path.lower(), names(), n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ArgumentValueError(
            f"the card {name_or_path!r} is not known. {hint}Choose one of {', '.join(names())}, or give a file that "
            "`offmate profile --json FILE` wrote"
        )
    try:
        data = json.loads(Path(name_or_path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentValueError(f"{name_or_path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ArgumentValueError(f"{name_or_path}: not JSON: {error}") from None
    except RecursionError:
        raise ArgumentValueError(
            f"{name_or_path}: not JSON of a hardware file: its brackets are nested too deeply"
        ) from None
    return _parse(data, name_or_path)


def _folder() -> Any:
    return resources.files("offmate") / "machines"


def _parse(data: Any, where: str) -> Hardware:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArgumentValueError(f"{where}: not a hardware file of format {FORMAT}")
    figures = {key: _figure(data, key, where, 0.0 if key == "launch_s" else 1.0) for key in _RATES}
    basis = data.get("basis", "")
    if basis not in ("", *BASES):
        raise ArgumentValueError(
            f"{where}: basis is {reprlib.repr(basis)}; it must be one of {', '.join(BASES)}, or left out"
        )
    shared_cores = data.get("shared_cores", False)
    if not isinstance(shared_cores, bool):
        raise ArgumentValueError(f"{where}: shared_cores is {reprlib.repr(shared_cores)}; it must be true or false")
    products = data.get("matrix_flops_per_s")
    if not isinstance(products, dict) or "float32" not in products:
        raise ArgumentValueError(f"{where}: matrix_flops_per_s must name at least float32")
    flops = tuple(sorted((dtype, figure(products, dtype, where, least=1.0, known=_KEYS)) for dtype in products))
    _check_optional(data, where)
    optional = {key: _figure(data, key, where) if key in data else 0.0 for key in _OPTIONAL}
    for key in ("host_memory_bytes_per_s", "cpu_master_update_bytes_per_s"):
        if 0 < optional[key] < 1:
            raise ArgumentValueError(
                f"{where}: {key} is {optional[key]!r}; it must be 1 or more, or 0 if it is not known"
            )
    return Hardware(
        name=str(data.get("name", where)),
        device_memory_bytes=int(_figure(data, "device_memory_bytes", where, 1.0)),
        matrix_flops_per_s=flops,
        host_memory_bytes=int(optional["host_memory_bytes"]),
        host_memory_bytes_per_s=optional["host_memory_bytes_per_s"],
        cpu_master_update_bytes_per_s=optional["cpu_master_update_bytes_per_s"],
        manage_s=optional["manage_s"],
        instruction_s=optional["instruction_s"],
        per_copy_s=optional["per_copy_s"] if "per_copy_s" in data else _per_copy_s(data, where),
        shared_cores=shared_cores,
        basis=basis,
        drives=drives_of(data.get("storage", []), where),
        **figures,
    )


def _figure(data: dict[str, Any], key: str, where: str, least: float = 0.0) -> float:
    return figure(data, key, where, least, _KEYS)


def _check_optional(data: dict[str, Any], where: str) -> None:
    """Raise ArgumentValueError for a key that no file has: a misspelt figure would be left out without a word."""
    for key in sorted(data.keys() - _KEYS):
        near = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(_KEYS))}"
        raise ArgumentValueError(f"{where}: {key!r} is not known; {hint}")


def _per_copy_s(data: dict[str, Any], where: str) -> float:
    """Return the seconds per copy that follow from a file's copies; 0 if it has none."""
    rows = data.get("copies", [])
    if not isinstance(rows, list):
        raise ArgumentValueError(f"{where}: copies must be a list, found {str(rows)[:40]}")
    curve = []
    for number, row in enumerate(rows):
        figures = [row.get(one.name) for one in fields(Copied)] if isinstance(row, dict) else [None]
        if figures[0] not in DIRECTIONS or not all(_is_positive(figure) for figure in figures[1:]):
            raise ArgumentValueError(
                f"{where}: copies[{number}] must have a direction ({', '.join(DIRECTIONS)}), and bytes and bytes_per_s "
                f"from 1 to {LARGEST:g}, found {str(row)[:80]}"
            )
        curve.append(Copied(*figures))
    try:
        return fitted(curve).per_copy_s if curve else 0.0
    except ValueError as error:
        raise ArgumentValueError(f"{where}: copies: {error}") from None


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= LARGEST
