"""`torch.sim`: the device module of the simulated accelerator, with the names and meanings of `torch.cuda`.

There are two devices, "sim:0" and "sim:1". What tests set holds for the one that they name, by default the first.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.accelerator.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)

__all__ = [
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
]

TOTAL_BYTES = 16 * 2**30
NO_LIMIT = 2**62

native: Any = None  # the extension, set when it is loaded
_initialized = True  # torch.utils.checkpoint saves the random state only of a device that is


# -- what tests set ---------------------------------------------------------------------------------------------------


def reset() -> None:
    """Wait for what is under way, take back what the functions below have set, let go of what nobody refers to."""
    lose(False)
    set_delays(0, 0)
    set_workspace_bytes(0)
    set_pinned_limit_bytes(NO_LIMIT)
    set_poisons(True)
    set_device(0)
    for index in range(device_count()):
        set_others_bytes(0, index)
        set_limit_bytes(NO_LIMIT, index)
        set_total_bytes(TOTAL_BYTES, index)
    if any(map(memory_allocated, range(device_count()))):
        gc.collect()
    empty_cache()
    native.empty_host_cache()
    for index in range(device_count()):
        reset_peak_memory_stats(index)
        reset_accumulated_memory_stats(index)


def set_delays(seed: int, max_us: int) -> None:
    """Precede every kernel, copy and event by a random delay of at most `max_us` microseconds; 0 turns delays off.

    With delays on, kernels run when their stream comes to them, beside the host; without, the host waits for each.
    """
    native.set_delays(seed, max_us)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """A stream that stands still within a block: what is put on it meanwhile is done after the block."""
    let_go = native.hold(stream.stream_id)
    try:
        yield
    finally:
        let_go()


def set_limit_bytes(limit_bytes: int, index: int = 0) -> None:
    """How much device memory may be reserved; beyond it cached segments are given back, then it is out of memory."""
    native.set_limit_bytes(index, limit_bytes)


def set_total_bytes(total_bytes: int, index: int = 0) -> None:
    """The memory of the whole card."""
    native.set_total_bytes(index, total_bytes)


def set_others_bytes(others_bytes: int, index: int = 0) -> None:
    """How much of the card other processes hold."""
    native.set_others_bytes(index, others_bytes)


def set_workspace_bytes(workspace_bytes: int) -> None:
    """What the first matrix product of each thread on each stream takes from the device and keeps, as cuBLAS does."""
    native.set_workspace_bytes(workspace_bytes)


def set_poisons(poisons: bool) -> None:
    """Whether memory that is let go is overwritten; if not, memory that nobody writes takes none of the host's."""
    native.set_poisons(poisons)


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[int, int]]]:
    """What is allocated within a block, in order: address and bytes asked for, or address and 0 when it is let go.

    The list is filled when the block ends.
    """
    changes: list[tuple[int, int]] = []
    native.watch_allocations(True)
    try:
        yield changes
    finally:
        changes += native.take_changes()
        native.watch_allocations(False)


def lose(lost: bool = True) -> None:
    """A lost device refuses everything with torch.AcceleratorError."""
    native.set_lost(lost)


def set_pinned_limit_bytes(limit_bytes: int) -> None:
    """How much host memory may be pinned."""
    native.set_pinned_limit_bytes(limit_bytes)


def let_pin(more_bytes: int) -> None:
    """Limit pinned memory to what is pinned now and this much more."""
    gc.collect()
    native.empty_host_cache()
    set_pinned_limit_bytes(native.pinned_bytes() + more_bytes)


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """The limit as a fraction of the card's memory."""
    set_limit_bytes(int(fraction * mem_get_info(device)[1]), _index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free and bytes there are."""
    return torch.accelerator.get_memory_info(device)


# -- devices ----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Nothing to do, but without it torch takes the device for one that nobody has used, and waits for nothing."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(native.n_devices)


def _index(device: Any) -> int:
    """The index of a device that is given as `torch.cuda` takes it; None is the current one."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


def get_device_name(device: Any = None) -> str:
    return "simulated accelerator"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(), total_memory=mem_get_info(device)[1])


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Make a device the current one within a block."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# -- streams ----------------------------------------------------------------------------------------------------------


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=f"sim:{_index(device)}", priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(device="sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one within a block."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


# -- random numbers ---------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    native.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        native.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return native.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    native.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)
