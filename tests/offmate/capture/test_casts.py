"""Parameters that autocast casts once and uses several times: their gradients add up in the lower precision."""

from __future__ import annotations

import contextlib

import pytest
import torch

import offmate

from ..loops import CPU_BUDGET

LOWER = torch.bfloat16


class Looped(torch.nn.Module):
    """One layer used three times, the last one on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = torch.nn.Linear(12, 12), torch.nn.Linear(12, 4)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).sin()).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.body(x)).sin()).float().pow(2).mean()


class OneRegion(Looped):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=LOWER):
            return super().body(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x).float()).pow(2).mean()


class TwoRegions(OneRegion):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=LOWER):
            x = self.layer(x)
        with torch.autocast("cpu", dtype=LOWER):
            x = self.layer(x.sin())
        return self.last(x.float()).pow(2).mean()


def train(kind: type[Looped], compiles: bool, around: bool | None, cache: bool, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if compiles:
        offmate.compile(
            model, 1 << 30, optimizer=optimizer, max_grad_norm=1.0, accumulation_steps=steps, device="emulated",
            cpu_budget=CPU_BUDGET, config=offmate.Config(cache_dir=None, options_per_block=3),
        )  # fmt: skip
    losses = []
    for step in range(3 * steps):
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(step))
        outer = torch.autocast("cpu", dtype=LOWER, enabled=around, cache_enabled=cache)
        with contextlib.nullcontext() if around is None else outer:
            loss = model(x)
        loss.backward()
        losses.append(loss.detach())
        if step % steps == steps - 1:
            if not compiles:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize(
    ("kind", "around", "cache", "steps"),
    [
        (Looped, True, True, 1), (Looped, True, False, 1), (Looped, True, True, 2),
        (OneRegion, None, True, 1), (OneRegion, True, True, 1), (TwoRegions, None, True, 1),
        (TwoRegions, True, True, 1), (TwoRegions, False, True, 1),
    ],
    ids=["around", "no cache", "accumulated", "inside", "both", "two inside", "two in one", "two in a disabled one"],
)  # fmt: skip
def test_gradients_of_a_layer_used_several_times_add_up_as_in_eager(kind, around, cache, steps):
    ours, plain = (train(kind, compiles, around, cache, steps) for compiles in (True, False))
    assert all(map(torch.equal, ours, plain))


class Mixed(Looped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=LOWER):
            x = self.body(x)
        return self.last(self.layer(x.float())).pow(2).mean()


def test_what_order_cannot_be_followed_is_refused():
    with pytest.raises(
        offmate.CaptureError, match=r"layer_(weight|bias) is used several times in one.*cache_enabled=False"
    ):
        train(Mixed, True, None, True, 1)
