"""Trained parameters whose memory lies in files on storage paths, where RAM has no room for their values."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..runtime.devices.device import Device
from ..runtime.devices.pinned import flat_bytes
from ..runtime.replay.states import first_bytes
from ..runtime.torch_names.autograd import without_torch_function
from ..runtime.torch_names.tensors import StorageWeakRef, storage_key
from ..solver.schedule import Schedule
from .host_state import Truth

log = logging.getLogger("offmate")


def may_leave(params: Sequence[tuple[str, torch.nn.Parameter]]) -> bool:
    """Return whether all trained parameters can have memory in files; if not, `why_all_stay` says why."""
    return not why_all_stay(params)


def why_all_stay(params: Sequence[tuple[str, torch.nn.Parameter]]) -> str:
    """Return why trained parameters cannot lie in files; "" if each has dense memory on the CPU of its own.

    Parameters on the meta device count as if they had memory of their own. Empty ones have none to leave with.
    """
    with without_torch_function():
        trained = {name: param for name, param in params if param.requires_grad and param.numel()}
        # `device` is where a parameter is used.
        elsewhere = [n for n, p in trained.items() if p.layout is not torch.strided or not (p.is_cpu or p.is_meta)]
        if elsewhere:
            return f"{elsewhere[0]} is not a dense tensor in RAM"
        own = _own_memory(params)
        shared = [name for name in trained if name not in own]
        if shared:
            return f"{shared[0]} shares its memory with another parameter"
        gaps = [name for name, param in trained.items() if not _is_dense(param)]
        return f"the memory of {gaps[0]} has gaps between its elements" if gaps else ""


def let_leave(params: Sequence[tuple[str, torch.nn.Parameter]], said: str = "") -> tuple[bool, str]:
    """Look whether trained parameters may lie in files, as the user allows, and log why if not.

    Parameters
    ----------
    said: what was logged before, which is not said again.

    Returns: whether they may, and why not.
    """
    why = why_all_stay(params)
    if why and why != said:
        _warn_of_all_in_ram(why)
    return not why, why


def _warn_of_all_in_ram(why: str) -> None:
    log.warning(
        "trained parameters stay in RAM, although the storage paths are for them too: %s. Give each parameter memory "
        "of its own, without gaps (`param.data = param.data.clone(memory_format=torch.contiguous_format)`), before "
        "offmate.compile",
        why,
    )


def _own_memory(params: Sequence[tuple[str, torch.nn.Parameter]]) -> set[str]:
    """Return the parameters whose storage no other one has; else one that left would free no RAM, or be held there."""
    owners: dict[int, set[torch.nn.Parameter]] = {}
    stored = {name: param for name, param in params if param.layout is torch.strided and not param.is_meta}
    for param in stored.values():
        owners.setdefault(storage_key(param.untyped_storage()), set()).add(param)
    shared = {name for name, p in stored.items() if len(owners[storage_key(p.untyped_storage())]) > 1}
    return {name for name, _ in params} - shared


def _is_dense(param: torch.nn.Parameter) -> bool:
    return flat_bytes(param.detach()) is not None


def settle(schedule: Schedule, truth: Truth, device: Device) -> None:
    """Move parameters to files or to RAM, one after another, as a schedule has them; the host's values are current.

    Raises: StorageError if files cannot be written, or have too little space.
    """
    host = truth.host
    if host.store is None:
        return
    in_files, left = schedule.parameters_in_files, dict[int, StorageWeakRef]()
    for name in tuple(host.params):
        own = host.params[name]
        if host.store.holds(own) == (name in in_files):
            continue
        memory = own.untyped_storage()
        left[storage_key(memory)] = StorageWeakRef(memory)
        del memory
        if name in in_files:
            truth.move({name: _in_files(truth, name, own, _starts(schedule, name, own))})
        else:
            truth.move({name: device.pinned(device.empty_host_like(own).copy_(own))})
        del own
    _warn_of_older_memory(truth, left)


def _in_files(truth: Truth, name: str, own: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
    store, values = truth.host.store, flat_bytes(own)
    assert store is not None and values is not None, "the plan knows which parameters may leave to files"
    moved = store.empty(f"{name}: values", own, starts)
    place = store.bytes_of(moved)
    assert place is not None
    place.write(values, 0).synchronize()
    return moved


def _starts(schedule: Schedule, name: str, own: torch.Tensor) -> tuple[int, ...]:
    """Return the offsets in bytes at which the rows begin that the host updates one after another."""
    if name not in schedule.updated_from_files:
        return ()
    return first_bytes(schedule.states[name], own)


def _warn_of_older_memory(truth: Truth, left: dict[int, StorageWeakRef]) -> None:
    """Say that somebody still holds memory that parameters had before, if that is so."""
    used = {storage_key(own.untyped_storage()) for own in truth.host.params.values()}
    held = sum(not weak.expired() for key, weak in left.items() if key not in used)
    if held:
        log.warning(
            "parameters moved between RAM and files on storage paths, and %d tensors still hold memory that they had "
            "before. It takes room there, shows no newer values, and what is written there is lost: read parameters "
            "from the model again",
            held,
        )
