"""States in files that a checkpoint has linked: training and edits go on in other files, with the same bits."""

from __future__ import annotations

import copy
import gc
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from offmate.session.linked_states import LinkedStates, handing_out_none, load_linked, make_room, session_of, taken_out

from .test_state_storage import (
    STEPS,
    assert_same,
    compiled,
    disk,
    made,
    one_cache,
    path,
    small_requests,
    train,
)

__all__ = ["one_cache", "path", "small_requests"]  # fixtures


def keep(model: Any, optimizer: torch.optim.Optimizer, step: int) -> tuple[dict[str, Any], LinkedStates]:
    with handing_out_none(session_of(model)):
        whole = optimizer.state_dict()
    rest, linked = taken_out(session_of(model), whole, PurePath("kept", f"step-{step}"))
    assert linked.tensors
    return copy.deepcopy(rest), linked  # as if written to a file


def whole_state(rest: dict[str, Any], linked: LinkedStates) -> dict[str, Any]:
    state = {**rest, "state": {number: dict(own) for number, own in rest["state"].items()}}
    linked.put_into(state)
    return state


def plain_after(n_steps: int) -> tuple[Any, torch.optim.Optimizer]:
    plain = made()
    train(*plain, range(n_steps))
    return plain


def equal(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    expected = optimizer.state_dict()["state"]
    return all(
        torch.equal(value, state["state"][number][key])
        for number, own in expected.items()
        for key, value in own.items()
    )


def test_a_step_after_a_checkpoint_reads_and_writes_no_more_bytes(path):
    pair = compiled(path)
    train(*pair, range(2))
    model = pair[0]
    model.offmate.sync()
    uses = [disk(model)]
    for step in (2, 3):
        train(*pair, range(step, step + 1))
        model.offmate.sync()
        uses.append(disk(model))
        if step == 2:
            keep(*pair, step)
            make_room(session_of(model))
            assert disk(model)[1:3] == uses[-1][1:3], "a checkpoint reads and writes no byte of states"
    steps = [(b.read_bytes - a.read_bytes, b.written_bytes - a.written_bytes) for a, b in pairwise(uses)]
    assert steps[0] == steps[1] and min(steps[0]) > 0


def test_every_checkpoint_is_that_of_its_step_whatever_comes_after(path):
    check_checkpoints(compiled(path))


def check_checkpoints(pair: Any) -> None:
    """Keep a checkpoint after every step, train on, and compare each with plain PyTorch's states of its step."""
    kept = []
    for step in range(STEPS):
        train(*pair, range(step, step + 1))
        kept.append(keep(*pair, step))
    train(*pair, range(STEPS, STEPS + 1))
    assert_same(pair, plain_after(STEPS + 1))
    for step, (rest, linked) in enumerate(kept):
        linked.check()
        assert equal(whole_state(rest, linked), plain_after(step + 1)[1])


@pytest.mark.parametrize("way", ["in place", "through numpy", "loaded"])
def test_edits_after_a_checkpoint_count_and_do_not_reach_it(path, way):
    pair, plain = compiled(path), made()
    for model, optimizer in (pair, plain):
        train(model, optimizer, range(2))
    rest, linked = keep(*pair, 2)
    for _, optimizer in (pair, plain):
        if way == "loaded":
            state = optimizer.state_dict()
            doubled = {n: {k: v * 2 if v.dim() else v for k, v in own.items()} for n, own in state["state"].items()}
            optimizer.load_state_dict({**state, "state": doubled})
            continue
        for own in optimizer.state.values():
            if way == "in place":
                own["exp_avg"].mul_(2)
            else:
                own["exp_avg"].numpy()[...] *= 2
    for model, optimizer in (pair, plain):
        train(model, optimizer, range(2, 4))
    assert_same(pair, plain)
    linked.check()
    assert equal(whole_state(rest, linked), plain_after(2)[1])


def test_held_tensors_show_new_values_after_a_checkpoint(path):
    pair, plain = compiled(path), made()
    train(*pair, range(1))
    held = {key: value for key, value in pair[1].state[pair[0].layers[0].weight].items() if value.dim()}
    keep(*pair, 1)
    train(*pair, range(1, 3))
    pair[0].offmate.sync()
    train(*plain, range(3))
    shown = plain[1].state[plain[0].layers[0].weight]
    assert all(torch.equal(value, shown[key]) for key, value in held.items())


def test_a_description_is_read_as_it_was_written(path, tmp_path):
    pair = compiled(path)
    train(*pair, range(1))
    _, linked = keep(*pair, 1)
    linked.save(tmp_path / "states.json")
    assert load_linked(tmp_path / "states.json") == linked
    for damaged in ("{}", "[]", '{"format": "offmate states 9"}', '{"format": "offmate states 1", "folders": 3}'):
        (tmp_path / "states.json").write_text(damaged)
        with pytest.raises(ValueError):
            load_linked(tmp_path / "states.json")


def test_links_outlive_the_model(path):
    pair = compiled(path)
    train(*pair, range(2))
    rest, linked = keep(*pair, 2)
    del pair
    gc.collect()
    assert [entry.name for entry in Path(path.folder).iterdir()] == ["kept"]
    assert equal(whole_state(rest, linked), plain_after(2)[1])


def test_without_states_in_files_nothing_is_linked(path):
    pair = compiled(path, cpu_budget="1GiB")
    train(*pair, range(1))
    state = pair[1].state_dict()
    assert taken_out(session_of(pair[0]), state, PurePath("kept")) == (state, LinkedStates())
    assert taken_out(None, state, PurePath("kept")) == (state, LinkedStates())
    assert not (Path(path.folder) / "kept").exists()
