"""What a plan is of, as it is told: the model, its dtype, the optimizer, the batch and the machine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from ..machines.devices import accelerator, words
from ..optim.masters import name_of
from ..plans.about import About
from ..plans.orders import way
from ..plans.plan import Plan
from ..runtime.torch_names import trees as pytree
from .subject import Subject

_SHOWN_SHAPES = 3


def described(plan: Plan, subject: Subject) -> Plan:
    """Return the plan with what it is of; a plan of an earlier day keeps its date."""
    made = plan.about.made or time.strftime("%Y-%m-%d")
    sizes: Counter[torch.dtype] = Counter()
    for parameter in subject.model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    about = About(
        model=type(subject.model).__name__,
        n_parameters=sizes.total(),
        dtype=_dtype(sizes, subject),
        optimizer=_optimizer(subject),
        batch=_batch(subject),
        machine=_machine(subject),
        made=made,
        storage=subject.request.storage.paths if subject.request.storage is not None and any(plan.stored_bytes) else (),
    )
    return replace(plan, about=about)


def _dtype(sizes: Counter[torch.dtype], subject: Subject) -> str:
    dtypes = " and ".join(_short(dtype) for dtype, _ in sizes.most_common())
    where = accelerator(subject.request.device) if subject.machine is None else None
    kind = "cpu" if where is None else where.type
    if not torch.is_autocast_enabled(kind):
        return dtypes
    return f"{dtypes} under autocast to {_short(torch.get_autocast_dtype(kind))}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _optimizer(subject: Subject) -> str:
    if subject.updater is None:
        return "your own optimizer"
    return name_of(subject.updater.base)


def _batch(subject: Subject) -> str:
    """Write the shapes of the batch's tensors, those that are alike once: "4 × 512 (input_ids, labels)"."""
    names: dict[str, list[str]] = {}
    for path, leaf in pytree.tree_flatten_with_path((subject.args, subject.kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            shape = " × ".join(map(str, leaf.shape)) or "a number"
            names.setdefault(shape, []).append(_name(path))
    shapes = []
    for shape, given in names.items():
        named = ", ".join(name for name in given if name)
        shapes.append(f"{shape} ({named})" if named else shape)
    more = ["…"] if len(shapes) > _SHOWN_SHAPES else []
    batch = " and ".join([*shapes[:_SHOWN_SHAPES], *more])
    times, together = subject.request.per_update, subject.request.per_step
    order = f", {way(together, times)}" if together > 1 else ""
    return batch if times == 1 else f"{times} micro-batches of {batch}{order}"


def _name(path: tuple[Any, ...]) -> str:
    """Return the name of a keyword argument's tensor; positional ones have none."""
    return next((str(key.key) for key in reversed(path) if hasattr(key, "key")), "")


def _machine(subject: Subject) -> str:
    if subject.machine is not None:
        return subject.machine.name
    where = accelerator(subject.request.device)
    return "the emulated device" if where is None else words(where)
