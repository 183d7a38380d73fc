"""What a plan says of parameters and gradients that move in the precision to which autocast casts parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..sizes import format_bytes
from ..solver import items
from ..solver.schedule import Schedule


def words(schedule: Schedule, copies: Mapping[str, str], gradients: Mapping[str, str]) -> list[str]:
    """Say what moves in a lower precision, in a sentence for copies of parameters and one for gradients alone.

    Parameters
    ----------
    copies: parameters that move as copies -> precision. gradients: those of which gradients alone do -> precision.
    """
    sizes, found = schedule.item_bytes, []
    if copies:
        low_bytes = sum(sizes[items.parameter(name)] for name in copies)
        gradients_too = ", and as many bytes of gradients leave it" if schedule.per_update == 1 else ""
        found.append(
            f"{_tensors(copies)} come to the GPU in {_named(copies.values())}, to which "
            f"autocast would cast them there: {format_bytes(low_bytes)} instead of "
            f"{format_bytes(2 * low_bytes)}{gradients_too}"
        )
    if gradients:
        whole_bytes = sum(sizes[items.parameter(name)] for name in gradients)
        low_bytes = sum(sizes[items.gradient(name)] for name in gradients)
        found.append(
            f"the gradients of {_tensors(gradients)} leave in {_named(gradients.values())}, as autocast makes "
            f"them: {format_bytes(low_bytes)} instead of {format_bytes(whole_bytes)}"
        )
    return found


def _tensors(parameters: Collection[str]) -> str:
    return f"{len(parameters)} parameter tensor{'s' if len(parameters) > 1 else ''}"


def _named(precisions: Collection[str]) -> str:
    return " and ".join(sorted(set(precisions)))
