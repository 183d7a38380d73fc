"""Facts about this machine and its installation for a problem report: versions, devices, link rates, limits."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..config import default_cache_dir
from .allocator import allocator_words
from .benchmark import processor
from .devices import EMULATED, make_device, words
from .host_memory import available_host_bytes, default_host_budget_bytes, is_wsl
from .links import measure_link

_NEEDED = ("torch", "pulp", "highspy", "ortools", "networkx", "rich")
_EXTRAS = (
    "transformers", "peft", "accelerate", "safetensors", "xxhash", "pyyaml", "matplotlib", "pandas", "tensorboard",
    "wandb",
)  # fmt: skip
_UNLIMITED_BYTES = 2**62
_PROBE_BYTES = 1 << 30


def examine() -> dict[str, Any]:
    """Examine the machine. Nothing in the result names a user, a host or one of their folders.

    Returns: JSON types, in sections: versions, system, host, devices, pinned, solvers, cache; bytes as integers.
    """
    return {
        "versions": {"offmate": _version("offmate"), **{name: _version(name) for name in (*_NEEDED, *_EXTRAS)}},
        "system": _system(),
        "host": {
            "available_bytes": available_host_bytes(),
            "default_budget_bytes": default_host_budget_bytes(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "devices": _devices(),
        "pinned": _pinned(),
        "solvers": {**{name: _solver(name) for name in ("highs", "cbc")}, "cp-sat": _cpsat()},
        "cache": _cache(Path(default_cache_dir())),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _system() -> dict[str, Any]:
    release = platform.uname().release
    return {
        "python": platform.python_version(),
        "os": platform.freedesktop_os_release().get("PRETTY_NAME", "Linux") if _has_release() else platform.system(),
        "kernel": release,
        "wsl": is_wsl(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
    }


def _has_release() -> bool:
    return any(Path(path).exists() for path in ("/etc/os-release", "/usr/lib/os-release"))


def _devices() -> list[dict[str, Any]]:
    """Describe the emulated device and every card that torch sees, with their link rates."""
    available = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if available is None else torch.accelerator.device_count()
    cards = [torch.device(available.type, index) for index in range(count)] if available is not None else []
    return [{"name": EMULATED, **_link(EMULATED)}, *map(_card, cards)]


def _link(kind: str) -> dict[str, float]:
    device = make_device(kind, _UNLIMITED_BYTES)
    try:
        return measure_link(device).figures()
    finally:
        device.close()


def _card(card: torch.device) -> dict[str, Any]:
    free, total = torch.accelerator.get_memory_info(card)
    found: dict[str, Any] = {"name": words(card), "memory_bytes": total, "free_bytes": free}
    if card.type == "cuda":
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(card)))
        found["allocator"] = allocator_words(card)
    try:
        return found | _link(str(card))
    except RuntimeError as error:  # the report may be about a card that is full or lost
        return found | {"link": str(error).splitlines()[0]}


def _pinned() -> dict[str, Any]:
    """Return how much memory may be locked, and, if there is a card, whether a gigabyte can be pinned."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    if not torch.accelerator.is_available():
        return {"limit_bytes": limit, "probe": "not tried: torch sees no accelerator"}
    try:
        torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return {"limit_bytes": limit, "probe": f"1 GiB cannot be pinned: {str(error).splitlines()[0]}"}
    return {"limit_bytes": limit, "probe": "1 GiB can be pinned"}


def _solver(name: str) -> str:
    from ..solver.backends import BackendError, get

    try:
        get(name)
    except BackendError as error:
        return str(error)
    return "works"


def _cpsat() -> str:
    from ..solver.backends import BackendError
    from ..solver.backends.cpsat import CpSat
    from ..solver.block_graph import BlockGraph, Op, Storage

    graph = BlockGraph((Op("a", 1.0, (0,), (1,), True),), (Storage(8, True), Storage(8, False)), frozenset({1}))
    try:
        with CpSat() as running:
            running.least_kept(graph)
    except BackendError as error:
        return str(error)
    return "works"


def _cache(folder: Path) -> dict[str, Any]:
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
