"""A head whose weight's gradient is made after the weight may have left: the same bits, in less memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offmate
from offmate.capture import late_heads, model

from ...fuzz.figures import from_hardware_file
from ..loops import CPU_BUDGET

CLASSES, HIDDEN, ROWS = 4096, 64, 5000  # three tiles


@pytest.fixture(scope="module", autouse=True)
def rates() -> Iterator[None]:
    """The options of blocks, and with them the least budget, do not hang on what was measured."""
    with from_hardware_file():
        yield


class Net(nn.Module):
    """Embeds, normalises, projects to the vocabulary, and takes the loss; `tied` as many language models are."""

    def __init__(self, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, HIDDEN)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(3))
        self.head = nn.Linear(HIDDEN, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        for norm in self.norms:
            hidden = hidden + torch.tanh(norm(hidden))
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), ids[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def prepared(compiles: bool, budget: str | int, outputs: Any, **settings: Any) -> tuple[nn.Module, Any]:
    kinds = {name: settings.pop(name) for name in ("tied", "bias") if name in settings}
    torch.manual_seed(0)
    net = Net(**kinds)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if compiles:
        config = offmate.Config(cache_dir=None, outputs=outputs, options_per_block=3)
        offmate.compile(
            net, budget, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=config, **settings
        )
    return net, optimizer


def trained(compiles: bool, budget: str | int = "1GiB", outputs: Any = "all", **settings: Any) -> Any:
    micro, norm = settings.get("accumulation_steps", 1), settings.get("max_grad_norm")
    net, optimizer = prepared(compiles, budget, outputs, **settings)
    drawn = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        for _ in range(micro):
            loss = net(torch.randint(0, CLASSES, (2, ROWS // 2), generator=drawn))["loss"]
            (loss / micro).backward()
            found.append(loss.detach())
        if norm is not None and not compiles:
            torch.nn.utils.clip_grad_norm_(net.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return net, [*found, *(value.detach().clone() for value in net.state_dict().values())]


def parts(graph_model: nn.Module) -> int:
    """How many heads of the model are parted."""
    found = []
    kept = model.part_heads

    def look(graph: torch.fx.Graph, trainable: Any) -> None:
        kept(graph, trainable)
        found.append(sum(node.target is late_heads.linear_before for node in graph.nodes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "part_heads", look)
        config = offmate.Config(cache_dir=None, options_per_block=3)
        batch = (torch.zeros(2, ROWS // 2, dtype=torch.int64),)
        offmate.plan(graph_model, "1GiB", example_inputs=batch, device="emulated", config=config)
    return found[0]


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_head_is_parted_once(tied: bool) -> None:
    assert parts(Net(tied)) == 1


def test_heads_that_might_sum_otherwise_stay_whole() -> None:
    assert parts(Net(bias=True)) == 0
    frozen = Net()
    frozen.head.weight.requires_grad_(False)
    assert parts(frozen) == 0


LOOPS: dict[str, dict[str, Any]] = {
    "as gradients come": {},
    "clipped": {"max_grad_norm": 0.1},
    "two micro-batches": {"accumulation_steps": 2, "max_grad_norm": 0.1},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name, outputs, tied",
    [
        ("as gradients come", ("loss",), True),
        ("clipped", "all", False),
        ("two micro-batches", ("loss",), True),
    ],
)
def test_bits_are_plain_pytorchs_with_much_memory_and_with_the_least(name: str, outputs: Any, tied: bool) -> None:
    _, plain = trained(False, tied=tied, **LOOPS[name])
    net, ample = trained(True, outputs=outputs, tied=tied, **LOOPS[name])
    assert all(map(torch.equal, ample, plain))
    least = net.offmate.plan.least_budget_bytes
    tight, found = trained(True, least, outputs, tied=tied, **LOOPS[name])
    assert all(map(torch.equal, found, plain))
    assert tight.offmate.peak_bytes <= least


class Other(Net):
    """Returns the loss, and logits for a loss of the user's."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norms[0](self.embed(ids))

    def loss(self, hidden: torch.Tensor, ids: torch.Tensor) -> Any:
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.view(-1, CLASSES), ids.view(-1)), logits


class UsersLoss(Other):
    def forward(self, ids: torch.Tensor) -> Any:
        return self.loss(self.hidden(ids), ids)


class TwoHeads(Other):
    def forward(self, ids: torch.Tensor) -> Any:
        first = self.hidden(ids)
        loss, _ = self.loss(first, ids)
        return loss + self.loss(torch.tanh(self.norms[1](first)), ids)[0], None


class SeveralUses(Other):
    def forward(self, ids: torch.Tensor) -> Any:
        hidden, weight = self.hidden(ids), self.head.weight
        others = (hidden @ weight.t()[:, :HIDDEN]).square().mean() + weight.square().mean() + weight.detach().mean()
        return self.loss(hidden, ids)[0] + others, None


class FrozenBelow(Other):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.norms.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.loss(self.hidden(ids), ids)[0], None


@pytest.mark.parametrize("kind, heads", [(UsersLoss, 1), (TwoHeads, 2), (SeveralUses, 0), (FrozenBelow, 1)])
def test_heads_in_other_places(kind: type[Other], heads: int) -> None:
    def run(budget: int) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        net = kind()
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        least, into = 0, ("0", "1") if kind is UsersLoss else "auto"
        if budget:
            config = offmate.Config(cache_dir=None, options_per_block=3, gradients_into=into)
            settings = {"optimizer": optimizer, "device": "emulated", "cpu_budget": CPU_BUDGET, "config": config}
            offmate.compile(net, budget, **settings)
        drawn = torch.Generator().manual_seed(1)
        for _ in range(2):
            loss, logits = net(torch.randint(0, CLASSES, (2, ROWS // 2), generator=drawn))
            (loss if logits is None else loss + logits.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if budget:
            least = net.offmate.plan.least_budget_bytes
        return [loss.detach(), *(value.clone() for value in net.state_dict().values())], least

    plain, _ = run(0)
    ample, least = run(1 << 30)
    tight, _ = run(least)
    assert all(map(torch.equal, ample, plain)) and all(map(torch.equal, tight, plain))
    if kind is not UsersLoss:
        assert parts(kind()) == heads


def test_weight_and_gradient_are_not_there_at_once_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def least_bytes() -> int:
        with torch.device("meta"):
            net = Net()
            net.embed, net.head = nn.Embedding(32768, 2048), nn.Linear(2048, 32768, bias=False)
            net.norms = nn.ModuleList(nn.LayerNorm(2048) for _ in range(3))
            ids = torch.zeros(1, 1024, dtype=torch.int64)
        monkeypatch.setitem(globals(), "CLASSES", 32768)
        config = offmate.Config(cache_dir=None, outputs=("loss",))
        optimizer = torch.optim.AdamW(net.parameters())
        settings = {"optimizer": optimizer, "hardware": "rtx3060", "config": config}
        return offmate.plan(net, "8GiB", example_inputs=(ids,), **settings).least_budget_bytes

    parted = least_bytes()
    monkeypatch.setattr(model, "part_heads", lambda graph, trainable: None)
    weight_bytes = 4 * 2048 * 32768
    assert weight_bytes / 2 < least_bytes() - parted <= weight_bytes
