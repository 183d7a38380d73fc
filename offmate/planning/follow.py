"""A plan that takes the decisions of another batch's plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..capture.batch_decisions import Decision
from ..capture.model import Traced, structure
from ..errors import PlanFileError
from ..lowering.problem import Lowered
from ..lowering.stored import StoredClass
from ..machines.links import LinkRates
from ..plans.plan import Plan
from ..profile.figures import measure
from ..programs.programs import NodeCost
from ..solver.scheduling.follow import follow
from .low_precision import of_plan
from .refusal import block_rows
from .request import Prepared
from .restore import kernel_bytes, restore_class
from .subject import Subject, fixed_bytes, in_low, lower, with_steps


@dataclass
class Seen:
    """What was seen of a batch that is to take the decisions of one plan, and of another one if those do not suit.

    Parameters
    ----------
    trace: gives the traced model, None before the first trace. costs: by the structure of the traced model, what its
        operators take. taken: the model's decisions about the batch.
    """

    trace: Callable[[], Traced] | None = None
    costs: dict[str, dict[str, dict[str, NodeCost]]] = field(default_factory=dict)
    taken: tuple[Decision, ...] = ()


def follow_plan(subject: Subject, near: tuple[Prepared, ...], seen: Seen | None = None) -> tuple[Plan, Lowered] | None:
    """Reuse the decisions of a larger batch's plan: bytes and seconds are measured anew, nothing is solved.

    Parameters
    ----------
    near: such plans, of which the first suitable one is taken. seen: what was seen of this batch before.

    Returns: the plan with its programs; None if no plan's decisions can be taken.
    """
    seen = seen or Seen()
    return next(filter(None, (_followed(subject, known, seen) for known in near)), None)


def _followed(subject: Subject, known: Prepared, seen: Seen) -> tuple[Plan, Lowered] | None:
    """Reuse the decisions of one plan; None if the batch has another structure, or if a budget would be exceeded."""
    request = subject.request
    try:
        subject = in_low(subject, of_plan(known.plan, subject.traced))
    except PlanFileError:  # that batch was under another autocast
        return None
    traced = subject.traced
    own = structure(traced)
    taken = {b.key: key for b, key in zip(traced.blocks, known.keys)}
    if known.structure != own or any(taken[b.key] != key for b, key in zip(traced.blocks, known.keys)):
        return None
    if own not in seen.costs:
        _, seen.costs[own] = measure(
            subject.model, subject.args, subject.kwargs, traced, subject.say, request.device
        )  # fmt: skip
    costs = seen.costs[own]
    options = {key: known.plan.classes[old].options for key, old in taken.items()}
    classes = {b.key: restore_class(b, options[b.key], costs[b.key]) for b in traced.blocks}
    unknown = LinkRates(1.0, 1.0, 1.0)
    larger = known.plan.problem
    if larger is None:
        return None
    lowered, held = lower(with_steps(subject, larger), classes, costs[""], {}, unknown)
    unchanged = known.plan.fixed_bytes - known.plan.allocator_bytes
    fixed = held + unchanged - fixed_bytes(subject.model, known.captured, {})
    if [g.uses for g in larger.groups] != [g.uses for g in lowered.problem.groups]:
        return None
    # The same parameters: only blocks and values depend on the batch.
    problem = replace(
        lowered.problem,
        groups=larger.groups,
        rates=larger.rates,
        gate_s=larger.gate_s,
        device_budget_bytes=max(0, request.budget_bytes - fixed),
    )
    schedule = follow(known.plan.schedule, problem)
    if schedule is None:
        return None
    plan = replace(
        known.plan,
        schedule=schedule,
        problem=problem,
        classes={key: StoredClass(o, kernel_bytes(costs[key])) for key, o in options.items()}
        | {"": StoredClass((), kernel_bytes(costs[""]))},
        blocks=block_rows(lowered, schedule),
        budget_bytes=request.budget_bytes,
        fixed_bytes=fixed,
        allocator_bytes=request.margin_bytes,
        lower_bound_s=0.0,
        gap=0.0,
        status="takes the decisions of a larger batch's plan",
        user_bytes=request.user_bytes or 0,
        other_order=None,  # what the other plan says of its own batch
        break_even=None,
        accumulation=(),
        from_cache=False,
    )
    return plan, lowered
