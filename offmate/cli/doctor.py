"""`offmate doctor`: the facts about a machine that a problem report needs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from .arguments import Help, output_file

_EXAMPLES = """examples:
  offmate doctor
  offmate doctor --json doctor.json
"""


def add_parser(verbs: Any) -> None:
    """Add the command `doctor` to the command line's subparsers; its `run` is `run`."""
    parser = verbs.add_parser(
        "doctor",
        help="print versions, devices, link rates and limits, for problem reports",
        description="Print the facts about this machine and installation that a problem report needs. The output names "
        "no user, host or folder.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the findings to FILE")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine and print the findings.

    Returns: the exit status, 0; 1 if no plan can be made, since a solver is missing.
    """
    from ..machines.doctor import examine
    from .screen import console, pairs

    found = examine()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if not arguments.quiet:
        console().print(pairs(_rows(found)))
    solvers = found["solvers"]
    return 0 if solvers["cp-sat"] == "works" and "works" in (solvers["highs"], solvers["cbc"]) else 1


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from ..sizes import format_bytes

    versions, system, host = found["versions"], found["system"], found["host"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield "absent", ", ".join(name for name, version in versions.items() if not version) or "nothing"
    wsl = ", WSL" if system["wsl"] else ""
    yield "system", f"Python {system['python']}, {system['os']}, Linux {system['kernel']}{wsl}"
    threads = system["torch_threads"]
    used = f"torch uses {threads} {'thread' if threads == 1 else 'threads'}"
    yield "processor", f"{system['processor']}, {system['cores']} cores, {used}"
    yield (
        "host",
        (
            f"{format_bytes(host['memory_bytes'])} of RAM, {format_bytes(host['available_bytes'])} available to "
            f"this process; default RAM budget {format_bytes(host['default_budget_bytes'])}"
        ),
    )
    for device in found["devices"]:
        yield "device", _device_words(device)
    pinned = found["pinned"]
    yield "pinned", f"{_locked(pinned['limit_bytes'])}; {pinned['probe']}"
    if system["wsl"]:
        yield (
            "WSL",
            (
                "Windows gives WSL2 half of its RAM; a line such as memory=28GB under [wsl2] in .wslconfig sets it. "
                "The GPU's driver pins only a part of it, so that some copies take longer; plans take this into account"
            ),
        )
    yield "solvers", ", ".join(f"{name}: {words}" for name, words in found["solvers"].items())
    yield "cache", f"{found['cache']['files']} files, {format_bytes(found['cache']['bytes'])}"


def _locked(limit_bytes: int | None) -> str:
    """Say how much memory a process may lock."""
    from ..sizes import format_bytes

    if limit_bytes is None:
        return "a process may lock any amount of memory (ulimit -l)"
    return (
        f"a process may lock {format_bytes(limit_bytes)} of memory (ulimit -l), which memlock in "
        "/etc/security/limits.conf raises. If a GPU's driver keeps to it, some copies take longer"
    )


def _device_words(device: dict[str, Any]) -> str:
    from ..sizes import format_bytes

    said = [device["name"]]
    if "memory_bytes" in device:
        capability = f"compute capability {device['capability']}, " if "capability" in device else ""
        room = f"{format_bytes(device['free_bytes'])} of {format_bytes(device['memory_bytes'])} free"
        said.append(f"{capability}{room}")
    if "allocator" in device:
        said.append(f"allocator: {device['allocator']}")
    ways = ("in", "out", "both")
    rates = [f"{way} {format_bytes(device[f'{way}_bytes_per_s'])}/s" for way in ways if f"{way}_bytes_per_s" in device]
    said.append(f"copies {', '.join(rates)}" if rates else f"copies not measured: {device['link']}")
    return f"{said[0]}: {'; '.join(said[1:])}"
