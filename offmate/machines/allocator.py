"""The settings of a card's caching allocator, and those with which no plan can be kept."""

from __future__ import annotations

import os
import re

import torch

from ..errors import DeviceError
from ..runtime.torch_names.allocators import settings_of_cuda

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # whatever its value is
_SEGMENT = "large_segment_size_mb"
_USUAL_SEGMENT = f"{_SEGMENT}:20"
_REFUSED = (
    "backend", "max_split_size_mb", "max_non_split_rounding_mb", "roundup_power2_divisions",
    "garbage_collection_threshold", "expandable_segments", _SEGMENT,
)  # fmt: skip
_MIB = 1 << 20


def allocator_words(device: torch.device) -> str:
    """Return the allocator's settings as the environment has them, "defaults" if there are none; "" if unknown."""
    if device.type != "cuda":
        return ""
    return ", ".join([*_refused(), *_others()]) or "defaults"


def check_allocator(device: torch.device | None) -> None:
    """Raise DeviceError, with the settings and what to write instead, if no plan can be kept with an allocator's.

    Parameters
    ----------
    device: None if the CPU emulates it.
    """
    if device is None or device.type != "cuda" or not (refused := _refused()):
        return
    variables = [name for name in (*_VARIABLES, _UNCACHED) if name in os.environ]
    rest = ",".join(_others())
    remedy = f"Start Python without {' and '.join(variables)}" if variables else "Leave out the call that sets this"
    if variables and rest:
        remedy += f", or with only {variables[0]}={rest}"
    raise DeviceError(
        f"the allocator of {device} runs with {', '.join(refused)}. It then splits and reserves memory differently "
        f"from what plans assume, and a step could run out of memory within its budget. {remedy}. Plans do not need "
        "such settings, since they leave no gaps"
    )


def _refused() -> list[str]:
    """List the settings that break plans, as one writes them in the environment."""
    found = [f"{_UNCACHED}={os.environ[_UNCACHED]}"] if _UNCACHED in os.environ else []
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return [*found, f"backend:{backend}"]
    settings = settings_of_cuda()
    if settings.get("max_split_size", -1) > 0:
        found.append(f"max_split_size_mb:{settings['max_split_size'] // _MIB}")
    if divisions := _divisions(settings.get("roundup_power2_divisions", {})):
        found.append(f"roundup_power2_divisions:{divisions}")
    if settings.get("garbage_collection_threshold", 0) > 0:
        found.append(f"garbage_collection_threshold:{settings['garbage_collection_threshold']:g}")
    if settings.get("expandable_segments", False):
        found.append("expandable_segments:True")
    # The allocator does not tell this one.
    return found + [one for one in _written() if one.startswith(_SEGMENT) and one != _USUAL_SEGMENT]


def _divisions(by_size: dict[str, int]) -> str:
    """Write divisions of powers of two, by size in MiB, as the environment does; "" if there are none (0, or 1)."""
    divided = {size: number for size, number in by_size.items() if number > 1}
    if len(divided) == len(by_size) and len(set(divided.values())) == 1:
        return str(next(iter(divided.values())))
    return f"[{','.join(f'{size}:{number}' for size, number in divided.items())}]" if divided else ""


def _others() -> list[str]:
    """List the settings in the environment that leave plans as they are."""
    return [one for one in _written() if one.partition(":")[0] not in _REFUSED]


def _written() -> list[str]:
    texts = [os.environ[name].replace(" ", "") for name in _VARIABLES if name in os.environ]
    # Commas inside brackets do not separate settings.
    return [one for text in texts for one in re.split(r",(?![^\[]*\])", text) if one]
