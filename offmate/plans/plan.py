"""The plan, as a user holds it: the schedule, its prediction, and how it was found."""

from __future__ import annotations

import os
import reprlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import ArgumentTypeError
from ..files import as_path, write_whole
from ..lowering.stored import StoredClass
from ..reports.chrome_trace import save_trace
from ..reports.frame import schedule_frame
from ..reports.html import document, figure
from ..reports.plots import draw_accumulation, draw_memory, draw_tensors, draw_timeline, write_below
from ..reports.timeline import Timeline, build_timeline
from ..reports.units import format_seconds, in_usual_units
from ..sizes import format_bytes, format_least_bytes
from ..solver import items
from ..solver.accumulation import AccumulationTrial, Order
from ..solver.explain import Explanation, explanation, offered
from ..solver.items import ItemKind
from ..solver.problem import Problem
from ..solver.schedule import Action, Kind, Schedule
from ..solver.simulate import Simulation, simulate
from ..split import Split
from . import low_precision
from .about import UNKNOWN, About
from .accumulation import chosen_words
from .break_even import BreakEven
from .diff import Compared, PlanDiff, diff
from .drives import cast_words, in_files, path_words, stored_words
from .orders import OtherOrder, order_words, other_trial
from .saved import read, to_text
from .table import BlockRow, plan_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from rich.table import Table

_WORTH_SAYING_BYTES = 1024
_WORTH_SAYING_PART = 0.01  # of a step


