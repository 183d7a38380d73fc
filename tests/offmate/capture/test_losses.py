"""Cross entropies in tiles of rows: plain PyTorch's bits, and no logits in full precision."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offmate.runtime.operators import losses
from offmate.runtime.operators.losses import rows_of_tile, tiled_cross_entropy
from torch.nn.functional import cross_entropy
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import offmate
from offmate.capture import losses as capture_losses
from offmate.capture.export import capture
from offmate.capture.model import trace_model

from ...accelerator.loops import without_allocator
from ..parity import AMPLE, HOST_BYTES, LEAST, Case, check

CLASSES = 1003
REDUCTIONS = ("none", "mean", "sum")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 rows."""
    monkeypatch.setattr(losses, "_TILE_ELEMENTS", 40 * CLASSES)
    capture_losses._same_bits.cache_clear()


def drawn(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, CLASSES, generator=generator)).to(dtype)
    return logits, torch.randint(0, CLASSES, (rows,), generator=generator)


@pytest.mark.parametrize("ignored", [-100, 0, 7])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loss_and_gradient_are_those_of_the_whole(
    dtype: torch.dtype, reduction: str, ignored: int, two_threads: None
) -> None:
    """Whatever is ignored, a class of its own or not, and whether the last tile is full or not."""
    for rows in (64, 75, 131):
        logits, target = drawn(rows, dtype)
        target[::7] = ignored
        whole, tiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        expected = cross_entropy(whole.float(), target, reduction=reduction, ignore_index=ignored)
        found, picked, _ = tiled_cross_entropy(tiled, target, REDUCTIONS.index(reduction), ignored, torch.float32)
        assert torch.equal(expected, found)
        assert picked.shape == (rows, 1)
        gradient = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1))
        expected.backward(gradient)
        found.backward(gradient)
        assert torch.equal(whole.grad, tiled.grad)


def test_no_target_counts() -> None:
    logits, target = drawn(70, torch.float32)
    found = tiled_cross_entropy(logits, torch.full_like(target, -100), 1, -100, torch.float32)[0]
    assert found.isnan(), "as in plain PyTorch"


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_a_target_that_is_no_class_fails(wrong: int) -> None:
    logits, target = drawn(70, torch.float32)
    target[3] = wrong
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        tiled_cross_entropy(logits, target, 1, -100, torch.float32)


