"""Plans for the tests of reports: from literal and random schedules, without a model and without torch."""

from __future__ import annotations

from dataclasses import replace

from offmate.solver.schedule import Schedule
from offmate.solver.simulate import simulate

from offmate.plans.plan import Plan
from offmate.plans.table import BlockRow

from ...solver.tiny_schedule import BACKWARD, tiny_schedule


def plan_of(schedule: Schedule, **changes) -> Plan:
    """A plan that holds `schedule`; numbers that the reports only repeat are made up."""
    fields = {
        "fingerprint": "made up",
        "schedule": schedule,
        "classes": {},
        "blocks": tuple(_row(schedule, i) for i in range(len(schedule.options))),
        "budget_bytes": schedule.device_budget_bytes + 7,
        "fixed_bytes": 7,
        "least_budget_bytes": 100,
        "lower_bound_s": 9.0,
        "gap": 0.0,
        "status": "solved",
        "user_bytes": 0,
        "plan_s": 1.0,
    }
    return Plan(**fields | changes)


def tiny_plan() -> Plan:
    """The literal schedule of two blocks; its budget is its peak."""
    schedule = tiny_schedule()
    return plan_of(replace(schedule, device_budget_bytes=simulate(schedule).peak_bytes))


def resident_plan() -> Plan:
    """The same blocks and tensors; both weights are updated on the device and block 0 keeps its values."""
    plan = tiny_plan()
    rows = (replace(plan.blocks[0], option="keep", kept_bytes=30, offloaded_bytes=0), plan.blocks[1])
    backward = BACKWARD.replace("3 offload g:w", "3 update-device w")
    schedule = tiny_schedule(backward=backward, turn_around="", update_cpu_s={}, update_device_s={"u": 0.5, "w": 0.25})
    return replace(plan, blocks=rows, schedule=schedule)


def _row(schedule: Schedule, block: int) -> BlockRow:
    sizes = schedule.item_bytes
    kept, offloaded = sizes.get(f"k:{block}", 0), sizes.get(f"a:{block}", 0)
    return BlockRow(str(block), "A", "offload" if offloaded else "keep", kept, offloaded, 0, 10, 0, 0)
