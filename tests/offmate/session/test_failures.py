import copy
import functools
import logging
import random
import signal

import pytest
import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from offmate.solver.schedule import Action, Kind

from offmate import BudgetExceeded, OffmateError

from ..loops import Loop, assert_same, checkpoint, plain, tensors, trained

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def ctrl_c_raises():
    """A process started in the background ignores Ctrl-C, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def fails(loop, first: int = 2) -> tuple[BaseException, int]:
    """Train until something raises; the error, and the step in which it was raised."""
    for step in range(first, first + 3):
        try:
            loop.step(step)
        except BaseException as error:
            return error, step
    pytest.fail("nothing failed")


@functools.cache
def reference(steps: int) -> dict[str, torch.Tensor]:
    return tensors(plain(steps))


def check_whole(loop, done: range) -> set[int]:
    """Every parameter equals plain PyTorch's after one of these numbers of updates, its states of the same; which."""
    found = tensors(loop)
    references = {count: reference(count) for count in done}
    counts = set()
    for index, (name, _) in enumerate(loop.model.named_parameters()):
        own = {key: value for key, value in found.items() if key == name or key.startswith(f"{index}/")}
        count = int(own[f"{index}/step"])
        assert count in references
        for key, value in own.items():
            assert torch.equal(value, references[count][key]), f"{key} is not of update {count}"
        counts.add(count)
    return counts


def check_told(loop, error: BaseException, counts: set[int], caplog) -> None:
    """A torn state is said in the error and at state_dict(), and training asks for a checkpoint."""
    torn = len(counts) > 1
    assert bool(loop.session.truth.torn) == torn
    caplog.clear()
    with caplog.at_level(logging.WARNING, "offmate"):
        loop.model.state_dict()
    assert ("one update ahead" in caplog.text) == torn
    if not torn:
        return
    if isinstance(error, OffmateError):
        assert "one update ahead" in str(error)
    with pytest.raises(OffmateError, match="Load a checkpoint"):
        loop.forward(9)


def check_goes_on(loop, counts: set[int]) -> None:
    """Where nothing is torn the loop goes on; else after a checkpoint was loaded."""
    if len(counts) > 1:
        model, optimizer = copy.deepcopy(checkpoint(max(counts)))
        loop.model.load_state_dict(model)
        loop.optimizer.load_state_dict(optimizer)
    loop.optimizer.zero_grad()
    reference = plain(max(counts))
    assert loop.steps(max(counts), max(counts) + 2) == reference.steps(max(counts), max(counts) + 2)
    assert_same(loop, reference)


@pytest.mark.parametrize("name", ["first.weight", "layers.4.bias", "last.weight"])
@pytest.mark.parametrize("budget", ["ample", "least", "shared"])
def test_faulty_update(name, budget, monkeypatch, caplog):
    loop = trained(budget, steps=2)
    updater = type(loop.session.updater)
    update = updater.__call__

    def faulty(self, tensor, *rest):
        if tensor == name:
            raise ArithmeticError("the worker broke")
        update(self, tensor, *rest)

    monkeypatch.setattr(updater, "__call__", faulty)
    error, _ = fails(loop)
    monkeypatch.undo()
    assert isinstance(error, OffmateError) and "ArithmeticError: the worker broke" in str(error)
    counts = check_whole(loop, range(1, 6))
    check_told(loop, error, counts, caplog)
    check_goes_on(loop, counts)


def failing_copies(monkeypatch, direction: str, nth: int, garbage: bool) -> None:
    """Make the nth copy in a direction fail, having written garbage or nothing."""
    real = EmulatedDevice._copy
    starts = getattr(EmulatedDevice, direction)
    seen = [0]

    def copy(self, link, target, source):
        if getattr(target, "_broken", False):
            if garbage:
                target.fill_(7)
            raise OSError("the link broke")
        real(self, link, target, source)

    def start(self, target, *given):
        target._broken = seen[0] == nth
        seen[0] += 1
        return starts(self, target, *given)

    monkeypatch.setattr(EmulatedDevice, "_copy", copy)
    monkeypatch.setattr(EmulatedDevice, direction, start)


@pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
@pytest.mark.parametrize("nth", range(0, 60, 4))
@pytest.mark.parametrize("budget", ["least", "shared"])
def test_copy_fails(budget, direction, nth, monkeypatch, caplog):
    loop = trained(budget, steps=2)
    moves = Kind.PREFETCH if direction == "copy_in" else Kind.OFFLOAD
    copies = sum(action.kind is moves for action in loop.executor.schedule.actions)
    with monkeypatch.context() as patch:
        # How many there are depends on the plan, and so on what was measured.
        failing_copies(patch, direction, nth % copies, garbage=nth % 2 == 0)
        error, _ = fails(loop)
    assert isinstance(error, OffmateError)
    assert "OSError: the link broke" in str(error) and "the copy of" in str(error)
    counts = check_whole(loop, range(1, 6))
    check_told(loop, error, counts, caplog)
    check_goes_on(loop, counts)


