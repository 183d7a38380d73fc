"""Which parameters, and which gradients, a plan moves in the precision to which autocast casts parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from ..capture.model import Traced
from ..capture.spec import LowPrecision
from ..errors import PlanFileError
from ..optim.updater import Updater
from ..plans.plan import Plan
from .request import Request

_PREFIX = "torch."

Low = Mapping[str, LowPrecision]


def possible(traced: Traced, request: Request, updater: Updater | None) -> Low:
    """Return the parameters that may move in the precision of autocast, with what surely gains: gradients alone.

    An update of one micro-batch makes a gradient in the lower precision, as it leaves. The sum over several is one in
    the parameter's own, and so is one that a scaler unscales.
    """
    if updater is None or request.scales:
        return {}
    trained = _with_gradients(traced).intersection(updater.names.values())
    alone = request.per_update == 1
    return {name: LowPrecision(dtype, False, alone) for name, dtype in traced.castable.items() if name in trained}


def _with_gradients(traced: Traced) -> set[str]:
    found = set()
    for block in traced.blocks:
        made = (e.node.name for e, grad in zip(block.spec.externals, block.joint.grads) if grad is not None)
        found |= {traced.captured.params[node] for node in traced.trainable.intersection(made)}
    return found


def _gradients_alone(low: Low) -> Low:
    """Return those whose gradients may leave in the lower precision, without copies."""
    return {name: one for name, one in low.items() if one.gradient}


def always_tried(low: Low, request: Request) -> list[Low]:
    """List what may be faster at any budget: what surely gains, then copies of all parameters."""
    return [_gradients_alone(low), *([_copied(low, low)] if _may_copy(low, request) else [])]


def copies_on_host(low: Low, request: Request, fastest: Plan) -> Low | None:
    """Return copies of only those parameters that the fastest plan updates on the host, if these are some but not all.

    Their parameters then stay there, while one that the device updates takes its copy along: 14 bytes for 12.
    """
    hosted = low.keys() & fastest.split.host
    return _copied(low, hosted) if _may_copy(low, request) and 0 < len(hosted) < len(low) else None


def _may_copy(low: Low, request: Request) -> bool:
    # A pass that runs several micro-batches in turn reads a weight as often as one that runs one. Copies were not seen
    # to gain much there.
    return bool(low) and request.config.low_copies and request.storage is None and request.per_step == 1


def _copied(low: Low, names: Collection[str]) -> Low:
    copied = {name: replace(one, copied=name in names) for name, one in low.items()}
    return {name: one for name, one in copied.items() if one.copied or one.gradient}


def words_of(low: Low, copied: bool) -> dict[str, str]:
    """Return the precisions of copies, or of gradients alone, as a plan's file has them."""
    return {name: _word(one.dtype) for name, one in low.items() if one.copied == copied}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix(_PREFIX)


def of_plan(plan: Plan, traced: Traced) -> Low:
    """Return what a plan moves in a lower precision.

    Raises: PlanFileError if a parameter of the model is not cast to this precision wherever it is read.
    """
    for name, word in (plan.low | plan.low_gradients).items():
        dtype = traced.castable.get(name)
        if dtype is None or _word(dtype) != word:
            what = f"a copy of {name}" if name in plan.low else f"the gradient of {name}"
            raise PlanFileError(
                f"the plan moves {what} in {word[:40]}, but the model reads this parameter in another way; plan again"
            )
    alone = plan.schedule.per_update == 1
    return {
        name: LowPrecision(traced.castable[name], name in plan.low, alone) for name in plan.low | plan.low_gradients
    }
