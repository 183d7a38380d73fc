"""Plans that were made before and serve again: given by the user, of this run, of an earlier one, or on disk."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..errors import PlanFileError
from ..files import keep
from ..plans.plan import Plan
from ..plans.saved import to_text
from ..sizes import format_bytes
from ..solver.scheduling.follow import follow
from ..solver.solve import least_budget
from ..split import Split
from .fingerprint import differences, fingerprint_of
from .request import Request
from .restore import cached, fitting
from .solver_errors import solver_errors
from .subject import Subject

log = logging.getLogger("offmate")


def fingerprints(subject: Subject) -> list[str]:
    """List the fingerprints of plans that serve: the request's own, then that of one which leaves the split open."""
    model, traced, request = subject.model, subject.traced, subject.request
    requests = [request]
    if isinstance(request.config.updates, Split):
        requests.append(replace(request, config=replace(request.config, updates="auto")))
    return [fingerprint_of(model, traced, one, subject.updater, subject.machine) for one in requests]


def earlier(subject: Subject, kept: Mapping[str, Plan]) -> Plan | None:
    """Find an earlier plan that serves a request.

    It was made for this request, or with the split left open but agreeing with the pinned one, or else with another
    reserve for the user's code.

    Parameters
    ----------
    kept: plans of this run and of an earlier one, by fingerprint.
    """
    request, known_as = subject.request, fingerprints(subject)
    outdated = request.config.measure_again and subject.machine is None  # figures that plans on disk are based on
    for fingerprint in known_as:
        plan = fitting(kept.get(fingerprint), request)
        if plan is None and not outdated:
            plan = cached(_path(request, fingerprint), fingerprint, request)
        if plan is not None and _as_pinned(plan, request):
            return plan
    others = sorted(kept.values(), key=lambda plan: plan.user_bytes)  # what reserves less is as fast or faster
    reserving = (with_reserve(plan, subject) for plan in others if plan.user_bytes != request.user_bytes)
    return next((plan for plan in reserving if fitting(plan, request) is not None), None)


def check_given(given: Plan, subject: Subject) -> None:
    """Raise PlanFileError, naming what differs, unless a plan that the user gives was made for this request.

    One that was made again for a larger reserve, since the user's code holds more than usual, serves as well.
    """
    request, known_as = subject.request, fingerprints(subject)
    if given.fingerprint in known_as and _as_pinned(given, request):
        return
    if given.user_bytes > (request.user_bytes or 0) and with_reserve(given, subject) is not None:
        return
    known = differences(given, request, subject.updater is not None)
    known.append(f"fingerprint {given.fingerprint}, now {known_as[0]}")
    raise PlanFileError(
        "the plan does not match this model, batch, optimizer, budget, machine (hardware=), storage=, max_grad_norm, "
        f"grad_scaler, accumulation_steps or Config ({'; '.join(known)}); plan again with offmate.plan and the same "
        "arguments"
    )


def store(plan: Plan, request: Request) -> None:
    """Write a plan to the folder where later runs look for it, if there is one."""
    path = _path(request, plan.fingerprint)
    if path is not None:
        keep(path, to_text(plan))


def with_reserve(plan: Plan, subject: Subject) -> Plan | None:
    """Return an earlier plan that differs from a request in what it reserves for the user's code.

    No plan with a larger reserve is faster than the best one with a smaller one, so that nothing has to be searched.

    Returns: the plan as it is if it reserves more; the same schedule with the larger reserve if GPU memory has room for
    that; None if it has none, or if the plan is for something else.
    """
    request = subject.request
    if differences(plan, request, subject.updater is not None):  # fingerprints take longer
        return None
    known_as = fingerprints(replace(subject, request=replace(request, user_bytes=plan.user_bytes)))
    if plan.fingerprint not in known_as or not _as_pinned(plan, request):
        return None
    more_bytes = (request.user_bytes or 0) - plan.user_bytes
    if more_bytes <= 0:
        return plan
    if plan.problem is None:
        return None
    fixed = plan.fixed_bytes - plan.allocator_bytes + request.margin_bytes
    problem = replace(
        plan.problem,
        user_bytes=plan.problem.user_bytes + more_bytes,
        device_budget_bytes=max(0, request.budget_bytes - fixed - request.spare_bytes),
    )
    schedule = follow(plan.schedule, problem)
    if schedule is None:
        return None
    with solver_errors():
        least = least_budget(problem, time_limit_s=request.config.solver_time_limit_s, backend=request.config.solver)
    log.info("the plan has room for %s of your code, so it stays as it is", format_bytes(request.user_bytes or 0))
    return replace(
        plan,
        fingerprint=fingerprints(subject)[known_as.index(plan.fingerprint)],
        schedule=schedule,
        problem=problem,
        fixed_bytes=fixed,
        allocator_bytes=request.margin_bytes,
        least_budget_bytes=min(request.budget_bytes, least.bytes + fixed + request.spare_bytes),
        user_bytes=request.user_bytes or 0,
    )


def _as_pinned(plan: Plan, request: Request) -> bool:
    """Return whether a plan updates nothing on another side than the pinned one."""
    updates = request.config.updates
    return not isinstance(updates, Split) or updates.agrees(plan.split)


def _path(request: Request, fingerprint: str) -> Path | None:
    margin = f"-{request.margin_bytes}" if request.margin_bytes else ""
    return Path(request.config.cache_dir, f"{fingerprint}{margin}.json") if request.config.cache_dir else None
