"""Batches of several shapes: plans are kept per shape, smaller ones take over decisions, numbers stay."""

from __future__ import annotations

import logging

import pytest
import torch

import offmate

from ..loops import CPU_BUDGET, Loop, adamw, assert_same, batch, plain, tiny

SIZES = (8, 8, 5, 8, 3, 5, 8, 1)


def cut(step: int, size: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:size] for name, tensor in batch(step).items()}


def run(loop: Loop, sizes: tuple[int, ...] = SIZES) -> list[float]:
    losses = []
    for step, size in enumerate(sizes):
        loss = loop.model(**cut(step, size))["loss"]
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


GATE = ("max_grad_norm", "accumulation_steps")


def compiled(budget: int | None = None, planned: bool = True, **more) -> Loop:
    model = tiny()
    optimizer = adamw(model)
    config = offmate.Config(cache_dir=None, **{name: value for name, value in more.items() if name not in GATE})
    settings = {"device": "emulated", "cpu_budget": CPU_BUDGET, "config": config}
    given = {"optimizer": optimizer} if planned else {}
    given |= {name: more[name] for name in GATE if name in more}
    if budget is None:
        budget = offmate.plan(model, 1 << 30, example_inputs=batch(0), **given, **settings).least_budget_bytes
    offmate.compile(model, budget, **given, **settings)
    return Loop(model, optimizer)


@pytest.mark.parametrize("planned", [True, False])
def test_alternating_shapes(planned):
    ours, reference = compiled(planned=planned), plain()
    assert run(ours) == run(reference)
    assert_same(ours, reference)
    assert ours.model.offmate.peak_bytes <= ours.model.offmate.plan.budget_bytes
    ours.session.residence.bring_home()
    assert ours.session.device.ledger.level_bytes == 0


def test_micro_batches_of_several_shapes():
    """Each goes by its own plan; what they add up is one total."""

    def accumulated(loop: Loop, sizes: tuple[int, ...]) -> list[float]:
        losses = []
        for step, size in enumerate(sizes):
            loss = loop.model(**cut(step, size))["loss"] / 3
            loss.backward()
            losses.append(loss.item())
            if step % 3 == 2:
                if loop is reference:
                    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return losses

    ours, reference = compiled(max_grad_norm=0.5, accumulation_steps=3), plain()
    sizes = (8, 8, 5, 8, 3, 5, 8, 1, 8)
    with ours.model.offmate.record():
        assert accumulated(ours, sizes) == accumulated(reference, sizes)
    assert_same(ours, reference)
    assert ours.model.offmate.trace is None, "no iteration went by one schedule"


def test_a_smaller_batch_takes_over_decisions(monkeypatch):
    ours, reference = compiled(), plain()
    assert run(ours, (8,)) == run(reference, (8,))
    own = ours.model.offmate.plan
    monkeypatch.setattr("offmate.planning.planner.solve_problem", lambda *_, **__: pytest.fail("solved anew"))
    assert run(ours, (8, 5)) == run(reference, (8, 5))
    followed = ours.model.offmate.plan
    assert "larger batch" in followed.status
    assert followed.schedule.actions == own.schedule.actions
    assert followed.predicted_peak_bytes < own.predicted_peak_bytes
    ours.model.offmate.reset_peak()
    assert run(ours, (5, 5)) == run(reference, (5, 5))
    assert ours.model.offmate.peak_bytes == followed.predicted_peak_bytes
    assert_same(ours, reference)


def statuses(sizes: tuple[int, ...], **config) -> list[bool]:
    """Whether each batch follows a larger one's decisions."""
    loop = compiled(**config)
    found = []
    for size in sizes:
        run(loop, (size,))
        found.append("larger batch" in loop.model.offmate.plan.status)
    return found


def test_buckets_and_a_larger_batch():
    assert statuses((6, 5, 8, 7), budget=1 << 30) == [False, True, False, True]
    assert statuses((8, 6, 5, 4), budget=1 << 30, shape_buckets=(5,)) == [False, True, False, True]


