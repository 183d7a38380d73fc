"""All inputs of the solver, as plain numbers: bytes, seconds, budgets.

Steps are numbered 0..T-1 and cyclic: forwards of blocks 0..L-1, backwards of blocks L-1..0, then
`turn_around_steps` steps without compute. Block i runs forward in step i and backward in step 2L-1-i.

With several micro-batches per update the forwards and backwards make up a pass, and the turn-around follows the last
one. Middle passes are all alike, so the steps hold three passes at most: the first, into which host updates of the
previous iteration may extend; a middle one that stands for all others; and the last, whose gradients complete the sums.
Steps of groups, values, shared values and outputs are given for the first pass, and recur in each later pass, 2L steps
later.

A pass may also run several micro-batches together: each step then runs its block for all of them in turn, and the
sizes and seconds of a problem are those of all of them (see fat_steps.py). The last pass may have fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from .arrivals import N_BUFFERS
from .checks import ProblemError as ProblemError
from .checks import check_blocks, check_groups, check_shared, check_values, numbers, require
from .resources import HOST, Tier
from .resources import Rates as Rates
from .rows import Block as Block
from .rows import Group as Group
from .rows import Option as Option
from .rows import Output as Output
from .rows import Rows as Rows
from .rows import Shared as Shared
from .rows import Side as Side
from .rows import TensorSize as TensorSize
from .rows import Value as Value
from .rows import log_share as log_share
from .steps import InPasses, Step, passes_of, steps_of

MOST_TURN_AROUND_STEPS = 10_000
RING_PIECES = 3  # of states in the host's memory at a time: one is read, one updated, one written
_SHARES = 6  # parts of the device budget, one for the states of a turn-around step; see `update_steps`


@dataclass(frozen=True)
class Problem(InPasses):
    """One training iteration to be planned.

    Parameters
    ----------
    update: "planned" if the program decides where updates run; "external" if the user's own code updates the host
        parameters between the first turn-around step and the second, from gradients on the host (no states here).
    user_bytes: bytes that the user's code holds on the device between the last forward and the first backward,
        including the gradients of outputs that it hands in.
    start_s, start_peak_bytes: seconds and peak of the code before the first block (the batch is copied in, shared
        values are computed); the peak includes the shared values themselves.
    turn_around_steps: R, steps without compute after the last backward.
    gate: no update starts before the last backward has ended (planned updates only; needs 3 turn-around steps). Updates
        on the device then run in turn-around steps, and their gradients stay on the device until then. Updates on the
        host run in turn-around steps and may continue into the next forward.
    host_in_time: whether what the host holds for a part of the iteration (gradients, activations) counts in these steps
        alone, so that it can share memory, or for the whole iteration.
    gate_s: seconds from the last gradient to the first update, for the verdict on all gradients.
    host_fixed_bytes: bytes in host memory that no decision changes, such as those of buffers.
    micro_batches: N, passes per update. More than one needs a gate.
    per_step: k, the micro-batches for which every step runs its block in turn.
    last_per_step: those of the last pass, if they are fewer; 0 if they are as many.
    speculates: whether updates on the host may start before the gate, as soon as their gradients are there, and keep a
        log of the old values that undoes them; their gradients stay on the host until the gate opens. Needs a gate.
    hands_on: whether values and their gradients may be away between neighbouring steps (see handed.py).
    """

    blocks: tuple[Block, ...]
    groups: tuple[Group, ...]
    values: tuple[Value, ...]
    shared: tuple[Shared, ...]
    outputs: tuple[Output, ...]
    rates: Rates
    device_budget_bytes: int
    host_budget_bytes: int
    update: Literal["planned", "external"] = "planned"
    user_bytes: int = 0
    start_s: float = 0.0
    start_peak_bytes: int = 0
    turn_around_steps: int = 3
    gate: bool = False
    host_in_time: bool = False
    gate_s: float = 0.0
    host_fixed_bytes: int = 0
    micro_batches: int = 1
    per_step: int = 1
    last_per_step: int = 0
    speculates: bool = False
    hands_on: bool = True

    def __post_init__(self) -> None:
        check(self)

    @property
    def n_blocks(self) -> int:
        return len(self.blocks)

    @property
    def machine(self) -> dict[str, Any]:
        """Rates and budgets, as the fields of a schedule that has to keep them."""
        return {name: getattr(self, name) for name in ("rates", "device_budget_bytes", "host_budget_bytes")}

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The memories other than the device's, the host's first."""
        return Tier(self.rates.host, self.host_budget_bytes), *self.rates.tiers

    @property
    def state_tiers(self) -> tuple[Tier, ...]:
        """The tiers that optimizer states may leave to, the host first."""
        host, *others = self.tiers
        return host, *(tier for tier in others if tier.capacity_bytes)

    @property
    def roaming_tiers(self) -> tuple[Tier, ...]:
        """The tiers that activations and interface values may leave to, the host first."""
        return tuple(tier for tier in self.state_tiers if tier.for_values or not tier.for_states)

    @property
    def frozen_tiers(self) -> tuple[Tier, ...]:
        """The tiers beside the host from which frozen parameters come."""
        return tuple(tier for tier in self.rates.tiers if tier.holds_frozen)

    @property
    def parameter_tiers(self) -> tuple[Tier, ...]:
        """The tiers beside the host that trained parameters may leave to."""
        return tuple(tier for tier in self.rates.tiers if tier.for_parameters) if self.update == "planned" else ()

    @property
    def host_update_tier(self) -> Tier | None:
        """The tier that may hold states that the host updates, if there is one."""
        planned = self.update == "planned"
        return next((t for t in self.state_tiers[1:] if t.for_host_updates), None) if planned else None

    def may_update_from_files(self, group: Group) -> bool:
        """Return whether the host may update a group whose states lie in files."""
        return self.host_update_tier is not None and group.in_pieces_on_host and group.state_bytes > 0

    @property
    def cast_tier(self) -> Tier | None:
        """The tier of parameters that are cast from float32 copies in RAM, if there is one.

        Before the gate the host's memory has to keep their old values.
        """
        planned = self.update == "planned" and not self.speculates
        return next((tier for tier in self.rates.tiers if tier.casts), None) if planned else None

    def may_cast(self, group: Group) -> bool:
        """Return whether parameters that the host updates may come from their float32 copies."""
        return self.cast_tier is not None and group.has_copies and group.side != "device"

    @property
    def without_casts(self) -> Problem:
        """The problem in which RAM has every parameter that comes from there."""
        return replace(self, rates=replace(self.rates, tiers=tuple(t for t in self.rates.tiers if not t.casts)))

    @property
    def values_beside_states(self) -> bool:
        """Whether parameters whose states the host updates from files lie there, too, and are updated with them.

        Before the gate the host's memory has to keep their old values, so it keeps the new ones as well.
        """
        tier = self.host_update_tier
        return tier is not None and tier.for_parameters and not self.speculates

    @property
    def ring_bytes(self) -> int:
        """Bytes of the host's memory through which states pass that it updates from files."""
        groups = [group for group in self.groups if group.trainable and self.may_update_from_files(group)]
        passing = (t.passing_bytes(self.values_beside_states) for group in groups for t in group.tensors)
        return RING_PIECES * max(passing, default=0)

    @property
    def with_host_updates_in_ram(self) -> Problem:
        """The problem in which the states that the host updates lie in its memory."""
        tiers = tuple(replace(tier, for_host_updates=False) for tier in self.rates.tiers)
        return replace(self, rates=replace(self.rates, tiers=tiers))

    def sources(self, group: Group) -> tuple[Tier, ...]:
        """Return the tiers beside the host from which a group's parameters can come."""
        if group.trainable:
            return self.parameter_tiers
        return self.frozen_tiers if group.in_files else ()

    @property
    def with_parameters_in_ram(self) -> Problem:
        """The problem in which trained parameters leave to the host only."""
        tiers = tuple(replace(tier, for_parameters=False) for tier in self.rates.tiers)
        return replace(self, rates=replace(self.rates, tiers=tiers))

    @property
    def with_values_in_ram(self) -> Problem:
        """The problem in which activations and interface values leave to no tier that is for states."""
        tiers = tuple(replace(tier, for_values=False) for tier in self.rates.tiers)
        return replace(self, rates=replace(self.rates, tiers=tiers))

    @property
    def without_handing_on(self) -> Problem:
        """The problem in which what neighbouring steps hand on stays on the device."""
        return replace(self, hands_on=False)

    @property
    def value_tiers(self) -> tuple[Tier, ...]:
        """The tiers for states that activations and interface values may leave to, too."""
        return tuple(tier for tier in self.roaming_tiers if tier.for_values)

    @property
    def buffers_bytes(self) -> int:
        """Bytes of the host's memory that copies through the host take, but for those that are cast there."""
        return sum(tier.buffers_bytes for tier in self.rates.tiers if not tier.casts)

    def with_capacities(self, tiers: Mapping[str, int]) -> Problem:
        """Return the problem with other capacities of some tiers, in bytes by name."""
        others = tuple(replace(t, capacity_bytes=tiers.get(t.name, t.capacity_bytes)) for t in self.rates.tiers)
        host_bytes = tiers.get(HOST, self.host_budget_bytes)
        return replace(self, host_budget_bytes=host_bytes, rates=replace(self.rates, tiers=others))

    def with_turn_around_steps(self, steps: int) -> Problem:
        """Return the problem with other turn-around steps; what stays to the end of an iteration still does."""
        before, last = (self.pass_steps + number - 1 for number in (self.turn_around_steps, steps))
        ends = (last if one.last_step == before else min(one.last_step, last) for one in self.shared)
        shared = tuple(replace(one, last_step=end) for one, end in zip(self.shared, ends))
        return replace(self, turn_around_steps=steps, shared=shared)

    @property
    def pass_steps(self) -> int:
        """Steps of one pass: all forwards and all backwards."""
        return 2 * len(self.blocks)

    @cached_property
    def n_passes(self) -> int:
        """Number of passes among the steps; see the module's docstring."""
        return len(passes_of(self.micro_batches))

    @cached_property
    def passes(self) -> tuple[int, ...]:
        """The first step of each pass."""
        return tuple(range(0, self.first_turn_around, self.pass_steps))

    @cached_property
    def n_steps(self) -> int:
        return self.first_turn_around + self.turn_around_steps

    @cached_property
    def first_turn_around(self) -> int:
        return self.n_passes * self.pass_steps

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every step with what runs in it."""
        return steps_of(self.n_blocks, self.micro_batches, self.turn_around_steps)

    def times(self, step: int) -> int:
        """Return how often a step happens in an iteration: a middle step stands for those of all middle passes."""
        return self.steps[step].times

    def in_middle(self, step: int) -> bool:
        """Return whether a step belongs to the middle pass, which ends with the items that it starts with."""
        return self.n_passes > 2 and self.steps[step].of_pass == 1

    @cached_property
    def runs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By block the steps of its forward and of its backward in every pass."""
        found: list[list[list[int]]] = [[[] for _ in range(self.n_passes)] for _ in self.blocks]
        for number, step in enumerate(self.steps):
            if step.block is not None:
                found[step.block][step.of_pass].append(number)
        return tuple(tuple((forward, backward) for forward, backward in block) for block in found)

    def slots_at(self, step: int) -> int:
        """Return the micro-batches for which a step runs its block in turn."""
        return self.last_slots if self.steps[step].of_pass == self.n_passes - 1 else self.per_step

    def share(self, step: int) -> float:
        """Return the part of a pass's micro-batches that a step runs for."""
        return self.slots_at(step) / self.per_step

    def each(self, step: int) -> tuple[int, ...]:
        """The steps of all passes in which what is said of a step of the first pass happens."""
        return tuple(start + step for start in self.passes)

    @property
    def endless_s(self) -> float:
        """Seconds of an iteration with unlimited device memory: the fastest options, all updates on the device."""
        sums = self.per_update - 1 if self.adds_up else 0  # of a single pass, they are among the seconds of norms
        return self.all_computes_s + sum(g.device_update_s + g.norm_s + sums * g.device_add_s for g in self.groups)

    @property
    def all_computes_s(self) -> float:
        """Seconds of all passes with the fastest options, of nothing but their computes."""
        return (self.micro_batches - 1 + self.last_slots / self.per_step) * self.computes_s

    @property
    def computes_s(self) -> float:
        """Seconds of a pass with the fastest options, of nothing but its computes."""
        return self.start_s + sum(min(o.forward_s + o.backward_s for o in block.options) for block in self.blocks)

    def backward_step(self, block: int) -> int:
        """Return the step of the first pass in which `block` (0-based) runs backward."""
        return self.runs[block][0][1]

    def last_gradient(self, group: Group) -> int:
        """Return g_w, the step in which the last pass completes the gradient of a trainable group."""
        return self.passes[-1] + group.grad_steps[-1]

    def last_read(self, group: Group) -> int:
        """Return the step after which the part of a trainable group that the host updates may be away.

        The step that completes a gradient need not read the parameter: that of an embedding does not. With several
        micro-batches what happens within a pass is decided for all of them, and the part stays until the last gradient.
        """
        last = self.last_gradient(group)
        return last if self.n_passes > 1 else min(last, group.uses[-1])

    @property
    def arrival_bytes(self) -> int:
        """Host bytes of the two buffers, each as large as the largest gradient, in which gradients arrive."""
        largest = max((t.grad_bytes for g in self.groups if g.trainable for t in g.tensors), default=0)
        return N_BUFFERS * largest if self.adds_up and not self.sums_on_device else 0

    def first_update(self, group: Group) -> int:
        """Return the first step in which the host may update a part of a trainable group."""
        waits = self.gate and not self.speculates
        return self.first_turn_around if waits else (self.last_gradient(group) + 1) % self.n_steps

    def first_certain_update(self, group: Group) -> int:
        """Return the first step in which the host may update a part of a trainable group without a log."""
        return self.first_turn_around if self.gate else self.first_update(group)

    def first_return(self, group: Group) -> int:
        """Return the first step in which new parameters from the host may come to the device."""
        soonest = self.last_gradient(group) + 2
        return (
            max(soonest, self.first_turn_around) if self.speculates else (self.first_update(group) + 1) % self.n_steps
        )

    def is_logged(self, group: Group, step: int) -> bool:
        """Return whether an update of a group on the host in `step` comes before the gate, and so keeps a log."""
        return self.speculates and self.last_gradient(group) < step < self.first_turn_around

    def device_update(self, group: Group) -> int:
        """Return the step in which the device updates its part of a trainable group.

        With a gate the groups share all turn-around steps but the last two, in which the group updated last can still
        leave and come back. Groups whose gradients are complete first go first, about as many bytes in each step.
        """
        return self._gated_updates[group.name] if self.gate else self.last_gradient(group)

    def waiting(self, group: Group) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the steps over which a gradient waits behind the gate for its update on the device, if it may leave.

        Returns: the steps from its completion to the one before its update; and those of them in which it may return,
        behind the gate, which scales what is on the host. Both are empty if it has to stay.
        """
        first, updated = self.last_gradient(group), self.device_update(group)
        back = tuple(range(max(self.first_turn_around, first + 2), updated)) if self.gate else ()
        return (tuple(range(first, updated)), back) if back else ((), ())

    @cached_property
    def _gated_updates(self) -> dict[str, int]:
        trainable = sorted((g for g in self.groups if g.trainable), key=lambda g: (g.grad_steps[-1], g.name))
        steps, before = self.turn_around_steps - 2, 0
        total = max(1, sum(g.update_bytes for g in trainable))
        found = {}
        for group in trainable:
            # By the middle of its bytes, so that all steps have about the same number of them.
            step = (2 * before + group.update_bytes) * steps // (2 * total)
            found[group.name] = self.first_turn_around + min(step, steps - 1)
            before += group.update_bytes
        return found

    def block_of(self, step: int) -> int | None:
        """Return the block that computes in `step`, or None in a turn-around step."""
        return self.steps[step].block


def check(problem: Problem) -> None:
    """Raise ProblemError, naming the row, if the problem contradicts itself."""
    n = problem.n_blocks
    require(n > 0, "a problem needs at least one block")
    _check_update(problem)
    check_blocks(problem.blocks)
    check_groups(problem.groups, n)
    check_values(problem.values, problem.outputs, n)
    check_shared(problem.shared, problem.pass_steps + problem.turn_around_steps)
    for row, why in problem.rates.faults():
        require(False, f"{row}: {why}")
    numbers("problem", problem)


def _check_update(problem: Problem) -> None:
    require(problem.turn_around_steps >= 2, f"turn_around_steps is {problem.turn_around_steps}; at least 2 are needed")
    many = f"turn_around_steps is {problem.turn_around_steps}; at most {MOST_TURN_AROUND_STEPS:,} can be planned"
    require(problem.turn_around_steps <= MOST_TURN_AROUND_STEPS, many)
    if problem.gate:
        require(problem.update == "planned", "a gate needs planned updates, but here the user's own code updates")
        steps = problem.turn_around_steps
        require(steps >= 3, f"turn_around_steps is {steps}; a gate needs at least 3")
    require(problem.gate or not problem.speculates, "speculates, but there is no gate that updates could come before")
    require(problem.gate or problem.gate_s == 0, f"gate_s is {problem.gate_s}, but there is no gate")
    count = problem.micro_batches
    require(count >= 1, f"micro_batches is {count}; at least 1 is needed")
    require(count == 1 or problem.gate, f"micro_batches is {count}; more than one needs planned updates and a gate")
    slots = problem.per_step
    require(slots >= 1, f"per_step is {slots}; at least 1 is needed")
    last = problem.last_per_step
    require(0 <= last < slots, f"last_per_step is {last}; it must be less than per_step, {slots}, or 0")
    require(last == 0 or count > 1, f"last_per_step is {last}, but there is one pass")


def update_steps(groups: Iterable[Group], device_budget_bytes: int) -> int:
    """Return the turn-around steps that an update phase behind a gate needs.

    The states of a step's updates are all on the device in it, while those of the next step come and those of the last
    one leave; and half of the memory is for gradients and parameters. So a step takes a sixth of the budget. Two more
    steps follow, in which what is updated last can leave and come back.

    Parameters
    ----------
    groups: all groups of the problem. device_budget_bytes: its device budget.
    """
    trainable = [group for group in groups if group.trainable]
    states = sum(group.state_bytes for group in trainable)
    shares = -(-_SHARES * states // max(device_budget_bytes, 1))
    return 2 + max(1, min(shares, len(trainable)))
