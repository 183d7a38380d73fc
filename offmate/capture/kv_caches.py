"""Caches of keys, values and states: training never reads them, and a plan cannot return them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch

from ..transformers_names import ATTENTION
from .captured import Captured
from .plain import forward_replaced

_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate")
_KINDS = ("layer_types", "layers_block_type")
_KEEPS_KEYS_AND_VALUES = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
_CACHES = ("past_key_values", "cache_params")
_FUSED = torch.ops.aten.scaled_dot_product_attention.default

_switched_off: WeakSet[torch.nn.Module] = WeakSet()  # models whose last call was given no cache here
_kept_on: WeakSet[torch.nn.Module] = WeakSet()  # models whose graph has shown that the cache affects its numbers


def has_cache(model: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a call with these arguments would make a cache."""
    return bool(getattr(getattr(model, "config", None), "use_cache", False)) and kwargs.get("use_cache") is not False


def without_cache(model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with which the model makes no cache, unless the cache affects its numbers.

    A cache copies keys and values. Attention with dropout, and attn_implementation="eager", run by the plain formula,
    in which the rounding of products depends on the layout of their inputs. There the cache stays on, with dropout in
    training only, and only the output is dropped. Layers that keep a state compute by another formula if they have a
    cache. There it stays on, too.
    """
    _switched_off.discard(model)
    plainly = model in _kept_on or _attends_plainly(model) or (model.training and _drops_attention(model))
    if not has_cache(model, kwargs) or plainly or _keeps_states(model):
        return kwargs
    _switched_off.add(model)
    return {**kwargs, "use_cache": False}


def with_cache_if_needed(model: torch.nn.Module, captured: Captured, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return arguments to capture a training forward with again, whose graph shows that the cache affects its numbers.

    Kernels that fuse attention take no mask that needs a gradient, so the plain formula runs. From now on,
    `without_cache` leaves this model's cache on.

    Parameters
    ----------
    captured: the forward with these arguments, which `without_cache` returned.

    Returns: None if the capture is right.
    """
    if model not in _switched_off or not any(map(captured.trains, _masks(captured))):
        return None
    _kept_on.add(model)
    return {**kwargs, "use_cache": True}


def _masks(captured: Captured) -> Iterator[str]:
    for node in captured.graph.nodes:
        if node.target is _FUSED:
            mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
            if mask is not None:
                yield mask.name


def _drops_attention(model: torch.nn.Module) -> bool:
    config = getattr(model, "config", None)
    return any((getattr(config, name, 0) or 0) > 0 for name in _ATTENTION_DROPOUT)


def _attends_plainly(model: torch.nn.Module) -> bool:
    """Return whether attention runs by its plain formula in some part of a model."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return any(getattr(config, ATTENTION, None) == "eager" for config in configs)


def _keeps_states(model: torch.nn.Module) -> bool:
    """Return whether some layer's cache holds more than keys and values, such as the state of a state-space model."""
    config = getattr(model, "config", None)
    kinds = {kind for name in _KINDS for kind in getattr(config, name, None) or ()}
    return not kinds <= _KEEPS_KEYS_AND_VALUES


@contextlib.contextmanager
def caches_dropped(model: torch.nn.Module) -> Iterator[None]:
    """Leave caches out of the model's outputs for the body."""
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if isinstance(output, dict) and any(name in output for name in _CACHES):
            return type(output)(**{name: value for name, value in output.items() if name not in _CACHES})
        return output

    with forward_replaced(model, forward):
        yield
