"""The figures that a plan is based on: measured on this machine, or estimated for another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.model import Traced
from ..capture.spec import LowPrecision
from ..machines.devices import accelerator, make_device, rng_untouched
from ..machines.hardware import Hardware
from ..machines.links import LinkRates, measure_host_memory, measure_link
from ..machines.pinning import as_pinned
from ..optim.masters import has_master
from ..optim.state_bytes import state_bytes
from ..optim.updater import UpdateCost, Updater
from ..programs.prelude import lower_prelude
from ..programs.programs import NodeCost
from ..progress import Progress
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.autograd import without_autocast
from ..solver.rows import log_share
from .analytic import node_costs
from .operators import profile_classes, profile_prelude

_UNLIMITED_BYTES = 2**62
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Figures:
    """The seconds and bytes that a plan is based on.

    Parameters
    ----------
    costs: per class key and node name; those of the prelude are under "".
    updates: per canonical parameter name.
    """

    rates: LinkRates
    costs: dict[str, dict[str, NodeCost]]
    updates: dict[str, UpdateCost]


def measure_all(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: Traced,
    updater: Updater | None,
    say: Progress,
    device: str,
) -> Figures:
    """Time classes, links and updates.

    Parameters
    ----------
    model: plain, with its weights. args, kwargs: one real batch. device: its kind.
    """
    say("measuring operators", 0.0)
    rates, costs = measure(model, args, kwargs, traced, say, device)
    where = accelerator(device)
    updates = _update_costs(model, updater, where or _CPU, traced.low)
    if where is not None:
        params = dict(model.named_parameters())
        others = sum(params[name].nbytes + cost.state_bytes for name, cost in updates.items())
        rates = as_pinned(rates, (param.detach() for param in params.values()), others, where)
    return Figures(rates, costs, updates)


def work_out(
    model: torch.nn.Module,
    traced: Traced,
    machine: Hardware,
    updater: Updater | None,
) -> Figures:
    """Estimate the same figures for another machine, from its rates; nothing is run.

    Parameters
    ----------
    model: its parameters may have no data. machine: the other machine.
    """
    costs = {b.key: node_costs(b.joint, machine) for b in traced.blocks}
    prelude = lower_prelude(traced.captured, traced.chain, traced.blocks)
    if prelude.graph is not None:
        costs[""] = node_costs(prelude.graph.joint, machine)
    rates = LinkRates(
        machine.in_bytes_per_s, machine.out_bytes_per_s, machine.both_bytes_per_s, machine.host_memory_bytes_per_s,
        machine.manage_s, machine.per_copy_s,
    )  # fmt: skip
    updates = {}
    for name, param in model.named_parameters() if updater is not None else ():
        if param.requires_grad and updater is not None:
            bulk, scalars = state_bytes(updater, param, updater.groups[name])
            low = traced.low.get(name)
            low_bytes = param.nbytes if low is None else param.numel() * low.dtype.itemsize
            grad_bytes = low_bytes if low is not None and low.gradient else param.nbytes
            copied = low is not None and low.copied
            param_bytes, bulk = (low_bytes, bulk + param.nbytes) if copied else (param.nbytes, bulk)
            plain_s = machine.update_s(param.numel(), masters=False)
            seconds = machine.update_s(param.numel(), masters=copied or has_master(updater.base, param))
            log_s = seconds[0] * log_share(param_bytes, grad_bytes, bulk)
            # Adding reads two tensors and writes one where AdamW reads four and writes three; a norm reads one, and
            # unscaling writes it again.
            looks = [part * s for part in (3 / 7, 1 / 7, 2 / 7) for s in plain_s]
            updates[name] = UpdateCost(bulk, scalars, *[*seconds, *looks, log_s])
    return Figures(rates, costs, updates)


def measure(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: Traced,
    say: Progress,
    device: str,
) -> tuple[LinkRates, dict[str, dict[str, NodeCost]]]:
    """Time every class on real data, and the links of a kind of device."""
    where = accelerator(device)
    params = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    captured = traced.captured
    tensors = {n: params[name] for n, name in captured.params.items()}
    tensors |= {n: buffers[name] for n, name in captured.buffers.items()}
    tensors |= captured.constants
    leaves = pytree.tree_leaves((args, kwargs))
    tensors |= {name: leaf for name, leaf in zip(captured.inputs, leaves) if name is not None}
    prelude = lower_prelude(captured, traced.chain, traced.blocks)
    with torch.no_grad(), without_autocast(), rng_untouched(where):
        shared, prelude_costs = profile_prelude(prelude, tensors, where or _CPU)
        nodes = {n.name: n for n in captured.graph.nodes}
        given = {nodes[name]: tensor for name, tensor in tensors.items()} | shared
        costs = profile_classes(
            traced.blocks,
            given.__getitem__,
            where or _CPU,
            lambda done, total: say("measuring operators", done / total),
        )
    say("measuring links and updates", 0.0)
    links = make_device(device, _UNLIMITED_BYTES)
    try:
        rates = measure_link(links)
        # A simulated accelerator's copies take the host's cores, which are then what is short.
        if where is not None and where.type == "cuda":
            rates = replace(rates, host_memory_bytes_per_s=measure_host_memory(links, rates))
    finally:
        links.close()
    return rates, costs | {"": prelude_costs}


def _update_costs(
    model: torch.nn.Module, updater: Updater | None, device: torch.device, low: Mapping[str, LowPrecision]
) -> dict[str, UpdateCost]:
    """Measure the cost of updating each trainable parameter, once per shape, dtype and group.

    Parameters
    ----------
    low: parameters that move in a lower precision.
    """
    if updater is None:
        return {}
    measured: dict[tuple[Any, ...], UpdateCost] = {}
    found = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        hyper = updater.groups[name]
        key = (tuple(param.shape), param.dtype, id(hyper), low.get(name))
        if key not in measured:
            measured[key] = updater.cost(param, hyper, device, low.get(name))
        found[name] = measured[key]
    return found
