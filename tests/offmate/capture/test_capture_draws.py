"""What a model draws is what plain PyTorch draws, however the tensors lie that are drawn for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offmate.errors import CaptureError

from ..parity import HALF, Case, check
from ..replayed import check_replay, traced

Layout = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda y: y,
    "transposed": lambda y: y.transpose(-1, -2),
    "permuted": lambda y: y.permute(0, 3, 1, 2),
    "channels_last": lambda y: y.contiguous(memory_format=torch.channels_last),
    "sliced": lambda y: y[..., ::2],
}
DRAWS: dict[str, Layout] = {
    "dropout": lambda y: F.dropout(y, 0.3, True),
    "dropout in place": lambda y: F.dropout(y * 1, 0.3, True, inplace=True),
    "dropout of bfloat16": lambda y: F.dropout(y.bfloat16(), 0.3, True).float(),
    "dropout1d": lambda y: F.dropout1d(y.flatten(0, 1), 0.3, True),
    "dropout2d": lambda y: F.dropout2d(y, 0.3, True),
    "dropout3d": lambda y: F.dropout3d(y[None], 0.3, True),
    "alpha_dropout": lambda y: F.alpha_dropout(y, 0.3, True),
    "feature_alpha_dropout": lambda y: F.feature_alpha_dropout(y, 0.3, True),
    "drop path": lambda y: y * y.new_empty((y.shape[0], 1, 1, 1)).bernoulli_(0.7).div_(0.7),
    "rand_like": lambda y: y * torch.rand_like(y),
    "randn_like": lambda y: y * torch.randn_like(y),
    "randint_like": lambda y: y * torch.randint_like(y, 7),
    "normal_": lambda y: y * torch.empty_like(y).normal_(),
    "normal_ of a slice": lambda y: y * torch.empty(2 * y.shape[-2], y.shape[-1])[::2].normal_(),
    "uniform_": lambda y: y * torch.empty_like(y).uniform_(0.5, 2),
    "exponential_": lambda y: y * torch.empty_like(y).exponential_(),
    "geometric_": lambda y: y * torch.empty_like(y).geometric_(0.4),
    "cauchy_": lambda y: y * torch.empty_like(y).cauchy_(),
    "log_normal_": lambda y: y * torch.empty_like(y).log_normal_(),
    "random_": lambda y: y * torch.empty_like(y).random_(),
    "bernoulli_": lambda y: y * torch.empty_like(y).bernoulli_(torch.full((y.shape[-1],), 0.3)),
    "bernoulli": lambda y: y * torch.bernoulli(y.detach(), 0.3),
    "gumbel_softmax": lambda y: F.gumbel_softmax(y),
    "attention": lambda y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.3),
    "one after the other": lambda y: F.dropout(torch.rand_like(y) + F.dropout(y, 0.3, True), 0.3, True),
}


class Drawing(nn.Module):
    def __init__(self, layout: str, draw: Layout) -> None:
        super().__init__()
        self.linear, self.layout, self.draw = nn.Linear(12, 12), LAYOUTS[layout], draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self.layout(self.linear(x))) * 1.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_are_eager_draws(draw: str, layout: str) -> None:
    torch.manual_seed(0)
    check_replay(Drawing(layout, DRAWS[draw]), torch.randn(2, 4, 6, 12))


def test_a_draw_needs_no_memory_but_its_own() -> None:
    joint = traced(Drawing("transposed", DRAWS["dropout"]), torch.randn(2, 4, 6, 12)).blocks[0].joint
    assert not [n for n in joint.forward if "empty" in str(n.target)]


class Translator(nn.Module):
    """PyTorch's own transformer with dropout; its batch comes second, so that attention transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.inner = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1)
        self.head = nn.Linear(16, 32)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.embedding(source), self.embedding(target))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())


def sentences() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{n: torch.randint(0, 32, (6, 3), generator=generator) for n in ("source", "target")} for _ in range(2)]


def returned(output: Any, batch: Any) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    return output


def test_transformer_of_pytorch(cache_dir: str) -> None:
    check(Case("nn.Transformer", Translator, sentences, loss=returned), HALF, cache_dir)


def segformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=4,
    )  # fmt: skip
    model: nn.Module = transformers.SegformerForSemanticSegmentation(config)
    return model


def segmented() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
            "labels": torch.randint(0, 4, (2, 32, 32), generator=generator),
        }
        for _ in range(2)
    ]


def test_segformer(cache_dir: str) -> None:
    check(Case("segformer", segformer, segmented), HALF, cache_dir)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(12, 12), torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * torch.empty_like(y).bernoulli_(0.5, generator=self.generator)


def test_a_generator_of_its_own_is_refused() -> None:
    with pytest.raises(CaptureError, match="generator"):
        traced(OwnGenerator(), torch.randn(2, 12))