@dataclass(frozen=True)
class Plan:
    """A schedule for one training iteration inside the budgets, with its prediction.

    Parameters
    ----------
    fingerprint: a hash of the model's graph, shapes, budgets, optimizer, device and versions that it is for.
    schedule: what the runtime replays.
    classes: how programs are rebuilt from the model, by class key.
    budget_bytes: the device budget that was asked for. fixed_bytes: part of it that no decision changes.
    least_budget_bytes: the smallest device budget that works; where the plan takes the decisions of a larger batch's,
        the smallest for that batch.
    lower_bound_s: no plan of the same problem is faster. gap: the relative distance of the program's solution from it.
    status: how the search ended, with advice.
    user_bytes: reserved for what the user's code holds between the model's return and backward().
    allocator_bytes: the part of `fixed_bytes` that the device's allocator takes beyond the tensors in it.
    plan_s: seconds that planning took. problem: what was solved, as plain numbers; None for a forward-only plan.
    about: what it is of, in words. batch_size: samples per micro-batch, if `offmate.plan` was asked for one.
    accumulation: all numbers and orders of micro-batches that were tried, if the planner chose them; else empty.
    other_order: figures of the plan for the other order of micro-batches; None if it was not planned.
    low: parameters of which a copy in a lower precision is moved instead of them -> that precision.
    low_gradients: parameters whose gradients alone are moved in a lower precision -> that precision.
    break_even: how it compares with a plan whose updates wait for the gate, or with one whose updates do not; None if
        only one was made. from_cache: whether it was read from disk.
    """

    fingerprint: str
    schedule: Schedule
    classes: dict[str, StoredClass]
    blocks: tuple[BlockRow, ...]
    budget_bytes: int
    fixed_bytes: int
    least_budget_bytes: int
    lower_bound_s: float
    gap: float
    status: str
    user_bytes: int
    plan_s: float
    problem: Problem | None = None
    allocator_bytes: int = 0
    low: dict[str, str] = field(default_factory=dict)
    low_gradients: dict[str, str] = field(default_factory=dict)
    about: About = field(default=UNKNOWN, compare=False)
    batch_size: int | None = field(default=None, compare=False)
    accumulation: tuple[AccumulationTrial, ...] = field(default=(), compare=False)
    other_order: OtherOrder | None = field(default=None, compare=False)
    break_even: BreakEven | None = field(default=None, compare=False)
    from_cache: bool = field(default=False, compare=False)

    @cached_property
    def simulation(self) -> Simulation:
        """The dry run of the schedule."""
        return simulate(self.schedule)

    @property
    def predicted_peak_bytes(self) -> int:
        """The most bytes that will be on the device."""
        return self.simulation.peak_bytes + self.fixed_bytes

    @property
    def predicted_step_s(self) -> float:
        """Seconds of one iteration in the steady state."""
        return self.simulation.step_s

    @property
    def samples_per_s(self) -> float:
        """Predicted samples per second; 0 if the size of the batch is not known."""
        samples = (self.batch_size or 0) * self.accumulation_steps
        return samples / self.predicted_step_s if self.predicted_step_s else 0.0

    @property
    def endless_s(self) -> float:
        """Seconds of one iteration on the same device with unlimited memory: nothing moves, nothing is recomputed."""
        return self.problem.endless_s if self.problem is not None else self.predicted_step_s

    @property
    def bound_words(self) -> str:
        """A sentence about what the proven bound says about this plan.

        It holds for plans whose copies and host updates keep to the program's steps; a schedule's may cross them.
        """
        if not self.lower_bound_s:
            return "it is not known how much faster a plan can be"
        bound = format_seconds(self.lower_bound_s)
        if self.lower_bound_s > self.predicted_step_s * 1.001:
            return f"copies that cross steps make it faster than the program's bound of {bound}"
        words = f"no plan that keeps to the program's steps is faster than {bound}"
        if self.rounding_loss_s > _WORTH_SAYING_PART * self.predicted_step_s:
            words += f", and moving only whole tensors costs {format_seconds(self.rounding_loss_s)}"
        return words

    @property
    def objective_s(self) -> float:
        """Seconds of a step in the program's fractions; the schedule's own if nothing was proved of them."""
        proved = self.lower_bound_s > 0 and self.gap < 1
        return self.lower_bound_s / (1 - self.gap) if proved else self.predicted_step_s

    @property
    def rounding_loss_s(self) -> float:
        """Seconds by which whole tensors are slower than the program's fractions; 0 if they are not, or if unknown."""
        return max(0.0, self.predicted_step_s - self.objective_s)

    @property
    def host_bytes(self) -> int:
        """The bytes that the plan holds in host memory."""
        return self.schedule.host_layout.used_bytes

    @property
    def split(self) -> Split:
        """The parameters that the host updates, and those that the device does; empty if the user's code updates."""
        return Split(tuple(self.schedule.update_cpu_s), tuple(self.schedule.update_device_s))

    @property
    def accumulation_steps(self) -> int:
        """The micro-batches of an update, as `offmate.compile` wants to know it."""
        return self.schedule.per_update

    @property
    def accumulation_order(self) -> Order:
        """The order in which the micro-batches of an update run."""
        return "by block" if self.schedule.per_step > 1 else "by batch"

    @property
    def micro_batches_per_pass(self) -> int:
        """The micro-batches for which each block runs in turn; the last pass of an update may have fewer."""
        return self.schedule.per_step

    @property
    def compared(self) -> OtherOrder:
        """The figures by which plans for two orders of micro-batches are compared."""
        return OtherOrder(self.predicted_step_s, self.predicted_peak_bytes, self.host_bytes, self.moved_bytes[0])

    @property
    def order_words(self) -> str:
        """In which order the micro-batches of an update run, and what that buys; empty if there is only one."""
        if self.accumulation_steps == 1:
            return ""
        trial = other_trial(self.accumulation, self.accumulation_steps, self.micro_batches_per_pass)
        return order_words(self.micro_batches_per_pass, self.accumulation_steps, self.compared, self.other_order, trial)

    @property
    def logged_bytes(self) -> int:
        """Bytes of the old values that updates before the gate keep in RAM until it opens."""
        early = (a for a in self.schedule.actions if a.kind is Kind.SPECULATE_CPU)
        return sum(self.schedule.item_bytes[items.log(a.name)] for a in early)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes per iteration that go to the device and to the host."""
        sizes = self.schedule.item_bytes
        into = sum(times * sizes[a.item] for times, a in self._all_actions if a.kind is Kind.PREFETCH)
        out = sum(times * sizes[a.item] for times, a in self._all_actions if a.kind is Kind.OFFLOAD)
        return into, out

    @cached_property
    def _all_actions(self) -> tuple[tuple[int, Action], ...]:
        """The actions of an iteration, and how many micro-batches carry out each."""
        return tuple((part.times, action) for part in self.schedule.parts for action in part.actions)

    @property
    def compute_s(self) -> float:
        """Seconds of all forwards and backwards of a step, without sums of gradients and updates that run apart."""
        computes = self.schedule.computes
        return sum(times * computes[a.name].seconds for times, a in self._all_actions if a.kind is Kind.COMPUTE)

    @property
    def read_bytes(self) -> int:
        """Bytes of frozen parameters that are read from files per step."""
        homes, sizes = self.schedule.homes, self.schedule.item_bytes
        tiers = {tier.name for tier in self.schedule.rates.tiers if tier.holds_frozen}
        frozen = {i for i, home in homes.items() if i.kind is ItemKind.PARAMETER and home in tiers}
        read = ((times, a.item) for times, a in self._all_actions if a.kind is Kind.PREFETCH)
        return sum(times * sizes[item] for times, item in read if item in frozen)

    @property
    def read_words(self) -> str:
        """How much is read from files per step, and for which part of a step that keeps their drive busy."""
        (tier,) = (tier for tier in self.schedule.rates.tiers if tier.holds_frozen)
        busy = self.read_bytes / tier.path.in_bytes_per_s / self.predicted_step_s if self.predicted_step_s else 0.0
        rate = format_bytes(int(tier.path.in_bytes_per_s))
        return (
            f"{format_bytes(self.read_bytes)} of frozen parameters are read from the checkpoint per step, at {rate}/s: "
            f"{round(100 * min(busy, 1.0))} % of the step"
        )

    @property
    def stored_bytes(self) -> tuple[int, int]:
        """Bytes of states and trained parameters that are read from the storage paths and written to them per step."""
        homes, sizes = self.schedule.homes, self.schedule.item_bytes
        files = {tier.name for tier in self.schedule.rates.tiers if tier.for_states}
        moved = [(times, a) for times, a in self._all_actions if a.kind in (Kind.PREFETCH, Kind.OFFLOAD)]
        stored = [(times, a) for times, a in moved if homes.get(a.item) in files]
        read = sum(times * sizes[a.item] for times, a in stored if a.kind is Kind.PREFETCH)
        written = sum(times * sizes[a.item] for times, a in stored) - read
        return read + self.updated_from_files_bytes, written + self.updated_from_files_bytes

    @property
    def updated_from_files_bytes(self) -> int:
        """Bytes that the host reads from the storage paths, updates and writes back per step."""
        return sum(map(self.schedule.passing_bytes_of, self.schedule.pieces_updated_from_files))

    @property
    def stored_words(self) -> str:
        """How much is read and written on the storage paths per step, how long that takes, and how it wears drives."""
        (path,) = (tier.path for tier in self.schedule.rates.tiers if tier.for_states)
        return stored_words(self.stored_bytes, path, self.predicted_step_s, in_files(self.schedule))

    @property
    def path_words(self) -> list[str]:
        """The same for each of several storage paths; empty if there is one, or if nothing is stored."""
        moved = self.stored_bytes
        return path_words(moved, self.about.storage, self.predicted_step_s) if any(moved) else []

    def explain(self, offers: bool = False) -> str:
        """Describe the plan: budget, peak, time, what moves, what is recomputed, and what limits each phase.

        Parameters
        ----------
        offers: also say what more memory, a faster link or faster updates would gain. The problem is solved again for
            each, which takes some seconds for a large model.
        """
        into, out = self.moved_bytes
        updates = sum(r.cpu_update_bytes for r in self.blocks), sum(r.params_bytes for r in self.blocks)
        recomputing = [r for r in self.blocks if r.recomputed and r.option_word != "keep"]
        updated = f"the CPU updates {format_bytes(updates[0])} of {format_bytes(updates[1])} of parameters"
        if self.problem is not None and self.problem.update == "external":
            updated = "your own code updates the parameters on the CPU"
        lines = [self.about.words()] if self.about.words() else []
        lines += [
            f"budget {format_bytes(self.budget_bytes)}, predicted peak {format_bytes(self.predicted_peak_bytes)}, "
            f"least budget that works {format_least_bytes(self.least_budget_bytes)}",
            f"one step {format_seconds(self.predicted_step_s)} predicted, {format_seconds(self.compute_s)} of it "
            f"forwards and backwards; {self.bound_words} ({self.status})",
            f"per step, {format_bytes(into)} are copied to the GPU and {format_bytes(out)} to RAM; "
            f"{format_bytes(self.host_bytes)} of RAM are needed",
            f"{updated}; {len(recomputing)} of {len(self.blocks)} blocks recompute",
        ]
        lines += low_precision.words(self.schedule, self.low, self.low_gradients)
        lines += cast_words(self.schedule)
        if self.logged_bytes:
            lines.append(
                "a step that clips and skips nothing is predicted: the CPU updates before that is known, and keeps "
                f"{format_bytes(self.logged_bytes)} of old values in RAM, to undo updates where it is wrong"
            )
        if self.break_even is not None:
            lines.append(self.break_even.words())
        if self.read_bytes:
            lines.append(f"{self.read_words}; they pass RAM, which does not keep them")
        if self.updated_from_files_bytes:
            moved, there = format_bytes(self.updated_from_files_bytes), self.schedule.updated_from_files
            what = "states and parameters" if there & self.schedule.parameters_in_files else "states"
            lines.append(f"the CPU updates {moved} of {what} in files, which pass RAM and do not go to the GPU")
        if self.schedule.second_slots_bytes:
            second = format_bytes(self.schedule.second_slots_bytes)
            lines.append(
                f"{second} more are reserved in files, for second places of the states that are updated before it is "
                "known whether gradients are clipped: the old states stay in the files until then, and not in RAM"
            )
        if any(self.stored_bytes):
            lines += [self.stored_words, *self.path_words]
        if self.batch_size is not None:
            lines.append(f"batch size {self.batch_size}: {self.samples_per_s:.3g} samples/s predicted")
        if self.order_words:
            lines.append(self.order_words)
        if self.accumulation:
            lines.append(chosen_words(self.accumulation, self.accumulation_steps))
        if self.user_bytes >= _WORTH_SAYING_BYTES:
            lines.append(f"{format_bytes(self.user_bytes)} are reserved for your code between forward and backward")
        if self.problem is not None:
            lines += in_usual_units(self.limits(offers).text()).splitlines()
        return "\n".join(lines)

    def limits(self, offers: bool = False) -> Explanation:
        """Explain what limits each phase and, with `offers`, what changes would gain; not for forward-only plans."""
        assert self.problem is not None
        found = offered(self.problem, self.objective_s) if offers else ()
        return explanation(self.problem, self.schedule, self.simulation, self.gap, found)

    def table(self) -> Table:
        """Return a table of what happens to the blocks' values and parameters: equal blocks in one row, and totals."""
        return plan_table(self.blocks)

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        peak, budget = format_bytes(self.predicted_peak_bytes), format_bytes(self.budget_bytes)
        step = format_seconds(self.predicted_step_s)
        return f"<Plan: {len(self.blocks)} blocks, {step} per step, {peak} of {budget}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_whole(path, to_text(self))

    def timeline(self, name: str = "predicted") -> Timeline:
        """Return the predicted iteration as plain data, including fixed bytes; its peak is `predicted_peak_bytes`."""
        return build_timeline(self.schedule, self.simulation, name, self.fixed_bytes, self.budget_bytes)

    def diff(self, other: Plan) -> PlanDiff:
        """Compare with another plan; the result prints as sentences, and `.table()` is for rich."""
        check_plan(other)
        return diff(_compared(self), _compared(other))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted iteration for Perfetto or chrome://tracing."""
        save_trace([self.timeline()], path)

    def plot_timeline(self, ax: Axes | None = None) -> Axes:
        """Draw what every resource does when, with matplotlib; on new axes if none are given."""
        return self._named(draw_timeline(self.timeline(), ax))

    def plot_memory(self, ax: Axes | None = None) -> Axes:
        """Draw what is on the device over an iteration, by kind, with matplotlib."""
        return self._named(draw_memory(self.timeline(), ax))

    def plot_tensors(self, ax: Axes | None = None) -> Axes:
        """Draw where every tensor is at each step, with matplotlib."""
        return self._named(draw_tensors(self.schedule, ax))

    def plot_accumulation(self, tokens: int = 0, ax: Axes | None = None) -> Axes:
        """Draw micro-batches per update against what they train per second, if the planner chose their number.

        Parameters
        ----------
        tokens: of a micro-batch; 0 counts micro-batches.
        """
        return self._named(draw_accumulation(self.accumulation, self.accumulation_steps, tokens, ax))

    def _named(self, ax: Axes) -> Axes:
        """Return a plot with a line that says what it is of."""
        if self.about.words():
            write_below(ax, self.about.words())
        return ax

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the plan's actions as a pandas frame, one row each."""
        return schedule_frame(self.schedule, self.simulation, self.fixed_bytes)

    def to_html(self) -> str:
        """Return a self-contained page with the picture of an iteration below a description of the plan."""
        return document([self.timeline()], self.title, self._sentences, self.about.below_title())

    @property
    def title(self) -> str:
        """The title of its picture: the model, the machine and the budget, as far as they are known."""
        return self.about.title(f"one step in {format_bytes(self.budget_bytes)}")

    @property
    def _sentences(self) -> list[str]:
        """The sentences of `explain`, without the description, the budget and the peak, which the picture says."""
        said = 2 if self.about.words() else 1
        least = f"the least budget that works is {format_least_bytes(self.least_budget_bytes)}"
        return [least, *self.explain().splitlines()[said:]]

    def _repr_html_(self) -> str:
        return figure([self.timeline()], self.title, self._sentences, self.about.below_title())


