"""One sequence: two worlds side by side, what may come out of it, and the smallest one that still goes wrong."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from offmate.errors import OffmateError

from . import python_state, table, tensors, training, worlds  # noqa: F401
from .table import Act
from .worlds import Setup, World

LIMIT_S = 60

EQUAL, REFUSED, BOTH_RAISED, FINDING = "equal", "refused", "both raised", "finding"

_LAST = (Act("step", 1), Act("evaluation", 2), Act("checkpoint", 3))


class Hang(BaseException):
    """A sequence has taken so long that it will not end."""


@dataclass(frozen=True)
class Sequence:
    """What a seed stands for."""

    seed: int
    setup: Setup
    acts: tuple[Act, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of a sequence.

    Parameters
    ----------
    result: "equal", "refused", "both raised" or "finding". kind: of refusal or finding, in words that several share.
    detail: the whole message. at: index of the action at which it ended. told: actions in words.
    """

    seed: int
    result: str
    kind: str
    detail: str
    at: int
    seconds: float
    told: tuple[str, ...]


def sequence(seed: int) -> Sequence:
    """Derived from the seed alone."""
    rng = random.Random(seed)
    setup = worlds.draw(rng)
    return Sequence(seed, setup, table.draw(setup, worlds.KINDS[setup.kind].has, rng) + _LAST)


@contextlib.contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(given: Sequence, cache_dir: str, limit_s: float = LIMIT_S) -> Outcome:
    """Play a sequence in both worlds."""
    start = time.perf_counter()
    told: list[str] = []
    try:
        with _alarm(limit_s), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result, kind, detail, at = _play(given, cache_dir, told)
    except Hang:
        result, kind, detail, at = FINDING, "hang", f"no end within {limit_s} s", len(told) - 1
    return Outcome(given.seed, result, kind, detail, at, round(time.perf_counter() - start, 2), tuple(told))


_Verdict = tuple[str, str, str]


def _play(given: Sequence, cache_dir: str, told: list[str]) -> tuple[str, str, str, int]:
    try:
        plain, ours, budget = worlds.twins(given.setup, given.seed, cache_dir)
    except OffmateError as error:
        return (*_refusal(error), -1)
    for index, act in enumerate(given.acts):
        told.append(act.name)
        expected, found = _take(plain, act), _take(ours, act)
        told[-1] = f"{act.name}: {'; '.join(plain.told)}"
        verdict = _judge(plain, ours, expected, found) or _surroundings()
        if verdict is None and ours.peak_bytes > budget:
            verdict = FINDING, "budget exceeded", f"{ours.peak_bytes} of {budget} bytes"
        if verdict is not None:
            return (*verdict, index)
    return EQUAL, "", "", len(given.acts)


def _take(world: World, act: Act) -> Exception | None:
    world.seen, world.told = [], []
    try:
        with world.alone():
            table.perform(world, act)
    except Exception as error:
        return error
    return None


def _judge(plain: World, ours: World, expected: Exception | None, found: Exception | None) -> _Verdict | None:
    """What ends the sequence, None if it goes on."""
    if expected is not None:
        if found is not None:
            return BOTH_RAISED, _words(expected), f"{expected!r} / {found!r}"
        return FINDING, f"plain raises: {_words(expected)}", repr(expected)
    if isinstance(found, OffmateError):
        return _refusal(found) if (after := _readable(ours)) is None else after
    if found is not None:
        return FINDING, f"raw error: {_words(found)}", _trace(found)
    difference = _difference(plain.seen, ours.seen)
    return None if difference is None else (FINDING, f"differs: {difference[0]}", difference[1])


def _refusal(error: OffmateError) -> _Verdict:
    words = str(error)
    if "the iteration failed" in words or " " not in words or len(words) < 20:
        return FINDING, f"obscure error: {_words(error)}", _trace(error)
    return REFUSED, _words(error), words


