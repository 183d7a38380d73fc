from pathlib import Path

import pytest

from offmate.errors import OffmateError
from offmate.machines.host_memory import available_host_bytes, default_host_budget_bytes

MIB = 1 << 20
GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 GiB available and no control groups: its /proc and its control-group mount."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable:    {8 * GIB // 1024} kB\n")
    return proc, cgroup


def group_v2(folder: Path, limit: str, used: int, inactive_file: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {inactive_file}\n")


def group_v1(folder: Path, limit: int, used: int, inactive_file: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory.stat", f"inactive_file 7\ntotal_inactive_file {inactive_file}\n")


def test_without_control_groups_it_is_what_the_machine_has(machine):
    assert available_host_bytes(*machine) == 8 * GIB


def test_version_2_limit_less_what_is_used(machine):
    proc, cgroup = machine
    write(proc / "self" / "cgroup", "0::/jobs/mine\n")
    group_v2(cgroup / "jobs" / "mine", str(4 * GIB), GIB, inactive_file=256 * MIB)
    assert available_host_bytes(*machine) == 3 * GIB + 256 * MIB


def test_version_2_a_parent_may_be_tighter(machine):
    proc, cgroup = machine
    write(proc / "self" / "cgroup", "0::/jobs/mine\n")
    group_v2(cgroup / "jobs" / "mine", "max", GIB)
    group_v2(cgroup / "jobs", str(2 * GIB), GIB)
    assert available_host_bytes(*machine) == GIB


@pytest.mark.parametrize("path", ["/", "/docker/of-the-host", "/../.."])
def test_version_2_inside_a_container(machine, path):
    proc, cgroup = machine
    write(proc / "self" / "cgroup", f"0::{path}\n")
    group_v2(cgroup, str(3 * GIB), GIB)
    assert available_host_bytes(*machine) == 2 * GIB


def test_version_1_limit_less_what_is_used(machine):
    proc, cgroup = machine
    write(proc / "self" / "cgroup", "5:cpu,cpuacct:/x\n4:memory:/jobs/mine\n0::/\n")
    group_v1(cgroup / "memory" / "jobs" / "mine", 4 * GIB, GIB, inactive_file=MIB)
    group_v1(cgroup / "memory", UNLIMITED_V1, 2 * GIB)
    assert available_host_bytes(*machine) == 3 * GIB + MIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    proc, cgroup = machine
    write(proc / "self" / "cgroup", "0::/\n")
    group_v2(cgroup, str(GIB), GIB + MIB)
    assert available_host_bytes(*machine) == 0
    assert default_host_budget_bytes(*machine) == 0


def test_a_machine_that_does_not_tell(tmp_path):
    with pytest.raises(OffmateError, match="cpu_budget="):
        available_host_bytes(tmp_path, tmp_path)


def test_the_default_budget_leaves_a_margin(machine):
    proc, _ = machine
    assert default_host_budget_bytes(*machine) == 7 * GIB
    write(proc / "meminfo", f"MemAvailable: {100 * GIB // 1024} kB\n")
    assert default_host_budget_bytes(*machine) == 90 * GIB


def test_this_machine_has_some():
    assert available_host_bytes() > 0