def test_rows_of_a_tile() -> None:
    """About as many elements in each, and a multiple of rows, so that each is aligned as in the whole."""
    assert rows_of_tile(CLASSES) == 32
    assert rows_of_tile(CLASSES // 8) == 320
    assert rows_of_tile(100 * CLASSES) == 32


def language_model(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    shape: dict[str, Any] = {
        "vocab_size": CLASSES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False,
    }  # fmt: skip
    if kind == "gemma":  # its logits have a soft cap
        return Gemma2ForCausalLM(Gemma2Config(**shape, head_dim=16)).to(dtype)
    return LlamaForCausalLM(LlamaConfig(**shape)).to(dtype)


def texts(items: bool = False) -> list[dict[str, Any]]:
    found = []
    for step in range(3):
        ids = torch.randint(0, CLASSES, (2, 80), generator=torch.Generator().manual_seed(step))
        labels = ids.clone()
        labels[:, : 5 + step] = -100
        counted = {"num_items_in_batch": torch.tensor(int((labels != -100).sum()))} if items else {}
        found.append({"input_ids": ids, "labels": labels, **counted})
    return found


def in_tiles(build: Callable[[], torch.nn.Module]) -> bool:
    """Whether the captured model takes its loss in tiles."""
    graph = capture(build().train(), (), texts()[0]).graph
    return any(node.target is tiled_cross_entropy for node in graph.nodes)


class Shifted(torch.nn.Module):
    """The logits are shifted as a tensor in full precision, as older models do, and returned as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(CLASSES, 32, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(32, CLASSES, bias=False, dtype=torch.bfloat16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        shifted = logits.float()[:, :-1, :].contiguous()
        loss = cross_entropy(shifted.view(-1, CLASSES), labels[:, 1:].contiguous().view(-1), reduction="sum")
        return {"loss": loss / 100, "logits": logits}


CASES = {
    "llama in bfloat16": (lambda: language_model("llama", torch.bfloat16), False),
    "llama in float32": (lambda: language_model("llama", torch.float32), False),
    "gemma, items counted": (lambda: language_model("gemma", torch.bfloat16), True),
    "shifted": (Shifted, False),
}
TRAINED = [
    ("llama in bfloat16", LEAST),
    ("llama in float32", AMPLE),
    ("gemma, items counted", LEAST),
    ("shifted", AMPLE),
    ("shifted", LEAST),
]


@pytest.mark.parametrize(("name", "budget"), TRAINED)
def test_training_in_tiles(name: str, budget: str) -> None:
    """Losses, logits, parameters and states are plain PyTorch's, and the peak is the predicted one."""
    build, items = CASES[name]
    case = Case(
        f"tiles, {name}", build, functools.partial(texts, items),
        loss=lambda output, batch: output["loss"], max_grad_norm=0.5,
    )  # fmt: skip
    check(case, budget, None)
    assert in_tiles(build)


LOSS_ALONE = {"outputs": ("loss",)}


def over_the_logits(build: Callable[[], torch.nn.Module], config: dict[str, Any] = LOSS_ALONE) -> bool:
    """Whether the gradient of the logits is written over them if the logits themselves are not returned."""
    traced = trace_model(build().train(), (), texts()[0], offmate.Config(**config), True, lambda *done: None)
    nodes = (node for block in traced.blocks for node in block.joint.graph.nodes)
    return any(node.target is losses.tiled_cross_entropy_backward_ for node in nodes)


@pytest.mark.parametrize(("name", "budget"), TRAINED)
def test_the_gradient_takes_the_logits_place_where_the_loss_alone_is_returned(name: str, budget: str) -> None:
    build, items = CASES[name]
    case = Case(
        f"loss alone, {name}", build, functools.partial(texts, items),
        loss=lambda output, batch: output["loss"], max_grad_norm=0.5, config=LOSS_ALONE, compares_outputs=False,
    )  # fmt: skip
    check(case, budget, None)
    # The copy of shifted logits is none of the model's outputs; so even those may be overwritten.
    assert over_the_logits(build)


class Squared(Shifted):
    """A second term reads the logits, as some mixtures' routers have it."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        loss = cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1))
        return {"loss": loss + 1e-3 * logits.float().square().mean(), "logits": logits}


class Twice(Shifted):
    """Two losses of the same logits."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids)).view(-1, CLASSES)
        first = cross_entropy(logits, labels.view(-1))
        return {"loss": first + 0.5 * cross_entropy(logits, input_ids.view(-1), reduction="sum")}


@pytest.mark.parametrize("build", [Squared, Twice])
def test_logits_that_something_else_reads_stay(build: Any) -> None:
    case = Case(
        f"loss alone, {build.__name__}", build, texts, loss=lambda output, batch: output["loss"], config=LOSS_ALONE,
        compares_outputs=False,
    )  # fmt: skip
    check(case, LEAST, None)
    assert in_tiles(build)
    assert not over_the_logits(build)


class WithMetrics(Shifted):
    """Metrics of the logits, whose values the backward does not need."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids)).view(-1, CLASSES)
        loss = cross_entropy(logits.float(), labels.view(-1))
        with torch.no_grad():
            total, right = logits.float().logsumexp(-1), logits.argmax(-1) == labels.view(-1)
        spread = logits.detach().float().var()
        return {"loss": loss, "total": total.mean(), "right": right.float().mean(), "spread": spread}


class Weighted(Shifted):
    """The likeliest classes are read again, and the backward needs to know which they were."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        logits = self.head(hidden).view(-1, CLASSES)
        likely = self.head.weight[logits.argmax(-1)] * hidden.view(-1, hidden.shape[-1])
        return {"loss": cross_entropy(logits, labels.view(-1)) + 1e-3 * likely.sum()}


@pytest.mark.parametrize("build", [WithMetrics, Weighted])
def test_metrics_of_logits_are_taken_before_these_are_overwritten(build: Any) -> None:
    config = {"outputs": ("loss", "total", "right", "spread")} if build is WithMetrics else LOSS_ALONE
    case = Case(f"metrics, {build.__name__}", build, texts, loss=lambda output, batch: output["loss"], config=config)
    check(case, LEAST, None)
    assert over_the_logits(build, config) == (build is WithMetrics)


class WrittenLater(Shifted):
    """The model overwrites some logits once it has taken the loss of a copy of them."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        full = logits.float()
        logits[:, 0] = 0.0
        return {"loss": cross_entropy(full.view(-1, CLASSES), labels.view(-1)), "logits": logits}


class LossLast(Shifted):
    """A tuple whose first output is no loss."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = super().forward(input_ids, labels)
        return found["logits"], found["loss"]


def test_a_loss_without_a_name_has_to_come_first() -> None:
    config = offmate.Config(cache_dir=None, **LOSS_ALONE)
    model: Any = offmate.compile(LossLast(), "64MiB", device="emulated", cpu_budget=HOST_BYTES, config=config)
    with pytest.raises(offmate.CaptureError, match="outputs names loss, but the model returns 0, 1"):
        model(**texts()[0])


def test_an_output_that_was_left_out_raises_by_name() -> None:
    torch.manual_seed(0)
    model: Any = language_model("llama", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = offmate.Config(cache_dir=None, **LOSS_ALONE)
    offmate.compile(model, "64MiB", optimizer=optimizer, device="emulated", cpu_budget=HOST_BYTES, config=config)
    output = model(**texts()[0])
    assert "logits" in repr(output.logits)
    assert not hasattr(output.logits, "shape")
    for read in (
        lambda logits: logits.shape,
        lambda logits: logits[0],
        lambda logits: logits + 1,
        lambda logits: list(logits),
        lambda logits: bool(logits),
        lambda logits: torch.softmax(logits, -1),
        lambda logits: torch.ones(1) * logits,
        lambda logits: logits == 3,
        lambda logits: logits != 3,
        lambda logits: logits**2,
        lambda logits: [1] @ logits,
        lambda logits: abs(logits),
        lambda logits: [0, 1][logits],
        lambda logits: logits.__setitem__(0, 1),
        lambda logits: setattr(logits, "mine", 1),
        lambda logits: 3 in logits,
    ):
        with pytest.raises(
            offmate.OffmateError, match=r"the output logits was read, which Config\(outputs=\('loss',\)"
        ):
            read(output.logits)
    output.loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        assert model(**texts()[0]).logits.shape == (2, 80, CLASSES)
        assert model(input_ids=texts()[0]["input_ids"]).logits.shape == (2, 80, CLASSES)


def planned(build: Any, batch: dict[str, Any] | None = None, **how: Any) -> offmate.Plan:
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    settings: dict[str, Any] = {"device": "emulated", "cpu_budget": HOST_BYTES} | how
    return offmate.plan(
        model, "1GiB", example_inputs=batch or texts()[0], optimizer=optimizer,
        config=offmate.Config(cache_dir=None), **settings,
    )  # fmt: skip


def test_memory_no_longer_follows_the_logits_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    build = CASES["llama in bfloat16"][0]
    least = planned(build).least_budget_bytes
    monkeypatch.setattr(losses, "_TILE_ELEMENTS", 10**9)
    assert not in_tiles(build)
    assert planned(build).least_budget_bytes - least > 2 * 160 * CLASSES * 4, "two copies of them"


def test_another_machines_plan_counts_the_tiles() -> None:
    found = planned(CASES["llama in bfloat16"][0], device=None, hardware="rtx3090")
    workspaces = [
        held for one in found.classes.values() for name, (held, *_) in one.kernel_bytes.items() if "tiled" in name
    ]
    assert sorted(workspaces) == [2 * 32 * CLASSES * 4, 3 * 32 * CLASSES * 4]


class Kept(Shifted):
    """Something else reads the logits in full precision."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids)).float()
        return {"loss": cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), "logits": logits}


class Smoothed(Shifted):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids)).float().view(-1, CLASSES)
        return {"loss": cross_entropy(logits, labels.view(-1), label_smoothing=0.1)}


class WrittenAsAnAlias(Shifted):
    """What einsum returns here is the logits' own memory, of which no schema tells."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids)).view(-1, CLASSES)
        full = logits.float()
        torch.einsum("ij->ij", logits).mul_(2.0)
        return {"loss": cross_entropy(full, labels.view(-1)), "logits": logits}


class WrittenOut(Shifted):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids)).view(-1, CLASSES)
        full = logits.float()
        with torch.no_grad():
            torch._foreach_mul_([logits.detach()], 2.0)
        return {"loss": cross_entropy(full, labels.view(-1)), "logits": logits}


class Counted(Shifted):
    """A second loss, of whole numbers."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        counts = torch.nn.functional.one_hot(input_ids, CLASSES).view(-1, CLASSES)
        loss = cross_entropy(self.head(self.embed(input_ids)).float().view(-1, CLASSES), labels.view(-1))
        return {"loss": loss, "unigrams": cross_entropy(counts.float(), labels.view(-1))}


class WrittenToo(Shifted):
    """What the model writes after the head has nothing to do with the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        logits = self.head(hidden)
        with torch.no_grad():
            torch._foreach_mul_([self.mean], 0.9)
            torch.add(self.mean, hidden.float().mean((0, 1)), out=self.mean)
        return {"loss": cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1))}


