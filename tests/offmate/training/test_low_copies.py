"""Weights that autocast casts move as copies in its precision: plain PyTorch's numbers under autocast, bit for bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.runtime.replay.low_copies import WHOLE

import offmate
from offmate.planning import planner

from ...fuzz.figures import from_hardware_file
from ..low_precision import WAYS, move, moved
from ..parity import AMPLE_BYTES, Case, check, least_bytes
from .test_parity_models import Decoder, token_case

Optimizers = Callable[[Any], torch.optim.Optimizer]
TESTED: dict[str, Optimizers] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=1e-2),
    "fused": lambda given: torch.optim.AdamW(given, lr=1e-2, fused=True),
    "sgd": lambda given: torch.optim.SGD(given, lr=1e-2, momentum=0.9),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=1e-2),
    "adafactor": lambda given: torch.optim.Adafactor(given, lr=1e-2),
}


def in_bfloat16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def rates() -> Iterator[None]:
    """What a plan moves does not hang on how busy the machine was."""
    with from_hardware_file():
        yield


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves in the lower precision."""
    move(monkeypatch, request.param)
    return str(request.param)


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans have low copies wherever they may, faster or not."""
    move(monkeypatch, "copies")


def case(name: str, **settings: Any) -> Case:
    own = settings.pop("optimizer", "fused")
    return token_case(
        f"low-{name}-{own}",
        lambda: Decoder(tied="tied" in name),
        around=in_bfloat16,
        optimizer=lambda model: TESTED[own](model.parameters()),
        **settings,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "clip", "updates"),
    [
        *(("decoder", clip, updates) for clip in (None, 0.05) for updates in ("auto", "host", "device")),
        ("decoder", 1e9, "auto"), ("tied", None, "host"), ("tied", 0.05, "auto"),
    ],
)  # fmt: skip
def test_numbers_states_and_peak(way: str, name: str, clip: float | None, updates: str) -> None:
    """Losses, gradients' norms, parameters and states are plain PyTorch's, and the ledger is the plan's to the byte."""
    own = case(f"{name}-{clip}-{updates}", max_grad_norm=clip, config={"updates": updates})
    assert moved(check(own, AMPLE_BYTES, None).plan, way)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("optimizer", "clip"), [("fused", None), *((optimizer, 0.05) for optimizer in TESTED)])
def test_in_the_least_budget(way: str, optimizer: str, clip: float | None) -> None:
    own = case(f"least-{clip}", max_grad_norm=clip, optimizer=optimizer)
    run = check(own, least_bytes(own, None), None)
    assert "embed.weight" not in moved(run.plan, way), "an embedding reads it as it is"


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_updates_before_the_gate(way: str, clip: float) -> None:
    """Those that were wrong are undone, with the copies."""
    own = case(f"early-{clip}", max_grad_norm=clip, config={"speculate": True, "updates": "host"})
    assert moved(check(own, AMPLE_BYTES, None).plan, way)


def test_tensors_that_are_updated_in_chunks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offmate.optim.chunks.CHUNK_ELEMENTS", 192)
    own = case("chunks", max_grad_norm=0.05, config={"updates": "host"})
    assert moved(check(own, AMPLE_BYTES, None).plan, way)


class Loop:
    """A decoder that is trained step by step, compiled or not."""

    def __init__(self, compiled: bool, clip: float | None = None, **config: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = Decoder()
        self.model.extra = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.optimizer = TESTED["adamw"]([p for p in self.model.parameters() if p.requires_grad])
        self.clip, self.compiled, self.at = clip, compiled, 0
        self.seen: list[torch.Tensor] = []
        if compiled:
            offmate.compile(
                self.model, "1GiB", optimizer=self.optimizer, device="emulated", max_grad_norm=clip,
                config=offmate.Config(cache_dir=None, **config),
            )  # fmt: skip

    def forward(self, length: int = 12, around: Callable[[], Any] = in_bfloat16) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.at)
        ids, y = (torch.randint(0, 40, (3, length), generator=generator) for _ in range(2))
        with around():
            loss: torch.Tensor = self.model(ids=ids, y=y)
        self.seen.append(loss.detach().clone())
        return loss

    def step(self, length: int = 12, outside: bool = False, around: Callable[[], Any] = in_bfloat16) -> None:
        self.forward(length, around).backward()
        if outside:
            (0.01 * self.model.layers[0][1].weight.square().sum()).backward()
        self.finish()
        self.at += 1

    def finish(self) -> None:
        if self.clip is not None and not self.compiled:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
        return self.seen, self.model.state_dict(), self.optimizer.state_dict()["state"]


