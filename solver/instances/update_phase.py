"""The update phase of Deep Optimizer States as a problem: subgroups whose states live on the host, behind a gate.

The paper's equation 1 chooses one stride k for all subgroups: k are updated on the host while one is copied in, updated
on the device and sent back.

Source: Deep Optimizer States (Maurya et al., 2024), section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from ..problem import Block, Group, Option, Problem, Rates, Side, TensorSize, update_steps
from ..solution import Solution

PARAM_BYTES, STATE_BYTES = 2, 12  # a half-precision copy; parameter, momentum and variance in single precision
LINK_BYTES = 4  # the paper's rates count single-precision parameters
SUBGROUP_PARAMS = 100_000_000


@dataclass(frozen=True)
class Throughputs:
    """The rates of a machine in parameters per second: B, U_c, D_c and U_g of the paper.

    Parameters
    ----------
    link: single-precision parameters over the link, each way. cpu_update, device_update: updates.
    cpu_cast: casts to half precision on the host.
    """

    link: float
    cpu_update: float
    cpu_cast: float
    device_update: float

    @property
    def cpu_s(self) -> float:
        """Seconds of host work per parameter."""
        return 1 / self.cpu_update + 1 / self.cpu_cast


def stride(machine: Throughputs) -> float:
    """Return k of equation 1: subgroups updated on the host per subgroup updated on the device, not rounded.

    Copies in and out overlap each other and the host's updates; the device's update does not overlap its copies.
    """
    return (3 / machine.link + 1 / machine.device_update) / (machine.cpu_s - 1 / (2 * machine.link))


def stride_s(machine: Throughputs, subgroups: int, subgroup_params: int = SUBGROUP_PARAMS) -> float:
    """Return the seconds of an update phase by equation 1's balance, with the better integer stride next to k."""
    k = stride(machine)

    def seconds(whole: int) -> float:
        host_s = whole * machine.cpu_s
        link_s = 3 / machine.link + whole / (2 * machine.link) + 1 / machine.device_update
        return subgroups / (whole + 1) * subgroup_params * max(host_s, link_s)

    return min(seconds(int(k)), seconds(int(k) + 1))


def ratio(solution: Solution) -> float:
    """Return k of a solution: subgroups updated on the host per subgroup whose states move; infinite if none do."""
    host = sum(flow.cpu_part for flow in solution.groups.values())
    moved = sum(sum(flow.state_out.values()) for flow in solution.groups.values())
    return host / moved if moved > 0 else inf


def forced(problem: Problem, device_parts: tuple[int, int]) -> Problem:
    """Return the problem with some subgroups updated on the device, evenly spread, and all others on the host.

    Parameters
    ----------
    device_parts: (1, 4) for every fourth subgroup on the device, as the paper's stride of 4 has it.
    """
    part, whole = device_parts

    def side(i: int) -> Side:
        return "device" if (i + 1) * part // whole > i * part // whole else "host"

    return replace(problem, groups=tuple(replace(group, side=side(i)) for i, group in enumerate(problem.groups)))


def update_phase(
    machine: Throughputs,
    *,
    subgroups: int = 24,
    subgroup_params: int = SUBGROUP_PARAMS,
    tensors: int = 1,
    room: float = 2.0,
    compute_s: float = 0.0,
    both: float = 2.0,
) -> Problem:
    """Return a chain of blocks, one subgroup each, whose gate opens after the last backward.

    Parameters
    ----------
    subgroups, subgroup_params: their number and size.
    tensors: of a subgroup, all of one size. The host updates whole tensors.
    room: subgroups whose states fit on the device at once, besides all half-precision parameters.
    compute_s: seconds of all forwards and backwards; with 0 the iteration is the update phase alone.
    both: total rate of the link while both directions are busy, in units of one direction.

    Returns: a problem whose gradients take no time to move, as in equation 1.
    """
    n, rate = subgroups, machine.link * LINK_BYTES
    forward_s = compute_s / (3 * n)
    option = Option("keep", 0, 0, forward_s, 2 * forward_s, 0, tensors)
    elements = subgroup_params // tensors
    groups = tuple(
        Group(
            f"subgroup {i}",
            tuple(TensorSize(f"w{i}.{k}", PARAM_BYTES * elements, 1, STATE_BYTES * elements) for k in range(tensors)),
            (i, 2 * n - 1 - i),
            (2 * n - 1 - i,),
            cpu_update_s=subgroup_params * machine.cpu_s,
            device_update_s=subgroup_params / machine.device_update,
        )
        for i in range(n)
    )
    budget_bytes = int((n * PARAM_BYTES + room * STATE_BYTES) * subgroup_params) + 2 * n * tensors
    return Problem(
        blocks=tuple(Block(f"block {i}", (option,)) for i in range(n)),
        groups=groups,
        values=(),
        shared=(),
        outputs=(),
        rates=Rates(rate, rate, both * rate),
        device_budget_bytes=budget_bytes,
        host_budget_bytes=n * (PARAM_BYTES + STATE_BYTES + 1) * subgroup_params,
        turn_around_steps=update_steps(groups, budget_bytes),
        gate=True,
    )
