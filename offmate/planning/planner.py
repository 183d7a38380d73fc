"""The planner: turns a model and a batch into a plan bound to tensors. Only this module knows all the phases."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..capture.arrivals import arrivals
from ..capture.chain import Cut
from ..capture.model import Traced, in_low_precision, structure, trace_model
from ..config import Config
from ..errors import InfeasibleBudget, PlanFileError
from ..lowering.bind import bind
from ..lowering.inductor import compiled
from ..lowering.problem import Lowered
from ..lowering.stored import StoredClass
from ..machines.devices import accelerator
from ..machines.hardware import Hardware
from ..optim.updater import Updater
from ..plans.plan import Plan
from ..profile.draws import advances
from ..profile.store import Measured
from ..progress import Progress
from ..solver.plan import Planned
from ..solver.plan import plan as solve_problem
from .accumulation import planned_with_fewest
from .describe import described
from .earlier import check_given, earlier, fingerprints, store
from .elsewhere import as_elsewhere
from .follow import Seen, follow_plan
from .garbage import fewer_collections
from .low_precision import Low, always_tried, copies_on_host, of_plan, possible, words_of
from .orders import check_together
from .phases import searching
from .refusal import block_rows, refusal
from .request import Prepared, Request
from .restore import kernel_bytes, other_rates
from .solver_errors import solver_errors
from .subject import Subject, fits, in_low, relower, stated_to_fit, user_bytes_of

log = logging.getLogger("offmate")


def make_plan(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updater: Updater | None,
    say: Progress = lambda phase, share: None,
    given: Plan | None = None,
    machine: Hardware | None = None,
    real: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    near: tuple[Prepared, ...] = (),
    kept: Mapping[str, Plan] | None = None,
    trace: Callable[[], Traced] | None = None,
) -> Prepared:
    """Plan one training iteration of a model for batches like this one.

    Parameters
    ----------
    model: plain, in the mode in which it will run. args, kwargs: one real batch.
    updater: the optimizer, None if the user's code updates.
    say: reports progress. given: a plan to use instead of searching for one.
    machine: rates of another machine; nothing is measured then, and model and batch may be fake.
    real: the batch on which to take data-dependent decisions, if the given one is fake.
    near: plans for larger batches of the same kind; the decisions of the first suitable one are reused.
    kept: plans of an earlier run by fingerprint, used if one fits.
    trace: gives the traced model if an earlier plan has traced it (see `trace_once`).

    Returns: the plan, bound to the model's tensors.
    Raises: CaptureError, InfeasibleBudget, PlanFileError, SolverError.
    """
    start = time.perf_counter()
    where = accelerator(request.device) if machine is None else None
    traced = trace() if trace is not None else trace_model(model, args, kwargs, request.config, True, say, real, where)
    subject = subject_of(model, args, kwargs, traced, request, updater, machine, say)
    if given is not None:
        check_given(given, subject)
    plan, lowered = _planned(subject, given, near, kept or {}, start)
    return _bound(subject, plan if given is not None else described(plan, subject), lowered)


def make_follower(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updater: Updater | None,
    say: Progress,
    lead: Prepared,
    seen: Seen,
) -> Prepared | None:
    """Plan an iteration that takes the decisions of another batch's plan, whatever another search would find.

    Parameters
    ----------
    model, args, kwargs, request, updater, say: as in `make_plan`. lead: the other plan. seen: what was seen of this
        batch before.

    Returns: the plan, bound to the model's tensors; None if this batch cannot take these decisions.
    Raises: CaptureError.
    """
    start = time.perf_counter()
    seen.trace = seen.trace or trace_once(model, args, kwargs, request, say, lead.cut)
    seen.taken = seen.trace().captured.taken
    subject = subject_of(model, args, kwargs, seen.trace(), request, updater, None, say)
    followed = follow_plan(subject, (lead,), seen)
    if followed is None:
        return None
    plan = replace(followed[0], fingerprint=fingerprints(subject)[0], plan_s=time.perf_counter() - start)
    return _bound(subject, described(plan, subject), followed[1])


def subject_of(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: Traced,
    request: Request,
    updater: Updater | None,
    machine: Hardware | None,
    say: Progress,
) -> Subject:
    """Return the subject of a plan; raises if its micro-batches cannot run block by block, but are to."""
    request = replace(request, user_bytes=user_bytes_of(traced, request))
    subject = Subject(model, args, kwargs, traced, request, updater, machine, say)
    if request.per_step > 1:
        check_together(traced, subject.generator_counts, request.config)
    return subject


def _bound(subject: Subject, plan: Plan, lowered: Lowered) -> Prepared:
    """Bind a plan to the model's tensors."""
    request, traced = subject.request, in_low_precision(subject.traced, of_plan(plan, subject.traced))
    if request.config.backend == "inductor":
        lowered = compiled(lowered, plan.schedule, request.device, subject.say)
    binding = bind(traced.captured, lowered, plan.schedule.options)
    if request.per_step > 1 and subject.machine is None and subject.generator_counts:
        binding = replace(binding, advances=advances(traced.blocks, torch.device(request.device)))
    keys = tuple(b.key for b in traced.blocks)
    arrive = arrivals(traced.blocks, traced.captured.params)
    return Prepared(
        traced.captured, plan, binding, _gradient_like(traced), arrive, keys, traced.cut, structure(traced), traced.low
    )