def assert_alike(first: Loop, second: Loop) -> None:
    (losses, state, optimizer), (others, other_state, other_optimizer) = first.result(), second.result()
    assert all(map(torch.equal, losses, others)) and len(losses) == len(others)
    assert state.keys() == other_state.keys() and all(torch.equal(state[n], other_state[n]) for n in state)
    assert optimizer.keys() == other_optimizer.keys()
    for key, own in optimizer.items():
        assert own.keys() == other_optimizer[key].keys(), "the parameter itself is no part of its state for the user"
        parts = [(own[part], other_optimizer[key][part]) for part in own]
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in parts)


def evaluate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.forward()
        loop.seen.append(loop.model(ids=torch.zeros(1, 4).long(), y=torch.zeros(1, 4).long()))  # without autocast
    loop.model.train()


def evaluate_before_the_backward(loop: Loop) -> None:
    loss = loop.forward()
    with torch.no_grad():
        loop.seen.append(loop.model(ids=torch.zeros(1, 4).long(), y=torch.zeros(1, 4).long()))  # without autocast
    loss.backward()
    loop.finish()


def evaluate_before_the_step(loop: Loop) -> None:
    loop.forward().backward()
    loop.model.eval()
    with torch.no_grad():
        loop.forward()
    loop.model.train()
    loop.finish()


def train_in_float16(loop: Loop) -> None:
    loop.step(around=lambda: torch.autocast("cpu", torch.float16))


def unfreeze_in_vain(loop: Loop) -> None:
    """A parameter that the optimizer does not hold."""
    extra = loop.model.extra
    if loop.compiled:
        extra.requires_grad_(True)
        with pytest.raises(offmate.ProtocolError, match="is not in the planned optimizer"):
            loop.forward()
        extra.requires_grad_(False)


def edit(loop: Loop) -> None:
    with torch.no_grad():
        for param in loop.model.parameters():
            param.mul_(1.01)


def write_by_numpy(loop: Loop) -> None:
    for param in loop.model.parameters():
        param.detach().numpy()[...] *= 1.5


def write_a_little_by_numpy(loop: Loop) -> None:
    """Less than a copy shows."""
    for param in loop.model.parameters():
        param.detach().numpy()[...] += 1e-5


def replace_memory(loop: Loop) -> None:
    for param in loop.model.parameters():
        param.data = param.data * 0.99


def halve_moments(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def load(loop: Loop) -> None:
    states = copy.deepcopy(loop.optimizer.state_dict())
    loop.model.load_state_dict({name: 0.9 * value for name, value in loop.model.state_dict().items()})
    loop.optimizer.load_state_dict(states)


def freeze(loop: Loop) -> None:
    loop.model.layers[1].requires_grad_(False)


def drop_a_backward(loop: Loop) -> None:
    loop.forward().backward()
    loop.optimizer.zero_grad()


def add_a_term(loop: Loop) -> None:
    loop.step(outside=True)


def change_the_shape(loop: Loop) -> None:
    loop.step(length=7)


BETWEEN = (
    evaluate, evaluate_before_the_backward, evaluate_before_the_step, edit, write_by_numpy, write_a_little_by_numpy,
    replace_memory, halve_moments, load, freeze, unfreeze_in_vain, drop_a_backward, add_a_term, change_the_shape,
    train_in_float16,
)  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("way", "updates"),
    [("copies", "host"), ("copies", "device"), ("gradients", "host"), ("both", "device")],
    indirect=["way"],
)
@pytest.mark.parametrize("between", BETWEEN)
def test_what_happens_between_steps(way: str, between: Callable[[Loop], None], updates: str) -> None:
    loops = [Loop(compiled, clip=0.05, updates=updates) for compiled in (False, True)]
    for loop in loops:
        for _ in range(2):
            loop.step()
            loop.step()
            between(loop)
        loop.step()
    assert_alike(*loops)
    assert moved(loops[1].model.offmate.plan, way)


