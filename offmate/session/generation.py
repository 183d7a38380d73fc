"""Text generation of a compiled model on the device, inside its budget."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.fake import faked
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.modules import buffers_of
from ..sizes import format_bytes
from .streaming import Held, ReadElsewhere, Streamed, bytes_of, units_of

log = logging.getLogger("offmate")

_SLACK = 1 / 20  # of an accelerator's budget: what its allocator rounds up, and kernels' workspaces


@dataclass(frozen=True)
class _Asked:
    """What a call of generate() asks for: sequences at once, and tokens of each, the prompt included."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class _Fit:
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


class _Elsewhere(Exception):
    """Generation cannot run on the device; the message says why."""


def generated(session: Any, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a plain model's `generate` returns, from the session's device, or from the host if it must be there.

    Tensors are returned where those of the prompt are.
    """
    try:
        with _on_device(session, model, args, kwargs) as (there, there_by_name):
            result = model.generate(*there, **there_by_name)  # type: ignore[operator]
            given = (leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            return result.to(next(given))
    except _Elsewhere as reason:
        session.say_once(f"generate() runs on the host, as plain PyTorch does: {reason}")
    return model.generate(*args, **kwargs)  # type: ignore[operator]


@contextlib.contextmanager
def _on_device(session: Any, model: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Let a plain model generate on the session's device inside the body; yield the arguments, which are there, too.

    Raises: _Elsewhere, before the body, if it cannot: an iteration is under way, the budget is too small, or what the
    call needs cannot be counted.
    """
    residence = session.residence
    if residence.turns.iteration is not None or residence.turns.micro_batches:
        raise _Elsewhere("an iteration is under way, and its tensors are on the device")
    device = residence.device
    found = _fit(model, session.request.budget_bytes, _asked(model, args, kwargs), device.torch_device)
    residence.bring_home()
    if device.arena is not None:
        device.arena.take(0)
    session.say_once(_said(found, residence))
    ledger = device.ledger
    with residence.lock, residence.stream.entered():
        ledger.made(found.working_bytes)
        try:
            with Streamed(model, device, found.stays):
                yield pytree.tree_map(lambda leaf: _there(leaf, device), (args, kwargs))
        finally:
            ledger.freed(found.working_bytes)


def _asked(model: torch.nn.Module, args: Any, kwargs: Any) -> _Asked:
    """Return what a call of generate() asks for.

    Raises: _Elsewhere if it cannot be told, or if the call keeps more than tokens.
    """
    config = getattr(model, "config", None)
    own = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    if own is None or getattr(config, "is_encoder_decoder", True):
        raise _Elsewhere("the model is not a decoder of transformers")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise _Elsewhere("the prompt is not a matrix of token ids")
    others = {"assistant_model", "past_key_values", "inputs_embeds", "custom_generate", "cache_implementation"}
    if given := sorted(name for name in others & kwargs.keys() if kwargs[name] is not None):
        raise _Elsewhere(f"it is called with {', '.join(given)}")

    def setting(name: str, default: int) -> int:
        value = kwargs.get(name, getattr(own, name, None))
        return default if value is None else int(value)

    if setting("return_dict_in_generate", 0):
        raise _Elsewhere("it is called with return_dict_in_generate, which keeps the cache")
    prompt = ids.shape[1]
    new = kwargs.get("max_new_tokens", getattr(own, "max_new_tokens", None))
    tokens = prompt + int(new) if new is not None else max(prompt + 1, setting("max_length", prompt + 20))
    copies = max(setting("num_beams", 1), setting("num_return_sequences", 1))
    return _Asked(ids.shape[0] * copies, tokens)


def _fit(model: torch.nn.Module, budget_bytes: int, wanted: _Asked, device: torch.device) -> _Fit:
    """Let parameters stay, in the order in which they are registered, while there is room for the others to pass."""
    working, elsewhere = _rehearsed(model, wanted)
    units = units_of(model)
    known = {id(param): param.nbytes for unit in units for param in unit.params.values()}
    total = sum(known.values())
    room = budget_bytes - working - (0 if device.type == "cpu" else int(_SLACK * budget_bytes))
    if total <= room:
        return _Fit(frozenset(known), total, 0, working)
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
        raise _Elsewhere(
            f"{wanted.tokens:,} tokens with the two largest layers need {format_bytes(least)}, and the budget is "
            f"{format_bytes(budget_bytes)}; ask for fewer tokens, or compile with a larger budget"
        )
    for unit in units:
        new = {id(param) for param in unit.params.values()} - stays
        size = sum(known[key] for key in new)
        if size <= left:
            stays |= new
            left -= size
    streamed = sum(param.nbytes for unit in units for param in unit.params.values() if id(param) not in stays)
    return _Fit(frozenset(stays), sum(known[key] for key in stays), streamed, working)


def _rehearsed(model: torch.nn.Module, wanted: _Asked) -> tuple[int, set[tuple[torch.nn.Module, str]]]:
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
        raise _Elsewhere(f"what it needs cannot be counted ({type(error).__name__}: {str(error)[:200]})") from error
    return sum(buffers.values()) + held.peak_bytes, elsewhere.found


def _said(found: _Fit, residence: Any) -> str:
    total = found.stays_bytes + found.streamed_bytes
    if not found.streamed_bytes:
        return f"generate() runs on the device; all {format_bytes(total)} of parameters stay there"
    rate = residence.preparer.plan.problem.rates.in_bytes_per_s if residence.preparer.plan is not None else 0
    least = f", at least {found.streamed_bytes / rate:.3g} s" if rate else ""
    return (
        f"generate() runs on the device; {format_bytes(found.stays_bytes)} of parameters stay there, and "
        f"{format_bytes(found.streamed_bytes)} are copied to it for every token{least}"
    )


def _there(leaf: Any, device: Any) -> Any:
    return device.bring(leaf) if isinstance(leaf, torch.Tensor) else leaf
