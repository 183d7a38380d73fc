"""Training loops of a tiny model on the simulated accelerator, in budgets as tight as on the emulated device.

A caching allocator takes megabytes where such a model has kilobytes, so its part of planning is left out: the budget is
kept by the ledger alone.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from offmate.runtime.devices.device import Device
from offmate.runtime.devices.streams import StreamDevice

import offmate
from offmate.planning.request import Prepared

from ..offmate.loops import CPU_BUDGET, Loop, adamw, tiny

AMPLE = 1 << 30


@contextlib.contextmanager
def without_allocator() -> Iterator[None]:
    """Plans are not placed in the allocator, and it is given no limit."""

    def placed(make: Callable[[int], Prepared], *given: Any) -> tuple[Prepared, None]:
        return make(0), None

    def make_device(kind: str, limit_bytes: int) -> Device:
        device = StreamDevice(torch.device(kind), AMPLE)
        device.ledger.limit_bytes = limit_bytes
        return device

    with (
        mock.patch("offmate.planning.sizing.fitted", placed),
        mock.patch("offmate.session.maker.fitted", placed),
        mock.patch("offmate.session.maker.pockets", lambda *given: ()),
        mock.patch("offmate.session.session.make_device", make_device),
    ):
        yield


@contextlib.contextmanager
def on_sim(
    percent: int | None,
    *,
    cache_dir: str | None,
    model: torch.nn.Module | None = None,
    inputs: dict[str, torch.Tensor],
    planned: bool = True,
    **settings: Any,
) -> Iterator[Loop]:
    """A compiled loop; closed afterwards.

    Parameters
    ----------
    percent: of the least budget; None gives an ample one. planned: whether the optimizer's updates are.
    """
    model = model or tiny()
    optimizer = adamw(model)
    settings = {
        "optimizer": optimizer if planned else None,
        "device": "sim",
        "cpu_budget": CPU_BUDGET,
        "config": offmate.Config(cache_dir=cache_dir),
    } | settings
    with without_allocator():
        budget = AMPLE
        if percent is not None:
            ample = offmate.plan(model, AMPLE, example_inputs=inputs, **settings)
            assert ample.least_budget_bytes is not None
            budget = ample.least_budget_bytes * percent // 100
        offmate.compile(model, budget, **settings)
        loop = Loop(model, optimizer)
        try:
            yield loop
        finally:
            loop.session.residence.bring_home()
            loop.session.device.close()
            gc.collect()
