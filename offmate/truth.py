"""A compiled model's parameters, buffers and optimizer states on the host, and whether they are current."""

from __future__ import annotations

import logging
import weakref
from collections import Counter

import torch

from .errors import ProtocolError
from .optimizer import Updater
from .runtime.binding import HostState
from .runtime.device import Device

log = logging.getLogger("offmate")


class Truth:
    """What the host knows of a model.

    State: `host`; `current`, whether nothing newer is on the device or under way; `torn`, the tensors that a failure
    left one update ahead of the others or, if `lost`, behind them; the versions of all parameters as last seen, which
    tell the user's edits. Changed on the training thread, `host` also by the executor and its workers.

    Parameters
    ----------
    model, updater: whose tensors these are; no updater if the user's code updates.
    """

    def __init__(self, model: torch.nn.Module, updater: Updater | None) -> None:
        self._model = weakref.ref(model)
        self._updater = updater
        self.host = HostState(
            params={n: p.data for n, p in model.named_parameters()},
            buffers=dict(model.named_buffers(remove_duplicate=False)),
        )
        self.current = True
        self.torn: tuple[str, ...] = ()
        self.lost = False
        self._not_reloaded: set[str] = set()
        self._trains = {n: p.requires_grad for n, p in model.named_parameters()}
        self._versions: dict[str, tuple[int, int]] = {}
        self.adopt_states()
        self.accept()

    # -- the user's edits ---------------------------------------------------------------------------------------------

    def edited(self) -> tuple[str, ...]:
        """Parameters that the user has written into or replaced since the last `accept`."""
        now = self._now()
        return tuple(n for n in now if now[n] != self._versions.get(n))

    def frozen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those that no optimizer changes; where the user's code updates, the others are sent anew every iteration."""
        return tuple(n for n in names if not self._trains[n])

    def accept(self) -> None:
        """Take the parameters as they are now for what the user wants."""
        self._versions = self._now()

    def _now(self) -> dict[str, tuple[int, int]]:
        with torch._C.DisableTorchFunctionSubclass():
            return {n: (p._version, p.data_ptr()) for n, p in self._named()}

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        model = self._model()
        # Parameters and optimizers that outlive their model are read all the same.
        return [] if model is None else list(model.named_parameters())

    def check_edits(self) -> tuple[str, ...]:
        """The parameters that were edited; refuses edits of values that were not the newest.

        Raises: ProtocolError if the newest value of an edited parameter was on the device or under way.
        """
        edited = self.edited()
        if edited and not self.current:
            self.accept()
            raise ProtocolError(
                f"{edited[0]} was edited through an older reference to its memory while its newest value was on the "
                "device or being computed, so the edit is lost or mixed with an update; set the parameter again, and "
                "call model.offmate.sync() before editing through references that are kept"
            )
        return edited

    def adopt_tensors(self) -> None:
        """Follow the user's replacements of parameters' and buffers' memory.

        Raises: ProtocolError if the model no longer has the tensors that it was compiled with.
        """
        named = dict(self._named())
        with torch._C.DisableTorchFunctionSubclass():
            if named.keys() != self.host.params.keys():
                changed = sorted(named.keys() ^ self.host.params.keys())
                raise ProtocolError(
                    f"parameters were added or removed after offmate.compile ({changed[0]}, {len(changed)} in all); "
                    "change the model first, then build the optimizer, then compile"
                )
            for name, param in named.items():
                self._adopt(name, param)
        model = self._model()
        assert model is not None
        self.host.buffers.update(model.named_buffers(remove_duplicate=False))

    def _adopt(self, name: str, param: torch.nn.Parameter) -> None:
        own = self.host.params[name]
        if param.data_ptr() == own.data_ptr() and param.dtype == own.dtype and param.shape == own.shape:
            return
        before = (own.dtype, tuple(own.shape), own.stride(), own.device.type)
        after = (param.dtype, tuple(param.shape), param.stride(), param.device.type)
        if before != after:
            raise ProtocolError(
                f"{name} changed from {before} to {after} (dtype, shape, strides, device) after offmate.compile; the "
                "plan counts its bytes. Convert the model first, then compile it"
            )
        if self._updater is not None and param not in self._updater.names:
            raise ProtocolError(
                f"{name} was replaced by another parameter, which the optimizer does not hold; copy into the old one, "
                "or load with load_state_dict(assign=False)"
            )
        self.host.params[name] = param.data

    def pin(self, device: Device) -> None:
        """Move parameters, one after another, into host memory from which copies run beside compute.

        Parameters that share memory stay where they are.
        """
        if device.torch_device.type == "cpu":
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            owners = Counter(p.untyped_storage().data_ptr() for _, p in self._named())
            for name, param in self._named():
                if owners[param.untyped_storage().data_ptr()] == 1:
                    param.data = device.pinned(param.data)
                    self.host.params[name] = param.data
        self.accept()

    def check_trained(self) -> None:
        """Raise ProtocolError if parameters were frozen or unfrozen since the model was compiled."""
        with torch._C.DisableTorchFunctionSubclass():
            changed = [n for n, p in self._named() if p.requires_grad != self._trains.get(n, p.requires_grad)]
        if changed:
            raise ProtocolError(
                f"requires_grad of {changed[0]} became {not self._trains[changed[0]]} after offmate.compile "
                f"({len(changed)} parameters changed); freeze first, then compile"
            )

    # -- optimizer states ---------------------------------------------------------------------------------------------

    def publish_states(self) -> None:
        """Show the optimizer the states that the plan keeps."""
        if self._updater is None:
            return
        for param, name in self._updater.names.items():
            if self.host.states.get(name):
                self._updater.optimizer.state[param] = self.host.states[name]

    def adopt_states(self) -> None:
        """Take the optimizer's states as the truth."""
        if self._updater is None:
            return
        for param, name in self._updater.names.items():
            self.host.states[name] = dict(self._updater.optimizer.state.get(param, {}))

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
        """The device is gone with the newest values of these tensors."""
        self._tear(tuple(sorted(names)), True)

    def _tear(self, names: tuple[str, ...], lost: bool) -> None:
        self.torn, self.lost = names, lost
        self._not_reloaded = {"model", "optimizer"} if self._updater is not None else {"model"}

    def reloaded(self, what: str) -> None:
        """The user has loaded a state of `what`, "model" or "optimizer"; both make the state whole again."""
        self._not_reloaded.discard(what)
        if not self._not_reloaded:
            self.torn, self.lost = (), False
            self.host.updates.clear()

    def torn_words(self) -> str:
        """What is torn, for a message."""
        names = ", ".join(self.torn[:8]) + (", ..." if len(self.torn) > 8 else "")
        if self.lost:
            return (
                f"the newest values of {len(self.torn)} tensors were lost with the device, and the host's are of "
                f"earlier updates than the others: {names}"
            )
        return f"{len(self.torn)} parameters are one update ahead of the others: {names}"

    def warn_if_torn(self) -> None:
        """Tell the reader of a state_dict if it is of several updates."""
        if self.torn:
            log.warning("state_dict() after a failure: %s", self.torn_words())
