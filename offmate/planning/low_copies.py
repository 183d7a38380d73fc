"""Whether a plan moves parameters, or copies of them in the precision to which autocast casts them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..capture.model import Traced
from ..errors import PlanFileError
from ..optim.updater import Updater
from ..plans.plan import Plan
from .request import Request

_PREFIX = "torch."


def possible(traced: Traced, request: Request, updater: Updater | None) -> dict[str, torch.dtype]:
    """Return the parameters that may move as copies in a lower precision, with that precision.

    An update of one micro-batch makes a gradient in the lower precision, as it leaves. The sum over several is one in
    the parameter's own, and so is one that a scaler unscales. They would travel in four bytes, with which low copies
    were not seen to save time.
    """
    several = request.per_update > 1
    if not request.config.low_copies or updater is None or several or request.scales or request.storage is not None:
        return {}
    trained = {traced.captured.params[node] for node in traced.trainable}.intersection(updater.names.values())
    return {name: dtype for name, dtype in traced.castable.items() if name in trained}


def on_the_host(low: Mapping[str, torch.dtype], plan: Plan) -> dict[str, torch.dtype]:
    """Return the low copies of what a plan has updated on the host.

    Their parameters then stay there, while one that the device updates takes its copy along: 14 bytes in place of 12.
    """
    hosted = set(plan.split.host)
    return {name: dtype for name, dtype in low.items() if name in hosted}


def words_of(low: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Return the precisions of low copies as a plan's file has them."""
    return {name: str(dtype).removeprefix(_PREFIX) for name, dtype in low.items()}


def precisions_of(plan: Plan, traced: Traced) -> dict[str, torch.dtype]:
    """Return the precisions of a plan's low copies.

    Raises: PlanFileError if a parameter of the model is not cast to the precision of its copy wherever it is read.
    """
    for name, word in plan.low.items():
        dtype = traced.castable.get(name)
        if dtype is None or words_of({name: dtype})[name] != word:
            raise PlanFileError(
                f"the plan moves a copy of {name} in {word[:40]}, but the model reads this parameter in another way; "
                "plan again"
            )
    return {name: traced.castable[name] for name in plan.low}
