"""The options of a class against every possible choice on small graphs."""

from __future__ import annotations

import os
import random
import sys
from itertools import product

import pytest
from offmate.solver.backends import BackendError, cpsat
from offmate.solver.block_graph import BlockGraph, GraphError, Op, Storage
from offmate.solver.options.choices import Choice, choices

LINK = 100.0  # bytes per second: a byte out and back takes 0.02 s


def random_graph(rng: random.Random, n_ops: int) -> BlockGraph:
    storages = [Storage(50, True), Storage(20, True)]
    ops, saved = [], set()
    for i in range(n_ops):
        reads = tuple(sorted({rng.randrange(max(0, len(storages) - 4), len(storages)) for _ in range(2)}))
        makes = tuple(range(len(storages), len(storages) + rng.choice([1, 1, 1, 2])))
        storages.extend(Storage(rng.choice([10, 20, 40]), False) for _ in makes)
        ops.append(Op(f"op{i}", rng.choice([0.1, 0.5, 2.0]), reads, makes, rng.random() < 0.85))
        saved |= {j for j in (*reads, *makes) if rng.random() < 0.5}
    return BlockGraph(tuple(ops), tuple(storages), frozenset(saved))


def is_valid(graph: BlockGraph, keep: set[int], offload: set[int], again: set[int]) -> bool:
    """Whether running `again` in program order restores everything that the backward reads."""
    there = {j for j, s in enumerate(graph.storages) if s.external} | keep | offload
    for a in sorted(again):
        op = graph.ops[a]
        if not op.recomputable or not set(op.reads) <= there:
            return False
        there |= set(op.makes)
    return set(graph.saved) <= there


def every_choice(graph: BlockGraph) -> list[tuple[int, int, float]]:
    own = sorted(graph.maker)
    costs = []
    for places in product("kon", repeat=len(own)):
        keep = {j for j, place in zip(own, places) if place == "k"}
        offload = {j for j, place in zip(own, places) if place == "o"}
        for flags in product((False, True), repeat=len(graph.ops)):
            again = {a for a, flag in enumerate(flags) if flag}
            if is_valid(graph, keep, offload, again):
                seconds = sum(graph.ops[a].seconds for a in again)
                costs.append((graph.bytes_of(keep), graph.bytes_of(offload), seconds))
    return costs


def by_name(found: tuple[Choice, ...]) -> dict[str, Choice]:
    return {choice.name: choice for choice in found}


@pytest.mark.parametrize("seed", range(12))
def test_against_every_choice(seed: int) -> None:
    graph = random_graph(random.Random(seed), 4)
    everything = every_choice(graph)
    found = choices(graph, LINK)
    for c in found:
        assert is_valid(graph, set(c.keep), set(c.offload), set(c.recompute))
        assert not c.keep & c.offload
        at_level = [s for k, o, s in everything if k <= c.keep_bytes and o <= c.offload_bytes]
        if c.name != "keep":
            assert c.recompute_s == pytest.approx(min(at_level), abs=1e-5)
    keep = found[0]
    assert (keep.name, keep.keep, keep.recompute_s) == ("keep", graph.own(graph.saved), 0)
    recompute = by_name(found).get("recompute", keep)
    alone = [(k, s) for k, o, s in everything if o == 0]
    assert (recompute.keep_bytes, recompute.recompute_s) == pytest.approx(min(alone))
    offload = by_name(found).get("offload", recompute)
    cheapest = min(s + 2 * o / LINK for k, o, s in everything if k == 0)
    assert offload.keep_bytes == 0
    assert offload.recompute_s + 2 * offload.offload_bytes / LINK == pytest.approx(cheapest, rel=1e-4)


def test_by_hand() -> None:
    # x -> a (dear) -> b (cheap); the backward reads both
    storages = (Storage(8, True), Storage(10, False), Storage(100, False))
    ops = (Op("dear", 5.0, (0,), (1,), True), Op("cheap", 0.1, (1,), (2,), True))
    found = by_name(choices(BlockGraph(ops, storages, frozenset({0, 1, 2})), LINK))
    assert (found["keep"].keep_bytes, found["keep"].recompute) == (110, ())
    assert (found["recompute"].keep_bytes, found["recompute"].recompute) == (0, (0, 1))
    assert (found["offload"].offload, found["offload"].recompute) == ({1}, (1,))  # 0.2 s to move a, 2 s to move b
    assert found["mixture 1"].recompute == (1,)


def test_what_draws_random_numbers_is_never_run_again() -> None:
    storages = (Storage(8, True), Storage(10, False), Storage(100, False))
    ops = (Op("dropout", 0.1, (0,), (1, 2), False),)
    found = choices(BlockGraph(ops, storages, frozenset({1, 2})), LINK)
    assert [(c.name, c.keep_bytes, c.offload_bytes) for c in found] == [("keep", 110, 0), ("offload", 0, 110)]
    assert all(c.recompute == () for c in found)


