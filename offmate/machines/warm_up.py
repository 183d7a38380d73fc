"""What a card loads at its first kernels: code, and memory of libraries that no allocator counts."""

from __future__ import annotations

import logging

import torch

from ..runtime.current import entered

log = logging.getLogger("offmate")

_SIDE, _HEADS, _TOKENS, _WIDTH = 256, 4, 128, 64
_DTYPES = (torch.float32, torch.bfloat16)
_warm: set[torch.device] = set()


def warm_up(device: torch.device) -> None:
    """Run what a training step runs, once per process, so that the free memory read next is what remains.

    A matrix product, attention forward and backward, and a fused update load hundreds of MB outside the allocator.
    """
    if device in _warm:
        return
    _warm.add(device)
    with (
        entered(device), torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False),
    ):  # fmt: skip
        for dtype in _DTYPES:
            try:
                _step(device, dtype)
            except RuntimeError as error:  # such as a kernel that this device lacks; the model will say what it needs
                log.debug("could not warm up %s for %s: %s", device, dtype, error)
    torch.accelerator.synchronize(device)
    torch.accelerator.empty_cache()


def _step(device: torch.device, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.full((_SIDE, _SIDE), 1e-2, dtype=dtype, device=device))
    values = torch.ones(_HEADS * _TOKENS * _WIDTH // _SIDE, _SIDE, dtype=dtype, device=device) @ weight
    heads = values.reshape(1, _HEADS, _TOKENS, _WIDTH)
    torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
