"""Text generation of a compiled model on the device, inside its budget."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..runtime.torch_names import trees as pytree
from ..sizes import format_bytes
from .generation_fit import Asked, Elsewhere, Fit, fit
from .streaming import Streamed

log = logging.getLogger("offmate")


def generated(session: Any, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a plain model's `generate` returns, from the session's device, or from the host if it must be there.

    Tensors are returned where those of the prompt are.
    """
    try:
        with _on_device(session, model, args, kwargs) as (there, there_by_name):
            result = model.generate(*there, **there_by_name)  # type: ignore[operator]
            given = (leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            return result.to(next(given))
    except Elsewhere as reason:
        session.say_once(f"generate() runs on the CPU, as plain PyTorch does: {reason}")
    return model.generate(*args, **kwargs)  # type: ignore[operator]


@contextlib.contextmanager
def _on_device(session: Any, model: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Let a plain model generate on the session's device inside the body; yield the arguments, which are there, too.

    Raises: Elsewhere, before the body, if it cannot: an iteration is under way, the budget is too small, or what the
    call needs cannot be counted.
    """
    residence = session.residence
    if residence.turns.iteration is not None or residence.turns.micro_batches:
        raise Elsewhere("an iteration is under way, and its tensors are on the device")
    device = residence.device
    emulated = device.torch_device.type == "cpu"
    found = fit(model, session.request.budget_bytes, _asked(model, args, kwargs), emulated=emulated)
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


def _asked(model: torch.nn.Module, args: Any, kwargs: Any) -> Asked:
    """Return what a call of generate() asks for.

    Raises: Elsewhere if it cannot be told, or if the call keeps more than tokens.
    """
    config = getattr(model, "config", None)
    own = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    if own is None or getattr(config, "is_encoder_decoder", True):
        raise Elsewhere("the model is not a decoder of transformers")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise Elsewhere("the prompt is not a matrix of token ids")
    others = {"assistant_model", "past_key_values", "inputs_embeds", "custom_generate", "cache_implementation"}
    if given := sorted(name for name in others & kwargs.keys() if kwargs[name] is not None):
        raise Elsewhere(f"it is called with {', '.join(given)}")

    def setting(name: str, default: int) -> int:
        value = kwargs.get(name, getattr(own, name, None))
        return default if value is None else int(value)

    if setting("return_dict_in_generate", 0):
        raise Elsewhere("it is called with return_dict_in_generate, which keeps the cache")
    prompt = ids.shape[1]
    new = kwargs.get("max_new_tokens", getattr(own, "max_new_tokens", None))
    tokens = prompt + int(new) if new is not None else max(prompt + 1, setting("max_length", prompt + 20))
    copies = max(setting("num_beams", 1), setting("num_return_sequences", 1))
    return Asked(ids.shape[0] * copies, tokens)


def _said(found: Fit, residence: Any) -> str:
    if not found.streamed_bytes:
        return f"generate() runs on the device; all {format_bytes(found.total_bytes)} of parameters stay there"
    plan = residence.preparer.plan
    least_s = found.least_token_s(plan.problem.rates.in_bytes_per_s, math.inf) if plan is not None else 0.0
    least = f", at least {least_s:.3g} s" if least_s else ""
    return (
        f"generate() runs on the device; {format_bytes(found.stays_bytes)} of parameters stay there, and "
        f"{format_bytes(found.streamed_bytes)} are copied to it for every token{least}"
    )


def _there(leaf: Any, device: Any) -> Any:
    return device.bring(leaf) if isinstance(leaf, torch.Tensor) else leaf
