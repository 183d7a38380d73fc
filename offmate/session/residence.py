"""The tensors of a compiled model on the device, and their way back to the host."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import torch

from ..errors import OffmateError, StorageError
from ..machines.freed import return_freed
from ..optim.updater import Updater
from ..planning.request import Request
from ..runtime import interrupts
from ..runtime.devices.device import Device
from .contexts import ComputingStream, Process, alone, outside_inference
from .failures import described
from .host_state import Truth
from .pace import Pace
from .parameter_files import settle
from .parameters import give_buffer_classes
from .preparer import Preparer
from .turns import Turns
from .variants import Variant

log = logging.getLogger("offmate")

_LASTS = 8  # the least number of iterations for which a layout of the device's memory is kept
_FREES = 2  # iterations before which memory is given back: what held the parameters, and what made the states


class Residence:
    """A compiled model's tensors on the device, and their way back to the host.

    State: `active`, the variant whose tensors are on the device, one with an executor of its own; `_stores`, the last
    one that trained, whose activations may have space in files; `_replays`, iterations since the device's memory was
    laid out; `lock`, held by the thread that runs a method; `stream`, on which the device computes; and what `turns`,
    `truth`, `preparer` and `pace` hold.
    Changed by one thread at a time.

    Parameters
    ----------
    updater: None if the user's code updates. turns: reset when an iteration fails or is given up.
    """

    def __init__(
        self, device: Device, updater: Updater | None, turns: Turns, truth: Truth, preparer: Preparer, pace: Pace
    ) -> None:
        self.device, self.updater, self.turns, self.truth = device, updater, turns, truth
        self.preparer, self.pace = preparer, pace
        self.active: Variant | None = None
        self._stores: Variant | None = None
        self._replays = 0
        self.process, self.lock = Process(), threading.RLock()
        self.stream = ComputingStream(device.torch_device)

    @property
    def request(self) -> Request:
        """The requirements of plans."""
        return self.preparer.request

    def activate(self, model: torch.nn.Module, variant: Variant, edited: tuple[str, ...]) -> None:
        """Make the device hold this variant's tensors with their current values."""
        self.stream.take()
        own = variant.lead
        stale = edited if self.updater is not None else self.truth.frozen(edited)
        if stale and self.active is own:
            log.info("%d parameters were edited (%s, ...), so all are copied to the device again", len(stale), stale[0])
        if (
            stale
            or self._copies_differ(variant)
            or self.active is not own
            or self._is_worn(own)
            or self.truth.low.differ()
        ):
            self.bring_home()
            if own.place is not None and self.device.arena is not None:
                with self.stream.entered():
                    self.device.arena.take(own.place.segment_bytes)
            self.truth.low.settle(own.prepared.low, self.device)
            self.active, self._replays = own, 0
            if own.kind.trains:  # a forward alone leaves them where they are
                self._settle(own)
        if give_buffer_classes(model, self, variant.prepared.binding.written_buffers):
            self.truth.adopt_buffers()
        if self._replays < _FREES and not self.turns.micro_batches:
            return_freed()
        self._replays += not self.turns.micro_batches
        if not self.turns.gate:  # behind one nothing is updated before step(), where plain PyTorch looks at copies
            self.truth.copies.match(variant.updates)
        self.truth.accept()

    def _copies_differ(self, variant: Variant) -> bool:
        """Return whether float32 copies of what a plan updates may have to follow edits."""
        copies, current = self.truth.copies, self.truth.current
        return copies.are_unmatched(variant.updates) and not (current and not copies.differ(variant.updates))

    def _settle(self, variant: Variant) -> None:
        """Move parameters and states to RAM and to files, as a plan has them."""
        try:
            if self._stores is not None and self._stores is not variant:
                self._stores.executor.release_files()
            self._stores = variant
            settle(variant.prepared.plan.schedule, self.truth, self.device)
            self.preparer.maker.pin_what_stays()
            if variant.executor.settle_states():
                self.truth.show_states()
            self.preparer.reserve_states(variant)
        except BaseException:
            self.active = None  # so that the next call tries again
            raise

    def _is_worn(self, variant: Variant) -> bool:
        """Return whether the device's memory must be laid out anew before the next iteration."""
        if variant.place is None or self._replays < _LASTS or self.turns.micro_batches:
            return False
        return torch.accelerator.memory_reserved(self.device.torch_device) > variant.place.reserved_bytes

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Run a part of the schedule; if it fails, bring everything to a state that can be read, and describe it."""
        try:
            with interrupts.held(), self.pace.working(), self.stream.entered():
                yield
        except BaseException as error:
            # What cannot be written here stays in memory, and is written before it is needed.
            with interrupts.held(), self.stream.entered(), contextlib.suppress(StorageError):
                self.give_up()
            if isinstance(error, OffmateError) or not isinstance(error, Exception):
                if self.truth.torn:
                    log.warning("the iteration was interrupted: %s", self.truth.torn_words())
                raise
            where, budget_bytes = self.device.torch_device, self.request.budget_bytes
            raise described(error, where, budget_bytes, self.preparer.plan, self.truth) from error

    @alone
    @outside_inference
    def give_up(self) -> None:
        """End the iteration where it is; updates that were made stay, and the host then holds the current values."""
        self.turns.given_up()
        self.preparer.user_code.forget()
        self.truth.host.totals.clear()
        variant, self.active = self.active, None
        if variant is None:
            return
        lost = frozenset(variant.updates)  # unless it is known what is
        try:
            lost = variant.executor.abandon()
        finally:
            if lost:
                self.truth.note_lost(lost)
            elif self.updater is not None:
                self.truth.note_torn(variant.updates)
        self.truth.came_home()

    @alone
    @outside_inference
    def sync(self) -> None:
        """Wait for everything under way; afterwards parameters and optimizer states on the host are current."""
        if self.truth.host.stored:
            self.process.check_reading_files()
        self.truth.shown = self.truth.low.seen = True
        if self.truth.current:
            return
        self.process.check_reading()
        try:
            self.truth.check_edits()
            self.truth.take_states()
        finally:
            self.bring_buffers()
            if self.active is not None:
                with self.whole():
                    self.active.executor.sync()
            self.truth.came_home()

    @alone
    def bring_buffers(self) -> None:
        """Copy buffers that forwards have written back to the host."""
        if self.active is not None and self.active.executor.newer_buffers:
            self.process.check_reading()
            with self.whole():
                self.active.executor.bring_buffers()
            if self.turns.iteration is not None:
                self.turns.iteration.reads()

    def drop_forward(self) -> None:
        """Give up the forward that waits for its backward; the sums of earlier micro-batches stay."""
        self.turns.forward_dropped()
        self.preparer.user_code.forget()
        self.bring_home()

    def renew(self) -> None:
        """Send parameters and states to the device again if the user may have written into them, as through numpy."""
        shown, read = self.truth.take_shown(), self.truth.take_reads()
        if shown and self.updater is not None:
            self.truth.copies.doubt(self.updater.names.values())
        if self.active is None or not (shown or read):
            return
        with self.whole():
            if shown and self.updater is not None:
                self.active.executor.renew_parameters(self.updater.names.values())
            if read or (shown and self.truth.host.low):  # whose states have the parameters themselves
                self.active.executor.renew_states()

    @alone
    @outside_inference
    def bring_home(self) -> None:
        """Copy everything back to the host and free it on the device."""
        self.process.check()
        if self.active is not None:
            with self.whole():
                self.active.executor.unload()
            self.active = None
        self.truth.came_home()
