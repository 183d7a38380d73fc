"""Hashes by which plans and measurements are known again."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import replace
from typing import Any

import torch

from . import __version__
from .capture import Captured
from .config import Config
from .devices import accelerator, words
from .hardware import Hardware
from .optimizer import Updater
from .request import Request
from .traced import Traced, structure


def fingerprint_of(
    model: torch.nn.Module,
    traced: Traced,
    request: Request,
    updater: Updater | None,
    machine: Hardware | None,
    budgets: bool = True,
) -> str:
    """A hash of everything that the plan depends on, or without `budgets` of what measuring depends on."""
    captured = traced.captured
    wiring = [(b.key, [e.node.name for e in b.spec.externals], [n.name for n in b.spec.results]) for b in traced.blocks]
    optimizer: Any = None
    if updater is not None:
        kept = ("lr", "weight_decay")
        hyper = {n: sorted((k, str(v)) for k, v in g.items() if k not in kept) for n, g in updater.groups.items()}
        optimizer = (updater.base.__qualname__, updater.by_element, hyper)
    parts: tuple[Any, ...] = (
        __version__, torch.__version__, platform.processor(), torch.get_num_threads(), _device_words(request, machine),
        wiring, structure(traced), [node.format_node() for node in traced.chain.prelude], _batch(captured),
        sorted(captured.params.items()), sorted(traced.differentiated), captured.outputs, optimizer,
        request.config.options_per_block, machine,
    )  # fmt: skip
    if budgets:
        host = None if request.automatic_host else request.host_budget_bytes
        parts += (request.budget_bytes, host, request.user_bytes, _planning(request.config))
        parts += (request.micro_batches, request.clips)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _batch(captured: Captured) -> list[tuple[Any, ...]]:
    """Layouts of the inputs: those that no block reads are in no block's key."""
    values = (node.meta["fake"] for node in captured.graph.nodes if node.name in captured.inputs)
    return [(tuple(v.shape), tuple(v.stride()), v.dtype) for v in values if isinstance(v, torch.Tensor)]


def _device_words(request: Request, machine: Hardware | None) -> str:
    where = accelerator(request.device) if machine is None else None
    return request.device if where is None else words(where)


def _planning(config: Config) -> Config:
    """What of a configuration decides a plan."""
    return replace(config, cache_dir=None, shape_buckets=(), max_plans=1, backend="eager")
