"""The memory that plain PyTorch needs for the same step, measured as the ledger counts."""

from __future__ import annotations

import torch

from ..runtime.torch_names.tensors import storage_key
from .allocations import AllocationLog


class ReferenceMeter:
    """Measures the bytes of a plain training step: parameters, buffers, states, gradients, and what the step adds.

    Use as a context manager around one step of a model that was not compiled; `peak_bytes` is valid afterwards.

    Parameters
    ----------
    model, optimizer: as in the step.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._log = AllocationLog()
        self.peak_bytes = 0

    def __enter__(self) -> ReferenceMeter:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        tensors += [p.grad for p in self._model.parameters() if p.grad is not None]
        for state in self._optimizer.state.values():
            tensors += [t for t in state.values() if isinstance(t, torch.Tensor)]
        storages = {storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}
        self._resting_bytes = sum(storages.values())
        self._log.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._log.__exit__(*error)
        self.peak_bytes = self._resting_bytes + self._log.peak_bytes()