def test_nothing_saved_is_one_choice() -> None:
    graph = BlockGraph((Op("a", 1.0, (0,), (1,), True),), (Storage(8, True), Storage(10, False)), frozenset({0}))
    assert [(c.name, c.keep_bytes, c.recompute_s) for c in choices(graph, LINK)] == [("keep", 0, 0)]


def test_no_choice_beats_another_and_the_number_is_bounded() -> None:
    graph = random_graph(random.Random(3), 40)
    found = choices(graph, LINK, max_choices=6)
    assert len(found) <= 6
    assert len({(c.keep_bytes, c.offload_bytes, c.recompute_s) for c in found}) == len(found)
    assert found == choices(graph, LINK, max_choices=6)


def test_a_class_of_150_ops_is_quick() -> None:
    graph = random_graph(random.Random(5), 150)
    before_s = spent_s()
    choices(graph, LINK)
    assert spent_s() - before_s < 10


def spent_s() -> float:
    """What this process and those that it has waited for have computed; a busy machine adds nothing to it."""
    return sum(os.times()[:4])


@pytest.mark.parametrize(
    ("ops", "saved", "words"),
    [
        ((Op("a", -1.0, (0,), (1,), True),), {1}, "op a: seconds is -1.0"),
        ((Op("a", 1.0, (0,), (7,), True),), {1}, "op a: there is no storage 7"),
        ((Op("a", 1.0, (1,), (2,), True),), {2}, "op a reads storage 1"),
        ((Op("a", 1.0, (0,), (1,), True), Op("b", 1.0, (0,), (1,), True)), {1}, "storage 1 is made by a and by b"),
        ((Op("a", 1.0, (0,), (1,), True),), {2}, "storage 2 is saved"),
    ],
)
def test_contradictions_are_named(ops: tuple[Op, ...], saved: set[int], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        BlockGraph(ops, (Storage(8, True), Storage(10, False), Storage(10, False)), frozenset(saved))


# -- the process that answers ------------------------------------------------------------------------------------------

CHILDREN = {
    "ends": ("import sys; sys.exit(3)", "CP-SAT ended: exit code 3 and no message"),
    "complains": ("raise ImportError('no ortools here')", "CP-SAT ended: ImportError: no ortools here"),
    "babbles": ("print('hello', flush=True); input()", "returned 'hello', which is not a valid answer"),
    "half": ("print('{\"keep\": [', flush=True)", "which is not a valid answer"),
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_process_without_answers_is_named(kind, tmp_path, monkeypatch):
    text, said = CHILDREN[kind]
    child = tmp_path / "child.py"
    child.write_text(text)
    monkeypatch.setattr(cpsat, "CHILD", child)
    with pytest.raises(BackendError, match=said), cpsat.CpSat() as running:
        running.least_kept(two_ops())
    assert running._child.poll() is not None


def test_what_the_process_says_beside_answers_does_not_stop_it(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(
        "import sys\nfor _ in sys.stdin:\n    print('x' * 200_000, file=sys.stderr, flush=True)\n"
        '    print(\'{"keep": [], "offload": []}\', flush=True)\n'
    )
    monkeypatch.setattr(cpsat, "CHILD", child)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path where others are text
    with cpsat.CpSat() as running:
        assert [running.least_kept(two_ops()) for _ in range(3)] == [(frozenset(), frozenset())] * 3
        process = running._child
        assert running._running() is process, "one process answers all"
    assert process.poll() is not None


def two_ops():
    ops = (Op("a", 1.0, (0,), (1,), True), Op("b", 1.0, (1,), (2,), True))
    return BlockGraph(ops, (Storage(8, True), Storage(8, False), Storage(8, False)), frozenset({1, 2}))


# -- blocks too large for CP-SAT's effort ------------------------------------------------------------------------------


def test_a_block_without_an_answer_in_time_gets_choices_that_are_always_possible(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(cpsat.CHILD.read_text().replace("EFFORT = 0.1", "EFFORT = 0.0"))
    monkeypatch.setattr(cpsat, "CHILD", child)
    ops = (Op("draw", 1.0, (0,), (1,), False), *(Op(f"o{i}", 1.0, (i,), (i + 1,), True) for i in range(1, 40)))
    graph = BlockGraph(ops, (Storage(8, True), *(Storage(8, False) for _ in ops)), frozenset(range(1, 41)))
    found = choices(graph, 1.0)
    assert [c.name for c in found] == ["keep", "recompute", "offload"]
    assert [len(c.keep) for c in found] == [40, 1, 0]
    assert len(found[2].offload) == 40
