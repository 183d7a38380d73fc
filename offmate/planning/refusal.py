"""Texts about plans: the rows of a plan's table, and the refusal of a budget that cannot work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..capture.losses import loss_logits
from ..config import Config
from ..errors import InfeasibleBudget
from ..lowering.problem import Lowered
from ..plans.table import BlockRow
from ..sizes import format_bytes, format_least_bytes
from ..solver.items import ItemKind, names_of
from ..solver.plan import planned_host
from ..solver.problem import Problem
from ..solver.schedule import Kind, Schedule
from ..solver.solve import LeastBudget, least_budget
from ..split import Split
from .request import Request
from .storage import usual_drive

_LARGE = 0.1  # of the RAM
_AMPLE_BYTES = 2**44  # more than any machine has, and few enough for the solver's arithmetic


def refusal(lowered: Lowered, request: Request, fixed: int, elsewhere: bool = False) -> InfeasibleBudget:
    """Build the error that says what does not fit, what would, and what to change.

    Parameters
    ----------
    elsewhere: whether the plan is for another machine.
    """
    problem, config = lowered.problem, request.config
    budget_bytes, host_budget_bytes = request.budget_bytes, request.host_budget_bytes
    sides = _sides(problem, fixed, config)
    least = least_budget(problem, time_limit_s=config.solver_time_limit_s, backend=config.solver)
    if least.resource == "host":
        return InfeasibleBudget(
            f"{format_bytes(host_budget_bytes)} of RAM is not enough: even with unlimited GPU memory, training needs "
            f"{format_least_bytes(least.bytes)}. Raise cpu_budget or free RAM, choose an optimizer "
            "with less state, or freeze a part of the model"
            + _buffer_words(request)
            + _drive_words(problem, request, fixed, elsewhere)
            + sides,
            budget_bytes=budget_bytes,
        )
    needed = least.bytes + fixed
    if needed <= budget_bytes:
        enough = planned_host(problem, time_limit_s=config.solver_time_limit_s, backend=config.solver)
        more = enough is not None and enough > host_budget_bytes
        raised = f"cpu_budget to {format_least_bytes(enough)}, or gpu_budget" if enough and more else "gpu_budget"
        return InfeasibleBudget(
            f"the model almost fits {format_bytes(budget_bytes)} of GPU memory and {format_bytes(host_budget_bytes)} "
            "of RAM: a plan that splits tensors would fit, but none was found that keeps them whole. Raise "
            f"{raised} by a few percent" + sides,
            budget_bytes=budget_bytes,
            least_budget_bytes=needed,
        )
    place = _place(lowered, least)
    roomy = replace(problem, host_budget_bytes=_AMPLE_BYTES)
    alone = fixed + least_budget(roomy, time_limit_s=config.solver_time_limit_s, backend=config.solver).bytes
    host_words = ""
    if alone < needed:
        host_words = (
            f". With more RAM than the {format_bytes(host_budget_bytes)} of cpu_budget, {format_least_bytes(alone)} of "
            f"GPU memory is enough{_buffer_words(request)}"
        )
    given, least_words = _beside(budget_bytes, needed)
    return InfeasibleBudget(
        f"a budget of {given} is too small; the least that works is {least_words}{host_words}. The tightest point is "
        f"{place}. Raise gpu_budget, or make the batch smaller or the sequence shorter, or keep fewer outputs "
        "(Config(outputs=...))" + (_drive_words(problem, request, fixed, elsewhere) if host_words else "") + sides,
        budget_bytes=budget_bytes,
        least_budget_bytes=needed,
        block=least.block,
        step=least.step,
        place=place,
    )


def _beside(budget_bytes: int, least_bytes: int) -> tuple[str, str]:
    """Format a budget and the least one, to the byte where three digits could not tell them apart."""
    given, least = format_bytes(budget_bytes), format_least_bytes(least_bytes)
    if (least_bytes - budget_bytes) * 100 > least_bytes:
        return given, least
    return f"{given} ({budget_bytes:,} bytes)", f"{least} ({least_bytes:,} bytes)"


def _buffer_words(request: Request) -> str:
    """Say how much RAM copies to and from storage paths take, if that is a large part of it; else empty."""
    files = request.storage
    if files is None or files.buffers_bytes < _LARGE * request.host_budget_bytes:
        return ""
    buffers, n_paths = format_bytes(files.buffers_bytes), len(files.paths)
    if n_paths == 1:
        return f". Copies to and from the storage path take {buffers} of RAM for buffers"
    return f". Copies to and from {n_paths} storage paths take {buffers} of RAM for buffers, and fewer paths take less"


def _drive_words(problem: Problem, request: Request, fixed: int, elsewhere: bool) -> str:
    """Say that more may leave to a drive, one that is not named yet or is too full; empty if it would still not fit."""
    files, config = request.storage, request.config
    if problem.update == "external":
        return ""
    drive = (usual_drive(None if elsewhere else request.device) if files is None else files).tier
    others = (tier for tier in problem.rates.tiers if tier.name != drive.name)
    tiers = (*others, replace(drive, capacity_bytes=_AMPLE_BYTES))
    roomier = replace(problem, rates=replace(problem.rates, tiers=tiers))
    least = least_budget(roomier, time_limit_s=config.solver_time_limit_s, backend=config.solver)
    if least.resource == "host" or least.bytes + fixed > request.budget_bytes:
        return ""
    if files is None:
        return (
            ". Or name a folder on an NVMe drive (storage=): with optimizer states and activations in files there, it "
            "fits"
        )
    room = format_bytes(files.capacity_bytes)
    return f". With more room than the {room} that storage= has for files, it fits: free space there, or name another"


def _place(lowered: Lowered, least: LeastBudget) -> str:
    """Name the block and the step that bind; the block of the loss by what it is."""
    number = f"block {least.block} in step {least.step} of {lowered.problem.n_steps}"
    if not least.block.isdecimal():
        return number
    logits = loss_logits(lowered.blocks[int(least.block)].joint.forward)
    if logits is None:
        return number
    return f"the loss ({' × '.join(f'{size:,}' for size in logits)} logits), {number}"


def stream_refusal(problem: Problem, request: Request, least_bytes: int) -> InfeasibleBudget:
    """Build the same error for a forward without gradients, whose device needs `least_bytes` in all."""
    streamed = sum(group.param_bytes for group in problem.groups if not group.in_files)
    if streamed > request.host_budget_bytes:
        return InfeasibleBudget(
            f"a forward without gradients streams {format_bytes(streamed)} of parameters from RAM, but cpu_budget is "
            f"{format_bytes(request.host_budget_bytes)}; raise it to {format_least_bytes(streamed)} or more",
            budget_bytes=request.budget_bytes,
        )
    given, least_words = _beside(request.budget_bytes, least_bytes)
    return InfeasibleBudget(
        f"a budget of {given} is too small for one block of the forward; the least that works is {least_words}. "
        "Raise gpu_budget or make the batch smaller",
        budget_bytes=request.budget_bytes,
        least_budget_bytes=least_bytes,
    )


def _sides(problem: Problem, fixed: int, config: Config) -> str:
    """Describe what it costs that the planner may not choose who updates; empty if it may."""
    if config.updates == "auto" or problem.update == "external":
        return ""
    groups = tuple(replace(group, side="any") for group in problem.groups)
    freely = least_budget(
        replace(problem, groups=groups), time_limit_s=config.solver_time_limit_s, backend=config.solver
    )
    least = f"{format_least_bytes(freely.bytes + fixed)} of GPU memory" if freely.resource == "device" else "no budget"
    if isinstance(config.updates, Split):
        return (
            ". The side that updates each parameter is fixed (Config(updates=Split(...)), a checkpoint's split, or "
            "that of the session's first plan), since CPU and GPU round differently. With Config(updates='auto'), "
            f"{least} is enough, but the last bits may differ"
        )
    return f". With Config(updates='auto') instead of updates={config.updates!r}, {least} is enough"


def block_rows(lowered: Lowered, schedule: Schedule) -> tuple[BlockRow, ...]:
    """Build the rows of the plan's table: parameters count where they are first used."""
    moved = names_of((a.item for a in schedule.actions if a.kind is Kind.PREFETCH), ItemKind.PARAMETER)
    ids = {key: chr(ord("A") + i % 26) + (str(i // 26) if i >= 26 else "") for i, key in enumerate(lowered.classes)}
    first: dict[int, list[Any]] = {}
    for group in lowered.problem.groups:
        first.setdefault(group.uses[0], []).extend(group.tensors)
    rows = []
    for index, (block, chosen) in enumerate(zip(lowered.blocks, schedule.options)):
        numbers = lowered.problem.blocks[index].options[chosen]
        programs = lowered.classes[block.key].options[chosen].programs
        tensors = first.get(index, [])
        rows.append(
            BlockRow(
                name=str(index),
                class_id=ids[block.key],
                option=numbers.name,
                kept_bytes=numbers.saved_bytes,
                offloaded_bytes=numbers.offloaded_bytes,
                recomputed=programs.recomputed,
                params_bytes=sum(t.param_bytes for t in tensors),
                params_resident_bytes=sum(t.param_bytes for t in tensors if t.name not in moved),
                cpu_update_bytes=sum(t.param_bytes for t in tensors if t.name in schedule.update_cpu_s),
            )
        )
    return tuple(rows)
