"""What two runs of a program left: losses, logs and every saved tensor, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .child import RECORD

STORED = (".safetensors", ".pt", ".pth", ".bin", ".tar")
_OF_TIME = (
    "runtime",
    "per_second",
    "offmate",
)  # words in the names of logged figures that time decides, or offmate adds
_NOT_TENSORS = ("training_args.bin", "rng_state.pth", "random_states_0.pkl")


def differences(plain: Path, ours: Path, given: Path) -> list[str]:
    """List what differs between the folders of two runs; nothing if all numbers are the same bit for bit.

    Parameters
    ----------
    given: the folder that both began with.
    """
    found = []
    a, b = (json.loads((folder / RECORD).read_text())["losses"] for folder in (plain, ours))
    if a != b:
        first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        found.append(f"losses differ from number {first + 1} on: {_text(a, first)} and {_text(b, first)}")
    if not a:
        found.append("the program made no backward()")
    files = {path.relative_to(folder) for folder in (plain, ours) for path in _stored(folder)}
    files = {file for file in files if not (given / file).exists()}
    if not files:
        found.append("the program saved no tensors")
    for file in sorted(files):
        found += _file_differences(file, plain / file, ours / file)
    for file in sorted(path.relative_to(plain) for path in plain.rglob("trainer_state.json")):
        logs = [list(_logged(json.loads((folder / file).read_text()))) for folder in (plain, ours)]
        if logs[0] != logs[1]:
            found.append(f"{file} differs: {[pair for pair in zip(*logs) if pair[0] != pair[1]][:1]}")
    return found


def _text(losses: list[str], index: int) -> str:
    return repr(float.fromhex(losses[index])) if index < len(losses) else "nothing"


def _stored(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.suffix in STORED and path.name not in _NOT_TENSORS:
            yield path


def _file_differences(name: Path, a: Path, b: Path) -> list[str]:
    if not (a.is_file() and b.is_file()):
        return [f"{name} was written by one run only"]
    first, second = dict(_tensors(a)), dict(_tensors(b))
    if first.keys() != second.keys():
        return [f"{name} holds other tensors: {sorted(first.keys() ^ second.keys())[:4]}"]
    different = [key for key in first if not _same_bits(first[key], second[key])]
    return [f"{len(different)} of {len(first)} tensors differ in {name}, {different[0]} first"] if different else []


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if path.suffix == ".safetensors":
        yield from load_file(path).items()
    else:
        yield from _within(torch.load(path, map_location="cpu", weights_only=False), "")


def _within(thing: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(thing, torch.Tensor):
        yield name, thing
    elif isinstance(thing, dict):
        for key, inner in thing.items():
            yield from _within(inner, f"{name}.{key}")
    elif isinstance(thing, (list, tuple)):
        for index, inner in enumerate(thing):
            yield from _within(inner, f"{name}.{index}")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().numpy(force=True).tobytes() == (b.contiguous().numpy(force=True).tobytes())
    )


def _logged(state: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    for row in state["log_history"]:
        for name, value in row.items():
            if not any(word in name for word in _OF_TIME):
                yield row["step"], name, value
