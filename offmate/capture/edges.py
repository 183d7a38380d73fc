"""Counts the gradients that autograd adds up at a leaf, from autograd's own graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def edges_into(outputs: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[int]:
    """Count per leaf the edges by which a backward through the outputs reaches it; 0 for one without gradient."""
    found: Counter[Any] = Counter()
    waiting = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is None:
                continue
            found[node] += 1
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return [found[get_gradient_edge(leaf).node] if leaf.requires_grad else 0 for leaf in leaves]
