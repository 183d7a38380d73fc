"""Fifty sequences of user actions, those that once found something, and whether this can find anything at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from . import sequence as sequences
from .campaign import Results
from .figures import from_hardware_file
from .found import FOUND
from .models import KINDS
from .table import TABLE, Act
from .worlds import Setup, World

SEEDS = range(25)


@pytest.fixture(scope="module", autouse=True)
def rates() -> Iterator[None]:
    with from_hardware_file(all_passes=True):
        yield


@pytest.fixture
def uncompiled() -> Iterator[None]:
    def leaves_plain(world: World, *_: Any) -> None:
        world.held["second"] = True

    with mock.patch.object(World, "compile", leaves_plain):
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_sequence(seed: int, cache_dir: str) -> None:
    given = sequences.sequence(seed)
    outcome = sequences.run(given, cache_dir)
    assert outcome.result != sequences.FINDING, sequences.text(given, outcome)


@pytest.mark.parametrize("name", sorted(FOUND))
def test_once_found(name: str, cache_dir: str) -> None:
    given = FOUND[name]
    outcome = sequences.run(given, cache_dir)
    assert outcome.result != sequences.FINDING, sequences.text(given, outcome)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_actions_do_the_same_in_plain_worlds(name: str, uncompiled: None, cache_dir: str) -> None:
    """What is found is not of the harness's making."""
    needs = TABLE[name].needs
    kind = next(kind for kind, known in KINDS.items() if needs <= known.has)
    around = ("step", "states kept", name, "hook that changes", "step", "evaluation", name, "step", "checkpoint")
    given = _sequence(around, Setup(kind, "", "AdamW", True, None, 1, False))
    outcome = sequences.run(given, cache_dir)
    # Plain PyTorch refuses some combinations too.
    assert outcome.result in (sequences.EQUAL, sequences.BOTH_RAISED), sequences.text(given, outcome)
    assert outcome.at >= 3


def _sequence(names: tuple[str, ...], setup: Setup) -> sequences.Sequence:
    return sequences.Sequence(0, setup, tuple(Act(name, index) for index, name in enumerate(names)))


def test_a_difference_is_found_and_made_small(uncompiled: None, cache_dir: str) -> None:
    take = sequences._take

    def forgets(world: World, act: Act) -> Any:
        before = getattr(world.model, "scale", None)
        error = take(world, act)
        if world.held.get("second") and act.name == "float attribute":
            world.model.scale = before
        return error

    given = _sequence(
        ("step", "float attribute", "evaluation", "checkpoint", "step"), Setup("mlp", "", "SGD", False, None, 1, False)
    )
    with mock.patch.object(sequences, "_take", forgets):
        found = sequences.run(given, cache_dir)
        small, _ = sequences.shrink(given, found, cache_dir)
    assert (found.result, found.at) == (sequences.FINDING, 2)
    assert [act.name for act in small.acts] == ["float attribute", "evaluation"]


def test_a_hang_is_found(uncompiled: None, cache_dir: str) -> None:
    def hangs(*_: Any) -> None:
        while True:
            pass

    with mock.patch.object(sequences, "_judge", hangs):
        outcome = sequences.run(sequences.sequence(3), cache_dir, limit_s=0.5)
    assert (outcome.result, outcome.kind) == (sequences.FINDING, "hang")


def test_a_sequence_follows_from_its_seed() -> None:
    before = torch.get_rng_state()
    assert sequences.sequence(7) == sequences.sequence(7) != sequences.sequence(8)
    assert torch.equal(before, torch.get_rng_state())


def test_results_go_on_where_they_were(tmp_path: Any) -> None:
    def line(seed: int) -> dict[str, Any]:
        return {"seed": seed, "result": "equal", "kind": "", "at": 9, "seconds": 1.0}

    first = Results(tmp_path / "r.jsonl", None, 3)
    first.add(line(first.left[1]))
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write('{"seed": 1')  # as a kill leaves it
    again = Results(tmp_path / "r.jsonl", None, 3)
    assert again.start == first.start and again.left == [first.start, first.start + 2]
    assert Results(tmp_path / "r.jsonl", first.start, 4).left == [again.start, again.start + 2, again.start + 3]
