"""States in files that the CPU updates before the gate: plain PyTorch's numbers, whether updates are kept or undone."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from offmate.runtime.replay.gate import Clip
from offmate.runtime.replay.speculation import Speculation
from offmate.runtime.storage.earlier import Earlier
from offmate.runtime.storage.mapped import MappedStore
from offmate.solver import items
from offmate.solver.effects import with_actions
from offmate.solver.schedule import Kind
from offmate.solver.scheduling.validate import validate

import offmate
from offmate.plans.break_even import BreakEven
from offmate.session import maker, state_storage

from ...accelerator.loops import without_allocator
from ...fuzz.figures import from_hardware_file
from ...runtime.storage.faulty import once
from ..training.speculating import own_cores
from .disks import broken, full, use_faulty_files
from .test_linked_states import keep, whole_state
from .test_state_storage import KINDS, assert_same, batch, disk, made, one_cache, ring, small_requests
from .test_updates_from_files import few_layers_in_pieces, from_files

__all__ = ["few_layers_in_pieces", "one_cache", "ring", "small_requests"]  # fixtures

INF = float("inf")
CONFIG = offmate.Config(updates="host", speculate=True)
RAM = {"adamw": 1_950_000, "bf16": 1_000_000, "masters": 1_500_000}


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    with own_cores():
        yield


class Pair:
    def __init__(self, path: Any, kind: str = "adamw", clip: float = 1.0, **settings: Any) -> None:
        make, self.dtype = KINDS[kind]
        settings = {"gpu_budget": 1_600_000, "cpu_budget": RAM[kind], "config": CONFIG, **settings}
        self.model, self.optimizer = from_files(path, make=make, dtype=self.dtype, max_grad_norm=clip, **settings)
        self.plain, self.own = made(make, self.dtype)
        self.clip = clip

    def limit(self, clip: float) -> None:
        """Clip at another norm from now on."""
        names = tuple(name for name, _ in self.model.named_parameters())
        self.clip = clip
        self.model._offmate_session.training.executor.gate._clip = Clip(clip, names)

    def step(self, number: int, rows: int = 16, micro: int = 1) -> None:
        for model, optimizer in ((self.plain, self.own), (self.model, self.optimizer)):
            torch.manual_seed(number)
            given = [{"x": batch(micro * number + i, self.dtype, rows)} for i in range(micro)]
            by_block = model is self.model and model._offmate_session.request.config.accumulation_order == "by block"
            for one in model.offmate.batches(given) if by_block else given:
                model(**one)["loss"].backward()
            if model is self.plain:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        assert_same((self.model, self.optimizer), (self.plain, self.own))


@pytest.fixture
def slow(tmp_path: Any) -> offmate.StoragePath:
    (tmp_path / "slow").mkdir()
    return offmate.StoragePath(tmp_path / "slow", read="100MB/s", write="100MB/s")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates begin although the norm is too large, and before the gate opens they have all been made and written."""
    _wait_for_updates(monkeypatch, lambda: True)


def _wait_for_updates(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[], bool]) -> None:
    """Updates begin although the norm is too large, and chosen ones are made and written before the gate opens."""
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    start = Speculation.start

    def waits(self: Any, name: str) -> None:
        start(self, name)
        attempt = self._attempts.get(name)
        if attempt is not None and chosen():
            (attempt.ended or attempt.event).synchronize()

    monkeypatch.setattr(Speculation, "start", waits)