def _readable(ours: World) -> _Verdict | None:
    """After an error the state can be read."""
    try:
        with ours.alone():
            ours.model.state_dict()
            ours.optimizer.state_dict()
    except Exception as error:
        return FINDING, f"unreadable after an error: {_words(error)}", _trace(error)
    return None


def _trace(error: BaseException) -> str:
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "site-packages" not in code.co_filename:
            place = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__} at {place}: {error}"[:600]


def _words(error: BaseException) -> str:
    """The kind of an error: its class and its first words, names and numbers left out."""
    words = re.sub(r"'[^']*'|\S*[._]\S*\w|\d+", "…", str(error).split("\n")[0]).split()
    return f"{type(error).__name__}: {' '.join(words[:9])}"


def _surroundings() -> _Verdict | None:
    """What no action may leave behind in the process."""
    now = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if now != (torch.float32, True, False) or torch.is_autocast_enabled("cpu"):
        return FINDING, "the process was changed", str(now)
    return None


def _difference(expected: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> tuple[str, str] | None:
    for (label, a), (other, b) in zip(expected, found):
        if label != other:
            return f"what is seen ({_class(label)})", f"{label!r} in plain PyTorch, {other!r} here"
        words = _apart(a, b)
        if words:
            return _class(label), f"{label}: {words}"
    if len(expected) != len(found):
        more = (expected if len(expected) > len(found) else found)[min(len(expected), len(found))][0]
        return f"what is seen ({_class(more)})", f"{len(expected)} values in plain PyTorch, {len(found)} here ({more})"
    return None


def _class(label: str) -> str:
    return label.split(" of ")[0].split(" at ")[0]


def _apart(a: Any, b: Any) -> str:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return "" if type(a) is type(b) and a == b else f"{a!r} in plain PyTorch, {b!r} here"[:300]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} in plain PyTorch, {b.dtype} {tuple(b.shape)} here"
    if torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, 0, 0, equal_nan=True)):
        return ""
    return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"


# -- the smallest one -------------------------------------------------------------------------------------------------


def shrink(given: Sequence, first: Outcome, cache_dir: str, most_s: float = 120) -> tuple[Sequence, Outcome]:
    """Drop actions one by one while a finding stays.

    Returns: the smallest sequence found within the time, and its outcome.
    """
    end = time.perf_counter() + most_s
    best, outcome = replace(given, acts=given.acts[: first.at + 1]), first
    shorter = True
    while shorter:
        shorter = False
        for candidate in _smaller(best):
            if time.perf_counter() > end:
                return best, outcome
            tried = run(candidate, cache_dir)
            if tried.result == FINDING and tried.kind.split(":")[0] == first.kind.split(":")[0]:
                best, outcome, shorter = replace(candidate, acts=candidate.acts[: tried.at + 1]), tried, True
                break
    return best, outcome


def _smaller(given: Sequence) -> Iterator[Sequence]:
    for index in reversed(range(len(given.acts))):
        yield replace(given, acts=given.acts[:index] + given.acts[index + 1 :])
    for index, act in enumerate(given.acts):
        if act.inner:
            less = replace(act, inner=act.inner[1:])
            yield replace(given, acts=(*given.acts[:index], less, *given.acts[index + 1 :]))


def text(given: Sequence, outcome: Outcome) -> str:
    """A sequence and its outcome, to read."""
    setup = given.setup
    lines = [
        f"# seed {given.seed}: {outcome.result}; {outcome.kind}",
        f"# {outcome.detail}",
        f"model, optimizer = {setup.kind!r}{f' ({setup.habit})' if setup.habit else ''}, {setup.optimizer}",
        f"offmate.compile(model, {'tight' if setup.tight else 'ample'}, optimizer={setup.planned}, "
        f"max_grad_norm={setup.clip}, accumulation_steps={setup.micro})",
    ]
    return "\n".join([*lines, *outcome.told, f"# as a test: {given!r}"])
