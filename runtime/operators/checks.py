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
