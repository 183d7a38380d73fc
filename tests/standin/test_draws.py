"""Random numbers of micro-batches that run block by block on a card: kernels draw from where they do in plain PyTorch.

The stand-in computes nothing, but torch's own generator counts there as on a card. A kernel's numbers follow from its
seed, its position and its shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offmate
from offmate.errors import OffmateError
from offmate.profile import draws as profile_draws

from .cases import Batch, Case, words
from .loops import training

pytestmark = pytest.mark.timeout(240)
MICRO_BATCHES = 4
SEED = 3
Drawn = tuple[str, int, int]


class Watching(TorchDispatchMode):
    """Notes every operator that moves the card's generator, with where it was before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Drawn] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _position()
        result = func(*args, **(kwargs or {}))
        if _position() != before:
            self.drawn.append((str(func), before, _position()))
        return result


def _position() -> int:
    return int(torch.cuda.get_rng_state(0)[8:].view(torch.int64).item())


class Attending(torch.nn.Module):
    """Attention that drops out, between dropouts. It asks nothing of values, which the stand-in does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 256)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 768) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.dropout(self.embed(input_ids), 0.1)
        for layer in self.layers:
            q, k, v = layer(h).unflatten(2, (12, 64)).transpose(1, 2).chunk(3, 1)
            read = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            h = h + torch.nn.functional.dropout(read.transpose(1, 2).flatten(2), 0.1)
        return torch.nn.functional.cross_entropy((h @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def attending() -> torch.nn.Module:
    torch.manual_seed(0)
    return Attending().to(torch.bfloat16)


class Noisy(torch.nn.Module):
    """Draws of several kinds: dropout, noise that is added, and noise in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(192, 192) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.nn.functional.dropout(layer(rows), 0.2)
            rows = rows + 0.1 * torch.randn_like(rows) + torch.empty_like(rows).uniform_(-0.1, 0.1)
        return rows.square().mean()


def noisy() -> torch.nn.Module:
    torch.manual_seed(0)
    return Noisy()


def rows() -> Batch:
    return {"rows": torch.randn(64, 192, generator=torch.Generator().manual_seed(0))}


def config(per_pass: int | None = None) -> dict[str, Any]:
    by_block = offmate.Config(accumulation_order="by block", micro_batches_per_pass=per_pass)
    return {"accumulation_steps": MICRO_BATCHES, "config": by_block}


CASES = {
    "dropout, and attention that drops out": Case(attending, words, config()),
    "in passes": Case(attending, words, config(3)),
    "several lengths": Case(attending, words, config(), sizes=((96, 33, 64, 96), 1)),
    "noise": Case(noisy, rows, config()),
}


def in_plain_pytorch(case: Case, updates: int) -> list[Drawn]:
    model = case.model().cuda()
    with Watching() as watching:
        torch.manual_seed(SEED)
        for _ in range(updates):
            for batch in case.micro_batches():
                found = model(**{name: tensor.cuda() for name, tensor in batch.items()})
                (found if isinstance(found, torch.Tensor) else found.loss).backward()
    return watching.drawn


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_draws_from_where_it_does_in_plain_pytorch(name: str, cache_dir: str) -> None:
    case = CASES[name]
    expected = in_plain_pytorch(case, 2)
    assert len(expected) > 2 * MICRO_BATCHES
    with training(case, cache_dir) as loop:
        loop.step()  # plans
        torch.manual_seed(SEED)
        with Watching() as watching:
            loop.step()
            first = list(watching.drawn)
            loop.step()
        assert loop.plan.schedule.per_step > 1
    ours = watching.drawn
    assert [start for _, start, _ in first] != sorted(start for _, start, _ in first), "blocks run in turn"
    assert sorted((start, end) for _, start, end in ours) == sorted((start, end) for _, start, end in expected)


def test_a_kernel_that_draws_otherwise_than_foreseen_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_draws, "_advance", lambda node, device: 400)
    with training(CASES["noise"], str(tmp_path)) as loop:
        before = {name: value.clone() for name, value in loop.model.state_dict().items()}
        with pytest.raises(OffmateError, match="has drawn other random numbers than when its plan was made"):
            loop.step()
        assert all(torch.equal(value, before[name]) for name, value in loop.model.state_dict().items())
