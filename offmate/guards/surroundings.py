"""Settings of torch during a call that decide which kernels run and how they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..runtime.torch_names.autograd import autocast_depth
from ..runtime.torch_names.operators import attention_order

AUTOCAST_KINDS = ("cpu", "cuda")
_PRECISIONS = (
    torch.backends.cuda.matmul, torch.backends.cudnn, getattr(torch.backends.cudnn, "conv", None),
    getattr(torch.backends.cudnn, "rnn", None), getattr(torch.backends.mkldnn, "matmul", None),
    getattr(torch.backends.mkldnn, "conv", None), getattr(torch.backends.mkldnn, "rnn", None), torch.backends,
)  # fmt: skip


def surroundings() -> tuple[Any, ...]:
    """Return torch's current settings: autocast, attention kernels, determinism, precision of products, defaults.

    Returns: a value that equals another one if the same operators run under both.
    """
    autocast = tuple((k, torch.get_autocast_dtype(k)) for k in AUTOCAST_KINDS if torch.is_autocast_enabled(k))
    return (
        autocast, inside_autocast() and torch.is_autocast_cache_enabled(), *kernel_settings(),
        torch.get_default_dtype(),
    )  # fmt: skip


def kernel_settings() -> tuple[Any, ...]:
    """Return the settings by which operators choose their kernels, and so their bits, seconds and workspace."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    deterministic: Any = torch.utils.deterministic
    return (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        attention_order(), torch.backends.mha.get_fastpath_enabled(),
        torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory,
        _precisions(),
        cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_bf16_reduced_precision_reduction,
        cudnn.enabled, cudnn.deterministic, cudnn.benchmark, torch.backends.mkldnn.enabled,
    )  # fmt: skip


def chosen_by_time() -> str:
    """Return a warning if kernels on a card are chosen by how long they take; "" if they are not."""
    if not (torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark):
        return ""
    return (
        "torch.backends.cudnn.benchmark is on: cuDNN measures its convolutions and takes the fastest one whose "
        "workspace fits into the free memory. Bits can then differ from run to run and from plain PyTorch. Set it to "
        "False for reproducible numbers"
    )


@contextlib.contextmanager
def autocast_on_cpu() -> Iterator[None]:
    """Inside, a region of autocast for another kind of device holds for the CPU, too, where fake tensors are."""
    open_for = [kind for kind in AUTOCAST_KINDS if torch.is_autocast_enabled(kind)]
    if not open_for or "cpu" in open_for:
        yield
        return
    with torch.autocast("cpu", torch.get_autocast_dtype(open_for[0]), cache_enabled=torch.is_autocast_cache_enabled()):
        yield


def inside_autocast() -> bool:
    """Return whether a `torch.autocast` is open, even a disabled one: copies of parameters are kept until it ends."""
    return autocast_depth() > 0


def _precisions() -> tuple[Any, ...]:
    """Return the precisions of float32 products; the older getter raises if the newer setter was used."""
    if not hasattr(torch.backends, "fp32_precision"):
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return tuple(where.fp32_precision for where in _PRECISIONS if where is not None)
