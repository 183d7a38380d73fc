"""Frozen parameters that a plan may read from a checkpoint's files: when, and at which rate."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ..lowering.frozen_files import FrozenFiles
from ..optim.updater import UpdateCost
from ..runtime.devices.ring import BUFFERS_BYTES
from ..runtime.storage.disk_queue import N_THREADS, REQUEST_BYTES
from ..solver.problem import Problem

_PER_TRAINED = 4  # bytes of gradient and states, at most, per byte of a parameter that is trained
_FOR_PARAMETERS = 0.7  # of the RAM; activations may leave to the rest of it


def ram_is_short(sizes: Mapping[str, int], frozen: Collection[str], host_budget_bytes: int) -> bool:
    """Return whether parameters, with all that training may add to them, may take more RAM than there is.

    Parameters
    ----------
    sizes: bytes of every parameter by name. frozen: the names of those that are not trained.
    """
    trained = sum(size for name, size in sizes.items() if name not in frozen)
    return sum(sizes.values()) + _PER_TRAINED * trained > _FOR_PARAMETERS * host_budget_bytes


def states_need_files(sizes: Mapping[str, int], updates: Mapping[str, UpdateCost], host_budget_bytes: int) -> bool:
    """Return whether parameters, gradients and optimizer states may take more RAM than there is.

    Parameters
    ----------
    sizes: bytes of every parameter by name. updates: costs of the updates that are planned, by parameter.
    """
    return _trained_bytes(sizes, updates) > _FOR_PARAMETERS * host_budget_bytes


def values_need_files(problem: Problem, sizes: Mapping[str, int], updates: Mapping[str, UpdateCost]) -> bool:
    """Return whether these, and all activations and interface values that can leave, may take more RAM than there is.

    Parameters
    ----------
    problem: the one without storage paths. sizes, updates: as in `states_need_files`.
    """
    leaving = sum(max(option.offloaded_bytes for option in block.options) for block in problem.blocks)
    leaving += sum(value.bytes for value in problem.values) + problem.arrival_bytes
    return _trained_bytes(sizes, updates) + leaving > problem.host_budget_bytes


def _trained_bytes(sizes: Mapping[str, int], updates: Mapping[str, UpdateCost]) -> int:
    """Return the bytes of parameters, and of gradients and states of those that are trained."""
    return sum(sizes.values()) + sum(sizes[name] + cost.state_bytes for name, cost in updates.items())


def files_elsewhere(model: torch.nn.Module, rate: float, host_budget_bytes: int) -> FrozenFiles | None:
    """Return the files of another machine, on which a checkpoint has every frozen parameter as it is.

    Parameters
    ----------
    rate: bytes per second at which the checkpoint is read.

    Returns: None if RAM has room for everything.
    """
    sizes = {name: param.nbytes for name, param in model.named_parameters()}
    frozen = frozenset(name for name, param in model.named_parameters() if not param.requires_grad)
    if not frozen or not ram_is_short(sizes, frozen, host_budget_bytes):
        return None
    return frozen_files(frozen, rate)


def frozen_files(names: frozenset[str], rate: float, emulated: bool = False) -> FrozenFiles:
    """Return what a plan without weights has to know of frozen parameters in files.

    Parameters
    ----------
    rate: bytes per second at which they are read. emulated: the CPU acts as the device, so that reads need no copy.
    """
    return FrozenFiles(names, rate, (0 if emulated else BUFFERS_BYTES) + N_THREADS * REQUEST_BYTES)
