"""Private names of operators: what their schemas say, and some that have no public name."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _foreach_utils, flop_counter

from .tracing import FakeTensorMode, outside_of_modes

OpOverload = torch._ops.OpOverload
"""The class of a node's target that is one of the dispatcher's operators; `torch.ops` names only objects of it."""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""The class of operators that hold graphs, such as `torch.cond`."""

norms_of = torch._foreach_norm
"""Computes the norm of each tensor, all in one kernel, as `torch.nn.utils.get_total_norm` does."""

grouped_by_kind = _foreach_utils._group_tensors_by_device_and_dtype
"""Groups tensors as `torch.nn.utils.get_total_norm` does, in its order, which determines the rounding of the sum."""


def attention_order() -> tuple[int, ...]:
    """Return the order in which attention kernels are tried; the public API can only set it."""
    if torch.cuda.is_initialized():
        _choose_attention()
    return tuple(torch._C._get_sdp_priority_order())


@functools.cache
def _choose_attention() -> None:
    """Have torch choose a kernel once: on some cards, the first choice of a process changes the order."""
    with outside_of_modes(), FakeTensorMode(), torch.autocast("cuda", enabled=False):
        heads = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


flops_of_attention = flop_counter.sdpa_flop_count
flops_of_attention_backward = flop_counter.sdpa_backward_flop_count
flop_counts = flop_counter.flop_registry
"""Floating-point operations by operator; the public `FlopCounterMode` counts only while operators run."""

# Autocast and `Tensor.to` cast with it; it has no other name.
cast = torch.ops.aten._to_copy.default

# What `cross_entropy` is made of, with its backward; the public functions record one of their own.
log_softmax = torch.ops.aten._log_softmax.default
log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default

# A view that autograd does not track, as products of matrices return it.
unsafe_view = torch.ops.aten._unsafe_view.default

# What the public functions of decompositions, and `bilinear`, are made of.
svd = torch.ops.aten._linalg_svd.default
eigh = torch.ops.aten._linalg_eigh.default
trilinear = torch.ops.aten._trilinear

linalg_check = torch.ops.aten._linalg_check_errors.default
"""Raises an error if the numbers that a decomposition returns besides its result say that it failed."""
number_of = torch.ops.aten._local_scalar_dense.default
"""Takes the one value of a tensor as a Python number; publicly `Tensor.item`, which calls it."""

keep_in_graphs = torch.fx.node.has_side_effect
"""Has dead code elimination keep an operator that returns nothing."""

# What `scaled_dot_product_attention` becomes on a CPU.
attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
attention_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

CASTS = ("aten.to.", "aten._to_copy")
"""Prefixes of the names of operators by which a program casts explicitly."""

ASSERTIONS = ("aten._assert", "aten.sym_constrain")
"""Prefixes of the names of operators that compute nothing and reject some values."""

ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention")
"""Substrings of the names of operators that compute attention, with or without dropout."""


def schema_of(target: Any) -> Any:
    """Give an operator's schema, which says what it writes, None for other targets; no public function does."""
    return getattr(target, "_schema", None)


def is_composite(target: OpOverload) -> bool:
    """Say whether an operator is made of others, and has no kernel that autograd would see."""
    return target._can_decompose()
