"""Refuses stock layers by name whose settings no plan can follow."""

from __future__ import annotations

import torch

from ..errors import CaptureError

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def check_layers(model: torch.nn.Module) -> None:
    """Raise CaptureError if the training forward of a layer cannot be followed, naming the layer and its setting."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _EMBEDDINGS) and module.sparse and module.weight.requires_grad:
            raise CaptureError(
                f"{name or kind} is an nn.{kind} with sparse=True. Its gradient is a sparse tensor, which cannot be "
                "planned; build it with sparse=False, or set its `sparse` to False"
            )
        if isinstance(module, _EMBEDDINGS) and module.max_norm is not None:
            raise CaptureError(
                f"{name or kind} is an nn.{kind} with max_norm={module.max_norm:g}, whose forward rescales its own "
                "weight in place, which a plan cannot repeat. Set its `max_norm` to None. For the same numbers, call "
                "torch.embedding_renorm_(weight, ids, max_norm, norm_type) under torch.no_grad() in the loop, before "
                "the model"
            )
        if _counts_in_python(module):
            raise CaptureError(
                f"{name or kind} is an nn.{kind} with momentum=None, which divides by the number of its calls in "
                "Python; a plan would always divide by the first count. Give it a momentum, such as 0.1"
            )


def _counts_in_python(module: torch.nn.Module) -> bool:
    """Return whether a batch norm averages over all of its calls, which it counts in a buffer that it reads."""
    counts = isinstance(module, _BATCH_NORMS) and module.momentum is None and module.track_running_stats
    return bool(counts) and module.training
