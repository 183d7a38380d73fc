"""Updates of parameters that move in the precision to which autocast casts them, or whose gradients do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..capture.spec import LowPrecision
from ..runtime.replay.low_copies import WHOLE
from ..runtime.torch_names.modules import bare_step
from .chunks import may_be_cut, step_in_chunks
from .lone import lone
from .masters import bare_kind, first_state
from .rows import depends_on_threads, works_by_element


def updated_in(low: LowPrecision | None, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return what updates take of a parameter: what moves of it, a gradient of zeros, and its state before the first.

    Parameters
    ----------
    low: the precision in which the parameter moves, None for its own. own: the parameter.
    """
    param = own.to(low.dtype) if low is not None and low.copied else own
    grad = torch.zeros_like(param, dtype=low.dtype if low is not None and low.gradient else own.dtype)
    return param, grad, {} if param is own else {WHOLE: own}


@torch.no_grad()
def step_low(
    kind: Any,
    attributes: Mapping[str, Any],
    hyper: dict[str, Any],
    param: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, Any],
    factor: torch.Tensor | None = None,
) -> None:
    """Update a parameter with the bits of plain PyTorch under autocast; a copy gets the new values.

    Autocast casts a gradient to the parameter's precision before anything else happens to it. So does this.

    Parameters
    ----------
    kind: the optimizer's class. attributes: those of the instance. hyper: of the parameter's group.
    param: or its copy in a lower precision, where `state` has the parameter itself under `WHOLE`.
    grad: in the lower precision or the parameter's own; it may be overwritten. state: the first update makes it.
    factor: by which the gradient is multiplied first, None for 1.
    """
    kind = bare_kind(kind)
    leaf = torch.nn.Parameter(state.get(WHOLE, param.data))
    own = {key: value for key, value in state.items() if key != WHOLE} or first_state(kind, hyper, leaf)
    inner = lone(kind, attributes, [{**hyper, "params": [leaf]}], {leaf: own})
    alike = works_by_element(kind) and not depends_on_threads(kind, hyper, leaf.dtype)
    if alike and may_be_cut(param, grad, leaf, own):
        step_in_chunks(kind, inner, leaf, param, grad, factor, widened=True)
    else:
        whole = grad.to(leaf.dtype)
        leaf.grad = whole if factor is None else whole.mul_(factor)
        bare_step(kind)(inner)
        if WHOLE in state:
            param.copy_(leaf)
    made = inner.state[leaf]
    for key in state.keys() - made.keys() - {WHOLE}:
        del state[key]
    state.update(made)
