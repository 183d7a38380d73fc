"""The order of an update's micro-batches: one after the other, or block by block where the loop announces them."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from ..errors import ArgumentValueError, InfeasibleBudget, ProtocolError
from ..planning.follow import Seen
from ..planning.orders import Compared, compared
from ..planning.request import Request
from ..plans.orders import way
from ..plans.plan import Plan
from ..reports.units import format_seconds
from ..sizes import format_bytes
from .announced import Announced
from .choice import Choice
from .residence import Residence
from .together import Together
from .variants import Call, CallKind, Unfit, Variant
from .widest import largest, made_up, widest

log = logging.getLogger("offmate")

_PLANS = 3  # made at most until one leaves enough to batches of other shapes
_ROOM_PERCENT = 125  # of what they were seen to need, so that the next shape does not need another plan


class Orders:
    """Decides, as an update begins, in which order its micro-batches run.

    State: `announced`, the batches that the loop has announced; `together`, the last update whose micro-batches ran
    block by block; `_compared`, by kind of call, the one or two numbers of micro-batches per pass that were the fastest
    at first, so that no more plans are kept; `_unfit`, kinds of made-up calls for which there is no plan;
    `_too_much_bytes`, what no plan has left to batches of other shapes, None if all have; `_said`, reasons that were
    logged. Changed by one thread at a time.

    Parameters
    ----------
    request: the requirements of plans in the usual order. choice: finds variants. given: a plan to use, whose order is
        then taken.
    """

    def __init__(self, request: Request, choice: Choice, residence: Residence, given: Plan | None) -> None:
        self._request, self._order = request, request.config.named_order
        self._per_pass = min(request.config.micro_batches_per_pass or request.micro_batches, request.micro_batches)
        if given is not None:
            self._order, self._per_pass = given.accumulation_order, given.micro_batches_per_pass
            named, per_pass = request.config.accumulation_order, request.config.micro_batches_per_pass
            if named not in ("auto", self._order):
                raise ArgumentValueError(
                    f"plan= runs the micro-batches of an update {self._order}, but config= has accumulation_order="
                    f"{named!r}; plan again with it, or leave it out"
                )
            if per_pass not in (None, self._per_pass) and min(per_pass, request.micro_batches) != self._per_pass:
                raise ArgumentValueError(
                    f"plan= runs {self._per_pass} micro-batches per pass, but config= has micro_batches_per_pass="
                    f"{per_pass}; plan again with it, or leave it out"
                )
        self._choice, self._residence, self._turns = choice, residence, residence.turns
        self.announced = Announced(1 if self._order == "by batch" else request.micro_batches, self._turns.one_by_one)
        self.together: Together | None = None
        self._said: set[str] = set()
        self._compared: dict[CallKind, tuple[int, ...]] = {}
        self._unfit: set[CallKind] = set()
        self._too_much_bytes: int | None = None

    @property
    def under_way(self) -> Together | None:
        """The update under way, if its micro-batches run block by block."""
        return self.together if self._turns.together and self._turns.in_update else None

    def begin(self, model: torch.nn.Module, call: Call) -> Variant | None:
        """Decide for the update that begins with this call; return the variant if it runs block by block.

        Raises: ProtocolError if the loop must announce its batches and did not.
        """
        variant = self._block_by_block(model, call)
        request = self._request if variant is None else self._request.in_passes(variant.kind.together)
        self._turns.begin_update(request.gate, together=variant is not None)
        return variant

    def _block_by_block(self, model: torch.nn.Module, call: Call) -> Variant | None:
        if self._request.micro_batches == 1 or self._order == "by batch":
            return None
        if not self.announced.begins:
            if self._order == "by block" and not self.announced.any:
                raise ProtocolError(
                    f"the micro-batches of an update run {way(self._per_pass, self._request.micro_batches)}, so the "
                    f"plan has to know all {self._request.micro_batches} batches before the first forward. Write the "
                    f'loop as "for batch in model.offmate.batches(loader):", or {self._turns.one_by_one}'
                )
            return None
        calls = self._foreseen(model, call, 1, early=False)
        # By call, not by kind: the model may decide differently about the values of batches that are alike.
        seen = [Seen() for _ in calls]
        before = self._residence.preparer.spare_bytes
        for _ in range(_PLANS):
            variant = self._of_all(model, calls, before)
            if variant is None:
                break
            per_pass, early = variant.kind.together, variant.kind.early
            own = self._foreseen(model, call, per_pass, early=early)
            try:
                variants = self._following(model, own, variant.lead, seen)
            except Unfit as unfit:
                if unfit.excess_bytes is None:
                    return None
                if not self._leave_room(unfit.excess_bytes):
                    break
            else:
                self.together = Together(variants, own, per_pass, self._turns.one_by_one)
                return variant
        self._take_back_room(before)
        return None

    def _following(self, model: torch.nn.Module, calls: list[Call], lead: Variant, seen: list[Seen]) -> list[Variant]:
        """Return the variants of calls in the steps of a plan.

        Parameters
        ----------
        seen: of each, what was seen of its batch before.

        Raises: Unfit if one cannot run there, with what all lack together if that is only bytes.
        """
        found, excess_bytes = list[Variant](), 0
        for call, known in zip(calls, seen, strict=True):
            try:
                found.append(
                    self._residence.preparer.follower(model, call, lead, known, self._residence.bring_home)
                )  # fmt: skip
            except Unfit as unfit:
                if unfit.excess_bytes is None:
                    self._declined(_words(call, lead, known, unfit))
                    raise
                excess_bytes = max(excess_bytes, unfit.excess_bytes)
        if excess_bytes:
            raise Unfit(excess_bytes)
        return found

    def _leave_room(self, excess_bytes: int) -> bool:
        """Have the next plan leave bytes to smaller batches that hold more; return False if no plan could before."""
        spare_bytes = excess_bytes * _ROOM_PERCENT // 100
        if self._too_much_bytes is not None and spare_bytes >= self._too_much_bytes:
            return False
        log.info(
            "kernels hold up to %s more for smaller batches of an update, so the plan for the largest one is made "
            "again and leaves that free", format_bytes(excess_bytes),
        )  # fmt: skip
        self._residence.preparer.leave_room(spare_bytes)
        return True

    def _take_back_room(self, before_bytes: int) -> None:
        """Note that no plan of this update has left as much as was needed, if any was to."""
        preparer = self._residence.preparer
        if preparer.spare_bytes > before_bytes:
            self._too_much_bytes = preparer.spare_bytes
            preparer.leave_room(before_bytes)
        if self._too_much_bytes is not None:
            self._declined(f"no plan leaves {format_bytes(self._too_much_bytes)} to batches of other shapes")

    def _of_all(self, model: torch.nn.Module, calls: list[Call], before_bytes: int) -> Variant | None:
        """Return the variant in whose steps all calls may run; None if it is to be in the usual order.

        Parameters
        ----------
        before_bytes: what plans have left to other batches before this update.
        """
        choose = self._planned if self._order == "by block" else self._fastest
        call, real = widest(calls), largest(calls)
        if call is not real and call.kind not in self._unfit:
            try:
                with made_up():
                    return choose(model, call, self._per_pass)
            except Exception as error:  # that nobody has made such a batch may show in any way
                log.info("no plan for a batch that is as large as each of an update, so it is made for the largest one")
                log.debug("the made-up batch: %s", error)
                self._unfit.add(call.kind)
        try:
            return choose(model, real, self._per_pass)
        except InfeasibleBudget:
            if self._residence.preparer.spare_bytes == before_bytes:
                raise
            return None

    def _planned(self, model: torch.nn.Module, call: Call, per_pass: int) -> Variant:
        own = replace(call, together=per_pass)
        return self._choice.variant_for(model, own, make_room=self._residence.bring_home)[0]

    def _fastest(self, model: torch.nn.Module, call: Call, most: int) -> Variant | None:
        """Return the variant that is predicted to be the fastest; None if that is the one in the usual order.

        Parameters
        ----------
        most: micro-batches of a pass.
        """
        known = self._compared.get(call.kind) or self._compared_near(call.kind)
        found = compared(
            lambda per_pass: self._planned(model, call, per_pass).prepared.plan,
            known or (most, 1),
            widely=known is None,
        )
        if found.cannot is not None:
            self._declined(str(found.cannot))
            return None
        fastest = tuple(found.plans)[:2]
        if fastest:
            self._compared.setdefault(call.kind, fastest)
        if fastest and known is None:
            self._note(self._planned(model, call, fastest[0]), found)
        if not fastest or fastest[0] == 1:
            seconds = [format_seconds(plan.predicted_step_s) for plan in found.plans.values()]
            if len(fastest) > 1:
                self._declined(f"the plans predict {seconds[1]} {way(fastest[1], most)}, and {seconds[0]}")
            elif found.lacks:
                self._declined(str(found.lacks[0]))
            return None
        return self._planned(model, call, fastest[0])  # the plan in use is the one that was asked for last

    def _compared_near(self, kind: CallKind) -> tuple[int, ...] | None:
        """Return the fastest numbers for larger calls of whose plans the decisions are taken, if there are such."""
        buckets = self._request.config.shape_buckets
        near = [known for known in self._compared if kind.may_follow(known, buckets)]
        return self._compared[min(near, key=lambda known: known.n_elements)] if near else None

    def _note(self, variant: Variant, found: Compared) -> None:
        """Note in the fastest plan what the next one predicts."""
        _, noted = found.fastest
        plan = replace(variant.prepared.plan, other_order=noted.other_order)
        variant.prepared = replace(variant.prepared, plan=plan)

    def _foreseen(self, model: torch.nn.Module, call: Call, per_pass: int, *, early: bool) -> list[Call]:
        """Return all calls of the update that begins with this one, as calls of a plan with these properties."""
        arguments = self.announced.foreseen(*call.given)
        calls = (self._residence.preparer.call_of(model, *one, gradients=True) for one in arguments)
        return [replace(one, together=per_pass, early=early) for one in calls]

    def _declined(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            log.info("the micro-batches of an update run one after the other, and not block by block: %s", why)


def _words(call: Call, lead: Variant, seen: Seen, unfit: Unfit) -> str:
    """Say why a call's micro-batch cannot run in the steps of a plan."""
    own, its = ([one.outcome for one in taken] for taken in (lead.prepared.captured.taken, seen.taken))
    shapes = [", ".join(str(list(shape)) for shape in kind.shapes) for kind in (call.kind, lead.kind)]
    if unfit.why:
        return (
            f"the call for one of their batches, with {shapes[0]}, cannot be foreseen: {unfit.why}. If the loop "
            "computes an argument, compute it in the data loader or its collate_fn"
        )
    if (seen.trace is not None and own != its) or shapes[0] == shapes[1]:
        return (
            "the model decides differently about the values of their batches, as transformers' models do where one has "
            "padding and another one has none"
        )
    return (
        f"their batches have different shapes, and those with {shapes[0]} do not fit into the steps of the plan for "
        f"{shapes[1]}"
    )
