"""The check that a matrix could be decomposed or inverted, as an operator that a trace can hold.

PyTorch's own raises an error by the values, and is marked as an effect, which a functional trace does not take.
"""

from __future__ import annotations

import torch

from ..torch_names.operators import keep_in_graphs, linalg_check

_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_LIBRARY.define("check_matrix(Tensor info, str name, bool is_matrix) -> ()")


def _check_matrix(info: torch.Tensor, name: str, is_matrix: bool) -> None:
    linalg_check(info, name, is_matrix=is_matrix)


_LIBRARY.impl("check_matrix", _check_matrix, "CompositeExplicitAutograd")


@torch.library.register_fake("offmate::check_matrix", lib=_LIBRARY)
def _(info, name, is_matrix):
    return None


check_matrix = torch.ops.offmate.check_matrix.default
"""check_matrix(info, name, is_matrix): raise torch.linalg.LinAlgError in the name of a function if `info` says so."""
keep_in_graphs(check_matrix)
_LIBRARY.define("check_flag(Tensor flag, bool expected, str line) -> ()")


class OtherPath(RuntimeError):
    """Values for which the forward would take another path than the one that was captured."""


def _check_flag(flag: torch.Tensor, expected: bool, line: str) -> None:
    if bool(flag) != expected:
        raise OtherPath(
            f"values are not finite where the forward asks whether they are{line}, and it would take another path "
            "than the one that was planned. See with the plain model where they come from; a lower learning rate, "
            "clipping (max_grad_norm) or bfloat16 in the place of float16 may keep them finite"
        )


_LIBRARY.impl("check_flag", _check_flag, "CompositeExplicitAutograd")


@torch.library.register_fake("offmate::check_flag", lib=_LIBRARY)
def _(flag, expected, line):
    return None


check_flag = torch.ops.offmate.check_flag.default
"""check_flag(flag, expected, line): raise OtherPath, naming the model's line, if a flag is not as it was captured."""
keep_in_graphs(check_flag)
CHECKS = (check_matrix, check_flag)
"""The operators that compute nothing and may raise."""
