"""How a model generates inside a budget: which parameters stay on the device, and what is copied for every token."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.fake import faked
from ..runtime.torch_names.modules import buffers_of
from ..sizes import format_bytes
from .streaming import Held, ReadElsewhere, bytes_of, units_of

_SLACK = 1 / 20  # of an accelerator's budget: what its allocator rounds up, and kernels' workspaces


@dataclass(frozen=True)
class Asked:
    """What a call of generate() asks for: sequences at once, and tokens of each, the prompt included."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class Fit:
    """How a model generates inside a budget.

    Parameters
    ----------
    stays: ids of the parameters that stay on the device. stays_bytes: their bytes. streamed_bytes: of those that cross
        the link for every token. working_bytes: of the cache and the activations at the last token, and of buffers.
    """

    stays: frozenset[int]
    stays_bytes: int
    streamed_bytes: int
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.stays_bytes + self.streamed_bytes

    def least_token_s(self, in_bytes_per_s: float, memory_bytes_per_s: float, *, shared_cores: bool = False) -> float:
        """Return the seconds that a token takes at the least.

        Parameters
        ----------
        in_bytes_per_s: of copies to the device. memory_bytes_per_s: of the device's memory, which holds every parameter
            that a token reads. shared_cores: copies and compute cannot overlap.
        """
        copies_s, reads_s = self.streamed_bytes / in_bytes_per_s, self.total_bytes / memory_bytes_per_s
        return copies_s + reads_s if shared_cores else max(copies_s, reads_s)


class Elsewhere(Exception):
    """Generation cannot run on the device; the message says why."""


def fit(model: torch.nn.Module, budget_bytes: int, wanted: Asked, *, emulated: bool) -> Fit:
    """Let parameters stay, in the order in which they are registered, while there is room for the others to pass.

    Parameters
    ----------
    model: may be on the meta device. emulated: the device is this CPU, whose memory is counted to the byte.

    Raises: Elsewhere if even two layers at a time have no room, or if what the model needs cannot be counted.
    """
    working, elsewhere = _rehearsed(model, wanted)
    units = units_of(model)
    known = {id(param): param.nbytes for unit in units for param in unit.params.values()}
    total = sum(known.values())
    room = budget_bytes - working - (0 if emulated else int(_SLACK * budget_bytes))
    if total <= room:
        return Fit(frozenset(known), total, 0, working)
    stays = {
        id(param)
        for unit in units
        for name, param in unit.params.items()
        if unit.has_parts or (unit.module, name) in elsewhere
    }
    # Two at a time: one computes while the next one comes.
    passing = sum(sorted((bytes_of(unit.params) for unit in units if not unit.has_parts), reverse=True)[:2])
    left = room - passing - sum(known[key] for key in stays)
    if left < 0:
        least = budget_bytes - left
        raise Elsewhere(
            f"{wanted.tokens:,} tokens with the two largest layers need {format_bytes(least)}, but the budget is "
            f"{format_bytes(budget_bytes)}; ask for fewer tokens, or compile with a larger budget"
        )
    for unit in units:
        new = {id(param) for param in unit.params.values()} - stays
        size = sum(known[key] for key in new)
        if size <= left:
            stays |= new
            left -= size
    streamed = sum(param.nbytes for unit in units for param in unit.params.values() if id(param) not in stays)
    return Fit(frozenset(stays), sum(known[key] for key in stays), streamed, working)


def _rehearsed(model: torch.nn.Module, wanted: Asked) -> tuple[int, set[tuple[torch.nn.Module, str]]]:
    """Run a forward of all tokens without memory.

    Returns: the most bytes that buffers, cache and activations take; and the parameters that are read while their
    module does not run, by module and name.
    """
    buffers = {id(b): b.nbytes for module in model.modules() for b in buffers_of(module).values() if b is not None}
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    try:
        with faked(model) as mode, torch.no_grad(), mode:
            ids = torch.zeros(wanted.sequences, wanted.tokens, dtype=torch.long)
            elsewhere = ReadElsewhere(model)
            with Held(ids, reads=elsewhere.read) as held, elsewhere.watching():
                output = model(ids, **options)
        del output
    except Exception as error:
        raise Elsewhere(f"its memory cannot be predicted ({type(error).__name__}: {str(error)[:200]})") from error
    return sum(buffers.values()) + held.peak_bytes, elsewhere.found
