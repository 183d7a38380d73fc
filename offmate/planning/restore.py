"""Stored plans: finds them on disk, and rebuilds their programs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..capture.blocks import TracedBlock
from ..errors import PlanFileError
from ..lowering.options import BlockClass, ClassOption
from ..lowering.stored import StoredOption
from ..plans.plan import Plan, load_plan
from ..programs.programs import ClassGraph, NodeCost
from ..sizes import format_bytes
from .request import Request

log = logging.getLogger("offmate")

_OTHER = 1.25  # times a rate; less may be noise


def cached(path: Path | None, fingerprint: str, request: Request) -> Plan | None:
    """Return the plan in a file, if there is one that can be read, that was made for this request, and that fits."""
    if path is None or not os.path.exists(path):  # unlike Path.exists, it never raises
        return None
    try:
        plan = load_plan(path)
    except PlanFileError as error:
        log.warning("a cached plan is ignored: %s", error)
        return None
    if plan.fingerprint != fingerprint:
        log.warning(
            "a cached plan is ignored: the plan in %s is for something else (fingerprint %s)",
            path,
            plan.fingerprint[:40],
        )
        return None
    return fitting(plan, request)


def fitting(plan: Plan | None, request: Request) -> Plan | None:
    """Return the plan if it fits into RAM and storage paths, and was made for paths about as fast as those now."""
    if plan is not None and not request.has_room_for(plan.host_bytes):
        log.info(
            "an earlier plan is ignored: it needs %s of RAM, more than there is now", format_bytes(plan.host_bytes)
        )
        return None
    if plan is not None and request.storage is not None:
        needed = plan.schedule.most_bytes_in_files
        if needed > request.storage.capacity_bytes:
            log.info(
                "an earlier plan is ignored: it needs %s in files, and there is room for %s now",
                format_bytes(needed), format_bytes(request.storage.capacity_bytes),
            )  # fmt: skip
            return None
    if plan is not None and (words := other_rates(plan, request)):
        log.info("an earlier plan is ignored: %s", words)
        return None
    return plan


def other_rates(plan: Plan, request: Request) -> str:
    """Say by how much storage paths are faster or slower than a plan took them to be.

    Returns: empty if the plan stores nothing, or if the difference is within what measuring anew makes.
    """
    if request.storage is None or not any(plan.stored_bytes):
        return ""
    (then,) = (tier.path for tier in plan.schedule.rates.tiers if tier.for_states)
    now = request.storage.tier.path
    pairs = {
        "read": (then.in_bytes_per_s, now.in_bytes_per_s),
        "written": (then.out_bytes_per_s, now.out_bytes_per_s),
        "read and written at once": (then.alike_bytes_per_s, now.alike_bytes_per_s),
    }
    for word, (before, after) in pairs.items():
        if not 1 / _OTHER < after / before < _OTHER:
            return (
                f"it is for storage paths on which {format_bytes(int(before))}/s are {word}, and now "
                f"{format_bytes(int(after))}/s are"
            )
    return ""


def restore_class(block: TracedBlock, options: tuple[StoredOption, ...], costs: dict[str, NodeCost]) -> BlockClass:
    """Rebuild a class with the programs of its options, from what is stored of them."""
    graph = ClassGraph(block.joint, costs)
    own = frozenset(s for n in block.joint.forward for s in graph.made_by(n)) - graph.resting
    restored = []
    for option in options:
        kept, offloaded = frozenset(option.kept), frozenset(option.offloaded)
        restored.append(ClassOption(option.name, graph.programs(own - kept - offloaded), kept, offloaded))
    return BlockClass(graph, tuple(restored))


def kernel_bytes(costs: dict[str, NodeCost]) -> dict[str, tuple[int, ...]]:
    """Return per node the bytes of its workspace and of its results' storages, if there are any."""
    found = {name: (c.workspace_bytes, *c.storage_bytes) for name, c in costs.items()}
    return {name: sizes for name, sizes in found.items() if any(sizes)}
