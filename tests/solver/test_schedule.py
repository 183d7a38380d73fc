"""Actions print as they parse; a valid schedule passes, and one that is broken in a single way is refused."""

import json
from dataclasses import replace

import pytest
from offmate.solver.schedule import Action, Kind
from offmate.solver.scheduling.validate import ScheduleError, validate
from offmate.solver.text import from_dict, to_dict, to_text

from .tiny_schedule import BACKWARD, FORWARD, TURN_AROUND, after, spec, tiny_schedule, without


@pytest.mark.parametrize("kind", Kind)
def test_actions_print_as_they_parse(kind):
    action = Action(12, kind, "p:model.layers.0.weight")
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("line", ["", "3 compute", "x free p:w", "3 fetch p:w"])
def test_what_is_no_action_is_refused(line):
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(line)


def test_the_tiny_schedule_is_valid():
    validate(tiny_schedule())


BROKEN = {
    "a read item that is away": ({"forward": without(FORWARD, "0 prefetch p:w")}, "F0: reads p:w"),
    "offload of what is away": ({"forward": after(FORWARD, "0 free a:0", "0 offload a:0")}, "offload a:0: not on"),
    "free of what is away": ({"forward": after(FORWARD, "0 free a:0", "0 free a:0")}, "free a:0: not on the device"),
    "prefetch of what is there": (
        {"backward": after(BACKWARD, "2 compute user", "2 prefetch p:w")},
        "prefetch p:w: on the device already",
    ),
    "no host copy of an activation": ({"forward": without(FORWARD, "0 offload a:0")}, "prefetch a:0: it was not sent"),
    "no host copy of a state": ({"backward": without(BACKWARD, "2 offload s:u")}, "prefetch s:u: it was not sent"),
    "a device parameter that was never sent": (
        {
            "backward": after(BACKWARD, "2 free s:u", "2 free p:u"),
            "forward": after(FORWARD, "0 free a:0", "0 prefetch p:u"),
            "resident": ("old:y",),
        },
        "prefetch p:u: the host holds no copy",
    ),
    "values from before the update": (
        {"forward": after(FORWARD, "0 compute F0", "0 update-cpu w"), "turn_around": ""},
        "prefetch p:w: the host holds no copy of its new values",
    ),
    "a parameter that is never renewed": (
        {
            "forward": without(FORWARD, "0 prefetch p:w"),
            "backward": without(BACKWARD, "3 free p:w"),
            "resident": ("old:y", "p:u", "p:w"),
        },
        "F0: reads p:w from before its last update",
    ),
    "an update before its gradient is out": (
        {"backward": after(BACKWARD, "3 compute B0", "3 update-cpu w"), "turn_around": ""},
        "update-cpu w: the gradient was not sent",
    ),
    "no update": ({"turn_around": ""}, "update-cpu w: announced, but no action does it"),
    "two updates": ({"turn_around": after(TURN_AROUND, "4 update-cpu w", "4 update-cpu w")}, "done twice"),
    "updates on both sides": ({"update_device_s": {"u": 0.5, "w": 0.5}}, "update-device w: announced"),
    "a tensor without an update": ({"turn_around": "", "update_cpu_s": {}}, "tensor w: has 0 updates per iteration"),
    "a device update without its state": (
        {"backward": without(BACKWARD, "2 prefetch s:u")},
        "update-device u: reads s:u",
    ),
    "a device update without its gradient": (
        {"backward": after(without(BACKWARD, "2 update-device u"), "2 free g:u", "2 update-device u")},
        "update-device u: reads g:u",
    ),
    "a lost gradient": ({"backward": without(BACKWARD, "3 offload g:w")}, "g:w: the gradient is neither used"),
    "a value freed too early": (
        {"forward": after(without(FORWARD, "1 free v:h"), "0 free a:0", "0 free v:h")},
        "F1: reads v:h",
    ),
    "more at the end than at the start": ({"forward": without(FORWARD, "1 free v:h")}, "end of the iteration, v:h"),
    "less at the end than at the start": (
        {"backward": after(BACKWARD, "2 free s:u", "2 free p:u"), "forward": FORWARD},
        "end of the iteration, p:u",
    ),
    "a device budget one byte short": (
        {"device_budget_bytes": 143},
        "compute B1: 144 bytes on the device, the budget is 143",
    ),
    "a host budget one byte short": ({"host_budget_bytes": 89}, "host: 90 bytes"),
    "an unknown item": ({"forward": after(FORWARD, "1 compute F1", "1 free p:z")}, "free p:z: no such name"),
    "a compute that is left out": ({"backward": without(BACKWARD, "2 compute user")}, "compute user: announced"),
    "a resident list out of order": ({"resident": ("p:u", "old:y")}, "resident: items must ascend"),
    "a gradient of a value freed by hand": (
        {"backward": after(BACKWARD, "2 compute B1", "2 free d:h")},
        "gradients of values",
    ),
    "an output that is brought in": (
        {"backward": after(BACKWARD, "2 compute user", "2 prefetch old:y")},
        "never copied to the device",
    ),
    "an output that is sent out": (
        {"forward": after(FORWARD, "1 compute F1", "1 offload o:y")},
        "never copied to the host",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_schedule_broken_in_one_way_is_refused(case):
    changes, message = BROKEN[case]
    with pytest.raises(ScheduleError, match=message):
        validate(tiny_schedule(**changes))


def test_the_wrong_action_is_shown_among_its_neighbours():
    with pytest.raises(ScheduleError) as caught:
        validate(tiny_schedule(forward=without(FORWARD, "0 prefetch p:w")))
    assert str(caught.value).splitlines() == [
        "0 compute F0: reads p:w, which is not on the device",
        "    0 compute start",
        "--> 0 compute F0",
        "    0 offload a:0",
        "    0 free a:0",
        "    1 compute F1",
        "    1 free old:y",
    ]


def test_a_rise_below_what_a_compute_leaves_is_refused():
    schedule = tiny_schedule()
    short = replace(schedule.computes["F0"], rise_bytes=37)
    with pytest.raises(ScheduleError, match="compute F0: rises by 37, needs 38 bytes"):
        validate(replace(schedule, computes={**schedule.computes, "F0": short}))


def test_an_item_that_nobody_knows_is_refused():
    schedule = tiny_schedule()
    odd = spec(0.0, needs="p:z")
    with pytest.raises(ScheduleError, match="compute user: names p:z"):
        validate(replace(schedule, computes={**schedule.computes, "user": odd}))


def test_dictionaries_survive_json():
    schedule = tiny_schedule()
    assert from_dict(json.loads(json.dumps(to_dict(schedule)))) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version 3"),
        ({"format": "other"}, "'other'"),
        ({"forward": ["0 jump F0"]}, "not an action"),
        ({"host_budget_bytes": 1}, "host: 90 bytes"),
        ({"rates": {"speed": 1}}, "cannot be read"),
        ({"rates": {"in_bytes_per_s": 0, "out_bytes_per_s": 1, "both_bytes_per_s": 1}}, "rates: in_bytes_per_s is 0"),
        ({"device_budget_bytes": "much"}, "cannot be read"),
        ({"host_bytes": None}, "cannot be read"),
    ],
)
def test_what_cannot_be_loaded_says_why(change, message):
    with pytest.raises(ScheduleError, match=message):
        from_dict(to_dict(tiny_schedule()) | change)


def test_a_missing_field_is_named():
    data = to_dict(tiny_schedule())
    del data["computes"]
    with pytest.raises(ScheduleError, match="lacks 'computes'"):
        from_dict(data)


def test_text_shows_every_action_with_the_bytes_on_the_device():
    text = to_text(tiny_schedule())
    assert "0 prefetch p:w" in text
    assert "10 B" in text
    assert text.count("\n") == 2 + 3 + len(tiny_schedule().actions)
