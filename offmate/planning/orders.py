"""The order of an update's micro-batches: one after the other, or block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..capture.effects import is_random
from ..capture.model import Traced
from ..config import Config
from ..errors import InfeasibleBudget, OffmateError
from ..plans.orders import OtherOrder, one_by_one, way
from ..plans.plan import Plan
from ..progress import planning_way
from ..runtime.operators.draws import draw
from ..solver.passes import between


class NotTogether(OffmateError):
    """A forward that cannot run block by block for several micro-batches: its numbers would be others."""


def check_together(traced: Traced, generator_counts: bool, config: Config) -> None:
    """Raise NotTogether if a forward has other numbers where its blocks run for all micro-batches in turn.

    Random numbers have to be drawn before it, in the order of plain PyTorch. And a buffer that one block writes must be
    of no other block: the second micro-batch's first block would read what the first one's last block has yet to write.

    Parameters
    ----------
    generator_counts: whether forwards draw from a card's generator, of which it is known how far each kernel moves it.
    config: that asks for it.
    """
    inside = (node for block in traced.blocks for node in block.joint.forward)
    for node in (*traced.chain.prelude, *inside):
        if is_random(node) and not generator_counts and (node.target is not draw or node.all_input_nodes):
            own = getattr(node.target, "namespace", "") == "offmate"
            raise NotTogether(
                f"the forward draws random numbers{'' if own else f' by {node.target}'}. If its blocks run for all "
                "micro-batches in turn, it draws them in another order than plain PyTorch. Set dropout to 0, "
                f"or use {one_by_one(config)}"
            )
    buffers = traced.captured.buffers
    reading: dict[str, set[int]] = {}
    written = set()
    for number, block in enumerate(traced.blocks):
        names = [buffers.get(external.node.name) for external in block.spec.externals]
        for name in filter(None, names):
            reading.setdefault(name, set()).add(number)
        written |= {names[index] for index in block.joint.writes}
    for node in traced.chain.prelude:
        for source in node.all_input_nodes:
            if source.name in buffers:
                reading.setdefault(buffers[source.name], set()).add(-1)
    shared = sorted(name for name in written if name is not None and len(reading[name]) > 1)
    if shared:
        raise NotTogether(
            f"the forward writes the buffer {shared[0]}, which several of its blocks use. If they run for all "
            "micro-batches in turn, they read and write it in another order than plain PyTorch. Use "
            f"{one_by_one(config)}"
        )


def drawn_bytes(traced: Traced) -> int:
    """Return the bytes of the largest tensor of random numbers that a forward draws."""
    drawn = (node for block in traced.blocks for node in block.joint.forward if node.target is draw)
    return max((node.meta["val"].untyped_storage().nbytes() for node in drawn), default=0)


@dataclass(frozen=True)
class Compared:
    """The plans for several numbers of micro-batches per pass.

    Parameters
    ----------
    plans: by number, the fastest first. lacks: why there are no others, in the order in which they were tried.
    between: the number of passes between one and all that was tried; None if none can be faster.
    """

    plans: dict[int, Plan]
    lacks: tuple[OffmateError, ...]
    between: int | None = None

    @property
    def cannot(self) -> NotTogether | None:
        """Why no pass can run several micro-batches; None if they can."""
        return next((error for error in self.lacks if isinstance(error, NotTogether)), None)

    @property
    def fastest(self) -> tuple[int, Plan]:
        """The fastest plan, which knows the next one's figures, and its number of micro-batches per pass.

        Raises: the first of `lacks` if there is no plan.
        """
        if not self.plans:
            raise self.lacks[0]
        (number, plan), *slower = self.plans.items()
        if not slower:
            why = str(self.lacks[0]).split(". ")[0] if self.lacks else ""
            return number, replace(plan, other_order=OtherOrder(None, why=why)) if why else plan
        next_number, next_one = slower[0]
        per_pass = 0 if self.between is None else next_number
        return number, replace(plan, other_order=replace(next_one.compared, per_pass=per_pass))


def compared(planned: Callable[[int], Plan], numbers: Sequence[int], *, widely: bool = True) -> Compared:
    """Plan for several numbers of micro-batches per pass, and compare the predicted seconds.

    Parameters
    ----------
    planned: plans for a number. numbers: one, and all of an update. Of equally fast plans, the earlier one is taken.
    widely: whether a number between them is tried, too, if it can be faster; see `passes_between`.
    """
    plans: dict[int, Plan] = {}
    lacks: list[OffmateError] = []
    between, left = None, list(numbers)
    while left:
        number = left.pop(0)
        try:
            plans[number] = planned(number)
        except InfeasibleBudget as error:
            lacks.append(error)
        except NotTogether as error:
            lacks.append(error)
            break
        if not left and widely and between is None:
            between = passes_between(list(plans.values()))
            left += [] if between is None else [between]
    fastest_first = sorted(plans, key=lambda number: plans[number].predicted_step_s)
    return Compared({number: plans[number] for number in fastest_first}, tuple(lacks), between)


def in_faster_order(planned: Callable[[Config], Plan], config: Config, accumulation_steps: int) -> tuple[Plan, Config]:
    """Plan in both orders of micro-batches if the configuration leaves it open, and take the fastest plan.

    Parameters
    ----------
    planned: plans by a configuration. accumulation_steps: micro-batches per update.

    Returns: the plan, which knows the next one's figures, and the configuration that names its order. Raises: as
        `planned` for "by batch", if neither can be planned.
    """
    if accumulation_steps == 1 or config.named_order != "auto":
        return planned(config), config

    def named(per_pass: int) -> Config:
        if per_pass == 1:
            return replace(config, accumulation_order="by batch")
        number = None if per_pass == accumulation_steps else per_pass
        return replace(config, accumulation_order="by block", micro_batches_per_pass=number)

    def planned_so(per_pass: int) -> Plan:
        with planning_way(f"micro-batches {way(per_pass, accumulation_steps)}"):
            return planned(named(per_pass))

    number, plan = compared(planned_so, (1, accumulation_steps)).fastest
    return plan, named(number)


def passes_between(plans: Sequence[Plan]) -> int | None:
    """Return a number of micro-batches per pass for which a plan may be faster than all of these; None if none may.

    Parameters
    ----------
    plans: those for one micro-batch per pass and for all in one, as far as there are.
    """
    usual = next((plan for plan in plans if plan.micro_batches_per_pass == 1), None)
    if usual is None or usual.problem is None:
        return None
    best_s = min(plan.predicted_step_s for plan in plans)
    return between(usual.problem, best_s, all_fit=len(plans) > 1)
