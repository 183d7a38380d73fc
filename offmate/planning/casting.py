"""Whether frozen parameters are cast on the host: only if its memory has room for the copies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

from ..capture.model import Traced
from ..errors import InfeasibleBudget, OffmateError, PlanFileError
from ..sizes import format_bytes

log = logging.getLogger("offmate")

_Result = TypeVar("_Result")


def with_casts_if_they_fit(make: Callable[[Traced], _Result], trace: Callable[[bool], Traced]) -> _Result:
    """Plan with casts on the host or, if no such plan fits or is the given one, with casts on the device.

    Parameters
    ----------
    make: plans for a traced model. trace: traces the model, with casts on the host or without.

    Raises: if both fail, the error of the one that would need less.
    """
    traced = trace(True)
    if not traced.chain.cast:
        return make(traced)
    try:
        return make(traced)
    except (InfeasibleBudget, PlanFileError) as error:
        log.info(
            "no plan with %s of parameters cast on the host serves; planning with casts on the device",
            format_bytes(copied_bytes(traced)),
        )
        try:
            return make(trace(False))
        except (InfeasibleBudget, PlanFileError) as second:
            raise min(error, second, key=_least_bytes) from None


def _least_bytes(error: OffmateError) -> float:
    """Return the least budget that an error says would work; a plan that does not fit its model comes first."""
    if not isinstance(error, InfeasibleBudget):
        return 0
    return inf if error.least_budget_bytes is None else error.least_budget_bytes


def copied_bytes(traced: Traced) -> int:
    """Return the bytes of host memory that copies in lower precision take."""
    return sum(_numel(traced, node) * dtype.itemsize for node, dtype in traced.chain.cast.items())


def left_bytes(traced: Traced) -> int:
    """Return the bytes of the parameters that stay on the host while their copies move."""
    return sum(_numel(traced, node) * node.meta["val"].element_size() for node in traced.chain.cast)


def _numel(traced: Traced, node: Any) -> int:
    numel: int = traced.chain.facts[node].value.numel()
    return numel
