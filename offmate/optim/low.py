"""Updates of parameters of which the plan holds a copy in the precision to which autocast casts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..runtime.replay.low_copies import WHOLE
from ..runtime.torch_names.modules import bare_step
from .chunks import may_be_cut, step_in_chunks
from .lone import lone
from .masters import bare_kind, first_state
from .rows import depends_on_threads, works_by_element


@torch.no_grad()
def step_low(
    kind: Any,
    attributes: Mapping[str, Any],
    hyper: dict[str, Any],
    copy: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, Any],
    factor: torch.Tensor | None = None,
) -> None:
    """Update a parameter with the bits of plain PyTorch under autocast, and give its copy the new values.

    Autocast casts a gradient to the parameter's precision before anything else happens to it. So does this.

    Parameters
    ----------
    kind: the optimizer's class. attributes: those of the instance. hyper: of the parameter's group.
    copy: in the lower precision. grad: in that or the parameter's own; it may be overwritten.
    state: the parameter itself under `WHOLE`, and its state, which the first update makes.
    factor: by which the gradient is multiplied first, None for 1.
    """
    kind = bare_kind(kind)
    leaf = torch.nn.Parameter(state[WHOLE])
    own = {key: value for key, value in state.items() if key != WHOLE} or first_state(kind, hyper, leaf)
    inner = lone(kind, attributes, [{**hyper, "params": [leaf]}], {leaf: own})
    alike = works_by_element(kind) and not depends_on_threads(kind, hyper, leaf.dtype)
    if alike and may_be_cut(copy, grad, leaf, own):
        step_in_chunks(kind, inner, leaf, copy, grad, factor, widened=True)
    else:
        whole = grad.to(leaf.dtype)
        leaf.grad = whole if factor is None else whole.mul_(factor)
        bare_step(kind)(inner)
        copy.copy_(leaf)
    state.update(inner.state[leaf])
