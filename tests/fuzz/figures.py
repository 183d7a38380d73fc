"""Plans from a hardware file: seconds follow from rates, bytes from one run of each class; CP-SAT runs in one process.

Measuring and starting solvers is much of what a tiny model's plan costs. What a plan means stays as it is: every
operator still runs once on real data, for the bytes that it really makes and for strides that were not promised.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from offmate.runtime.storage.files import SystemFiles
from offmate.solver.rows import log_share

from offmate.capture.spec import Joint, LowPrecision
from offmate.machines.hardware import Hardware, load
from offmate.machines.links import LinkRates
from offmate.optim.state_bytes import state_bytes
from offmate.optim.updater import UpdateCost, Updater
from offmate.planning import earlier
from offmate.profile import analytic, figures, store
from offmate.profile import operators as profile
from offmate.profile.store import Measured
from offmate.programs.programs import NodeCost

from .lasting_cpsat import one_cpsat
from .solved import solved_as_for_users, solved_once

_ROOM_BYTES = 1 << 30  # more than a test writes

_MEASURED = profile._measure

_kept: dict[tuple[str, bool], dict[str, Measured]] = {}  # by hardware file, and whether workspaces are measured


def _measure(machine: Hardware, joint: Joint, inputs: list[torch.Tensor], device: torch.device) -> dict[str, NodeCost]:
    costs = analytic.node_costs(joint, machine)
    found = {}
    for node, work in profile._run_through(joint, inputs, device):
        work.result = work()
        found[node.name] = NodeCost(costs[node.name].seconds, 0, profile._storage_bytes(node, work.result))
    return found


def _update_cost(
    machine: Hardware,
    updater: Updater,
    like: torch.Tensor,
    hyper: dict[str, Any],
    device: torch.device,
    low: LowPrecision | None = None,
) -> UpdateCost:
    bulk, scalars = state_bytes(updater, like, hyper)
    bulk += like.nbytes if low is not None and low.copied else 0
    size = 4 * like.numel()
    host_s, device_s = size / machine.cpu_update_bytes_per_s, size / machine.device_update_bytes_per_s
    parts = (1 / 2, 1 / 7, 2 / 7)  # to add a gradient, to take its norm, to unscale it
    looks = (part * s for part in parts for s in (host_s, device_s))
    return UpdateCost(bulk, scalars, host_s, device_s, *looks, host_s * log_share(size, size, bulk))


def _in_rated_seconds(
    measure: Callable[..., dict[str, NodeCost]],
    machine: Hardware,
    joint: Joint,
    inputs: list[torch.Tensor],
    device: torch.device,
) -> dict[str, NodeCost]:
    costs = analytic.node_costs(joint, machine)
    measured = measure(joint, inputs, device)
    return {n: replace(cost, seconds=costs[n].seconds, launch_s=0.0) for n, cost in measured.items()}


def _apart(path: Path | None, rests_on: str) -> Path | None:
    return path and path.with_stem(f"{path.stem}-{rests_on}")


@contextlib.contextmanager
def from_hardware_file(
    name: str = "emulated", workspaces: bool = False, all_passes: bool = False, timed_moves: bool = False
) -> Iterator[None]:
    """Inside, plans rest on a hardware file's rates instead of on measured times.

    Parameters
    ----------
    workspaces: whether operators are measured all the same, for the bytes that their kernels take meanwhile.
    all_passes: whether schedules go through all passes, as a user's do, and not only through the quick ones.
    timed_moves: whether list scheduling is among the quick ones.
    """
    machine = load(name)
    rates = LinkRates(machine.in_bytes_per_s, machine.out_bytes_per_s, machine.both_bytes_per_s)
    free_bytes = SystemFiles.free_bytes
    measure = functools.partial(_in_rated_seconds, _MEASURED) if workspaces else _measure
    rests_on = f"{name}-{workspaces}-{all_passes}-{timed_moves}"
    profile_path, plan_path = store._path, earlier._path
    with (
        one_cpsat(),
        solved_as_for_users() if all_passes else solved_once(timed_moves),
        # What was measured for the same model elsewhere is neither used nor replaced, and what follows from it neither.
        mock.patch.object(store, "_kept", _kept.setdefault((name, workspaces), {})),
        mock.patch.object(store, "_path", lambda *args: _apart(profile_path(*args), rests_on)),
        mock.patch.object(earlier, "_path", lambda *args: _apart(plan_path(*args), rests_on)),
        mock.patch.object(profile, "_measure", functools.partial(measure, machine)),
        mock.patch.object(figures, "measure_link", lambda device: rates),
        # What is free on a disk changes all the time, and would make each plan another one.
        mock.patch.object(SystemFiles, "free_bytes", lambda *args: min(free_bytes(*args), _ROOM_BYTES)),
        mock.patch.object(Updater, "cost", lambda *args: _update_cost(machine, *args)),
    ):
        yield
