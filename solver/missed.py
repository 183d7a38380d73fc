"""A step in which every update that came before the gate turns out to be wrong, as a schedule to run dry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .effects import with_actions
from .schedule import Action, Kind, Schedule
from .simulate import simulate


def missed(schedule: Schedule) -> Schedule:
    """Return a schedule whose dry run takes as long as a step that undoes its updates before the gate.

    Those that have begun when the gate opens are undone and made again behind it, the others are made there only. To
    put old values back takes as long as to keep them. It is for the simulator; no executor replays it.

    Parameters
    ----------
    schedule: a valid one, with updates before its gate.
    """
    early, begun = tuple(action.name for action in _early(schedule)), _begun(schedule)
    # The update and its log take as long together as before, and so do the update behind the gate and what undoes it.
    longer = {name: schedule.update_cpu_s[name] + schedule.log_cpu_s[name] for name in begun}
    again = replace(
        schedule,
        update_cpu_s=schedule.update_cpu_s | longer,
        log_cpu_s=schedule.log_cpu_s | dict.fromkeys(begun, 0.0),
    )
    return with_actions(again, [list(_redone(part.actions, early, begun)) for part in schedule.parts])


def _early(schedule: Schedule) -> Iterator[Action]:
    return (action for action in schedule.actions if action.kind is Kind.SPECULATE_CPU)


def _begun(schedule: Schedule) -> frozenset[str]:
    """Return the tensors whose updates a worker has begun when the gate opens."""
    spans = simulate(schedule).timeline
    opens_s = next(span.start_s for span in spans if span.action.name == "gate")
    early = (span for span in spans if span.action.kind is Kind.SPECULATE_CPU)
    return frozenset(span.action.name for span in early if span.start_s < opens_s)


def _redone(actions: tuple[Action, ...], early: tuple[str, ...], begun: frozenset[str]) -> Iterator[Action]:
    for action in actions:
        if action.kind is not Kind.SPECULATE_CPU or action.name in begun:
            yield action
        if action.name == "gate":
            yield from (Action(action.step, Kind.UPDATE_CPU, name) for name in early)
