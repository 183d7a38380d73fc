"""Norms of gradients: each is taken where its gradient becomes complete, while the values are at hand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch

from ...solver.compute_names import BACKWARD, parse
from ...solver.effects import effect
from ...solver.items import ItemKind
from ...solver.schedule import Kind, Schedule
from ..events import Event
from ..torch_names.operators import norms_of
from .world import World

_BEYOND_ROUNDING = 1 + 1e-3  # a sum of some squares this much above the limit is above it in any order and precision
# One thread takes the norm of a whole contiguous tensor of these; of others, such as float16, threads add up parts.
_OF_ONE_THREAD = (torch.float32, torch.float64, torch.bfloat16)


class Norms:
    """Takes the norms that clipping needs, after gradients of a scaled loss were unscaled.

    With one pass a gradient is complete when a block's backward has made it, on the device. With several, the
    total is complete after its last addition, on the device or in a worker of the host.

    State: `_found`, the norms of this iteration, each where its gradient was; `_taking`, whether the backward under way
    is the last; `_complete`, the parameters whose gradients it has completed so far; `_threads`, the number of threads
    that the training thread uses; `_copied`, norms on the device that are copied to the host, with the events of these
    copies; `_squares`, the sum of the squares of the norms that `exceed` has seen, and `_unseen`, the others on the
    host. A worker adds to `_found` what the event of its addition announces.

    Parameters
    ----------
    names: parameters whose norms are wanted; none without clipping.
    """

    def __init__(self, world: World, names: Iterable[str] = ()) -> None:
        self._device, self._watched = world.device, bool(world.schedule.log_cpu_s)
        self._lock = threading.Lock()  # of `_unseen` and `_squares`
        self._copied: list[tuple[Event, torch.Tensor]] = []
        self._unseen: list[tuple[Event | None, torch.Tensor]] = []
        self._squares = 0.0
        self._wanted, self._contents, self._host = frozenset(names), world.contents, world.host
        self._several = world.schedule.adds_up
        self._completed = _completed(world.schedule) if self._wanted or self._host.unscaling is not None else {}
        self._threads = torch.get_num_threads()
        self._found: dict[str, torch.Tensor] = {}
        self._taking = False
        self._complete: set[str] = set()

    def begin(self, *, last: bool) -> None:
        """Prepare for the backward of the last pass or of an earlier one."""
        self.clear()
        self._taking, self._threads = last, torch.get_num_threads()

    def of_block(self, index: int) -> None:
        """Take the gradients that a block's backward has completed, if they are whole already."""
        names = self._completed.get(index, ()) if self._taking else ()
        self._complete.update(names)
        if not self._several:
            self._take_complete({name: self._contents.grads[f"param:{name}"] for name in names})

    def of_total(self, name: str) -> None:
        """Take a total on the device, to which a gradient was added."""
        if self.completes(name):
            self._take_complete({name: self._contents.totals[name].read()})

    def completes(self, name: str) -> bool:
        """Return whether a gradient that leaves now completes a total that is to be taken.

        One of the pass before may leave in the last backward, until its block makes it again.
        """
        return name in self._complete

    def on_worker(self, name: str, total: torch.Tensor) -> None:
        """Take a total on the host, in a worker, but no norm of which the training thread would get other bits."""
        self._unscale({name: total})
        alike = total.is_contiguous() and total.dtype in _OF_ONE_THREAD
        if self._wanted and (alike or torch.get_num_threads() == self._threads):
            self.take({name: total})

    @property
    def awaited(self) -> tuple[Event, ...]:
        """The events after which a worker may take a total."""
        return self._host.unscaling.arrived if self._host.unscaling is not None else ()

    def _take_complete(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self._unscale(gradients)
        self.take({name: gradient for name, gradient in gradients.items() if name in self._wanted})

    def _unscale(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if self._host.unscaling is not None:
            self._host.unscaling.take(gradients)

    def take(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the norms of complete gradients, by parameter."""
        found = {name: (one.device, one.dtype, self._precision(name, one)) for name, one in gradients.items()}
        for kind in set(found.values()):
            own = {name: one for name, one in gradients.items() if found[name] == kind}
            norms = torch.stack(norms_of(list(own.values()), dtype=kind[-1]))
            self._found |= zip(own, norms.unbind())
            self._watch(norms)

    def _precision(self, name: str, gradient: torch.Tensor) -> torch.dtype | None:
        """Return the precision in which a norm is taken, its parameter's; None for the gradient's own."""
        return self._host.whole(name).dtype if self._host.is_low(name, gradient) else None

    def _watch(self, norms: torch.Tensor) -> None:
        if not self._watched:
            return
        home, event = norms, None
        if norms.device.type != "cpu":
            home = self._device.empty_host_like(norms)
            event = self._device.copy_out(home, norms, ())
            self._copied.append((event, norms))
        with self._lock:
            self._unseen.append((event, home))

    def exceed(self, max_norm: float) -> bool:
        """Return whether the norms known to the host make the global norm larger than this, beyond rounding."""
        with self._lock:
            arrived = [event is None or event.done() for event, _ in self._unseen]
            for there, (_, norms) in zip(arrived, self._unseen):
                self._squares += float(norms.double().square().sum()) if there else 0.0
            self._unseen = [one for there, one in zip(arrived, self._unseen) if not there]
            return not self._squares <= (max_norm * _BEYOND_ROUNDING) ** 2  # NaN exceeds everything

    def of(self, gradients: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms of all gradients; those that were not taken before are taken now.

        Parameters
        ----------
        gradients: by parameter, in the order of the result. All work that writes them has ended, or is launched.
        """
        if torch.get_num_threads() != self._threads:  # the user has changed it since; plain PyTorch would use it now
            self._found = {name: norm for name, norm in self._found.items() if norm.device.type != "cpu"}
        self.take({name: gradient for name, gradient in gradients.items() if name not in self._found})
        return [self._found[name] for name in gradients]

    def taken(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Return the norms that were taken as gradients became complete, in the order of these parameters."""
        return [self._found[name] for name in names if name in self._found]

    def clear(self) -> None:
        """Forget all norms, since gradients may change from now on, or the iteration is over."""
        self._found, self._taking, self._complete = {}, False, set()
        with self._lock:
            unseen, self._unseen, self._squares = self._unseen, [], 0.0
        for copied, _ in self._copied:
            copied.wait()  # what the copy reads on the device is let go now,
        for event, _ in unseen:
            if event is not None:
                event.synchronize()  # and what it writes on the host
        self._copied.clear()


def _completed(schedule: Schedule) -> dict[int, tuple[str, ...]]:
    """Return, by block, the parameters whose gradients its backward completes."""
    last: dict[str, int] = {}
    for action in schedule.backward:
        compute = parse(action.name) if action.kind is Kind.COMPUTE else None
        if compute is not None and compute.what == BACKWARD and compute.block is not None:
            made = [item for item in effect(action, schedule).writes if item.kind is ItemKind.GRADIENT]
            last |= {item.name: compute.block for item in made}
    found: dict[int, tuple[str, ...]] = {}
    for name, block in last.items():
        found[block] = (*found.get(block, ()), name)
    return found
