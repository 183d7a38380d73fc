"""Numbers that a forward takes out of its batch are part of what a plan is for; finite values are asked for again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offmate
from offmate.capture.known import MOST_VALUES
from tests.offmate import parity


class Patches(nn.Module):
    """A vision encoder: pictures of several sizes in one row of patches, their sizes in a small tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.places = nn.Embedding(16, 16)

    def forward(self, patches: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        places = [torch.arange(h).repeat_interleave(w) + torch.arange(w).repeat(h) for h, w in sizes.tolist()]
        h = self.a(patches) + self.places(torch.cat(places) % 16)
        ends = torch.repeat_interleave(sizes.prod(1), torch.ones_like(sizes[:, 0])).cumsum(0)
        parts = torch.split(h, [int(size) for size in ends.diff(prepend=ends.new_zeros(1))])
        mixed = torch.cat([part - part.mean(0, keepdim=True) for part in parts])
        return self.b(torch.tanh(mixed)).square().mean()


def _sizes(step: int) -> torch.Tensor:
    """Twice the same sizes, then others for as many patches, then the first again."""
    return torch.tensor([[2, 3], [3, 4]] if step % 4 < 2 else [[3, 4], [2, 3]])


PICTURES = parity.Case(
    "known sizes",
    Patches,
    lambda: [
        {"patches": torch.randn(18, 8, generator=torch.Generator().manual_seed(step)), "sizes": _sizes(step)}
        for step in range(5)
    ],
    loss=lambda output, batch: output,
    compares_outputs=False,
)


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
def test_sizes_of_pictures_train_bit_for_bit(budget: str) -> None:
    run = parity.check(PICTURES, budget, None)
    assert run.model is not None
    assert len(run.model.offmate.plans) == 2  # one for each of the batch's sizes


class Masked(nn.Module):
    """Picks and replaces the elements that a mask of the batch names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        h = self.a(x).clone()
        h[kinds == 1] = self.b(h[kinds == 2][:2])
        return torch.tanh(h[kinds != 0]).square().mean()


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
def test_elements_that_a_mask_of_the_batch_picks(budget: str) -> None:
    kinds = [torch.tensor(row) for row in ([[0, 1, 2], [2, 1, 0]], [[1, 2, 0], [0, 2, 1]])]
    batches = [
        {"x": torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)), "kinds": kinds[step % 3 // 2]}
        for step in range(5)
    ]
    case = parity.Case(
        "known masks", Masked, lambda: batches, loss=lambda output, batch: output, compares_outputs=False
    )
    parity.check(case, budget, None)


class Chosen(nn.Module):
    """Patches that are chosen by chance among as many as there are, as in ViLT; the number repeats a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = [torch.multinomial(torch.ones(length).float(), 2) for length in lengths.tolist()]
        chosen = torch.stack([row[picked] for row, picked in zip(x, rows)])
        return (self.a(chosen) * torch.ones(1, 1, 1).to(x).repeat(1, lengths.min(), 1)[:, :2]).square().mean()


@pytest.mark.parametrize("budget", (parity.AMPLE, parity.LEAST))
def test_numbers_that_are_drawn_by_known_sizes_differ_in_every_call(budget: str) -> None:
    batches = [
        {"x": torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step)), "lengths": torch.tensor([4, 6])}
        for step in range(5)
    ]
    case = parity.Case(
        "known draws", Chosen, lambda: batches, loss=lambda output, batch: output, compares_outputs=False
    )
    parity.check(case, budget, None)


