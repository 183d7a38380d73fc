"""The census as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from typing import Any

_HEAD = """# The census

`python -m benchmarks.census` trains every model on public lists that we did not write for three steps: with plain
PyTorch, and with offmate on the emulated device within an ample and within the least budget. Losses, parameters,
buffers, optimizer states and the random state are compared bit for bit (`offmate check` does this for one model). A
number behind a name counts the inputs of torch's own table.

| word | meaning |
| --- | --- |
| equal | all numbers are plain PyTorch's, bit for bit, within both budgets |
| refused | offmate says by name what it cannot train, before it trains |
| different, failed, crashed | a fault of offmate: other numbers, an error not its own, or a process that ended |
| too long | the model took longer than the census allows |
| not compared | nothing is said of offmate; below |

Nothing can be said of a model for which no tiny size or no data could be made, which needs a package that was not
there, which fails in plain PyTorch, or which differs from itself when it is run twice.
The share is that of equal models among those that were compared.
"""
_SILENT = ("unstable", "plain_fails", "not built")
_TITLES = {
    "transformers": "transformers: every model type that has a base model, in a tiny size",
    "timm": "timm: the smallest model of each family",
    "torchvision": "torchvision: the smallest model of each family",
    "diffusers": "diffusers: denoisers",
    "modules": "`torch.nn`: every module in torch's own test table (`common_modules.module_db`)",
    "optimizers": "`torch.optim`: every optimizer in torch's own test table (`common_optimizers.optim_db`)",
}


def markdown(found: dict[str, Any]) -> str:
    """Write the page.

    Parameters
    ----------
    found: what the census's JSON file holds.
    """
    lists: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        lists.setdefault(row["list"], []).append(row)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = [_HEAD, f"Made with Python {found['python']}, {versions}.\n", _summary(lists)]
    parts += [_section(name, lists[name]) for name in _TITLES if name in lists]
    return "\n".join(parts)


def _summary(lists: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| list | equal | refused | different, failed, crashed | too long | not compared | share equal |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in _TITLES:
        if name not in lists:
            continue
        count = Counter(row["outcome"] for row in lists[name])
        faults = count["different"] + count["failed"] + count["crashed"]
        silent = sum(count[outcome] for outcome in _SILENT)
        compared = count["equal"] + count["refused"] + faults + count["too long"]
        share = f"{count['equal'] / compared:.0%}".replace("%", " %") if compared else ""
        lines.append(
            f"| {name} | {count['equal']} | {count['refused']} | {faults} | {count['too long']} | {silent} | {share} |"
        )
    return "\n".join(lines) + "\n"


def _section(name: str, rows: list[dict[str, Any]]) -> str:
    equal = ", ".join(row["name"] for row in rows if row["outcome"] == "equal")
    lines = [f"## {_TITLES[name]}\n", f"Equal: {equal or 'none'}.\n"]
    others = [row for row in rows if row["outcome"] != "equal"]
    if others:
        lines += ["| | | why |", "| --- | --- | --- |"]
        lines += [f"| {row['name']} | {_word(row['outcome'])} | {_cell(row['words'])} |" for row in others]
    return "\n".join(lines) + "\n"


def _word(outcome: str) -> str:
    return "not compared" if outcome in _SILENT else outcome


def _cell(words: str) -> str:
    """Return text that cannot end its cell or start markup."""
    text = " ".join(words.split())
    for mark in "\\|<>*_`[]$":
        text = text.replace(mark, f"\\{mark}")
    return text