@pytest.mark.parametrize("updates", ["host", "device"])
def test_an_interrupted_backward(way: str, updates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in an update: what was updated is so whole, with its copy, and training goes on from there."""
    loops = [Loop(compiled, clip=1e9, updates=updates) for compiled in (False, True)]
    for loop in loops:
        loop.step()
    loop = loops[1]
    loop.forward().backward()
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(type(loop.model._offmate_session.updater), "snapshot", interrupt)
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    host = loop.model._offmate_session.truth.host
    assert all(torch.equal(host.params[name], host.whole(name).bfloat16()) for name in host.low)
    loop.seen.pop()
    for one in loops:
        one.step()
    assert_alike(*loops)


def interrupt(*given: Any) -> None:
    raise KeyboardInterrupt


def test_a_plan_is_kept_with_its_copies(way: str, tmp_path: Any) -> None:
    """In its file, for another run."""
    first = Loop(True)
    first.step()
    plan = first.model.offmate.plan
    plan.save(tmp_path / "plan.json")
    assert offmate.load_plan(tmp_path / "plan.json") == plan
    assert moved(plan, way)
    assert set((plan.low | plan.low_gradients).values()) == {"bfloat16"}
    first.model.offmate.save_plans(tmp_path / "plans")
    again = Loop(True)
    again.model.offmate.load_plans(tmp_path / "plans")
    again.step()
    assert again.model.offmate.plan.from_cache
    assert again.model.offmate.plan.low == plan.low
    assert again.model.offmate.plan.low_gradients == plan.low_gradients
    assert_alike(first, again)


def test_a_plan_for_weights_that_are_read_otherwise_is_refused(low: None, tmp_path: Any) -> None:
    """By name if it is given, and with a warning if it was kept."""
    loop = Loop(True)
    loop.step()
    plan = loop.model.offmate.plan
    name = next(iter(plan.low))
    wrong = replace(plan, low={**plan.low, name: "bfloat17"})
    model = Decoder()
    optimizer = TESTED["adamw"](model.parameters())
    given = replace(wrong, fingerprint=plan.fingerprint)
    with pytest.raises(offmate.PlanFileError), in_bfloat16():
        offmate.compile(
            model, "1GiB", optimizer=optimizer, device="emulated", plan=given, config=offmate.Config(cache_dir=None)
        )
        model(ids=torch.zeros(3, 12).long(), y=torch.zeros(3, 12).long())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_states_in_rows(way: str, monkeypatch: pytest.MonkeyPatch, clip: float | None) -> None:
    """The device updates rows of a weight, with those of its state, the weight itself among it."""
    monkeypatch.setattr("offmate.solver.options.pieces._LEAST_BYTES", 1 << 11)
    own = token_case(
        f"low-rows-{clip}", lambda: Decoder(width=256), around=in_bfloat16, max_grad_norm=clip,
        config={"updates": "device"},
    )  # fmt: skip
    run = check(own, least_bytes(own, None) * (120 if clip is None else 104) // 100, None)
    assert any(len(run.plan.schedule.states[name]) > 1 for name in moved(run.plan, way))


def test_the_fastest_plan_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three: with gradients alone, with all copies, and with those of what the faster one updates on the host."""
    tried: list[offmate.Plan] = []
    alone = planner._search

    def search(*given: Any) -> Any:
        found = alone(*given)
        tried.append(found[0])
        return found

    monkeypatch.setattr(planner, "_search", search)
    own = case("fastest")
    budget = least_bytes(own, None) * 3 // 2
    tried.clear()
    run = check(own, budget, None)
    without, every, *some = tried
    assert not without.low
    assert "head.weight" in every.low
    best = min((without, every), key=lambda plan: plan.predicted_step_s)
    assert [set(plan.low) for plan in some] == [set(every.low) & set(best.split.host)]
    assert run.plan is not None
    assert run.plan.predicted_step_s == min(plan.predicted_step_s for plan in (without, every, *some))


def test_the_least_budget_is_not_one_at_which_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of what a plan updates on the host may need less, but without such a plan they are not tried."""
    own, some = case("least", config={"updates": offmate.Split(host=("head.weight",))}), []
    alone = planner._search

    def search(subject: Any, *given: Any) -> Any:
        plan, lowered = alone(subject, *given)
        if plan.low.keys() == {"head.weight"}:
            some.append(plan)
            plan = replace(plan, least_budget_bytes=1)
        return plan, lowered

    monkeypatch.setattr(planner, "_search", search)
    plan = check(own, AMPLE_BYTES, None).plan
    assert plan is not None and some
    check(own, plan.least_budget_bytes, None)


def test_no_copies_if_they_are_not_wanted() -> None:
    """Gradients need no other memory, and leave as autocast makes them."""
    loop = Loop(True, low_copies=False)
    loop.step()
    assert not loop.model.offmate.plan.low
    assert "head.weight" in loop.model.offmate.plan.low_gradients


def planned(model: torch.nn.Module, order: Any = "auto", low_copies: bool = True, **settings: Any) -> offmate.Plan:
    given = {"optimizer": TESTED["adamw"](model.parameters())} | settings
    batch = {"ids": torch.zeros(2, 8).long(), "y": torch.zeros(2, 8).long()}
    config = offmate.Config(cache_dir=None, accumulation_order=order, low_copies=low_copies)
    with in_bfloat16():
        return offmate.plan(model, "1GiB", example_inputs=batch, device="emulated", config=config, **given)


@pytest.mark.parametrize("settings", [{"grad_scaler": torch.amp.GradScaler("cpu")}, {"optimizer": None}])
def test_where_gradients_are_wider_there_are_none(low: None, settings: dict[str, Any]) -> None:
    """A scaler unscales gradients in the parameter's own precision, and the user's code takes them in that."""
    plan = planned(Decoder(), **settings)
    assert not plan.low
    assert not plan.low_gradients


def test_sums_over_micro_batches_are_in_float32(low: None) -> None:
    """Copies come in the lower precision all the same, for each of them."""
    model = Decoder()
    plan = planned(model, "by batch", accumulation_steps=2)
    assert "head.weight" in plan.low
    assert plan.problem is not None
    sizes = {tensor.name: tensor for group in plan.problem.groups for tensor in group.tensors}
    elements = model.head.weight.numel()
    assert (sizes["head.weight"].param_bytes, sizes["head.weight"].grad_bytes) == (2 * elements, 4 * elements)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("updates", ["host", "device"])
@pytest.mark.parametrize("clip", [None, 0.05, 1e9])
@pytest.mark.parametrize("budget", ["ample", "least"])
def test_several_micro_batches(low: None, updates: str, clip: float | None, budget: str) -> None:
    own = case(f"micro-{clip}-{updates}", max_grad_norm=clip, micro=3, config={"updates": updates})
    plan = check(own, AMPLE_BYTES if budget == "ample" else least_bytes(own, None), None).plan
    assert plan is not None
    assert plan.low


class WithAux(Decoder):
    """A decoder with a layer that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(ids=ids, y=y)
        with torch.no_grad():
            nothing = 0 * self.aux(loss.detach().expand(8)).sum()
        return loss + nothing


def test_a_weight_without_a_gradient_moves_as_it_is() -> None:
    plan = planned(WithAux())
    assert "head.weight" in plan.low | plan.low_gradients
    assert not any(name.startswith("aux") for name in plan.low | plan.low_gradients)
    assert "leave in bfloat16" in planned(WithAux(), low_copies=False).explain()


class Once(torch.optim.SGD):
    """Remembers the first step, and acts once on it in the second."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "warm" in state:
                    param.data.add_(state.pop("warm"))
                elif "after" not in state:
                    state["warm"], state["after"] = torch.full((), 0.01), 1


@pytest.mark.parametrize("updates", ["host", "device"])
def test_a_state_that_loses_a_part(way: str, updates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "adamw", lambda given: Once(given, lr=1e-2))
    loops = [Loop(compiled, updates=updates) for compiled in (False, True)]
    for loop in loops:
        for _ in range(4):
            loop.step()
    assert_alike(*loops)


def test_bytes_that_move(way: str) -> None:
    """A copy and a gradient take two bytes each; with a copy, the weight itself is four more of its state."""
    loop = Loop(True)
    loop.step()
    problem = loop.model.offmate.plan.problem
    sizes = {tensor.name: tensor for group in problem.groups for tensor in group.tensors}
    for name, param in loop.model.named_parameters():
        if name == "extra":
            continue
        own, plan = sizes[name], loop.model.offmate.plan
        copied, low = name in plan.low, name in plan.low | plan.low_gradients
        assert own.param_bytes == (2 if copied else 4) * param.numel()
        assert own.grad_bytes == (2 if low else 4) * param.numel()
        assert own.state_bytes == (12 if copied else 8) * param.numel()
    assert WHOLE not in loop.optimizer.state[loop.model.head.weight]


def test_no_copy_of_a_weight_is_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast without copies, blocks may save the weights that they cast as activations."""
    saved = {}
    for may in (False, True):
        loop = Loop(True)
        with monkeypatch.context() as patched:
            move(patched, "copies" if may else "gradients")
            loop.step()
        blocks = loop.model.offmate.plan.problem.blocks
        saved[may] = sum(next(o for o in block.options if o.name == "keep").saved_bytes for block in blocks)
    weights = sum(2 * loop.model.get_parameter(name).numel() for name in loop.model.offmate.plan.low)
    assert saved[False] - saved[True] >= 0.9 * weights
