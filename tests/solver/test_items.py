"""Items print as they parse, and an action's effect is what the executor, the simulator and the validator go by."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offmate.solver import items
from offmate.solver.effects import effect
from offmate.solver.items import Item, ItemKind
from offmate.solver.resources import Resource
from offmate.solver.schedule import Action, Kind
from offmate.solver.scheduling.validate import ScheduleError
from offmate.solver.text import from_dict, to_dict

from .micro_schedule import micro_schedule
from .tiny_schedule import tiny_schedule

NAMES = st.text(min_size=1) | st.sampled_from(["w", "model.layers.0.weight", "u[0:2]", "u[:]", "u[0:2][3:4]", "a:b"])
ROWS = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.sampled_from(ItemKind.all()), NAMES, st.none() | ROWS)
def test_an_item_prints_as_it_parses(kind: ItemKind, name: str, rows: tuple[int, int] | None) -> None:
    item = Item(kind, name, rows if kind is ItemKind.STATE else None)
    for other in (Item.parse(str(item)), pickle.loads(pickle.dumps(item)), copy.deepcopy(item)):
        assert (other, other.kind, other.name, other.rows) == (item, kind, name, item.rows)


@given(st.lists(st.tuples(NAMES, st.none() | ROWS), min_size=2, max_size=2, unique=True))
def test_different_states_are_different_items(two: list[tuple[str, tuple[int, int] | None]]) -> None:
    first, second = (items.state(*one) for one in two)
    assert first != second


@pytest.mark.parametrize("text", ["w", "p:", "q:w", ":w", ""])
def test_what_is_no_item_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=rf"not an item: '{text}'"):
        Item.parse(text)


def does(line: str, m: int = 1):
    schedule = tiny_schedule() if m == 1 else micro_schedule(m)
    return effect(Action.parse(line), schedule)


def test_effects_of_the_kinds_of_action() -> None:
    brought = does("0 prefetch p:w")
    assert (brought.resource, brought.seconds, brought.brings) == (Resource.IN, 1.0, ("p:w",))
    assert brought.host_reads == ("p:w",) and brought.rise_bytes == brought.growth_bytes == brought.moved_bytes == 10
    sent = does("3 offload g:w")
    assert (sent.resource, sent.reads, sent.host_writes, sent.growth_bytes) == (Resource.OUT, ("g:w",), ("g:w",), 0)
    freed = does("3 free g:w")
    assert (freed.resource, freed.blocks, freed.releases, freed.growth_bytes) == (None, True, ("g:w",), -10)
    computed = does("2 compute B1")
    assert computed.brings == ("d:h", "g:u") and computed.releases == ("k:1", "d:y")
    assert (computed.rise_bytes, computed.growth_bytes) == (28, 8 + 20 - 6 - 4)
    updated = does("2 update-device u")
    assert updated.reads == ("p:u", "s:u", "g:u") and updated.writes == ("p:u", "s:u")
    assert does("4 update-cpu w").host_reads == ("g:w", "p:w")


def test_the_first_gradient_becomes_the_total_and_later_ones_are_added() -> None:
    begun, added = does("2 begin-total u", 2), does("2 accumulate u", 2)
    assert (begun.seconds, begun.brings, begun.releases, begun.growth_bytes) == (0.0, ("t:u",), ("g:u",), 0)
    assert (added.seconds, added.brings, added.releases, added.growth_bytes) == (0.125, (), ("g:u",), -20)
    assert does("4 update-device u", 2).reads == ("p:u", "s:u", "t:u")
    assert does("4 update-cpu w", 2).host_reads == ("t:w", "p:w")


def test_an_action_about_a_tensor_is_about_no_item() -> None:
    with pytest.raises(TypeError, match="4 update-cpu w is not about an item"):
        _ = Action(4, Kind.UPDATE_CPU, "w").item


@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_text_of_version_1_is_read(m: int) -> None:
    schedule = tiny_schedule() if m == 1 else micro_schedule(m)
    old = json.loads(json.dumps(to_dict(schedule)).replace("begin-total", "accumulate")) | {"version": 1}
    assert from_dict(old) == schedule


@pytest.mark.parametrize("line", ["", "1", "1 accumulate", "1 accumulate ", "x accumulate u", "1 jump u"])
def test_a_broken_line_of_version_1_is_named(line: str) -> None:
    old = to_dict(micro_schedule(2)) | {"version": 1, "backward": [line]}
    with pytest.raises(ScheduleError, match=r"not an action|no such name|announced"):
        from_dict(old)


@pytest.mark.parametrize("odd", ["u[0:2]", "u[:]", "my u[0:2]"])
def test_a_state_whose_tensor_is_named_like_rows_is_read_from_version_1(odd: str) -> None:
    def renamed(text: str) -> str:
        return text.replace("s:u", f"s:{odd}").replace("p:u", f"p:{odd}").replace("g:u", f"g:{odd}")

    old = json.loads(renamed(json.dumps(to_dict(tiny_schedule()))).replace("update-device u", f"update-device {odd}"))
    old |= {"version": 1, "update_device_s": {odd: 0.5}, "resident": sorted(old["resident"])}
    read = from_dict(old)
    assert read.states == {odd: (f"s:{odd}[:]",)}
    assert from_dict(json.loads(json.dumps(to_dict(read)))) == read
