"""Every use of memory comes after what it must come after, whatever streams and workers are fast or slow.

The real executor and device run real plans; streams, events, copies, kernels, updates and what is let go are watched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from offmate.runtime.devices.streams import StreamDevice, _Direction
from offmate.runtime.events import UnderWay
from offmate.runtime.replay.contents import Buffer
from offmate.runtime.replay.transfers import Transfers
from offmate.solver.items import ItemKind
from offmate.solver.schedule import Action, Kind, Schedule

from ...accelerator.loops import on_sim
from ...fuzz.figures import from_hardware_file
from ...offmate.loops import Loop, batch, tiny
from .order import Order, watched

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def rates() -> Iterator[None]:
    """Which kinds of actions a plan has is not left to how busy the machine was."""
    with from_hardware_file(workspaces=True):
        yield


MOVES = {Kind.COMPUTE, Kind.PREFETCH, Kind.OFFLOAD, Kind.FREE}


class Case(NamedTuple):
    """A plan: its budget as in `on_sim`, how it is made, and kinds of actions that it has to have."""

    percent: int | None
    settings: dict[str, Any]
    kinds: set[Kind]
    frozen: bool = False

    @property
    def micro(self) -> int:
        return self.settings.get("accumulation_steps", 1)


CASES = {
    "tight": Case(100, {}, MOVES | {Kind.UPDATE_CPU}),
    "wider": Case(150, {}, MOVES | {Kind.UPDATE_CPU}),
    "ample": Case(None, {}, MOVES | {Kind.UPDATE_CPU}),
    "clipped": Case(100, {"max_grad_norm": 0.1}, MOVES | {Kind.UPDATE_CPU}),
    "two micro-batches": Case(100, {"accumulation_steps": 2}, MOVES | {Kind.UPDATE_CPU, Kind.ACCUMULATE_CPU}),
    "four, clipped": Case(
        100, {"accumulation_steps": 4, "max_grad_norm": 0.1}, MOVES | {Kind.UPDATE_CPU, Kind.ACCUMULATE_CPU}
    ),
    "two, wider": Case(200, {"accumulation_steps": 2}, MOVES | {Kind.ACCUMULATE}),
    "frozen": Case(100, {}, MOVES, frozen=True),
    "the user updates": Case(100, {"planned": False}, MOVES),
}


def model_of(case: Case) -> torch.nn.Module:
    model = tiny()
    if case.frozen:
        for layer in model.layers:
            layer.requires_grad_(False)
    return model


def train(loop: Loop, case: Case, first: int, end: int) -> list[float]:
    losses = []
    for step in range(first, end):
        for m in range(case.micro):
            loss = loop.forward(step * case.micro + m) / case.micro
            loss.backward()
            losses.append(loss.item())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return losses


def actions_of(schedule: Schedule) -> list[Action]:
    """What is done in an iteration, in order; a schedule has some micro-batches' actions only once."""
    passes = [schedule.pass_of(m) for m in range(schedule.micro_batches)]
    return [action for one in passes for action in (*one.forward, *one.backward)] + [*schedule.turn_around]


def waits_asked_for(case: Case, schedule: Schedule) -> Counter[str]:
    """How often the training thread has to wait in an iteration if every worker is late, by what it waits for."""
    actions = actions_of(schedule)
    sent = Counter(a.name for a in actions if a.kind is Kind.OFFLOAD and a.name.startswith("g:"))
    # A copy in that comes after an update on the host is launched by a worker, and whoever reads it waits for that.
    brought = sum(a.kind is Kind.PREFETCH and a.name[2:] in schedule.update_cpu_s for a in actions)
    # So is a copy out to where an earlier gradient was added up from; the first gradient of all becomes the total.
    asked = Counter({"for a worker": brought + sum(sent.values()) - len(sent)})
    if "max_grad_norm" in case.settings:
        gate = next(i for i, a in enumerate(actions) if a.name == "gate")
        left = {a.name for a in actions[:gate] if a.kind is Kind.OFFLOAD and a.name.startswith("g:")}
        asked["for an event"] += len(left)  # the norm is taken of whole gradients
        # Of those that were added up the last one's copy was launched by a worker, and another added it.
        asked["for a worker"] += 2 * sum(sent[name] > 1 for name in left)
        # The norms of totals on the host go to the device, where those of a single micro-batch were taken anyway; the
        # scale comes back, and decides whether anything is scaled. Where all norms are on the host, so is the scale.
        several = schedule.micro_batches > 1
        if not several or {item for item in schedule.item_bytes if item.kind is ItemKind.GRADIENT} - left:
            asked += Counter({"for _to_copy": 1 + several, "for _local_scalar_dense": 1})
    return +asked


