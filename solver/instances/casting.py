"""Where mixed precision casts between device and host: SuperOffload's roads as problems, with offmate's own.

The device computes in half precision, the host updates in single precision. A gradient and the parameter that returns
are each cast somewhere on their way. Every road is the same problem with other bytes on the link and other seconds of
the host.

Source: SuperOffload (Lian et al.), section 4.5 and figure 9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..problem import Block, Group, Option, Problem

Way = Literal["chunks", "apart", "device"]
"""Where one direction is cast: on the host within the chunks of the update, which is offmate's way; on the host in a
pass of its own, through a temporary (the paper's Cast_cpu, Move_fp16); or on the device (its Cast_gpu, Move_fp32)."""

Exact = Literal["link", "memory"]
"""What a problem of a road counts in full."""

LOW_BYTES, FULL_BYTES, STATE_BYTES = 2, 4, 12
_MOMENTS_BYTES = 24  # of host memory that an update reads and writes per parameter for the copy and both moments
# What else an update and its casts read and write: the gradient, and the parameter in half precision.
_GRADIENT_BYTES = {"chunks": LOW_BYTES, "apart": FULL_BYTES + LOW_BYTES + FULL_BYTES, "device": FULL_BYTES}
_PARAMETER_BYTES = {"chunks": 2 * LOW_BYTES, "apart": FULL_BYTES + LOW_BYTES, "device": 0}


@dataclass(frozen=True)
class Road:
    """The ways of the gradient to the host and of the parameter back."""

    gradient: Way
    parameter: Way

    @property
    def casts_on_device(self) -> bool:
        """Whether the device makes any of its casts."""
        return "device" in (self.gradient, self.parameter)

    @property
    def link_bytes(self) -> tuple[int, int]:
        """Bytes per parameter on the link to the host, and on the link back."""
        gradient, parameter = (FULL_BYTES if way == "device" else LOW_BYTES for way in (self.gradient, self.parameter))
        return gradient, parameter

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that an update with its casts reads and writes per parameter."""
        return _MOMENTS_BYTES + _GRADIENT_BYTES[self.gradient] + _PARAMETER_BYTES[self.parameter]


OURS = Road("chunks", "chunks")


@dataclass(frozen=True)
class Casts:
    """A machine's seconds per parameter.

    Parameters
    ----------
    update_s: of the host's update in single precision. chunks_s: what both casts add to it within its chunks.
    moved_s: a single-precision parameter on the link. A cast apart and its copy take twice that (the paper's figure 9).
    device_s: a cast on the device.
    """

    update_s: float
    chunks_s: float
    moved_s: float
    device_s: float

    def host_s(self, road: Road) -> float:
        """Return the host's seconds per parameter on a road; half of `chunks_s` is for each direction."""
        apart_s = 2 * self.moved_s - self.moved_s * LOW_BYTES / FULL_BYTES
        of = {"chunks": self.chunks_s / 2, "apart": apart_s, "device": 0.0}
        return self.update_s + of[road.gradient] + of[road.parameter]


def on_road(problem: Problem, road: Road, casts: Casts, exact: Exact = "link") -> Problem:
    """Return the problem of a model in half precision with single-precision copies, whose casts take another road.

    What a road with casts on the device moves is larger than what it holds, but a problem has one size for both.
    Therefore two problems bound such a road, and it is no faster than the slower one. For other roads they are equal.

    Parameters
    ----------
    problem: all groups with parameters and gradients of 2 bytes, and states of 12. casts: the machine's seconds.
    exact: "link" counts all bytes that the road moves. What it thus seems to hold in addition is given to it as budget:
        on the device two bytes per parameter and per gradient that is there at one time, on the host four per
        parameter, since its copy is part of the state. "memory" counts all bytes that it holds, and moves no more;
        what the host's memory reads and writes for the rest counts with the update.
    """
    traffic_bytes = road.host_bytes
    if exact == "link":
        problem = _moved_in_full(problem, road)
    else:
        traffic_bytes += sum(road.link_bytes) - 2 * LOW_BYTES
    return replace(
        _with_casts(problem, road, casts.device_s),
        groups=tuple(_timed(group, road, casts) for group in problem.groups),
        rates=replace(problem.rates, worker_bytes_per_s=traffic_bytes / casts.host_s(road)),
    )


def casting_at_every_use(problem: Problem, cast_s: float, gradients: bool = False) -> Problem:
    """Return the problem of a model in single precision whose weights the device casts in every forward and backward.

    Parameters
    ----------
    problem: parameters of 4 bytes. cast_s: seconds of one element. gradients: whether backwards cast gradients, too.
    """
    made = [0] * problem.n_blocks
    for group in problem.groups:
        made[problem.pass_steps - 1 - group.grad_steps[-1]] += group.param_bytes // FULL_BYTES
    forward_s = [cast_s * n for n in made]
    return _slower(problem, forward_s, [(1 + gradients) * seconds for seconds in forward_s])


def _slower(problem: Problem, forward_s: list[float], backward_s: list[float]) -> Problem:
    """Return the problem with these seconds more per block."""

    def slower(option: Option, i: int) -> Option:
        return replace(option, forward_s=option.forward_s + forward_s[i], backward_s=option.backward_s + backward_s[i])

    blocks = (
        replace(block, options=tuple(slower(o, i) for o in block.options)) for i, block in enumerate(problem.blocks)
    )
    return replace(problem, blocks=tuple(blocks))


def _moved_in_full(problem: Problem, road: Road) -> Problem:
    """Return the problem with the road's bytes on the link, and the budgets that this takes."""
    grad_bytes, param_bytes = road.link_bytes
    made = _gradients_made(problem)
    more, device_bytes, host_bytes = grad_bytes - LOW_BYTES, 0, 0
    if param_bytes > LOW_BYTES:
        elements = sum(map(_elements, problem.groups))
        device_bytes += (param_bytes - LOW_BYTES) * elements
        host_bytes += param_bytes * elements
    waiting = problem.gate and any(group.side != "host" for group in problem.groups)
    device_bytes += more * (sum(made if waiting else sorted(made)[-2:]) + max(made))
    blocks = (_at_peak(block, more * n) for block, n in zip(problem.blocks, made))
    return replace(
        problem,
        blocks=tuple(blocks),
        groups=tuple(_sized(group, grad_bytes // LOW_BYTES, param_bytes // LOW_BYTES) for group in problem.groups),
        device_budget_bytes=problem.device_budget_bytes + device_bytes,
        host_budget_bytes=problem.host_budget_bytes + host_bytes,
    )


def _at_peak(block: Block, more_bytes: int) -> Block:
    peaks = ((option, option.backward_peak_bytes + more_bytes) for option in block.options)
    return replace(block, options=tuple(replace(option, backward_peak_bytes=peak) for option, peak in peaks))


def _sized(group: Group, grads: int, params: int) -> Group:
    """Return a group with that many times the bytes of gradients and parameters."""
    tensors = (replace(t, grad_bytes=grads * t.grad_bytes, param_bytes=params * t.param_bytes) for t in group.tensors)
    return replace(group, tensors=tuple(tensors))


def _elements(group: Group) -> int:
    """Return the parameters of a group, which has 12 bytes of state for each."""
    return group.state_bytes // STATE_BYTES


def _gradients_made(problem: Problem) -> list[int]:
    """Return, by block, the elements of the gradients to which its backward contributes."""
    made = [0] * problem.n_blocks
    for group in problem.groups:
        for step in group.grad_steps:
            made[problem.pass_steps - 1 - step] += _elements(group)
    return made


def _timed(group: Group, road: Road, casts: Casts) -> Group:
    """Return a group with the road's seconds; blocks make the device's casts as if the host updated all of it."""
    cast_s = casts.device_s * (road.gradient, road.parameter).count("device")
    return replace(
        group,
        cpu_update_s=casts.host_s(road) * _elements(group),
        device_update_s=max(0.0, group.device_update_s - cast_s * _elements(group)),
    )


def _with_casts(problem: Problem, road: Road, cast_s: float) -> Problem:
    """Return the problem with the device's casts: parameters before their first use, gradients once complete."""
    made, read = [0] * problem.n_blocks, [0] * problem.n_blocks
    for group in problem.groups:
        made[problem.pass_steps - 1 - group.grad_steps[-1]] += _elements(group)
        read[group.uses[0]] += _elements(group)
    forward_s = [cast_s * n if road.parameter == "device" else 0.0 for n in read]
    backward_s = [cast_s * n if road.gradient == "device" else 0.0 for n in made]
    return _slower(problem, forward_s, backward_s)
