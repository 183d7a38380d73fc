"""What is checked: a model, its batches, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.torch_names import trees

SEED = 0
_LEARNING_RATE = 1e-3

Batch = dict[str, Any] | tuple[Any, ...]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make AdamW over all parameters that require a gradient."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=_LEARNING_RATE)


def own_loss(output: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of a model's output: its `loss`, or the sum of the mean squares of all its numbers."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    leaves = [leaf for leaf in trees.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    if len(numbers) == 1 and numbers[0].numel() == 1:
        return numbers[0].squeeze()
    # Not only those that need a gradient: a forward without gradients has to give the same loss.
    return torch.stack([number.abs().float().square().mean() for number in numbers]).sum()


def called(model: torch.nn.Module, batch: Batch) -> Any:
    """Call a model with all of a batch."""
    return model(*batch) if isinstance(batch, tuple) else model(**batch)


class WithLoss(torch.nn.Module):
    """A model that returns a loss of all its outputs, for those that return none."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Return {"loss": the sum of the mean squares of the model's outputs}."""
        return {"loss": own_loss(self.model(*args, **kwargs), ())}


@dataclass(frozen=True)
class Subject:
    """A model to check.

    Parameters
    ----------
    name: what reports call it.
    build: makes the model; it is called with torch's generator seeded, and has to make the same model every time.
    batch: makes the batch of a step, as keyword arguments (dict) or positional ones (tuple), after seeding likewise.
    loss: takes the model's output and the batch, and returns a scalar.
    optimizer: makes the optimizer of a model, or returns None: then gradients are compared.
    call: calls the model with what it takes of a batch, and returns its output.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], torch.Tensor] = own_loss
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer | None] = adamw
    call: Callable[[torch.nn.Module, Batch], Any] = called

    def built(self) -> torch.nn.Module:
        """Build the model, in training mode; the same one every time."""
        torch.manual_seed(SEED)
        return self.build().train()

    def batches(self, steps: int) -> list[Batch]:
        """Make the batches of all steps, the same ones every time."""
        made = []
        for step in range(steps):
            torch.manual_seed(SEED + 1 + step)
            made.append(self.batch(step))
        return made