@pytest.fixture
def fates(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many states in files were updated before the gate and kept, or put back."""
    counted = {"kept": 0, "put back": 0}
    drop, put_back = Earlier.drop, Earlier.put_back

    def dropped(self: Earlier) -> None:
        counted["kept"] += bool(self._had)
        drop(self)

    def back(self: Earlier) -> None:
        counted["put back"] += bool(self._had)
        put_back(self)

    monkeypatch.setattr(Earlier, "drop", dropped)
    monkeypatch.setattr(Earlier, "put_back", back)
    return counted


def all_early(plan: offmate.Plan) -> offmate.Plan:
    """Update all states in files before the gate, from gradients that leave before it."""
    schedule, files = plan.schedule, plan.schedule.updated_from_files
    late = [a for a in schedule.actions if a.kind is Kind.UPDATE_CPU and a.name in files]
    gradients = {item(action.name) for action in late for item in (items.gradient, items.total)}
    around = schedule.turn_around + schedule.forward
    leaves = [a for a in around if a.kind in (Kind.OFFLOAD, Kind.FREE) and a.item in gradients and not schedule.lead]
    last = schedule.backward[-1].step
    moved = [*leaves, *(replace(action, kind=Kind.SPECULATE_CPU) for action in late)]
    parts = [tuple(a for a in part.actions if a not in (*late, *leaves)) for part in schedule.parts]
    parts[-2] += tuple(replace(action, step=last) for action in moved)
    more = sum(schedule.item_bytes[items.log(action.name)] for action in late)
    ram = schedule.host_bytes + more
    schedule = with_actions(replace(schedule, host_bytes=ram, host_budget_bytes=ram), parts)
    validate(schedule)
    assert schedule.in_two_slots == files
    return replace(plan, schedule=schedule)


@pytest.fixture
def timed_moves() -> Iterator[None]:
    """Plans whose moves were timed: without that, gradients of several passes leave late."""
    with from_hardware_file(timed_moves=True):
        yield


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans update all states in files before the gate."""
    make_plan = maker.make_plan

    def made_early(*args: Any, **given: Any) -> Any:
        prepared = make_plan(*args, **given)
        return replace(prepared, plan=all_early(prepared.plan))

    monkeypatch.setattr(maker, "make_plan", made_early)


@pytest.mark.parametrize("clip", [INF, 1e-3])
@pytest.mark.parametrize("kind", RAM)
def test_steps_have_plain_bits(slow, kind, clip, everything, forced, fates):
    """Kept at every step, or undone at every one. The first one makes the states, and waits."""
    pair = Pair(slow, kind, clip)
    for number in range(4):
        pair.step(number)
    pair.check()
    schedule = pair.model.offmate.plan.schedule
    assert schedule.in_two_slots and sum(fates.values()) == 3 * len(schedule.in_two_slots)
    assert fates["kept" if clip == INF else "put back"] == sum(fates.values())
    for number in range(4, 6):
        pair.step(number)
        pair.check()


@pytest.mark.parametrize("clip", [INF, 1e-3])
@pytest.mark.parametrize(("order", "ram"), [("by batch", 2_300_000), ("by block", 2_000_000)])
def test_updates_of_several_micro_batches(slow, order, ram, clip, timed_moves, everything, forced, fates):
    config = replace(CONFIG, accumulation_order=order)
    pair = Pair(slow, clip=clip, accumulation_steps=3, config=config, gpu_budget=2_000_000, cpu_budget=ram)
    for number in range(4):
        pair.step(number, micro=3)
    pair.check()
    assert fates["kept" if clip == INF else "put back"] == sum(fates.values()) > 0


def test_plans_that_take_turns(slow, everything, forced, fates, monkeypatch):
    """States lie where the plan before has left them, in their first places or in their second ones."""
    pair, late = Pair(slow, clip=INF), []
    pair.step(0)
    monkeypatch.setattr(f"{__name__}.all_early", lambda plan: late.append(plan) or plan)
    for number, rows in enumerate((8, 16, 16, 8, 16, 8, 8, 16), 1):
        pair.step(number, rows)
        if number % 4 == 0:
            pair.check()
    assert fates["kept"] and len(late) == 1 and late[0].schedule.updated_from_files


@pytest.mark.parametrize("seed", range(3))
def test_misses_at_random(slow, seed, everything, fates, monkeypatch):
    """The drive and the gate are late at random, so that it finds updates waiting, under way and done."""
    rng, faulty = random.Random(seed), use_faulty_files(monkeypatch)
    _wait_for_updates(monkeypatch, lambda: rng.random() < 0.2)
    faulty.faults |= dict.fromkeys(("preadv", "pwritev"), functools.partial(_late, rng))
    pair = Pair(slow)
    pair.step(0)
    for number in range(1, 200):
        pair.limit(rng.choice([1e-2, INF]))
        pair.step(number)
        if rng.random() < 0.2:
            pair.check()
        if number >= 12 and fates["kept"] and fates["put back"]:
            break
    pair.check()
    assert fates["kept"] and fates["put back"]


def _late(rng: random.Random, call: Any, *given: Any) -> int:
    time.sleep(rng.choice([0, 0, 0.001, 0.004]))
    return call(*given)


def _look(pair: Pair) -> tuple[Any, Any]:
    return copy.deepcopy((pair.model.state_dict(), pair.optimizer.state_dict()["state"]))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    return all(map(_equal, one, other)) if isinstance(one, tuple) else one == other


def test_a_look_before_the_step_shows_what_was_before(slow, everything, forced, fates):
    pair = Pair(slow, clip=INF)
    pair.step(0)
    before = _look(pair)
    held = [state["exp_avg"] for state in pair.optimizer.state.values()]
    torch.manual_seed(1)
    pair.model(x=batch(1))["loss"].backward()
    assert not fates["put back"]
    assert _equal(_look(pair), before) and fates["put back"]
    assert all(map(torch.equal, held, (state["exp_avg"] for state in before[1].values())))
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    torch.manual_seed(1)
    pair.plain(x=batch(1))["loss"].backward()
    pair.own.step()
    pair.own.zero_grad()
    pair.step(2)
    pair.check()


@pytest.mark.parametrize("way", ["rate", "state", "weight"])
def test_edits_before_the_step_count(slow, way, everything, forced, fates):
    pair = Pair(slow, clip=INF)
    pair.step(0)
    for number in range(1, 4):
        for model, optimizer in ((pair.plain, pair.own), (pair.model, pair.optimizer)):
            torch.manual_seed(number)
            model(x=batch(number))["loss"].backward()
            if way == "rate":
                optimizer.param_groups[0]["lr"] *= 0.5
            elif way == "state":
                optimizer.state[model.layers[1].weight]["exp_avg"].mul_(0.5)
            else:
                with torch.no_grad():
                    model.layers[1].weight.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    pair.check()
    assert fates["put back"]


@pytest.mark.parametrize("clip", [INF, 1e-3])
def test_checkpoints_link_what_is_current(slow, clip, everything, forced):
    """Each keeps the states of its step, whichever place they lie in, and takes no part in what follows."""
    pair, kept = Pair(slow, clip=clip), []
    for number in range(5):
        pair.step(number)
        kept.append((keep(pair.model, pair.optimizer, number), copy.deepcopy(pair.own.state_dict())))
    pair.step(5)
    pair.check()
    for (rest, linked), states in kept:
        linked.check()
        assert _equal(whole_state(rest, linked)["state"], states["state"])


@pytest.mark.parametrize("clip", [INF, 1e-3])
def test_an_interrupt_at_any_action_leaves_a_whole_step(slow, clip, everything, forced):
    """All have had the update or none, and those that a gate was to decide on have not."""
    pair = Pair(slow, clip=clip)
    pair.step(0)
    executor = pair.model._offmate_session.residence.active.executor
    seen, number = 0, 1
    for left in range(0, len(executor.schedule.actions), 3):
        before, loaded = _look(pair), copy.deepcopy((pair.plain.state_dict(), pair.own.state_dict()))
        pair.step(number)
        after = _look(pair)
        for model, optimizer in ((pair.plain, pair.own), (pair.model, pair.optimizer)):
            model.load_state_dict(loaded[0])
            optimizer.load_state_dict(copy.deepcopy(loaded[1]))
        assert _equal(_look(pair), before)
        executor = pair.model._offmate_session.training.executor
        executor.on_action = functools.partial(_interrupt, [left])
        torch.manual_seed(number)
        try:
            pair.model(x=batch(number))["loss"].backward()
            pair.optimizer.step()
        except KeyboardInterrupt:
            seen += 1
        executor.on_action = None
        assert not pair.model._offmate_session.truth.torn
        found = _look(pair)
        done = [_equal(found, before), _equal(found, after)]
        assert sum(done) == 1
        pair.optimizer.zero_grad()
        if done[1]:
            pair.plain.load_state_dict(after[0])
            pair.own.load_state_dict({**pair.own.state_dict(), "state": copy.deepcopy(after[1])})
        number += 1
    assert seen > 20
    pair.step(number)
    pair.check()


def _interrupt(left: list[int], action: Any) -> None:
    left[0] -= 1
    if left[0] < 0:
        raise KeyboardInterrupt


@pytest.mark.parametrize("clip", [INF, 1e-3])
@pytest.mark.parametrize("call", ["preadv", "pwritev", "map"])
def test_a_disk_that_fails_once_leaves_no_silent_mixture(slow, call, clip, everything, forced, monkeypatch):
    """At any call: values are those of a whole step, or what is lost is said and training on it is refused."""
    faulty = use_faulty_files(monkeypatch)
    pair, whole, torn = Pair(slow, clip=clip), 0, 0
    pair.step(0)
    for number, skip in enumerate((0, 7, 20, 37, 55), 1):
        loaded = copy.deepcopy((pair.plain.state_dict(), pair.own.state_dict()))
        faulty.faults[call] = once(broken, skip)
        with contextlib.suppress(offmate.StorageError):
            pair.step(number)
            pair.model.offmate.sync()
        faulty.faults.clear()
        pair.optimizer.zero_grad()
        if pair.model._offmate_session.truth.torn:
            torn += 1
            with pytest.raises(offmate.OffmateError, match="Load a checkpoint"):
                pair.model(x=batch(number))
        else:
            whole += 1
            found = pair.model.state_dict()
            states = (loaded[0], pair.plain.state_dict())
            assert sum(all(torch.equal(value, found[name]) for name, value in one.items()) for one in states) == 1
        pair.plain.load_state_dict(loaded[0])
        pair.own.load_state_dict(copy.deepcopy(loaded[1]))
        pair.model.load_state_dict(loaded[0])
        pair.optimizer.load_state_dict(copy.deepcopy(loaded[1]))
        pair.step(number)
        pair.check()


def test_an_early_write_that_fails_loses_nothing(slow, everything, forced, fates, monkeypatch):
    """What the update replaces is still there, so that it is put back and made again behind the gate."""
    faulty = use_faulty_files(monkeypatch)
    pair = Pair(slow, clip=INF)
    pair.step(0)
    pair.check()
    faulty.faults["pwritev"] = once(broken, 2)
    for number in range(1, 4):
        pair.step(number)
    pair.check()
    assert fates["put back"] == 1


def test_bytes_on_the_drive(slow, tmp_path, everything, forced):
    """Files have room for both places from the first step on, and a hit reads and writes what a gated step does."""
    pair = Pair(slow, clip=INF)
    pair.step(0)
    plan, own = pair.model.offmate.plan, disk(pair.model)
    schedule = plan.schedule
    files = sum(file.stat().st_size for file in (tmp_path / "slow").glob("*.tensor"))
    needed = schedule.bytes_in_files + schedule.second_slots_bytes
    assert needed <= files <= needed + 2 * 2 * 4096 * sum(len(schedule.states[n]) for n in schedule.states_in_files)
    (use,) = pair.model.offmate.storage
    assert use.stored_bytes >= needed
    for number in range(1, 4):
        pair.step(number)
    pair.model.offmate.sync()
    ends = 2 * 4096 * 2 * sum(len(schedule.states[name]) for name in schedule.states_in_files)
    read, written = plan.stored_bytes
    assert 3 * read <= disk(pair.model).read_bytes - own.read_bytes <= 3 * (read + ends)
    assert 3 * written <= disk(pair.model).written_bytes - own.written_bytes + written + ends
    assert disk(pair.model).written_bytes <= 4 * (written + ends)
    assert files == sum(file.stat().st_size for file in (tmp_path / "slow").glob("*.tensor"))
    assert "second places" in plan.explain()


def test_without_space_for_second_places_no_step_is_made(slow, everything, monkeypatch):
    faulty = use_faulty_files(monkeypatch)
    reserve = MappedStore.reserve_twice

    def without_space(store: MappedStore, tensor: torch.Tensor) -> Callable[[], None]:
        faulty.faults.setdefault("fallocate", once(full))
        return reserve(store, tensor)

    monkeypatch.setattr(MappedStore, "reserve_twice", without_space)
    pair = Pair(slow)
    with pytest.raises(offmate.StorageError, match="No space left"):
        pair.step(0)
    assert "fallocate" in faulty.faults


@pytest.mark.parametrize("max_us", [0, 300])
def test_on_an_accelerator(slow, sim, ring, max_us, everything, monkeypatch):
    """A missing wait would show as other numbers."""
    monkeypatch.setattr("offmate.runtime.replay.norms.Norms.exceed", lambda self, limit: False)
    sim.set_delays(1, max_us)
    with without_allocator():
        pair = Pair(slow, device="sim", cpu_budget=RAM["adamw"] + 6 * (1 << 14))
        pair.step(0)
        for number in range(1, 5):
            pair.limit([INF, 1e-2][number % 2])
            pair.step(number)
        pair.check()
    assert pair.model.offmate.plan.schedule.in_two_slots
    pair.model._offmate_session.device.close()


@pytest.mark.parametrize("look", ["sync", "state"])
def test_a_write_that_failed_after_its_step_is_not_forgotten(slow, look, everything, forced, monkeypatch):
    """Not by the early update of the next step, which fails for that reason and is given up by a look at the states."""
    faulty = use_faulty_files(monkeypatch)
    pair = Pair(slow, clip=1e-3)
    for number in range(3):
        pair.step(number)
    assert pair.optimizer.state
    pair.model(x=batch(3))["loss"].backward()
    faulty.faults["pwritev"] = once(broken, 3)
    with pytest.raises(offmate.StorageError):
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.model(x=batch(4))["loss"].backward()
        for event in pair.model._offmate_session.training.executor._contents.written.values():
            with contextlib.suppress(Exception):
                event.synchronize()
        if look == "sync":
            pair.model.offmate.sync()
        else:
            assert pair.optimizer.state
        pair.optimizer.step()
        pair.model.offmate.sync()
    assert pair.model._offmate_session.truth.torn


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of both kinds. Those with updates before the gate have all of them there, and begin after 5 steps."""
    figures = BreakEven(gated_s=1.0, kept_s=0.8, missed_s=1.2, switch_s=0.0, log_bytes=1000)
    monkeypatch.setattr("offmate.session.choice.break_even", lambda gated, early: figures)
    make_plan = maker.make_plan

    def made(*args: Any, **given: Any) -> Any:
        prepared = make_plan(*args, **given)
        return replace(prepared, plan=all_early(prepared.plan)) if args[3].speculates else prepared

    monkeypatch.setattr(maker, "make_plan", made)


AUTO = replace(CONFIG, speculate="auto")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize(
    ("order", "micro", "gpu", "ram"),
    [
        ("by batch", 1, 1_600_000, 1_950_000),
        ("by batch", 3, 2_000_000, 2_300_000),
        ("by block", 3, 1_700_000, 2_200_000),
    ],
)
def test_a_drive_that_has_filled_up_lets_updates_wait(
    slow: Any,
    order: str,
    micro: int,
    gpu: int,
    ram: int,
    skip: int,
    timed_moves: None,
    chosen: Any,
    forced: Any,
    monkeypatch: Any,
    caplog: Any,
) -> None:
    """Training goes on with the plan that needs no second places, and asks again after twice as many steps."""
    faulty = use_faulty_files(monkeypatch)
    config = replace(AUTO, accumulation_order=order)
    pair = Pair(slow, clip=INF, accumulation_steps=micro, config=config, gpu_budget=gpu, cpu_budget=ram)
    early = []
    for number in range(20):
        if number == 3:
            faulty.faults["fallocate"] = _after(skip, full)
        if number == 7:
            storage = pair.model._offmate_session.storage
            assert not any(storage._engine.second_bytes_by_path), "they would leave no space for anything else"
            faulty.faults.clear()
        pair.step(number, micro=micro)
        early.append(pair.model._offmate_session.training.kind.early)
    pair.check()
    assert pair.model.offmate.plan.schedule.in_two_slots
    said = [record.getMessage() for record in caplog.records if "wait for the gate again" in record.getMessage()]
    assert len(said) == 1 and "No space left" in said[0]
    assert early == [False] * early.index(True) + [True] * (20 - early.index(True)) and early.index(True) > 12


def _after(skip: int, fault: Any) -> Any:
    """A fault of all calls after the first ones."""
    calls = itertools.count()
    return lambda real, *given: real(*given) if next(calls) < skip else fault(real, *given)


def test_without_room_for_second_places_updates_wait_from_the_first_step_on(slow, chosen, monkeypatch, caplog):
    check = state_storage.StateStorage.check_room
    monkeypatch.setattr(
        state_storage.StateStorage,
        "check_room",
        lambda self, schedule: _refuse() if schedule.second_slots_bytes else check(self, schedule),
    )
    with caplog.at_level("INFO", "offmate"):
        pair = Pair(slow, clip=INF, config=AUTO)
        for number in range(8):
            pair.step(number)
    pair.check()
    assert not pair.model._offmate_session.training.kind.early
    assert any("no plan updates before the gate: full" in record.getMessage() for record in caplog.records)


def _refuse() -> None:
    raise state_storage.TooFull("full")


@pytest.mark.parametrize("skip", range(0, 12, 3))
def test_a_disk_that_fails_before_a_switch_is_no_want_of_space(slow, skip, chosen, monkeypatch):
    """The error comes out, and no step follows that would train on what a failed update has left."""
    faulty = use_faulty_files(monkeypatch)
    pair = Pair(slow, clip=INF, config=AUTO)
    session = pair.model._offmate_session
    number = 0
    while not session.choice.clipping or session.choice.clipping._account_s < 0.75:
        pair.step(number)
        number += 1
    pair.model(x=batch(number))["loss"].backward()
    faulty.faults["preadv"] = once(broken, skip)
    with pytest.raises(offmate.OffmateError):
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.model(x=batch(number + 1))["loss"].backward()
        assert not session.truth.torn
        pair.model.offmate.sync()
        pair.model(x=batch(number + 2))
