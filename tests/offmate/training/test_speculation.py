"""Updates before the gate: plain PyTorch's bits, whether they are kept or undone."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.runtime.replay.gate import Clip
from offmate.runtime.replay.speculation import Speculation, _Log
from offmate.runtime.replay.updates import Updates
from offmate.solver import items
from offmate.solver.scheduling.validate import validate

import offmate
from offmate.optim.masters import with_master_weights

from ..loops import adamw, batch, tiny
from .speculating import CONFIG, early, own_cores

INF = float("inf")
Between = Callable[[Any, Any, int, int], None]


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    with own_cores():
        yield


@pytest.fixture
def fates(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often an update before the gate was started, kept and undone."""
    counted = {"started": 0, "kept": 0, "undone": 0}
    started, kept, undo = _Log.write, Updates.adopt, Speculation._undo

    def write(self: Any, host: Any, name: str) -> None:
        counted["started"] += 1
        started(self, host, name)

    def adopt(self: Any, name: str, event: Any) -> None:
        counted["kept"] += 1
        kept(self, name, event)

    def undone(self: Any, name: str, attempt: Any) -> None:
        counted["undone"] += attempt.counted
        undo(self, name, attempt)

    monkeypatch.setattr(_Log, "write", write)
    monkeypatch.setattr(Updates, "adopt", adopt)
    monkeypatch.setattr(Speculation, "_undo", undone)
    return counted


def low_precision() -> Any:
    return tiny().bfloat16()


def masters(model: Any) -> torch.optim.Optimizer:
    return with_master_weights(torch.optim.AdamW)(model.parameters(), lr=1e-2, fused=True)


def low_batch(step: int) -> dict[str, torch.Tensor]:
    given = batch(step)
    return {"x": given["x"].bfloat16(), "y": given["y"]}


class Trained:
    """A model that is trained twice, by plain PyTorch and with updates before the gate."""

    def __init__(self, micro: int, clip: float | None, low: bool, **compiled: Any) -> None:
        self.micro, self.clip, self.batch = micro, clip, low_batch if low else batch
        self.announces = compiled.get("accumulation_order") == "by block"
        make, optimizer_of = (low_precision, masters) if low else (tiny, adamw)
        self.plain, self.model = make(), make()
        self.optimizers = optimizer_of(self.plain), optimizer_of(self.model)
        self.scalers, self.loss_scale = compiled.pop("scalers", (None, None)), 1.0
        offmate.compile(
            self.model, compiled.pop("budget", 1 << 30), optimizer=self.optimizers[1], max_grad_norm=clip,
            grad_scaler=self.scalers[1], accumulation_steps=micro, device="emulated",
            cpu_budget=1 << 30, plan=compiled.pop("plan", None),
            config=offmate.Config(**{"cache_dir": None, **CONFIG, **compiled}),
        )  # fmt: skip

    def step(self, number: int, clip: float | None = None, between: Between | None = None) -> None:
        """Make one step of each, and compare norms; `between` is called after every backward."""
        norms = []
        for model, optimizer, scaler in zip((self.plain, self.model), self.optimizers, self.scalers):
            group = [self.batch(self.micro * number + micro) for micro in range(self.micro)]
            announced = self.announces and model is self.model
            for micro, given in enumerate(model.offmate.batches(group) if announced else group):
                loss = model(**given)["loss"] * self.loss_scale / self.micro
                (loss if scaler is None else scaler.scale(loss)).backward()
                if between is not None:
                    between(model, optimizer, number, micro)
            if self.clip is not None and model is self.plain:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if self.clip is not None and model is not self.plain:
                norms.append(model.offmate.grad_norm)
            optimizer.zero_grad()
        if norms and None not in norms:
            assert torch.equal(*(norm.nan_to_num() for norm in norms))

    def assert_same(self) -> None:
        assert_same(self.plain, self.optimizers[0], self.model, self.optimizers[1])


def assert_same(plain: Any, plain_optimizer: Any, model: Any, optimizer: Any) -> None:
    found = model.state_dict()
    assert [name for name, value in plain.state_dict().items() if not torch.equal(value, found[name])] == []
    states, own = (one.state_dict()["state"] for one in (plain_optimizer, optimizer))
    assert states.keys() == own.keys()
    for number, state in states.items():
        assert state.keys() == own[number].keys()
        assert all(torch.equal(value, own[number][key]) for key, value in state.items())


GATES = [(micro, clip) for micro in (1, 2, 4) for clip in (INF, 1e-3, 1.2, None) if micro > 1 or clip is not None]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("micro", "clip"), GATES)
def test_steps_have_plain_bits(micro: int, clip: float | None, low: bool, fates: dict[str, int]) -> None:
    """Kept at every step, undone or not even begun at every one, or now this and now that."""
    trained = Trained(micro, clip, low)
    for number in range(6):
        trained.step(number)
    trained.assert_same()
    assert early(trained.model.offmate.plan.schedule)
    if clip in (INF, None):
        assert fates["started"] > 0 and fates["undone"] == 0
    assert fates["kept"] > 0


