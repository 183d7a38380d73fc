"""Modules and optimizers of torch, from the tables with which torch tests them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from offmate.runtime.torch_names import trees
from torch.nn.modules.lazy import LazyModuleMixin

from offmate.check.subject import Batch, Subject, own_loss

_MOST_INPUTS = 3  # of one module


def module_names() -> list[str]:
    """List the modules in torch's table with the number of an input, one name for each of the first inputs."""
    found = []
    for entry in _module_table():
        found += [f"{entry.name} ({index + 1})" for index in range(min(len(list(_module_inputs(entry))), _MOST_INPUTS))]
    return sorted(set(found))


def module_subjects(name: str) -> Iterator[Subject]:
    """Yield the subject of a module with one of the inputs that torch tests it with."""
    module, _, number = name.removesuffix(")").partition(" (")
    entry = next(entry for entry in _module_table() if entry.name == module)
    index = int(number) - 1
    yield Subject(name, functools.partial(_build_module, entry, index), functools.partial(_module_batch, entry, index))


def optimizer_names() -> list[str]:
    """List the names of all optimizers in torch's table with their settings, one name for each."""
    return [name for name, _, _ in _optimizers()]


def optimizer_subjects(name: str) -> Iterator[Subject]:
    """Yield the subject of an optimizer with its settings: a small network, sparse where the optimizer needs it."""
    for known, made_by, settings in _optimizers():
        if known == name:
            make = functools.partial(_optimizer, made_by, settings)
            if made_by is torch.optim.SparseAdam:
                yield Subject(name, _sparse_network, _tokens, optimizer=make)
            else:
                yield Subject(name, _network, _vectors, optimizer=make)


class _Around(torch.nn.Module):
    """A module behind a trained factor, so that it has a gradient to hand on even if it holds no parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        def scaled(leaf: Any) -> Any:
            able = isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
            return leaf * self.factor if able and leaf.dtype == self.factor.dtype else leaf

        args, kwargs = trees.tree_map(scaled, (args, kwargs))
        return {"loss": own_loss(self.module(*args, **kwargs), ())}


def _module_table() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def _module_inputs(entry: Any) -> Iterator[Any]:
    """Yield the inputs that torch makes for a module, those that its tests expect to fail left out."""
    yield from entry.module_inputs_func(entry, device="cpu", dtype=torch.float32, requires_grad=False, training=True)


def _build_module(entry: Any, index: int) -> torch.nn.Module:
    given = list(_module_inputs(entry))[index].constructor_input
    torch.manual_seed(0)
    made = entry.module_cls(*given.args, **given.kwargs)
    if isinstance(made, LazyModuleMixin):
        # Its parameters get their sizes from the first input.
        batch = _module_batch(entry, index, 0)
        made(*batch) if isinstance(batch, tuple) else made(**batch)
    return _Around(made)


def _module_batch(entry: Any, index: int, step: int) -> Batch:
    given = list(_module_inputs(entry))[index].forward_input
    if not given.kwargs:
        return tuple(given.args)
    names = _argument_names(entry.module_cls.forward)
    return dict(zip(names, given.args)) | given.kwargs


def _argument_names(function: Callable[..., Any]) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)[1:]


def _optimizers() -> list[tuple[str, Any, dict[str, Any]]]:
    from torch.testing._internal.common_optimizers import optim_db

    found = []
    for entry in optim_db:
        for given in entry.optim_inputs_func(device="cpu"):
            words = ", ".join(f"{key}={value}" for key, value in given.kwargs.items())
            found.append((f"{entry.optim_cls.__name__}({words})", entry.optim_cls, dict(given.kwargs)))
    return sorted({row[0]: row for row in found}.values(), key=lambda row: row[0])


def _optimizer(made_by: Any, settings: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in settings.items()}
    made: torch.optim.Optimizer = made_by(model.parameters(), **copied)
    return made


def _network() -> torch.nn.Module:
    # Muon takes matrices only.
    layers = [
        torch.nn.Linear(16, 32, bias=False),
        torch.nn.GELU(),
        torch.nn.Linear(32, 32, bias=False),
        torch.nn.GELU(),
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 4, bias=False))


def _sparse_network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(16, 8, sparse=True))


def _vectors(step: int) -> Batch:
    return (torch.randn(8, 16),)


def _tokens(step: int) -> Batch:
    return (torch.randint(0, 16, (8,)),)
