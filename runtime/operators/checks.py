"""Checks that raise an error by the values, as operators that a trace can hold.

PyTorch's own check of matrices is marked as an effect, which a functional trace does not take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_names.operators import keep_in_graphs, linalg_check

_LIBRARY = torch.library.Library("offmate", "FRAGMENT")


def _operator(schema: str, kernel: Callable[..., None]) -> Any:
    """Return an operator that computes nothing, may raise, and stays in graphs."""
    name = schema.partition("(")[0]
    _LIBRARY.define(f"{schema} -> ()")
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"offmate::{name}", lambda *arguments: None, lib=_LIBRARY)
    operator = getattr(torch.ops.offmate, name).default
    keep_in_graphs(operator)
    return operator


class OtherPath(RuntimeError):
    """Values for which the forward would take another path than the one that was captured."""


def _check_matrix(info: torch.Tensor, name: str, is_matrix: bool) -> None:
    linalg_check(info, name, is_matrix=is_matrix)


def _check_flag(flag: torch.Tensor, expected: bool, line: str) -> None:
    if bool(flag) != expected:
        raise OtherPath(
            f"values are not finite where the forward checks for this{line}, so it would take another path than the "
            "planned one. Run the plain model to see where they come from. To keep them finite, try a lower learning "
            "rate, clipping (max_grad_norm), or bfloat16 instead of float16"
        )


check_matrix = _operator("check_matrix(Tensor info, str name, bool is_matrix)", _check_matrix)
"""check_matrix(info, name, is_matrix): raise torch.linalg.LinAlgError in the name of a function if `info` says so."""

check_flag = _operator("check_flag(Tensor flag, bool expected, str line)", _check_flag)
"""check_flag(flag, expected, line): raise OtherPath, naming the model's line, if a flag is not as it was captured."""

CHECKS = (check_matrix, check_flag)
"""The operators that compute nothing and may raise."""
