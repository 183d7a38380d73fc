"""The number of micro-batches of an update and their order, chosen by the planner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ..errors import ArgumentValueError, InfeasibleBudget
from ..plans.accumulation import chosen_words, order_name, unfit_words
from ..plans.plan import Plan
from ..reports.units import format_seconds
from ..solver.accumulation import ORDERS, AccumulationTrial, Order, fewest, try_micro_batches
from ..solver.problem import Problem
from .orders import NotTogether, check_together
from .request import Request
from .solver_errors import solver_errors
from .subject import Subject, state, user_bytes_of

log = logging.getLogger("offmate")

AUTO = "auto"


def of_update(request: Request, micro_batches: int, per_pass: int) -> Request:
    """Return the request of an update of so many micro-batches, of which each pass runs so many."""
    own = replace(request, micro_batches=micro_batches, per_step=1)
    return own if per_pass == 1 else own.in_passes(request.config.micro_batches_per_pass or per_pass)


def planned_with_fewest(subject: Subject, make: Callable[[Request], Plan]) -> Plan:
    """Plan for the least number of micro-batches per update after which one more hardly adds tokens per second.

    Both orders of micro-batches are tried, if the configuration names none, and passes of some where they may be
    faster.

    Parameters
    ----------
    subject: with the request of one micro-batch per update. make: plans for a request.

    Returns: the plan, with all that was tried. Raises: InfeasibleBudget if not even one micro-batch fits.
    Source: GreedySnake, section 4.5.
    """
    trials = _tried(subject)
    best = fewest(trials)
    smaller = [one for one in trials if one.fits and one.rate < best.rate and one.micro_batches <= best.micro_batches]
    for one in (best, *sorted(smaller, key=lambda one: -one.rate)):
        try:
            plan = make(of_update(subject.request, one.micro_batches, one.micro_batches_per_pass))
        except InfeasibleBudget:  # fractions fit, whole tensors may not
            if one.micro_batches == 1:
                raise
            log.info("%d micro-batches per update do not fit in whole tensors", one.micro_batches)
            continue
        subject.say(chosen_words(trials, one.micro_batches), 1.0)
        return replace(plan, accumulation=trials)
    return replace(make(subject.request), accumulation=trials)


def _tried(subject: Subject) -> tuple[AccumulationTrial, ...]:
    config = subject.request.config
    request = replace(subject.request, user_bytes=user_bytes_of(subject.traced, subject.request))

    def stated(count: int, per_pass: int) -> Problem | None:
        try:
            return state(replace(subject, request=of_update(request, count, per_pass)))[1].problem
        except InfeasibleBudget:
            return None

    found = []
    with solver_errors():
        for trial in try_micro_batches(
            stated,
            orders=_orders(subject),
            time_limit_s=config.solver_time_limit_s,
            gap=config.solver_gap,
            backend=config.solver,
        ):
            found.append(trial)
            words = unfit_words(trial) if trial.update_s is None else format_seconds(trial.update_s)
            subject.say(f"{trial.micro_batches} micro-batches {order_name(trial)}: {words}", 0.0)
            log.info("%d micro-batches %s: %s", trial.micro_batches, order_name(trial), words)
    return tuple(found)


def _orders(subject: Subject) -> tuple[Order, ...]:
    """Return the orders that may be tried. Raises: NotTogether if the only one that may cannot run."""
    named = subject.request.config.named_order
    if named == "by batch":
        return (named,)
    try:
        check_together(subject.traced, subject.generator_counts, subject.request.config)
    except NotTogether as error:
        if named == "by block":
            raise
        log.info("only micro-batches one after the other are tried: %s", error)
        return ("by batch",)
    return (named,) if named == "by block" else ORDERS


def check_accumulation(accumulation_steps: object, planned: bool) -> None:
    """Raise ArgumentValueError if micro-batches are to be counted where no updates are planned."""
    if accumulation_steps == AUTO and not planned:
        raise ArgumentValueError(
            'accumulation_steps="auto" needs optimizer=: without one, your own code updates, and decides after how '
            "many micro-batches"
        )