class Decoder(nn.Module):
    """A stock decoder, which compares its mask with a causal one; without a mask in the batch it makes one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.embedding, self.layers, self.head = nn.Embedding(20, 16), nn.TransformerDecoder(layer, 2), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if mask is None else mask
        h = self.embedding(ids)
        return self.head(self.layers(h, h, tgt_mask=mask)).square().mean()


def _masked(step: int) -> dict[str, torch.Tensor]:
    """Twice a mask that hides the last places, then one that hides the first ones, then the first again."""
    hidden = torch.arange(6) > 3 if step % 4 < 2 else torch.arange(6) < 2
    mask = torch.zeros(6, 6).masked_fill(hidden, float("-inf"))
    return {"ids": torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(step)), "mask": mask}


@pytest.mark.parametrize(
    ("given", "budget"),
    [(True, parity.LEAST), (False, parity.AMPLE)],
    ids=["mask in the batch", "mask made inside"],
)
def test_a_stock_decoder_that_looks_at_its_mask(given: bool, budget: str) -> None:
    def batch(step: int) -> dict[str, torch.Tensor]:
        return {key: value for key, value in _masked(step).items() if given or key != "mask"}

    case = parity.Case(
        f"masks, given: {given}",
        Decoder,
        lambda: [batch(step) for step in range(5)],
        loss=lambda output, batch: output,
        compares_outputs=False,
    )
    parity.check(case, budget, None)


def test_numbers_with_a_fraction_that_decide_a_branch_are_refused() -> None:
    class Scales(nn.Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean() * (2.0 if scale.item() > 1 else scale.item())

    model = offmate.compile(Scales(8, 8), "1GiB", device="emulated", config=offmate.Config(cache_dir=None))
    with pytest.raises(offmate.CaptureError, match=r"masks of 0, 1 and -inf, with at most"):
        model(torch.randn(2, 8), torch.tensor(0.5))


def test_more_values_than_a_plan_can_be_for_are_refused() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.a(x).mean() if mask.any() else self.a(x).sum()

    compiled = _compiled(Mean())
    with pytest.raises(offmate.CaptureError, match=rf"of 5,000 torch.int64 values.*at most {MOST_VALUES:,}"):
        compiled(torch.randn(3, 4), torch.ones(5000, dtype=torch.int64))
    with pytest.raises(offmate.CaptureError, match=r"of 3 torch.float32 values"):
        compiled(torch.randn(3, 4), torch.full((3,), 0.5))


def test_a_mask_that_decides_a_branch_takes_the_branch_of_each_batch() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            h = self.a(x) * mask[:, None]
            return h.mean() if bool(mask.all()) else h.sum()

    batches = [
        {"x": torch.randn(3, 4), "mask": torch.tensor(mask)} for mask in ([1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 1])
    ]
    case = parity.Case(
        "known mask", Branches, lambda: batches, loss=lambda output, batch: output, compares_outputs=False
    )
    parity.check(case, parity.AMPLE, None)


class Checked(nn.Module):
    """Layers that ask whether their values are finite, as those of DETR do, and clamp them if not."""

    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.layers, self.asks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self.asks(x):
                x = x.clamp(-1e4, 1e4)
        return x.square().mean()


ASKS = {
    "isfinite": lambda x: not torch.isfinite(x).all(),
    "isinf or isnan": lambda x: torch.isinf(x).any() or x.isnan().any(),
    "both at once": lambda x: bool((torch.isinf(x) | torch.isnan(x)).any()),
    "how many": lambda x: x.isnan().sum() != 0,
    "none": lambda x: torch.logical_not(torch.eq(torch.isnan(x).sum(), 0)),
}


@pytest.mark.parametrize("asks", ASKS)
def test_questions_whether_values_are_finite(asks: str) -> None:
    batches = [{"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(step))} for step in range(5)]
    case = parity.Case(
        f"asks {asks}",
        lambda: Checked(ASKS[asks]),
        lambda: batches,
        loss=lambda output, batch: output,
        compares_outputs=False,
    )
    for budget in (parity.AMPLE, parity.LEAST):
        parity.check(case, budget, None)


@pytest.mark.parametrize("asks", ASKS)
def test_values_that_are_not_finite_stop_the_iteration(asks: str) -> None:
    compiled = _compiled(Checked(ASKS[asks]))
    compiled(torch.randn(4, 8)).backward()
    before = {name: value.clone() for name, value in compiled.state_dict().items()}
    with pytest.raises(offmate.OffmateError, match=r"iteration failed: values are not finite where .*x"):
        compiled(torch.full((4, 8), torch.nan)).backward()
    assert all(torch.equal(value, before[name]) for name, value in compiled.state_dict().items())


class Dropping(nn.Module):
    """Leaves out whole layers by chance, as wav2vec2 does."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers, self.probability = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            skips = self.training and torch.rand([]) < self.probability
            if not skips:
                x = torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("probability", [0, 0.0])
def test_layers_that_are_never_dropped(probability: float) -> None:
    batches = [{"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(step))} for step in range(5)]
    case = parity.Case(
        f"drops {probability!r}", lambda: Dropping(probability), lambda: batches, loss=lambda output, batch: output
    )
    parity.check(case, parity.AMPLE, None)


def test_layers_that_are_dropped_by_chance_are_refused() -> None:
    with pytest.raises(
        offmate.CaptureError, match=r"branches on it in Python.*if not skips.*in Dropping.*layerdrop = 0"
    ):
        _compiled(Dropping(0.1))(torch.randn(4, 8))


class Filled(nn.Module):
    """Writes hidden values into a full tensor, and takes sizes out of its batch, as Grounding DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = torch.split(self.a(x), lengths.tolist())
        scores = torch.full((len(x), 12), -2.0)
        scores[:, :8] = torch.cat([part - part.mean(0) for part in parts])
        return scores.square().mean()


def test_full_tensors_into_which_hidden_values_are_written() -> None:
    batches = [
        {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(step)), "lengths": torch.tensor([1, 3])}
        for step in range(3)
    ]
    case = parity.Case("filled", Filled, lambda: batches, loss=lambda output, batch: output)
    parity.check(case, parity.AMPLE, None)


def _compiled(model: nn.Module) -> Any:
    return offmate.compile(model, "1GiB", device="emulated", config=offmate.Config(cache_dir=None))


@pytest.mark.parametrize("late", [False, True])
def test_answers_that_are_written_into_are_not_foreseen(late: bool) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn = torch.rand([])
            if not late:
                drawn.sub_(2.0)
            below = drawn < 0.0
            if late:
                below.fill_(True)
            return self.a(x).mean() if below else self.a(x).sum()

    with pytest.raises(offmate.CaptureError, match=r"branches on it|reads a Python number"):
        _compiled(Writes())(torch.randn(3, 4))


def test_evaluation_asks_again_too() -> None:
    compiled = _compiled(Checked(ASKS["isfinite"])).eval()
    with torch.no_grad():
        assert compiled(torch.randn(4, 8)).isfinite()
        with pytest.raises(offmate.OffmateError, match="values are not finite where"):
            compiled(torch.full((4, 8), torch.inf))


def test_a_batch_tensor_that_is_written_into_is_refused() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            lengths += 1
            return self.a(x[: int(lengths[0])]).mean()

    with pytest.raises(offmate.CaptureError, match=r"from a batch tensor of shape \(2,\) and also writes into it"):
        _compiled(Writes())(torch.randn(3, 4), torch.tensor([1, 2]))


def test_hidden_values_written_into_known_ones_are_refused() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            found = torch.ones(int(lengths.sum()), 4)
            found[: len(x)] = self.a(x)
            return found.mean()

    with pytest.raises(offmate.CaptureError, match=r"__setitem__ .*found\[: len\(x\)\].* writes hidden values"):
        _compiled(Writes())(torch.randn(3, 4), torch.tensor([2, 2]))
