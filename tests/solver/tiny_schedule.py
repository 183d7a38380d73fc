"""A literal schedule of two blocks: one weight updated on the host, one on the device with a state that moves."""

from offmate.solver.items import Item
from offmate.solver.problem import Rates
from offmate.solver.schedule import Action, ComputeSpec, Schedule

FORWARD = """
0 prefetch p:w
0 compute start
0 compute F0
0 offload a:0
0 free a:0
1 compute F1
1 free old:y
1 free v:h
"""

BACKWARD = """
2 compute user
2 prefetch a:0
2 prefetch s:u
2 compute B1
2 update-device u
2 free g:u
2 offload s:u
2 free s:u
3 compute B0
3 offload g:w
3 free g:w
3 free p:w
3 free x:m
"""

TURN_AROUND = """
4 update-cpu w
"""


def lines(text):
    return tuple(Action.parse(line) for line in text.strip().splitlines())


def spec(seconds, needs="", makes="", drops="", rise_bytes=0):
    """A compute's specification, with items as words."""
    return ComputeSpec(seconds, *(tuple(map(Item.parse, words.split())) for words in (needs, makes, drops)), rise_bytes)


def tiny_schedule(forward=FORWARD, backward=BACKWARD, turn_around=TURN_AROUND, **changes):
    """The schedule with parts or fields replaced; at rest u's weight (20 bytes) and the old output (4) are there."""
    fields = {
        "options": (0, 0),
        "item_bytes": {
            "p:w": 10,
            "g:w": 10,
            "p:u": 20,
            "g:u": 20,
            "s:u": 40,
            "v:h": 8,
            "d:h": 8,
            "a:0": 30,
            "k:1": 6,
            "x:m": 2,
            "o:y": 4,
            "old:y": 4,
            "d:y": 4,
        },
        "resident": ("old:y", "p:u"),
        "computes": {
            "start": spec(0.0, makes="x:m", rise_bytes=2),
            "F0": spec(1.0, "p:w x:m", "a:0 v:h", rise_bytes=40),
            "F1": spec(2.0, "p:u v:h x:m", "k:1 o:y", rise_bytes=10),
            "user": spec(0.0, makes="d:y", rise_bytes=4),
            "B1": spec(4.0, "p:u k:1 d:y x:m", "d:h g:u", "k:1 d:y", 28),
            "B0": spec(2.0, "p:w a:0 d:h x:m", "g:w", "a:0 d:h", 10),
        },
        "update_cpu_s": {"w": 3.0},
        "update_device_s": {"u": 0.5},
        "rates": Rates(10.0, 10.0, 20.0),
        "device_budget_bytes": 200,
        "host_budget_bytes": 200,
        "host_bytes": 90,
        "forward": lines(forward),
        "backward": lines(backward),
        "turn_around": lines(turn_around),
    }
    fields |= changes
    fields["item_bytes"] = {Item.parse(item): size for item, size in fields["item_bytes"].items()}
    fields["resident"] = tuple(map(Item.parse, fields["resident"]))
    return Schedule(**fields)


def without(text, *gone):
    """`text` less the lines `gone`, each of which must be there."""
    kept = text.strip().splitlines()
    for line in gone:
        kept.remove(line)
    return "\n".join(kept)


def after(text, line, *new):
    """`text` with lines inserted after `line`."""
    rows = text.strip().splitlines()
    place = rows.index(line) + 1
    return "\n".join(rows[:place] + list(new) + rows[place:])
