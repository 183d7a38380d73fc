"""What the order of an update's micro-batches buys and costs, against the other one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Config
from ..reports.units import format_seconds
from ..sizes import format_bytes
from ..solver.accumulation import AccumulationTrial, Order

_SAME_BYTES = 1 << 20
_NAMES: dict[Order, str] = {"by batch": "one after the other", "by block": "block by block"}


def way(per_pass: int, count: int) -> str:
    """Return how an update's micro-batches run, such as "block by block, 4 at a time"."""
    if per_pass == 1:
        return _NAMES["by batch"]
    return _NAMES["by block"] if per_pass >= count else f"{_NAMES['by block']}, {per_pass} at a time"


def one_by_one(config: Config) -> str:
    """Return the configuration that a user writes instead, for micro-batches one after the other."""
    left_out = config.micro_batches_per_pass
    beside = "" if left_out is None else f" without micro_batches_per_pass={left_out}"
    return f'Config(accumulation_order="by batch"){beside}'


@dataclass(frozen=True)
class OtherOrder:
    """The plan for the other order of micro-batches, as far as it is compared.

    Parameters
    ----------
    step_s: seconds of an update; None if there is no such plan. device_bytes, host_bytes: the most on the GPU and in
        RAM. moved_bytes: that are copied to the GPU per update. why: the reason why there is no plan.
    per_pass: micro-batches per pass; 0 if it is the only other order.
    """

    step_s: float | None
    device_bytes: int = 0
    host_bytes: int = 0
    moved_bytes: int = 0
    why: str = ""
    per_pass: int = 0


def order_words(
    per_pass: int, count: int, own: OtherOrder, other: OtherOrder | None, trial: AccumulationTrial | None
) -> str:
    """Say in which order micro-batches run, and what that buys and costs.

    Parameters
    ----------
    per_pass, count: micro-batches of a pass, and of an update. own: figures of the plan itself. other: of the
        plan for the next best order; None if none was planned. trial: what the program predicts for the next best
        order in fractions of tensors; None if none was solved.
    """
    begin, name = f"micro-batches run {way(per_pass, count)}", way(count if per_pass == 1 else 1, count)
    if other is not None and other.per_pass:
        name = _instead(per_pass, other.per_pass, count)
    if other is None:
        if trial is None:
            return begin
        name = _instead(per_pass, trial.micro_batches_per_pass, count)
        predicted = "does not fit" if trial.update_s is None else f"takes {format_seconds(trial.update_s)} per update"
        return f"{begin}; {name} {predicted} in fractions of tensors, and was not planned in whole ones"
    if other.step_s is None:
        return f"{begin}; {name} has no plan: {other.why}"
    assert own.step_s is not None
    less = f"which takes {format_seconds(other.step_s - own.step_s)} less per update than {name}"
    costs = [
        _bytes(own.device_bytes - other.device_bytes, "GPU memory"),
        _bytes(own.host_bytes - other.host_bytes, "RAM"),
    ]
    copied = f"{format_bytes(own.moved_bytes)} instead of {format_bytes(other.moved_bytes)} are copied to the GPU"
    return f"{begin}, {less} ({format_seconds(other.step_s)}), with {' and '.join(costs)}; {copied}"


def _instead(per_pass: int, other: int, count: int) -> str:
    """Return another way to run micro-batches, beside the plan's own, without what both have in common."""
    if 1 in (per_pass, other):
        return way(other, count)
    return f"{other} at a time" if other < count else "all at a time"


def other_trial(trials: Sequence[AccumulationTrial], count: int, per_pass: int) -> AccumulationTrial | None:
    """Return the fastest trial of the same number of micro-batches, but not per pass; None if there is none."""
    others = (one for one in trials if one.micro_batches == count and one.micro_batches_per_pass != per_pass)
    return max(others, key=lambda one: one.rate, default=None)


def _bytes(more: int, what: str) -> str:
    if abs(more) < _SAME_BYTES:
        return f"as much {what}"
    return f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'} {what}"