def _planned(
    subject: Subject,
    given: Plan | None,
    near: tuple[Prepared, ...],
    kept: Mapping[str, Plan],
    start: float,
) -> tuple[Plan, Lowered]:
    """Take the given plan, an earlier one, or a larger batch's decisions, the first that serves; else search."""
    request, fingerprint = subject.request, fingerprints(subject)[0]
    if given is not None:
        if words := other_rates(given, request):
            log.warning("the seconds of the given plan do not hold: %s; plan again with offmate.plan", words)
        return given, relower(subject, given)
    stored = earlier(subject, kept)
    if stored is not None:
        try:
            lowered = relower(subject, stored)
            return replace(stored, plan_s=time.perf_counter() - start, from_cache=True), lowered
        except PlanFileError as error:
            log.warning("an earlier plan is ignored: %s", error)
    if followed := follow_plan(subject, near):
        plan, lowered = followed
        return replace(plan, fingerprint=fingerprint, plan_s=time.perf_counter() - start), lowered
    with solver_errors():
        plan, lowered = _fastest(subject, fingerprint, start)
    store(described(plan, subject), request)
    return plan, lowered


def trace_once(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    say: Progress,
    like: Cut = (),
) -> Callable[[], Traced]:
    """Return a function that traces a model once, for all plans of one batch: no budget enters.

    Parameters
    ----------
    like: how the graph of a batch was cut whose decisions may be taken.
    """
    where = accelerator(request.device)
    return functools.cache(
        lambda: trace_model(model, args, kwargs, request.config, True, say, device=where, like=like)
    )  # fmt: skip


@fewer_collections()
def plan_elsewhere(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    updater: Updater | None,
    machine: Hardware,
    say: Progress = lambda phase, share: None,
    *,
    fewest: bool = False,
) -> Plan:
    """Plan for another machine; parameters and batch may be on the meta device.

    Attention is planned with the memory of a card's fused kernel (see `offmate.capture.fake`); seconds follow from the
    rates. If `torch.autocast` is open, for whichever kind of device, the forward is planned under it.

    Parameters
    ----------
    fewest: choose the number of micro-batches per update, and their order.

    Returns: the plan. Raises: CaptureError, InfeasibleBudget.
    """
    with as_elsewhere(model, (args, kwargs)) as ((args, kwargs), real):

        @functools.cache
        def trace() -> Traced:
            return trace_model(model, args, kwargs, request.config, True, say, real)

        def make(own: Request) -> Plan:
            return make_plan(model, args, kwargs, own, updater, say, machine=machine, real=real, trace=trace).plan

        if not fewest:
            return make(request)
        return planned_with_fewest(Subject(model, args, kwargs, trace(), request, updater, machine, say), make)