@pytest.mark.parametrize("name", CASES)
def test_everything_comes_after_what_it_needs(sim: ModuleType, cache_dir: str, name: str) -> None:
    case = CASES[name]
    with watched(sim) as order, compiled(case, cache_dir) as loop:
        sim.set_delays(1, 50)
        train(loop, case, 0, 2)
        usual = taken(order, loop, case, 2)
        order.workers_are_late = True
        train(loop, case, 3, 4)
        late = taken(order, loop, case, 4)
        sim.set_delays(0, 0)
        schedule = loop.model.offmate.plan.schedule
    assert not order.races and not order.synchronized
    assert {action.kind for action in schedule.actions} >= case.kinds
    assert Counter(why for _, why in late) == waits_asked_for(case, schedule)
    assert Counter(usual) <= Counter(late)


def compiled(case: Case, cache_dir: str | None) -> Any:
    return on_sim(case.percent, cache_dir=cache_dir, inputs=batch(0), model=model_of(case), **case.settings)


def taken(order: Order, loop: Loop, case: Case, step: int) -> list[tuple[str, str]]:
    """The waits of one iteration."""
    order.waits.clear()
    train(loop, case, step, step + 1)
    return list(order.waits)


# -- the watcher sees what it is for ----------------------------------------------------------------------------------


def reads_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Buffer, "read", lambda buffer: next(iter(buffer.tensors.values())))


def lets_go_at_once(patch: pytest.MonkeyPatch) -> None:
    free = Transfers.free

    def careless(transfers: Transfers, item: str) -> None:
        with mock.patch.object(UnderWay, "wait", lambda *given: None):
            free(transfers, item)

    patch.setattr(Transfers, "free", careless)


def copies_into_what_is_in_use(patch: pytest.MonkeyPatch) -> None:
    launch = _Direction.launch
    patch.setattr(
        _Direction, "launch", lambda way, target, source, before, job: launch(way, target, source, before[1:], job)
    )


def copies_what_is_being_updated(patch: pytest.MonkeyPatch) -> None:
    copy_in = StreamDevice.copy_in
    patch.setattr(
        StreamDevice,
        "copy_in",
        lambda device, target, source, after, *link: copy_in(device, target, source, (), *link),
    )


def updates_without_the_gradient(patch: pytest.MonkeyPatch) -> None:
    update = StreamDevice.update_on_host
    patch.setattr(
        StreamDevice, "update_on_host", lambda device, work, after, *worker: update(device, work, (), *worker)
    )


def writes_the_gradient_that_is_being_added(patch: pytest.MonkeyPatch) -> None:
    copy_out = StreamDevice.copy_out
    patch.setattr(
        StreamDevice,
        "copy_out",
        lambda device, target, source, after, *link: copy_out(device, target, source, (), *link),
    )


FAULTS = {
    reads_at_once: ("tight", r"compute \w+ reads on compute what \d+ prefetch \S+ writes on stream"),
    lets_go_at_once: ("tight", r"lets go of what \d+ offload \S+ reads on stream"),
    copies_into_what_is_in_use: ("tight", r"offload \S+ reads on stream \d+ what \d+ compute \w+ writes on compute"),
    copies_what_is_being_updated: ("tight", r"prefetch p:\S+ reads on stream \d+ what \d+ update-cpu"),
    updates_without_the_gradient: ("tight", r"update-cpu \S+ reads on offmate-update what \d+ offload g:"),
    writes_the_gradient_that_is_being_added: ("four, clipped", r"offload g:\S+ overwrites on stream \d+ what .* reads"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_that_is_missing_is_seen(sim: ModuleType, cache_dir: str, monkeypatch: Any, fault: Any) -> None:
    name, words = FAULTS[fault]
    with watched(sim, workers_are_late=True) as order, compiled(CASES[name], cache_dir) as loop:
        fault(monkeypatch)
        train(loop, CASES[name], 0, 3)
        monkeypatch.undo()
    assert any(re.search(words, race) for race in order.races), sorted(set(order.races))[:5]


def test_waits_for_the_whole_device_are_seen(sim: ModuleType, cache_dir: str, monkeypatch: Any) -> None:
    prefetch = Transfers.prefetch

    def careless(transfers: Any, item: str) -> None:
        prefetch(transfers, item)
        torch.accelerator.synchronize()
        for buffer in transfers._handlers[ItemKind.PARAMETER]._contents.params.values():
            buffer.tensors[""].record_stream(torch.accelerator.current_stream())

    with watched(sim) as order, compiled(CASES["tight"], cache_dir) as loop:
        monkeypatch.setattr(Transfers, "prefetch", careless)
        train(loop, CASES["tight"], 0, 1)
        monkeypatch.undo()
    assert {entry.split(": ")[-1] for entry in order.synchronized} == {"synchronize()", "record_stream"}