class WithGaps(Shifted):
    """Only the cast makes the slice dense, so that it can be viewed."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        loss = cross_entropy(logits[:, :-1].float().view(-1, CLASSES), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


class Weighted(Shifted):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids)).float().view(-1, CLASSES)
        return {"loss": cross_entropy(logits, labels.view(-1), weight=torch.ones(CLASSES))}


class ByAutocast(Shifted):
    """Autocast casts the logits for the loss by itself."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.head(self.embed(input_ids)).view(-1, CLASSES)
            return {"loss": cross_entropy(logits, labels.view(-1))}


@pytest.mark.parametrize(
    ("build", "tiled"),
    [
        (Kept, True),
        (Smoothed, False),
        (Weighted, False),
        (ByAutocast, False),
        (WrittenLater, False),
        (WrittenAsAnAlias, False),
        (WrittenOut, False),
        (WrittenToo, False),
        (Counted, True),
        (WithGaps, True),
    ],
)
def test_other_losses(build: Any, tiled: bool) -> None:
    """What is read elsewhere stays, and only the log-softmax goes into tiles; other kinds of losses stay whole."""
    check(Case(f"tiles, {build.__name__}", build, texts, loss=lambda output, batch: output["loss"]), LEAST, None)
    assert in_tiles(build) is tiled