def _gradient_like(traced: Traced) -> dict[str, torch.Tensor]:
    found = {}
    for node in traced.chain.made_in:
        if node.name in traced.differentiated:
            fake = traced.chain.facts[node].value
            strides = traced.incoming[node.name]
            found[node.name] = torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device="meta")
    return found


def _fastest(subject: Subject, fingerprint: str, start: float) -> tuple[Plan, Lowered]:
    """Search for a plan that moves gradients as autocast makes them, then for those that move copies of parameters.

    Returns: the fastest of them.
    """
    found, refused = list[tuple[Plan, Lowered]](), list[InfeasibleBudget]()

    def search(low: Low) -> None:
        try:
            found.append(_search(in_low(subject, low), fingerprint, start))
        except InfeasibleBudget as error:
            refused.append(error)

    def fastest() -> tuple[Plan, Lowered]:
        return min(found, key=lambda one: one[0].predicted_step_s)

    every = possible(subject.traced, subject.request, subject.updater)
    for low in always_tried(every, subject.request):
        search(low)
    if not found:
        raise min(refused, key=lambda error: error.least_budget_bytes or math.inf)
    # What follows from a plan is not tried within a budget that allows none, whatever it needs itself.
    least = min(one.least_budget_bytes for one, _ in found)
    if hosted := copies_on_host(every, subject.request, fastest()[0]):
        search(hosted)
    plan, lowered = fastest()
    return replace(plan, least_budget_bytes=least, plan_s=time.perf_counter() - start), lowered


def _search(subject: Subject, fingerprint: str, start: float) -> tuple[Plan, Lowered]:
    """Measure, solve the options, and formulate and solve the problem."""
    request, say = subject.request, subject.say
    measured, lowered, fixed, least = stated_to_fit(subject)
    problem = lowered.problem
    if not fits(least, problem):
        raise refusal(lowered, request, fixed, subject.machine is not None)
    found = solve_problem(problem, **how_to_solve(request.config), report=searching(say))
    if found.schedule is None:
        raise refusal(lowered, request, fixed, subject.machine is not None)
    plan = Plan(
        fingerprint=fingerprint,
        **parts_of(measured, lowered, found),
        budget_bytes=request.budget_bytes,
        fixed_bytes=fixed,
        least_budget_bytes=least.bytes + fixed + request.spare_bytes,
        user_bytes=request.user_bytes or 0,
        plan_s=time.perf_counter() - start,
        allocator_bytes=request.margin_bytes,
        low=words_of(subject.traced.low, copied=True),
        low_gradients=words_of(subject.traced.low, copied=False),
    )
    return plan, lowered


def how_to_solve(config: Config) -> dict[str, Any]:
    """Return how a problem is solved, as the solver takes it."""
    return {"time_limit_s": config.solver_time_limit_s, "gap": config.solver_gap, "backend": config.solver}


def parts_of(measured: Measured, lowered: Lowered, found: Planned) -> dict[str, Any]:
    """Return what a plan has of its problem and of what was found for it."""
    classes = {key: StoredClass(o, kernel_bytes(measured.costs[key])) for key, o in measured.options.items()}
    assert found.schedule is not None
    return {
        "schedule": found.schedule,
        "classes": classes | {"": StoredClass((), kernel_bytes(measured.costs.get("", {})))},
        "blocks": block_rows(lowered, found.schedule),
        "lower_bound_s": found.solution.lower_bound_s,
        "gap": found.solution.gap,
        "status": found.solution.status.value,
        "problem": lowered.problem,
    }