def pair_document(first: Plan, second: Plan, names: tuple[str, str]) -> str:
    """Return a page with the pictures of two plans below each other on the same axes, and a table of their numbers.

    Parameters
    ----------
    names: of the two, such as those of their files.
    """
    timelines = [
        plan.timeline(f"{name}: {plan.about.words()}" if plan.about.words() else name)
        for plan, name in zip((first, second), names)
    ]
    found = first.diff(second)
    return document(timelines, f"{names[0]} and {names[1]}: one step each", found.words(), table=found.rows())


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `Plan.save` wrote.

    Raises: PlanFileError if the file is not a plan, is damaged, or is of another version.
    """
    return Plan(**read(as_path(path)))


def check_plan(plan: object) -> None:
    """Raise ArgumentTypeError unless a user gives a plan where one is needed."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"{reprlib.repr(plan)} is a {type(plan).__name__}, not a plan; offmate.plan and offmate.load_plan give one"
        )


def _compared(plan: Plan) -> Compared:
    """Collect the parts of a plan that are compared with another."""
    schedule, blocks, (moved_in, moved_out) = plan.schedule, plan.blocks, plan.moved_bytes
    figures: dict[tuple[str, str], float] = {
        ("one step", "s"): plan.predicted_step_s,
        ("of it waiting", "s"): sum(plan.simulation.stall_s.values()),
        ("of it forwards and backwards", "s"): plan.compute_s,
        ("GPU budget", "B"): plan.budget_bytes,
        ("predicted peak", "B"): plan.predicted_peak_bytes,
        ("least budget", "B"): plan.least_budget_bytes,
        ("RAM", "B"): plan.host_bytes,
        ("copied in per step", "B"): moved_in,
        ("copied out per step", "B"): moved_out,
        ("activations kept", "B"): sum(row.kept_bytes for row in blocks),
        ("activations offloaded", "B"): sum(row.offloaded_bytes for row in blocks),
        ("parameters updated on the CPU", "B"): sum(row.cpu_update_bytes for row in blocks),
        ("parameters that never leave", "B"): sum(row.params_resident_bytes for row in blocks),
    }
    return Compared(figures, schedule, blocks)
