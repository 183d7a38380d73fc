"""Signals wait until no operation is half done, and their handlers are back afterwards, whatever they raise."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from offmate.runtime import interrupts

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class Stop(Exception):
    """What the handlers of these tests raise."""


def stop(number: int, frame: object) -> None:
    raise Stop(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, stop) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def check_usual() -> None:
    assert all(signal.getsignal(number) == stop for number in NUMBERS)
    done = []
    with pytest.raises(Stop), interrupts.held():
        signal.raise_signal(signal.SIGTERM)
        done.append(True)
    assert done


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_waits_for_the_end(number: int) -> None:
    done = []
    with pytest.raises(Stop, match=str(int(number))), interrupts.held():
        signal.raise_signal(number)
        done.append(True)
    assert done
    check_usual()


def test_a_checkpoint_delivers_and_a_patient_one_only_the_second() -> None:
    reached = []
    with pytest.raises(Stop), interrupts.held():
        signal.raise_signal(signal.SIGALRM)
        interrupts.checkpoint(patient=True)
        reached.append("patient")
        signal.raise_signal(signal.SIGALRM)
        interrupts.checkpoint(patient=True)
        reached.append("never")
    assert reached == ["patient"]
    check_usual()


@pytest.mark.parametrize("call", range(1, 2 * len(NUMBERS) + 1))
def test_a_signal_between_any_two_handlers_leaves_all_as_they_were(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives right after one handler was replaced, or put back, and its own handler raises."""
    calls, set_handler = [0], signal.signal

    def interrupted(number: int, handler: object) -> object:
        before = set_handler(number, handler)  # type: ignore[arg-type]
        calls[0] += 1
        if calls[0] == call:
            raise Stop("between")
        return before

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(Stop, match="between"), interrupts.held():
        pass
    monkeypatch.undo()
    check_usual()


def test_a_handler_that_a_handler_installs_stays() -> None:
    def other(number: int, frame: object) -> None:
        """Do nothing."""

    def replaces(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, other)

    signal.signal(signal.SIGALRM, replaces)
    with interrupts.held():
        signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGTERM) is other and signal.getsignal(signal.SIGALRM) is replaces