@pytest.mark.parametrize("clip", [INF, 1e-3, 1.2])
def test_micro_batches_that_run_block_by_block(clip: float, fates: dict[str, int]) -> None:
    """Their gradients are complete in one backward, and updates with them begin before the gate."""
    trained = Trained(3, clip, low=False, accumulation_order="by block")
    for number in range(6):
        trained.step(number)
    trained.assert_same()
    schedule = trained.model.offmate.plan.schedule
    assert early(schedule) and schedule.per_step == 3
    assert fates["kept"] > 0
    if clip == INF:
        assert fates["started"] > 0 and fates["undone"] == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("micro", [1, 3])
def test_misses_at_random(micro: int, seed: int, fates: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates begin although the norm is too large, so that each such step has to undo them."""
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    trained, rng = Trained(micro, 1.0, low=seed == 2), random.Random(seed)
    names = tuple(name for name, _ in trained.model.named_parameters())
    for number in range(8):
        trained.clip = rng.choice([1e-2, INF])
        if number == 0:
            trained.clip = 1.0
        else:
            trained.model._offmate_session.training.executor.gate._clip = Clip(trained.clip, names)
        trained.step(number)
    trained.assert_same()
    assert fates["undone"] > 0 and fates["started"] > fates["undone"]


def forced(monkeypatch: pytest.MonkeyPatch, micro: int = 1, clip: float = INF, **more: Any) -> Trained:
    """A model whose first step is done, and whose workers have made all updates before the gate."""
    trained = Trained(micro, clip, low=False, **more)
    trained.step(0)
    at_once(monkeypatch)
    return trained


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers make every update before the gate as soon as it is started."""
    start = Speculation.start

    def waits(self: Any, name: str) -> None:
        start(self, name)
        attempt = self._attempts.get(name)
        if attempt is not None:
            attempt.event.synchronize()

    monkeypatch.setattr(Speculation, "start", waits)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("clip", [INF, 1e-3])
def test_the_first_step_updates_before_the_gate_too(
    clip: float, low: bool, fates: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the states that it lacks, and a miss takes them away again; an edit before it changes nothing."""
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    at_once(monkeypatch)
    trained = Trained(1, clip, low)
    with torch.no_grad():
        for model in (trained.plain, trained.model):
            model.last.weight.mul_(1.01)
    trained.step(0)
    trained.assert_same()
    assert fates["started"] > 0 and (fates["undone"] == fates["started"]) is (clip != INF)
    trained.step(1)
    trained.assert_same()


def read(model: Any, optimizer: Any, number: int, micro: int) -> None:
    """Read everything before the step, which must show what it was before the backward."""
    seen = {name: value.clone() for name, value in model.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    LOOKS.append((seen, moments))


LOOKS: list[Any] = []


def warm(model: Any, optimizer: Any, number: int, micro: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3 * (number + micro + 1)


def edit(model: Any, optimizer: Any, number: int, micro: int) -> None:
    with torch.no_grad():
        model.last.weight.mul_(1.01)


def edit_state(model: Any, optimizer: Any, number: int, micro: int) -> None:
    if micro == 0:
        optimizer.state[model.last.weight]["exp_avg"].mul_(1.01)


def evaluate(model: Any, optimizer: Any, number: int, micro: int) -> None:
    with torch.no_grad():
        model(**batch(50))


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("between", [read, warm, edit, edit_state, evaluate], ids=lambda one: one.__name__)
def test_what_comes_before_the_step(
    between: Between, micro: int, fates: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = forced(monkeypatch, micro)
    LOOKS.clear()
    for number in range(1, 5):
        trained.step(number, between=between)
        if between is read:
            plain, planned = LOOKS[:micro], LOOKS[micro:]
            for (seen, moments), (own, own_moments) in zip(plain, planned, strict=True):
                assert all(torch.equal(value, own[name]) for name, value in seen.items())
                assert all(
                    torch.equal(value, own_moments[n][key])
                    for n, state in moments.items()
                    for key, value in state.items()
                )
            LOOKS.clear()
    trained.assert_same()
    early = between is edit_state and micro > 1  # before the last backward, whose updates then stay
    assert (fates["undone"] > 0) is not early


def test_dropped_gradients_leave_no_trace(fates: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    trained = forced(monkeypatch)
    for number in range(1, 4):
        for model, optimizer in zip((trained.plain, trained.model), trained.optimizers):
            model(**batch(90 + number))["loss"].backward()
            optimizer.zero_grad()
        trained.assert_same()
        trained.step(number)
    trained.assert_same()
    assert fates["undone"] > 0


@pytest.mark.parametrize("clip", [INF, 0.5, None])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_scaler_that_skips(
    clip: float | None, micro: int, fates: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scalers = tuple(torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2) for _ in range(2))
    monkeypatch.setattr("tests.offmate.training.test_speculation.adamw", unfused)
    trained = forced(monkeypatch, micro, clip, scalers=scalers)  # type: ignore[arg-type]
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    whole = trained.batch
    for number in range(1, 8):
        trained.batch = (lambda n: {**whole(n), "x": whole(n)["x"] * INF}) if number in (3, 5) else whole
        trained.step(number)
    trained.assert_same()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert fates["undone"] > 0 and (fates["started"] > fates["undone"]) is (clip != 0.5)


def unfused(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_kernel_that_unscales_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(offmate.OffmateError, match="unscales gradients in place"):
        Trained(1, None, False, scalers=(None, scaler))


class Stop(Exception):
    pass


@pytest.mark.parametrize("clip", [INF, 1e-3])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.97])
def test_an_interrupted_iteration_is_whole(share: float, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters have had the update or none, and those that a gate was to decide on have not."""
    trained = forced(monkeypatch, clip=clip)
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    model, optimizer = trained.model, trained.optimizers[1]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trained.step(1)
    after = copy.deepcopy((trained.plain.state_dict(), trained.optimizers[0].state_dict()))
    model.load_state_dict(before[0])
    optimizer.load_state_dict(copy.deepcopy(before[1]))
    executor = model._offmate_session.training.executor
    left = int(share * len(executor.schedule.actions))

    def interrupt(action: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            executor.on_action = None
            raise KeyboardInterrupt

    executor.on_action = interrupt
    with contextlib.suppress(KeyboardInterrupt):
        model(**batch(1))["loss"].backward()
        optimizer.step()
    executor.on_action = None
    assert not model._offmate_session.truth.torn
    found = model.state_dict()
    done = [all(torch.equal(v, found[k]) for k, v in state.items()) for state, _ in (before, after)]
    assert sum(done) == 1, done
    state = optimizer.state_dict()["state"]
    expected = (before, after)[done.index(True)][1]["state"]
    assert all(torch.equal(v, state[n][key]) for n, entry in expected.items() for key, v in entry.items())


def test_an_update_that_fails_is_undone_and_fails_behind_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = forced(monkeypatch)
    model, optimizer = trained.model, trained.optimizers[1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (name, *_) = early(model.offmate.plan.schedule)
    make = Updates.make

    def fails(self: Any, one: str, grad: Any, scale: Any = None) -> None:
        if one == name:
            self._host.params[one].zero_()
            raise Stop
        make(self, one, grad, scale)

    monkeypatch.setattr(Updates, "make", fails)
    model(**batch(1))["loss"].backward()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    optimizer.step()
    with pytest.raises(Exception, match="update of"):
        model.state_dict()


def test_logs_share_ram_with_what_is_there_at_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations that leave, in as little RAM as a schedule's items can share."""
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    given = {"max_grad_norm": 1.2, "device": "emulated", "cpu_budget": 1 << 30}
    config, model = offmate.Config(cache_dir=None, **CONFIG), tiny()
    given |= {"example_inputs": batch(0), "optimizer": adamw(model), "config": config}
    least = offmate.plan(model, 1 << 30, **given).least_budget_bytes
    plan = offmate.plan(model, least, **given)
    tight = [replace(plan.schedule, host_budget_bytes=plan.host_bytes * part // 100) for part in range(50, 100)]
    schedule = next(s for s in tight if s.host_layout.used_bytes <= s.host_budget_bytes)
    validate(schedule)
    assert any(items.log(name) in schedule.host_layout.places for name in early(schedule))
    trained = Trained(1, 1.2, low=False, budget=least, plan=replace(plan, schedule=schedule))
    for number in range(8):
        trained.step(number)
    trained.assert_same()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("micro", [1, 2])
def test_fifty_steps_with_delays(micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are held up at random, so that the gate finds updates waiting, under way and done."""
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    rng, make = random.Random(micro), Updates.make

    def slow(self: Any, name: str, grad: Any, scale: Any = None) -> None:
        if rng.random() < 0.3:
            torch.randn(rng.choice([10, 300, 600]), 600) @ torch.randn(600, 600)
        make(self, name, grad, scale)

    monkeypatch.setattr(Updates, "make", slow)
    trained = Trained(micro, 1.2, low=False)
    for number in range(50):
        trained.step(number, between=read if rng.random() < 0.1 else None)
    LOOKS.clear()
    trained.assert_same()
