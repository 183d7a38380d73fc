"""A literal schedule of several micro-batches: one weight updated on the host, one on the device."""

from dataclasses import replace

from offmate.solver import items
from offmate.solver.schedule import Action, ComputeSpec, Pass, Schedule

from .tiny_schedule import lines, tiny_schedule

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
2 compute B1
2 accumulate u
3 compute B0
3 offload g:w
3 accumulate-cpu w
3 free g:w
3 free p:w
3 free x:m
"""

TURN_AROUND = """
4 compute gate
4 prefetch s:u
4 update-cpu w
4 update-device u
4 free t:u
4 offload s:u
4 free s:u
"""


def later(actions: tuple[Action, ...], passes: int) -> tuple[Action, ...]:
    """The actions that many passes later."""
    return tuple(replace(action, step=action.step + 4 * passes) for action in actions)


def micro_schedule(
    m: int, forward: str = FORWARD, backward: str = BACKWARD, turn_around: str = TURN_AROUND, **changes: object
) -> Schedule:
    """The schedule of `m` micro-batches, at least 2: every pass has the same actions; the first begins the totals."""
    one = Pass(lines(forward), lines(backward))
    lead = tuple(Pass(later(one.forward, p), later(one.backward, p)) for p in range(1, min(m, 3) - 1))
    lead = (Pass(one.forward, lines(backward.replace("accumulate u", "begin-total u"))), *lead)
    base = tiny_schedule(forward="", backward="", turn_around="")
    fields = {
        "micro_batches": m,
        "gate": True,
        "lead": lead,
        "forward": later(one.forward, len(lead)),
        "backward": later(one.backward, len(lead)),
        "turn_around": later(lines(turn_around), len(lead)),
        "item_bytes": base.item_bytes | {items.total("u"): 20},
        "computes": base.computes | {"gate": ComputeSpec(0.25)},
        "add_cpu_s": {"w": 0.5},
        "add_device_s": {"u": 0.125},
    }
    return replace(base, **(fields | changes))  # type: ignore[arg-type]