def interrupt_at(loop, action: Action, by) -> None:
    """Call `by` once, when the walk reaches the action."""

    def hook(reached: Action) -> None:
        if reached == action:
            loop.executor.on_action = None
            by()

    loop.executor.on_action = hook


def actions(loop: Loop, count: int) -> list[Action]:
    """The first actions of each part, updates, and some more, drawn at random."""
    schedule = loop.executor.schedule
    chosen = random.Random(0).sample(schedule.actions, min(count, len(schedule.actions)))
    updates = [a for a in schedule.actions if a.kind in (Kind.UPDATE_CPU, Kind.UPDATE_DEVICE)]
    firsts = [schedule.forward[0], schedule.backward[0], (*schedule.turn_around, *updates)[0]]
    return [*firsts, updates[0], updates[-1], *chosen]


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("nth", range(17))
@pytest.mark.parametrize("budget", ["ample", "least", "shared"])
def test_interrupted_between_actions(budget, nth, caplog):
    loop = trained(budget, steps=2)
    interrupt_at(loop, actions(loop, 12)[nth], raise_interrupt)
    error, _ = fails(loop)
    assert isinstance(error, KeyboardInterrupt)
    counts = check_whole(loop, range(1, 5))
    check_told(loop, error, counts, caplog)
    check_goes_on(loop, counts)


@pytest.mark.parametrize("nth", range(17))
def test_ctrl_c_never_tears(nth):
    """The signal is held back until stopping leaves all parameters of one update."""
    loop = trained("least", steps=2)
    interrupt_at(loop, actions(loop, 12)[nth], lambda: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    error, _ = fails(loop)
    assert isinstance(error, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    counts = check_whole(loop, range(2, 5))
    assert len(counts) == 1
    check_goes_on(loop, counts)


def test_second_ctrl_c_stops_at_once(caplog):
    loop = trained("ample", steps=2)
    updates = [a for a in loop.executor.schedule.backward if a.kind is Kind.UPDATE_DEVICE]

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    interrupt_at(loop, updates[-1], twice)
    error, _ = fails(loop)
    assert isinstance(error, KeyboardInterrupt)
    check_goes_on(loop, check_whole(loop, range(2, 4)))


def test_interrupt_during_an_update_waits_for_its_end(monkeypatch):
    loop = trained("ample", steps=2)
    updater = type(loop.session.updater)
    update = updater.step_one

    def pressed(self, *given, **more):
        signal.raise_signal(signal.SIGINT)
        update(self, *given, **more)

    monkeypatch.setattr(updater, "step_one", pressed)
    error, _ = fails(loop)
    monkeypatch.undo()
    assert isinstance(error, KeyboardInterrupt)
    check_whole(loop, range(2, 4))


def test_torn_state_can_be_accepted():
    loop = trained("ample", steps=2)
    updates = [a for a in loop.executor.schedule.backward if a.kind is Kind.UPDATE_DEVICE]
    interrupt_at(loop, updates[3], raise_interrupt)
    fails(loop)
    assert loop.session.truth.torn
    loop.model.load_state_dict(loop.model.state_dict())
    with pytest.raises(OffmateError, match="Load a checkpoint"):
        loop.forward(3)
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.step(3)


def test_budget_exceeded():
    loop = trained("least", steps=2)
    device = loop.session.device
    limit, device.ledger.limit_bytes = device.ledger.limit_bytes, device.ledger.level_bytes + 100
    device.ledger.reset_peak()
    with pytest.raises(BudgetExceeded, match=r"held by kind: parameters \d+.*activations and gradients"):
        loop.step(2)
    device.ledger.limit_bytes = limit
    counts = check_whole(loop, range(2, 3))
    check_goes_on(loop, counts)


def test_gradient_copy_fails_without_an_optimizer(monkeypatch):
    loop = trained("least", steps=2, planned=False)
    with monkeypatch.context() as patch:
        failing_copies(patch, "copy_out", 12, garbage=True)
        error, _ = fails(loop)
    assert isinstance(error, OffmateError) and "the link broke" in str(error)
    loop.optimizer.zero_grad()
    assert loop.steps(2, 4) == plain(2).steps(2, 4)
