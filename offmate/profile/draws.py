"""How far the forwards of blocks move the random generator of a card."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..capture.blocks import TracedBlock
from ..capture.effects import is_random
from ..runtime.devices.generator import Generator, position_of
from ..runtime.torch_names.autograd import without_autocast

_CHANCE = 0.5  # a probability, and a count or a rate, too


def advances(blocks: tuple[TracedBlock, ...], device: torch.device) -> dict[int, int]:
    """Run every operator that draws once per class of blocks, on made-up values, and see where the generator is after.

    Parameters
    ----------
    device: a card whose generator counts; where it was is restored by the caller.

    Returns: by block that draws, in order, how far all its draws move the generator.
    """
    known: dict[str, int] = {}
    for block in blocks:
        if block.key not in known:
            drawing = [node for node in block.joint.forward if is_random(node)]
            known[block.key] = sum(_advance(node, device) for node in drawing)
    return {i: known[block.key] for i, block in enumerate(blocks) if known[block.key]}


def _advance(node: fx.Node, device: torch.device) -> int:
    generator, target = Generator(device), node.target
    assert callable(target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: _made_up(one.meta["val"], device))
    with torch.no_grad(), without_autocast():
        before = position_of(generator.state())
        target(*args, **kwargs)
    return position_of(generator.state()) - before


def _made_up(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return tensor.fill_(_CHANCE if value.is_floating_point() else 1)
