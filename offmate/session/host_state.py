"""A compiled model's parameters, buffers and optimizer states on the host, and whether they are current."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..capture.checks import check_overlaps
from ..errors import OffmateError, ProtocolError
from ..guards.watch import Watch
from ..optim.updater import Updater
from ..runtime.devices.device import Device
from ..runtime.replay.binding import HostState
from ..runtime.torch_names.autograd import without_torch_function
from ..runtime.torch_names.tensors import version_of
from .copies import Copies
from .low_copies import LowCopies
from .parameters import WrittenBuffer
from .published import Published

log = logging.getLogger("offmate")

_TENSOR: Any = torch.Tensor
_data = _TENSOR.data.__get__  # bypasses the `data` of a parameter's own class


def _same_memory(buffer: torch.Tensor, own: torch.Tensor | None) -> bool:
    with without_torch_function():
        return own is not None and (buffer.data_ptr(), buffer.dtype, buffer.shape, buffer.stride()) == (
            own.data_ptr(), own.dtype, own.shape, own.stride(),
        )  # fmt: skip


class Truth:
    """The state of a model on the host.

    State: `host`; `states`, the optimizer's states as the user sees them; `_late`, the parameters whose states were
    changed while newer ones were under way; `current`, whether nothing newer is on the device or under way; `shown`,
    whether the user was shown parameters, and may have written as no version reveals; `torn`, the tensors that a
    failure left one update ahead of the others or, if `lost`, behind them; the last seen versions of all parameters,
    which reveal the user's edits; `copies`, which float32 copies may have to follow them; `low`, copies of parameters
    in a lower precision; which parameters are trained.
    Changed on the training thread, `host` also by the executor and its workers.

    Parameters
    ----------
    model, updater: the owners of the tensors; no updater if the user's code updates. watch: lists the model's
        parameters. in_files: whether states may lie in files.
    """

    def __init__(self, model: torch.nn.Module, updater: Updater | None, watch: Watch, in_files: bool = False) -> None:
        self._model = weakref.ref(model)
        self._updater, self._watch = updater, watch
        self.host = HostState(
            params={n: _data(p) for n, p in watch.parameters},
            buffers=dict(model.named_buffers(remove_duplicate=False)),
        )
        self.current, self.shown = True, False
        self.torn: tuple[str, ...] = ()
        self.lost = False
        self._not_reloaded: set[str] = set()
        self._trains = {n: p.requires_grad for n, p in watch.parameters}
        self._versions: dict[str, tuple[int, int]] = {}
        self.states = Published(updater, self.host, in_files) if updater is not None else None
        self._late: tuple[str, ...] = ()
        written = () if self.states is None else self.states.with_written_copies()
        self.copies = Copies(updater, self.host, written)
        self.low = LowCopies(self.host)
        self.accept()

    # -- the user's edits ---------------------------------------------------------------------------------------------

    def edited(self) -> tuple[str, ...]:
        """Return the parameters that the user has written into or replaced since the last `accept`."""
        now = self._now()
        return tuple(n for n in now if now[n] != self._versions.get(n))

    def frozen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return those that are not trained; if the user's code updates, the others are sent anew every iteration."""
        return tuple(n for n in names if not self._trains.get(n))

    def trained(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return those that are trained; an edit of another one is used from the next forward on."""
        return tuple(n for n in names if self._trains.get(n))

    def accept(self) -> None:
        """Accept the present values of the parameters as the user's intention."""
        self._versions = self._now()

    def _now(self) -> dict[str, tuple[int, int]]:
        with without_torch_function():
            return {n: (version_of(p), p.data_ptr()) for n, p in self._named()}

    def _named(self) -> tuple[tuple[str, torch.nn.Parameter], ...]:
        return self._watch.parameters

    def check_edits(self) -> tuple[str, ...]:
        """Return the parameters that were edited; refuse edits of values that were not the newest.

        Raises: ProtocolError if the newest value of an edited parameter was on the device or under way.
        """
        edited = self.edited()
        moving = self.trained(edited)
        if moving and not self.current:
            self.accept()
            raise ProtocolError(
                f"{moving[0]} was edited through an older reference to its memory while its newest value was on the "
                "device or being computed, so the edit is lost or mixed with an update. Set the parameter again, and "
                "call model.offmate.sync() before you edit through an older reference"
            )
        return edited

    def adopt_tensors(self) -> None:
        """Adopt the new memory of parameters and buffers that the user has replaced.

        Raises: ProtocolError if a parameter has become one that the plan is not for. OffmateError if two share memory.
        """
        with without_torch_function():
            if any(param.data_ptr() != self.host.whole(name).data_ptr() for name, param in self._named()):
                model = self._model()
                assert model is not None
                check_overlaps(model)
            for name, param in self._named():
                self._adopt(name, param)
        self.adopt_buffers()

    def adopt_buffers(self) -> None:
        """Adopt the buffers that the user has replaced."""
        model = self._model()
        assert model is not None
        with without_torch_function():
            # Buffers that notice reads are held as plain tensors on the same memory, with the same version.
            self.host.buffers.update(
                (n, b.detach() if isinstance(b, WrittenBuffer) else b)
                for n, b in model.named_buffers(remove_duplicate=False)
            )

    def replaced_buffers(self) -> list[str]:
        """Return the buffers that the user has replaced, or given other memory, since they were adopted."""
        model = self._model()
        assert model is not None
        with without_torch_function():
            named = dict(model.named_buffers(remove_duplicate=False))
        return [name for name, buffer in named.items() if not _same_memory(buffer, self.host.buffers.get(name))]

    def has_other_parameters(self, trains: bool) -> bool:
        """Return whether parameters were added, removed or renamed or, if a call `trains`, others are trained now."""
        with without_torch_function():
            now = {n: p.requires_grad for n, p in self._named()}
            held = self._updater.names if self._updater is not None else {}
            renamed = any(held.get(p, n) != n for n, p in self._named())
        return renamed or now.keys() != self._trains.keys() or (trains and now != self._trains)

    def follow(self) -> None:
        """Adopt the model's present parameters: their names, and which are trained. Nothing may be under way.

        Raises: ProtocolError if one is trained that the planned optimizer does not hold.
        """
        with without_torch_function():
            named = dict(self._named())
            self.low.forget()
            if self._updater is not None:
                self._check_held(named)
                self._rename({param: name for name, param in named.items()})
            self.host.params = {n: _data(p) for n, p in named.items()}
            self._trains = {n: p.requires_grad for n, p in named.items()}
        self.host.updates.clear()
        self.copies.doubt_all()
        self.accept()

    def _rename(self, now: dict[torch.Tensor, str]) -> None:
        """Rename the optimizer's parameters as the model does now; one that was removed keeps its name."""
        assert self._updater is not None and self.states is not None
        names = self._updater.names
        renamed = {old: now[param] for param, old in names.items() if now.get(param, old) != old}
        if renamed:
            names.update({param: now.get(param, old) for param, old in names.items()})
            self.host.states = {renamed.get(old, old): state for old, state in self.host.states.items()}
            self.states.adopt_all()
        self._updater.snapshot()

    def _check_held(self, named: dict[str, torch.nn.Parameter]) -> None:
        assert self._updater is not None
        missing = [n for n, p in named.items() if p.requires_grad and p not in self._updater.names]
        if missing:
            raise ProtocolError(
                f"{missing[0]} requires a gradient since offmate.compile ({len(missing)} parameters), but is not in "
                "the planned optimizer. Before compiling, build the optimizer with all parameters that you will train, "
                "including those still frozen; or freeze it with requires_grad_(False)"
            )

    def _adopt(self, name: str, param: torch.nn.Parameter) -> None:
        own = self.host.whole(name)
        if self._updater is not None and param.requires_grad and param not in self._updater.names:
            raise ProtocolError(
                f"{name} was replaced by another parameter, which is not in the optimizer; copy into the old one, or "
                "load with load_state_dict(assign=False)"
            )
        if param.data_ptr() == own.data_ptr() and param.dtype == own.dtype and param.shape == own.shape:
            return
        before = (own.dtype, tuple(own.shape), own.stride(), own.device.type)
        after = (param.dtype, tuple(param.shape), param.stride(), _data(param).device.type)  # not where it is used
        if before != after:
            raise ProtocolError(
                f"{name} changed from {before} to {after} (dtype, shape, strides, device) after offmate.compile; the "
                "plan counts its bytes. Convert the model first, then compile it"
            )
        self.low.move(name, _data(param))

    def pin(self, device: Device, but: Collection[str] = ()) -> None:
        """Move parameters, one after another, into host memory from which copies run concurrently with compute.

        Parameters that share memory stay where they are. Those that are mapped from a file share no more than that.
        Those in files of the store stay there.

        Parameters
        ----------
        but: those that stay as they are.
        """
        if device.torch_device.type == "cpu":
            return
        with without_torch_function(), torch.no_grad():
            owners = Counter(p.untyped_storage().data_ptr() for _, p in self._named())
            for name, param in self._named():
                alone = name in self.host.files or owners[param.untyped_storage().data_ptr()] == 1
                if alone and name not in but and not self.host.stores(name):
                    self._move(name, param, device.pinned(param.data))
        self.accept()

    def move(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give parameters other memory, which has their values."""
        with without_torch_function(), torch.no_grad():
            for name, param in self._named() if tensors else ():
                if name in tensors:
                    self._move(name, param, tensors[name])
        self.accept()

    def _move(self, name: str, param: torch.nn.Parameter, own: torch.Tensor) -> None:
        param.data = own
        self.low.move(name, param.data)

    # -- optimizer states ---------------------------------------------------------------------------------------------

    def came_home(self) -> None:
        """Note that the host now holds the newest values of everything."""
        if self.states is None:
            self.current = True
            return
        if not self.current:
            self._late = self.states.changed()
        self.current = True
        self.states.show()
        if self.states.handed_out and self.host.in_store:
            self.states.read = True  # whoever holds tensors of states may write into them from now on
            self._may_be_written()

    def show_states(self) -> None:
        """Show the optimizer's states where they are now."""
        if self.states is not None:
            self.states.show()

    def take_states(self) -> tuple[str, ...]:
        """Adopt the user's changes of the optimizer's states, and return the parameters whose states they are.

        Raises: ProtocolError if newer ones were on the device or under way when the user wrote, or if a new tensor has
            another size than the plan counts.
        """
        changed = self.states.changed() if self.states is not None else ()
        if not changed:
            return ()
        assert self.states is not None
        late, self._late = changed if not self.current else self._late, ()
        if late:
            self.states.refuse(late)
            raise ProtocolError(
                f"the optimizer's state of {late[0]} was changed through an older reference while its newest values "
                "were on the device or being computed, so the change is lost or mixed with an update. Read "
                "optimizer.state again and change what it shows, or call model.offmate.sync() before you write through "
                "an older reference"
            )
        wrong = self.states.uncounted(changed)
        if wrong:
            self.states.refuse(tuple(wrong))
            name, what = next(iter(wrong.items()))
            raise ProtocolError(
                f"in the optimizer's state of {name} {what}, but the plan counts the bytes of states. Write into the "
                "tensor instead, or clear the state; this state was restored"
            )
        try:
            self.states.check_taken()
        except ProtocolError:
            self.states.refuse(changed)
            raise
        for name in changed:
            self.host.states_written(name)
        written, replaced = self.states.changed_copies(changed)
        self.copies.note_states(written, replaced)
        self.states.adopt(changed)
        return changed

    def take_shown(self) -> bool:
        """Return whether the user was shown parameters since the last call; the device's copies may then be old."""
        if not (self.current and self.shown):
            return False
        self.shown = False
        self._parameters_may_be_written()
        return True

    def take_reads(self) -> bool:
        """Return whether the user has read the optimizer's states since the last call; the device's may then be old."""
        if self.states is None or not self.states.read or not self.current:
            return False
        self.states.read = False
        self._may_be_written()
        return True

    def note_writes(self) -> None:
        """Note that whoever has read states or parameters may have written into those that lie in files."""
        self._parameters_may_be_written()
        if self.states is not None and (self.states.read or self.states.handed_out):
            self._may_be_written()

    def _may_be_written(self) -> None:
        for name in self.host.in_store:
            self.host.states_written(name)

    def _parameters_may_be_written(self) -> None:
        """Let no checksum stand in the way of what numpy, for example, has written, which no version reveals."""
        if self.host.store is not None:
            self.host.written(self.host.params.values())

    def adopt_states(self) -> None:
        """Adopt the optimizer's states as the current ones."""
        if self.states is not None:
            self.states.adopt_all()
            self._may_be_written()
            self._late = ()
            self.copies.loaded()

    # -- after a failure ----------------------------------------------------------------------------------------------

    def note_torn(self, updated: set[str]) -> None:
        """Find out whether all parameters have had the same number of updates.

        Parameters
        ----------
        updated: names of the parameters that every iteration updates.
        """
        counts = {n: self.host.updates.get(n, 0) for n in updated}
        most = max(counts.values(), default=0)
        ahead = tuple(sorted(n for n, count in counts.items() if count == most))
        if len(ahead) < len(counts):
            self._tear(ahead, False)

    def note_lost(self, names: frozenset[str]) -> None:
        """Note that the newest values of these tensors were lost with the device or a disk."""
        self._tear(tuple(sorted(names)), True)

    def _tear(self, names: tuple[str, ...], lost: bool) -> None:
        self.torn, self.lost = names, lost
        self._not_reloaded = {"model", "optimizer"} if self._updater is not None else {"model"}

    def reloaded(self, what: str) -> None:
        """Note that the user has loaded a state of `what`, "model" or "optimizer"; both make the state whole again."""
        self._not_reloaded.discard(what)
        if not self._not_reloaded:
            self.torn, self.lost = (), False
            self.host.updates.clear()

    def check_whole(self) -> None:
        """Raise OffmateError if a failure has left tensors at different updates, so that training cannot continue."""
        if self.torn:
            raise OffmateError(
                f"after an earlier failure, {self.torn_words()}. Load a checkpoint into the model and the optimizer "
                "before you continue. To continue from this state anyway, load it again: "
                "model.load_state_dict(model.state_dict()), optimizer.load_state_dict(optimizer.state_dict())"
            )

    def torn_words(self) -> str:
        """Describe what is torn, for a message."""
        names = ", ".join(self.torn[:8]) + (", ..." if len(self.torn) > 8 else "")
        if self.lost:
            return (
                f"the newest values of {len(self.torn)} tensors were lost with the device, or the disk, that had them, "
                f"and their values now are from earlier updates than the others: {names}"
            )
        return f"{len(self.torn)} parameters are one update ahead of the others: {names}"

    def warn_if_torn(self) -> None:
        """Warn the reader of a state_dict if its tensors belong to different updates."""
        if self.torn:
            log.warning("state_dict() after a failure: %s", self.torn_words())
