"""The host memory that this process may use: what is free on the machine and what its control group allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ..errors import OffmateError

_PROC = Path("/proc")
_WSL = "microsoft"  # in the name of its kernel
_CGROUP = Path("/sys/fs/cgroup")
_LEAST_MARGIN_BYTES = 1 << 30


def available_host_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that this process can still allocate without swapping and without reaching a limit.

    This is the minimum of MemAvailable and, for the process's control group and each of its parents (version 1 or 2),
    the limit less the memory in use. Page cache that the kernel can drop at once counts as free.

    Parameters
    ----------
    proc, cgroup: where /proc and the control groups are mounted.

    Raises: OffmateError if the machine does not say how much memory is available.
    """
    rooms = [_mem_available_bytes(proc / "meminfo")]
    rooms += _rooms_v2(_own_groups(proc, cgroup, controller=""))
    rooms += _rooms_v1(_own_groups(proc, cgroup / "memory", controller="memory"))
    return max(0, min(rooms))


def default_host_budget_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return the host budget if the user gives none: available memory less a margin of 10 %, at least 1 GiB.

    The margin is for memory that no plan counts: the interpreter, data loading, other processes. The result may be 0.
    """
    available_bytes = available_host_bytes(proc, cgroup)
    return max(0, available_bytes - max(available_bytes // 10, _LEAST_MARGIN_BYTES))


def is_wsl(proc: Path = _PROC) -> bool:
    """Return whether this is Linux inside Windows, where little host memory can be pinned."""
    return _WSL in _read(proc / "sys" / "kernel" / "osrelease").lower()


def _mem_available_bytes(meminfo: Path) -> int:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OffmateError(f"{meminfo} does not say how much RAM is available; pass cpu_budget=, such as '16GiB'")


def _own_groups(proc: Path, mount: Path, controller: str) -> list[Path]:
    """List the folders of the process's control group and its parents below `mount`, innermost first.

    In a container the path may be the host's, which does not exist inside. Then only the mount remains, which is the
    container's own group.
    """
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        inside = PurePosixPath(path.lstrip("/"))
        return [mount / part for part in (inside, *inside.parents) if ".." not in part.parts]
    return []


def _rooms_v2(groups: list[Path]) -> Iterator[int]:
    for group in groups:
        limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            yield int(limit) - int(used) + _stat_bytes(group, "inactive_file")


def _rooms_v1(groups: list[Path]) -> Iterator[int]:
    for group in groups:
        limit = _read(group / "memory.limit_in_bytes").strip()
        used = _read(group / "memory.usage_in_bytes").strip()
        if limit.isdigit() and used.isdigit():
            yield int(limit) - int(used) + _stat_bytes(group, "total_inactive_file")


def _stat_bytes(group: Path, key: str) -> int:
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _read(path: Path) -> str:
    """Return a file's text, empty if it cannot be read: each of these files is absent on some machines."""
    try:
        return path.read_text()
    except OSError:
        return ""
