"""Private names of Inductor, for our own graphs; the public API takes only what `torch.compile` has captured.

Importing this takes seconds, so callers import it only where they compile.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import _guards
from torch._inductor import compile_fx, config, cpp_builder, decomposition, exc
from torch._inductor.codegen import common
from torch.utils import _triton

from .autograd import without_autocast
from .tracing import FakeTensorMode, make_fx

_SETTINGS = {
    "compile_threads": 1,  # more would start processes, which stay alive
    "fallback_random": True,  # PyTorch's own draws
    "comprehensive_padding": False,  # bytes as planned
    "triton.cudagraphs": False,  # they hold extra memory
}


def has_cpp_compiler() -> bool:
    """Say whether Inductor finds a C++ compiler."""
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def writes_code_for(kind: str) -> bool:
    """Say whether Inductor knows a kind of device."""
    common.init_backend_registration()
    return common.get_scheduling_for_device(kind) is not None


def has_triton() -> bool:
    """Say whether Triton is installed and knows the card."""
    return _triton.has_triton()


def compile_function(
    function: Callable[..., list[torch.Tensor]],
    given: list[torch.Tensor],
    left: list[torch.Tensor],
    donated: tuple[int, ...],
) -> Any:
    """Compile a functional Python function of tensors.

    Parameters
    ----------
    given: tensors like those that it will be given. left: tensors with the strides that its results are to have.
    donated: indices of the given tensors that it may write into.

    Returns: a function that takes a list of tensors and empties it.
    """
    with torch.no_grad(), without_autocast(), config.patch(_SETTINGS):
        with FakeTensorMode() as mode:
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]
            module = make_fx(function, decomposition_table=decomposition.select_decomp_table())(*fakes)
        last = module.graph.output_node()
        last.meta["user_visible_output_idxs"] = list(range(len(left)))
        last.meta["original_output_strides"] = [tensor.stride() for tensor in left]
        context = _guards.TracingContext(mode)
        # Inductor looks here for tensors that may be written into, and allows that only for a backward's saved tensors.
        context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(donated), static_input_indices=[])  # type: ignore[assignment]
        with _guards.tracing(context):
            return compile_fx.compile_fx_inner(module, fakes, is_backward=bool(donated))