def test_so_many_plans_are_kept(caplog):
    loop = compiled(budget=1 << 30, max_plans=2)
    with caplog.at_level(logging.INFO, "offmate"):
        run(loop, (8, 7, 6, 6, 7, 8))
    assert caplog.text.count("planning for batches with [8, 16], [8]") == 1
    assert caplog.text.count("plan ready") == 4
    assert len(loop.model.offmate.plans) == 2


def test_training_in_eval_mode_too():
    ours, reference = compiled(), plain()
    for loop in (ours, reference):
        run(loop, (8,))
        loop.model.eval()
        run(loop, (8,))
        loop.model.train()
    assert run(ours, (8,)) == run(reference, (8,))
    assert_same(ours, reference)


def texts(step: int) -> dict[str, torch.Tensor]:
    """Batches as a collator pads them: lengths differ, and only some have padding."""
    generator = torch.Generator().manual_seed(step)
    rows, length, padding = ((2, 40, 0), (2, 40, 6), (2, 33, 0), (1, 20, 0))[step % 4]
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, length - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_a_language_model_with_the_loss_outside(cache_dir):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )

    def train(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        optimizer = adamw(model)
        if compiles:
            settings = {"device": "emulated", "cpu_budget": CPU_BUDGET, "config": offmate.Config(cache_dir=cache_dir)}
            offmate.compile(model, 1 << 30, optimizer=optimizer, **settings)
        losses = []
        for step in range(8):
            batch = texts(step)
            logits = model(**batch).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(value.clone() for value in model.state_dict().values())]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


class Shared(torch.nn.Module):
    """A loss shared out over a number of items, as Trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, num_items_in_batch: int = 1, power: int = 1) -> torch.Tensor:
        return (self.layer(x) ** 2).sum() / num_items_in_batch * power


class Sliced(Shared):
    """A number that a graph cannot hold as a tensor."""

    def forward(self, x: torch.Tensor, first: int = 1) -> torch.Tensor:
        return (self.layer(x)[list(range(first))] ** 2).sum()


@pytest.mark.parametrize(
    ("kind", "calls", "most"),
    [
        (Shared, [{"num_items_in_batch": n} for n in (3, 7, 11, 3)], 3),
        (Shared, [{"power": n} for n in (3, 7, 11, 3)], 3),
        (Sliced, [{"first": n} for n in (3, 2, 1, 3)], 3),
    ],
    ids=["count", "other", "sliced"],
)
def test_whole_numbers_stay_python_numbers(kind, calls, most, caplog):
    """Each value is captured once: a forward may ask for its type, and lower precisions round otherwise."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 4)
    expected = [model(x, **more).item() for more in calls]
    offmate.compile(model, 1 << 30, device="emulated", config=offmate.Config(cache_dir=None))
    with caplog.at_level(logging.INFO, "offmate"):
        for more, value in zip(calls, expected):
            loss = model(x, **more)
            loss.backward()
            assert loss.item() == value
    assert caplog.text.count("plan ready") == most


class Typed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        out = self.layer(x) + k / 3
        return (out if isinstance(k, int) else 3 * out).float().square().sum()


def test_what_a_forward_does_with_a_whole_number_is_what_it_does_in_plain_pytorch():
    torch.manual_seed(0)
    model, x = Typed(), torch.randn(8, 4, dtype=torch.bfloat16)
    expected = [model(x, k).item() for k in (1, 2, 5, 1)]
    offmate.compile(model, 1 << 30, device="emulated", config=offmate.Config(cache_dir=None))
    with torch.no_grad():
        assert [model(x, k).item() for k in (1, 2, 5, 1)] == expected


def test_the_number_of_items_of_a_transformers_model_makes_no_plan_of_its_own(caplog):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model, ids = transformers.GPT2LMHeadModel(config).train(False), torch.arange(16)[None]
    counts = (3, 7, 11)
    expected = [model(input_ids=ids, labels=ids, num_items_in_batch=n).loss.item() for n in counts]
    offmate.compile(model, 1 << 30, device="emulated", config=offmate.Config(cache_dir=None))
    with caplog.at_level(logging.INFO, "offmate"):
        for count, value in zip(counts, expected):
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=count).loss
            loss.backward()
            assert loss.item() == value
    assert caplog.text.count("plan ready") == 1