def test_logits_that_the_user_changes_before_the_backward() -> None:
    """Plain PyTorch would not notice; the loss in tiles reads them again, and says so instead of using them."""
    torch.manual_seed(0)
    model: Any = language_model("llama", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = offmate.Config(cache_dir=None)
    offmate.compile(model, "64MiB", optimizer=optimizer, device="emulated", cpu_budget=HOST_BYTES, config=config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    output = model(**texts()[0])
    output.logits.data.mul_(3)
    with pytest.raises(offmate.OffmateError, match="the logits that the model returned were changed"):
        output.loss.backward()
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(**texts()[0]).loss.backward()
    optimizer.step()


def test_other_bits_on_a_device_leave_the_loss_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = capture_losses.tiled_cross_entropy

    def off(*given: Any) -> Any:
        loss, *rest = kernel(*given)
        return loss * (1 + 1e-6), *rest

    with caplog.at_level(logging.INFO, "offmate"), monkeypatch.context() as patch:
        patch.setattr(capture_losses, "tiled_cross_entropy", off)
        assert not in_tiles(CASES["llama in bfloat16"][0])
    assert "the loss is not split into tiles" in caplog.text
    capture_losses._same_bits.cache_clear()


@pytest.mark.parametrize("outputs", ["all", ("loss",)])
def test_on_an_accelerator(outputs: Any, sim: Any) -> None:
    """Copies are late at random, and memory that is let go is poisoned."""
    sim.set_delays(3, 40)

    def trained(device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model: Any = language_model("llama", torch.bfloat16).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if device:
            config = offmate.Config(cache_dir=None, outputs=outputs)
            offmate.compile(
                model,
                "64MiB",
                optimizer=optimizer,
                device=device,
                cpu_budget=HOST_BYTES,
                max_grad_norm=0.5,
                config=config,
            )
        found = []
        for batch in texts():
            loss = model(**batch).loss
            loss.backward()
            if not device:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, {name: value.cpu().clone() for name, value in model.state_dict().items()}

    expected = trained("")
    with without_allocator():
        found = trained("sim")
    assert expected[0] == found[0]
    assert [name for name, value in expected[1].items() if not torch.equal(value, found[1][name])] == []
