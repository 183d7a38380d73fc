"""Scaled losses with planned updates: torch's scaler unscales, checks and skips as in plain PyTorch, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from typing import Any

import pytest
import torch
from offmate.runtime.replay import unscaling

import offmate
from offmate import OffmateError, PlanFileError, ProtocolError
from offmate.arguments import check_unscaling

from ...accelerator.loops import without_allocator
from ...fuzz.figures import from_hardware_file
from ...pairs import covering
from ..loops import CPU_BUDGET, Tiny, batch
from .test_waiting_gradients import all_wait, returning, slow_host  # noqa: F401

AMPLE = 1 << 20
NONE: dict[str, float] = {}
CLIP = {"max_grad_norm": 0.5}


class Run:
    """A model, its optimizer and a scaler; everything that the loop shows, step by step.

    Parameters
    ----------
    budget: None for plain PyTorch. unscales: whether the loop calls unscale_ itself. mixed: whether it uses autocast.
    compiled: settings of compile.
    """

    def __init__(
        self,
        budget: int | None,
        *,
        micro: int = 1,
        fused: bool = False,
        clip: dict[str, float] = NONE,
        unscales: bool = True,
        kind: Any = torch.optim.AdamW,
        dtype: torch.dtype = torch.float32,
        scale: float = 2.0**24,
        growth: float = 2.0,
        mixed: bool = True,
        device: str = "cpu",
        **compiled: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = Tiny(layers=3).to(dtype)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **({"fused": True} if fused else {}))
        self.scaler = torch.amp.GradScaler(device, init_scale=scale, growth_factor=growth, growth_interval=2)
        self.micro, self.clip, self.unscales, self.dtype, self.mixed = micro, clip, unscales, dtype, mixed
        self.planned = budget is not None
        self.shown: list[Any] = []
        if budget is not None:
            settings = {
                "device": "emulated" if device == "cpu" else device, "cpu_budget": CPU_BUDGET,
                "config": offmate.Config(cache_dir=None), "grad_scaler": self.scaler, "accumulation_steps": micro,
            }  # fmt: skip
            settings |= {**clip, **compiled}
            offmate.compile(self.model, budget, optimizer=self.optimizer, **settings)

    def backward(self, number: int, count: int | None = None) -> None:
        with torch.autocast("cpu", torch.float16, enabled=self.mixed):
            given = batch(number)
            loss = self.model(given["x"].to(self.dtype), given["y"])["loss"] / (count or self.micro)
        loss = loss if self.mixed else 4 * loss  # float32 overflows, too, if scaled enough
        self.scaler.scale(loss).backward()
        self.shown.append(loss.item())

    def update(self) -> None:
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
        if self.clip and not self.planned:
            self.shown.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), *self.clip.values()).item())
        self.scaler.step(self.optimizer)
        if self.clip and self.planned:
            self.shown.append(self.model.offmate.grad_norm.item())
        self.scaler.update()
        self.optimizer.zero_grad()
        self.shown.append(self.scaler.state_dict())

    def steps(self, counts: tuple[int, ...], first: int = 0) -> Run:
        for step, count in enumerate(counts, first):
            for number in range(count):
                self.backward(3 * step + number, count)
            self.update()
        return self

    @property
    def state(self) -> tuple[Any, Any]:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))

    @property
    def updates(self) -> int:
        return max((int(state["step"]) for state in self.state[1].values()), default=0)


def assert_same(a: Run, b: Run) -> None:
    assert list(map(repr, a.shown)) == list(map(repr, b.shown))  # norms of skipped steps are inf or nan
    (params, states), (other_params, other_states) = a.state, b.state
    assert [name for name in params if not torch.equal(params[name], other_params[name].cpu())] == []
    assert states.keys() == other_states.keys()
    for number, state in states.items():
        assert state.keys() == other_states[number].keys()
        assert [key for key in state if not torch.equal(state[key], other_states[number][key].cpu())] == []


def check(budget: int, counts: tuple[int, ...] | None = None, **settings: Any) -> Run:
    """Run plain PyTorch and a plan side by side, over steps that are skipped and steps that are not."""
    counts = counts or (settings.get("micro", 1),) * 10
    ours = Run(budget, **settings)
    plain = Run(None, **{key: value for key, value in settings.items() if key not in ("config", "device")})
    ours.steps(counts)
    plain.steps(counts)
    assert_same(plain, ours)
    assert 0 < plain.updates < len(counts)
    return ours


def least_of(**gate: Any) -> int:
    model, given = Tiny(layers=3), batch(0)
    with torch.autocast("cpu", torch.float16):
        found = offmate.plan(
            model, AMPLE, example_inputs=(given["x"], given["y"]), optimizer=torch.optim.AdamW(model.parameters()),
            device="emulated", cpu_budget=CPU_BUDGET, grad_scaler=torch.amp.GradScaler("cpu"),
            config=offmate.Config(cache_dir=None), **gate,
        ).least_budget_bytes  # fmt: skip
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fused", "clips", "micro", "unscales", "tight"),
    covering(
        [False, True], [False, True], [1, 2, 3], [False, True], [False, True],
        allowed=lambda fused, clips, micro, unscales, tight: unscales or not clips,
    ),
)  # fmt: skip
def test_skipped_steps(fused: bool, clips: bool, micro: int, unscales: bool, tight: bool) -> None:
    clip = CLIP if clips else NONE
    budget = least_of(accumulation_steps=micro, **clip) if tight else AMPLE
    run = check(budget, fused=fused, clip=clip, micro=micro, unscales=unscales)
    assert run.model.offmate.peak_bytes == run.model.offmate.plan.predicted_peak_bytes
    assert type(copy.deepcopy(run.scaler)) is torch.amp.GradScaler


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_scales_that_are_no_power_of_two(fused: bool, unscales: bool, micro: int) -> None:
    """A fused kernel divides by the scale, and unscale_() multiplies by its inverse: the last bits differ."""
    check(AMPLE, fused=fused, unscales=unscales, micro=micro, growth=1.7, scale=3.0e7)


@pytest.mark.parametrize("fused", [False, True])
def test_with_clipping_the_loop_may_leave_unscaling_to_the_step(fused: bool) -> None:
    plain, ours = Run(None, fused=fused, clip=CLIP), Run(AMPLE, fused=fused, clip=CLIP, unscales=False)
    assert_same(plain.steps((1,) * 8), ours.steps((1,) * 8))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [NONE, CLIP])
def test_fewer_micro_batches_at_the_end_of_an_epoch(clip: dict[str, float], fused: bool) -> None:
    check(AMPLE, (3, 1, 3, 2, 3, 1, 3, 3, 2, 3), micro=3, clip=clip, fused=fused)


@pytest.mark.parametrize(("micro", "fused"), [(1, False), (2, False), (1, True)])
def test_gradients_that_wait_on_the_host(micro: int, fused: bool, all_wait: None) -> None:  # noqa: F811
    config = offmate.Config(cache_dir=None, turn_around_steps=8)
    for settings in ({"clip": CLIP}, {"unscales": False}, {}):
        run = check(AMPLE, micro=micro, fused=fused, config=config, **settings)
        assert returning(run.model.offmate.plan.schedule)


def look(run: Run) -> None:
    """Evaluate and save."""
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        run.shown.append(run.model(**batch(77))["loss"].item())
    run.shown.append(run.state)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("clip", [NONE, CLIP])
def test_evaluation_and_saving_before_the_step(clip: dict[str, float], unscales: bool, micro: int) -> None:
    if clip and not unscales:
        return
    runs = Run(None, clip=clip, micro=micro), Run(AMPLE, clip=clip, micro=micro)
    for run in runs:
        for step in range(9):
            for number in range(micro):
                run.backward(2 * step + number)
            look(run)
            if unscales:
                run.scaler.unscale_(run.optimizer)
                look(run)
            run.unscales = False
            if clip and not run.planned:
                run.shown.append(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5).item())
                run.clip = NONE
            run.update()
            if step == 3:
                run.shown.append(run.scaler.get_scale())
    if clip:  # plain PyTorch shows norms before the step
        runs[0].shown = [one for one in runs[0].shown if not isinstance(one, float)]
        runs[1].shown = [one for one in runs[1].shown if not isinstance(one, float)]
    assert_same(*runs)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clip", [NONE, CLIP])
def test_a_loss_term_after_unscaling(clip: dict[str, float], micro: int) -> None:
    """It is not scaled; clipping counts it, and the scaler does not check it."""
    runs = Run(None, clip=clip, micro=micro, scale=2.0**10), Run(AMPLE, clip=clip, micro=micro, scale=2.0**10)
    for run in runs:
        for step in range(4):
            for number in range(micro):
                run.backward(2 * step + number)
            run.scaler.unscale_(run.optimizer)
            run.unscales = False
            (0.1 * next(run.model.parameters()).square().sum()).backward()
            run.update()
    assert_same(*runs)
    assert runs[0].updates == 4


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_master_weights(dtype: torch.dtype, unscales: bool) -> None:
    """A fused kernel unscales float16 gradients in float32; unscale_() refuses them."""
    for kind in (torch.optim.AdamW, offmate.with_master_weights(torch.optim.AdamW)):
        if unscales and dtype == torch.float16:
            run = Run(AMPLE, kind=kind, dtype=dtype, fused=True)
            run.backward(0)
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                run.update()
            assert not run.updates
        else:
            check(AMPLE, kind=kind, dtype=dtype, fused=True, unscales=unscales, scale=2.0**22)


def test_a_skipped_first_step_of_a_fused_optimizer_makes_its_states() -> None:
    for micro in (1, 2):
        plain, ours = Run(None, fused=True, micro=micro), Run(AMPLE, fused=True, micro=micro)
        assert_same(plain.steps((micro,)), ours.steps((micro,)))
        assert plain.state[1] and not plain.updates


def test_a_step_hook_and_a_scheduler_see_what_they_see_in_plain_pytorch() -> None:
    """A fused optimizer steps when an update is skipped, any other one does not."""
    for fused in (False, True):
        seen = []
        for budget in (None, AMPLE):
            run, called = Run(budget, fused=fused), []
            scale = run.scaler.get_scale
            run.optimizer.register_step_post_hook(lambda *_, into=called, scale=scale: into.append(scale()))
            run.steps((1,) * 8)
            seen.append(called)
        assert seen[0] == seen[1] and (len(seen[0]) == 8) is fused


def test_a_disabled_scaler_is_none() -> None:
    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = Tiny(layers=3)
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=False)
        if compiles:
            offmate.compile(
                model, AMPLE, optimizer=optimizer, grad_scaler=scaler, device="emulated",
                config=offmate.Config(cache_dir=None),
            )  # fmt: skip
        for step in range(3):
            loss = model(**batch(step))["loss"]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert not model.offmate.plan.schedule.gate


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_that_is_saved_and_resumed(fused: bool) -> None:
    """From a skipped step on, with and without offmate."""
    whole = Run(AMPLE, fused=fused).steps((1,) * 4)
    saved = io.BytesIO()
    torch.save((whole.model.state_dict(), whole.optimizer.state_dict(), whole.scaler.state_dict()), saved)
    whole.shown.clear()
    whole.steps((1,) * 6, first=4)
    assert whole.updates
    for budget in (AMPLE, None):
        saved.seek(0)
        resumed = Run(budget, fused=fused)
        parts = (resumed.model, resumed.optimizer, resumed.scaler)
        for part, state in zip(parts, torch.load(saved, weights_only=True), strict=True):
            part.load_state_dict(state)
        assert_same(whole, resumed.steps((1,) * 6, first=4))


@pytest.fixture
def unscaled(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often gradients of each size went through torch's kernel."""
    found: Counter[int] = Counter()

    def noted(gradients: list[torch.Tensor], *given: torch.Tensor) -> None:
        found.update(gradient.numel() for gradient in gradients)
        kernel(gradients, *given)

    kernel = unscaling.check_and_unscale
    monkeypatch.setattr(unscaling, "check_and_unscale", noted)
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_every_gradient_is_unscaled_once_where_it_becomes_complete(
    micro: int, fused: bool, unscaled: Counter[int]
) -> None:
    run = Run(least_of(accumulation_steps=micro), micro=micro, fused=fused, unscales=False)
    sizes = Counter(param.numel() for param in run.model.parameters())
    for number in range(micro):
        run.backward(number)
    if micro == 1:  # additions on the host may still have to be made
        assert unscaled == sizes
    run.update()
    assert unscaled == sizes


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clip", [NONE, CLIP])
def test_an_iteration_interrupted_at_any_action_of_the_update_phase(clip: dict[str, float], micro: int) -> None:
    """Before the gate nothing was updated; once it is open all updates are made, from gradients unscaled once."""
    run = Run(least_of(accumulation_steps=micro, **clip), micro=micro, clip=clip, scale=2.0**10)
    start, after = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict())), [run.state[0]]
    after.append(Run(None, micro=micro, clip=clip, scale=2.0**10).steps((micro,)).state[0])
    run.steps((micro,))
    executor = run.model._offmate_session.training.executor
    gate = next(i for i, action in enumerate(executor.schedule.turn_around) if action.name == "gate")
    for stop in range(len(executor.schedule.turn_around)):
        for part, state in zip((run.model, run.optimizer), copy.deepcopy(start), strict=True):
            part.load_state_dict(state)
        run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 2.0**10})
        for number in range(micro):
            run.backward(number)
        left = stop

        def interrupt(action: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

        run.scaler.unscale_(run.optimizer)
        executor.on_action = interrupt
        with contextlib.suppress(KeyboardInterrupt):
            run.scaler.step(run.optimizer)
        executor.on_action = None
        run.scaler.update()
        run.optimizer.zero_grad()
        found = run.state[0]
        done = [all(torch.equal(v, found[k]) for k, v in state.items()) for state in after]
        assert done == [stop <= gate, stop > gate]


def test_on_an_accelerator_with_the_loss_on_the_host(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale lies where the loss does."""
    scale = torch.amp.GradScaler.scale
    monkeypatch.setattr(torch.amp.GradScaler, "scale", lambda self, loss: scale(self, loss.cpu()))
    for unscales in (False, True):
        with without_allocator():
            check(1 << 30, fused=True, unscales=unscales, device="sim", mixed=False, scale=2.0**127)


@pytest.mark.parametrize("counts", [(1,) * 10, (3, 1, 3, 2, 3, 3, 1, 3, 2, 3)], ids=["one", "several"])
@pytest.mark.parametrize(("unscales", "clip"), [(False, NONE), (True, NONE), (True, CLIP)])
def test_on_an_accelerator(counts: tuple[int, ...], unscales: bool, clip: dict[str, float], sim: Any) -> None:
    """Copies are late at random, and memory that is let go is poisoned."""
    sim.set_delays(3, 40)
    settings = {"micro": max(counts), "unscales": unscales, "mixed": False, "scale": 2.0**127}
    with without_allocator():
        check(1 << 30, counts, fused=True, clip=clip, device="sim", **settings)


# -- plans ------------------------------------------------------------------------------------------------------------


def test_the_plan_counts_what_is_done_and_differs_from_others() -> None:
    with from_hardware_file():
        found = {}
        cases = (False, NONE, 1), (True, NONE, 1), (True, CLIP, 1), (False, NONE, 2), (True, NONE, 2)
        for scales, clip, micro in cases:
            model = Tiny(layers=3)
            found[scales, bool(clip), micro] = offmate.plan(
                model, AMPLE, example_inputs=batch(0), optimizer=torch.optim.AdamW(model.parameters(), fused=True),
                device="emulated", cpu_budget=CPU_BUDGET, accumulation_steps=micro, **clip,
                grad_scaler=torch.amp.GradScaler("cpu") if scales else None, config=offmate.Config(cache_dir=None),
            )  # fmt: skip
    problems = {key: plan.problem for key, plan in found.items()}
    updates_s = sum(group.device_update_s for group in problems[False, False, 1].groups)
    shares = {key: sum(group.norm_s for group in problem.groups) / updates_s for key, problem in problems.items()}
    assert shares == {
        (False, False, 1): 0.0, (True, False, 1): pytest.approx(2 / 7), (True, True, 1): pytest.approx(3 / 7),
        (False, False, 2): 0.0, (True, False, 2): 0.0,
    }  # fmt: skip
    added = [sum(group.device_add_s for group in problems[scales, False, 2].groups) for scales in (False, True)]
    assert added[1] - added[0] == pytest.approx(2 / 7 * updates_s)
    assert [problem.gate for problem in problems.values()] == [False, True, True, True, True]
    assert [problem.gate_s > 0 for problem in problems.values()] == [False, True, True, False, True]
    model = Tiny(layers=3)
    offmate.compile(
        model, AMPLE, optimizer=torch.optim.AdamW(model.parameters(), fused=True), device="emulated",
        cpu_budget=CPU_BUDGET, plan=found[True, False, 1], config=offmate.Config(cache_dir=None),
    )  # fmt: skip
    with pytest.raises(PlanFileError, match=r"plan with max_grad_norm= or grad_scaler=, now without"):
        model(**batch(0))


# -- what is refused --------------------------------------------------------------------------------------------------


class OwnScaler(torch.amp.GradScaler):
    """Unscales as it likes."""

    def _unscale_grads_(self, *given: Any) -> Any:
        return super()._unscale_grads_(*given)


@pytest.mark.parametrize(
    ("scaler", "planned", "words"),
    [
        (lambda: torch.amp.GradScaler("cpu"), False, r"needs optimizer="),
        (lambda: OwnScaler("cpu"), True, r"OwnScaler, which unscales gradients in its own way.*plain"),
        (lambda: 2.0**16, True, r"grad_scaler= is a float; it must be a torch\.amp\.GradScaler"),
    ],
)
def test_scalers_that_compile_refuses(scaler: Any, planned: bool, words: str) -> None:
    model = Tiny(layers=1)
    optimizer = torch.optim.AdamW(model.parameters()) if planned else None
    with pytest.raises(OffmateError, match=words):
        offmate.compile(model, AMPLE, optimizer=optimizer, grad_scaler=scaler(), device="emulated")


def test_loops_that_a_scaler_cannot_follow() -> None:
    run = Run(AMPLE, scale=2.0**10)
    with pytest.raises(ProtocolError, match=r"grad_scaler= has not scaled"):
        run.model(**batch(0))["loss"].backward()
    run.backward(0)
    with pytest.raises(ProtocolError, match=r"optimizer\.step\(\) was called without the scaler.*grad_scaler\.step"):
        run.optimizer.step()
    run.scaler.update(2.0**12)
    with pytest.raises(ProtocolError, match=r"the scale of grad_scaler= changed"):
        run.scaler.unscale_(run.optimizer)
    run.optimizer.zero_grad()
    run.scaler.scale(sum(param.square().sum() for param in run.model.parameters())).backward()
    run.backward(0)
    with pytest.raises(ProtocolError, match=r"does not come from the model's planned backward.*Put that term"):
        run.scaler.unscale_(run.optimizer)
    run.optimizer.zero_grad()
    assert not run.updates
    assert_same(Run(None, scale=2.0**12).steps((1, 1)), with_nothing_shown(run).steps((1, 1)))


def with_nothing_shown(run: Run) -> Run:
    run.shown.clear()
    return run


def test_gradients_are_unscaled_once() -> None:
    run = Run(AMPLE, micro=2, scale=2.0**10)
    run.backward(0)
    run.scaler.unscale_(run.optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        run.scaler.unscale_(run.optimizer)
    with pytest.raises(ProtocolError, match=r"after grad_scaler unscaled"):
        run.backward(1)
    run.scaler.step(run.optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        run.scaler.step(run.optimizer)


def test_gradients_that_a_card_cannot_unscale_are_refused():
    """CUDA's kernel lacks bfloat16, for which plain PyTorch raises an error that names the kernel only."""
    scaler = torch.amp.GradScaler("cuda")
    params = {torch.zeros(2, dtype=torch.bfloat16): "first.weight", torch.zeros(2, dtype=torch.bfloat16): "last.weight"}
    with pytest.raises(
        OffmateError,
        match=r"gradients of torch\.bfloat16 on cuda:0.* those of first\.weight and 1 more\. Leave grad_scaler",
    ):
        check_unscaling(scaler, params, "cuda:0")
    for kind, dtype in (("cuda:0", torch.float16), ("emulated", torch.bfloat16)):
        check_unscaling(scaler, {torch.zeros(2, dtype=dtype): "weight"}, kind)


@pytest.mark.parametrize("more", [{}, {"max_grad_norm": 1.0, "fused": True}])
def test_float16_parameters_that_pytorch_would_not_unscale_are_refused_at_once(more: dict[str, Any]) -> None:
    """It would raise in the first step; only a fused update without clipping unscales such gradients."""
    model = Tiny(layers=3).half()
    optimizer = torch.optim.AdamW(model.parameters(), fused=more.pop("fused", False))
    with pytest.raises(OffmateError, match=r"gradients in float16, which PyTorch refuses: .* more\. Keep these param"):
        offmate.compile(
            model, AMPLE, optimizer=optimizer, device="emulated", grad_scaler=torch.amp.GradScaler("cpu"), **more
        )


def test_a_plan_for_a_card_says_that_a_disabled_scaler_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """As torch makes one for "cuda" on a machine that has none."""
    for enabled in (True, False):
        model = Tiny(layers=3)
        caplog.clear()
        offmate.plan(
            model, AMPLE, optimizer=torch.optim.AdamW(model.parameters()), example_inputs=batch(0), hardware="rtx3090",
            grad_scaler=torch.amp.GradScaler("cpu", enabled=enabled), config=offmate.Config(cache_dir=None),
        )  # fmt: skip
        assert ("grad_scaler= is disabled" in caplog.text) is not enabled
