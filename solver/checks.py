"""Checks of rows: one that contradicts itself is named, with its value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from .rows import Block, Group, Output, Shared, Side, TensorSize, Value


class ProblemError(ValueError):
    """A problem that contradicts itself: the message names the row and the value."""


def check_blocks(blocks: Iterable[Block]) -> None:
    """Check blocks and their options."""
    for block in blocks:
        require(bool(block.options), f"block {block.name} has no options")
        for option in block.options:
            numbers(f"block {block.name}, option {option.name}", option)


def check_groups(groups: Iterable[Group], n: int) -> None:
    """Check groups over `n` blocks."""
    for group in groups:
        row = f"group {group.name}"
        numbers(row, group)
        require(bool(group.tensors), f"{row} has no tensors")
        require(bool(group.uses), f"{row} is used by no step")
        steps_within(row, "uses", group.uses, 0, 2 * n - 1)
        steps_within(row, "grad_steps", group.grad_steps, n, 2 * n - 1)
        require(not (group.in_files and group.trainable), f"{row} is in files that are only read, and trained")
        require(group.side in get_args(Side), f"{row}: side is {group.side!r}, must be any, host or device")
        for tensor in group.tensors:
            numbers(f"{row}, tensor {tensor.name}", tensor)
            _rows(f"{row}, tensor {tensor.name}", tensor)


def check_values(values: Iterable[Value], outputs: Iterable[Output], n: int) -> None:
    """Check what `n` blocks hand on, and what they hand out."""
    for value in values:
        row = f"value {value.name}"
        numbers(row, value)
        require(bool(value.uses), f"{row} is read by no step")
        require(0 <= value.made < n, f"{row}: made in step {value.made}, forwards are 0..{n - 1}")
        steps_within(row, "uses", value.uses, value.made + 1, 2 * n - 1)
        steps_within(row, "grad_steps", value.grad_steps, n, 2 * n - 2 - value.made)
    for output in outputs:
        numbers(f"output {output.name}", output)
        require(0 <= output.made < n, f"output {output.name}: made in step {output.made}, forwards are 0..{n - 1}")


def check_shared(shared_values: Iterable[Shared], n_steps: int) -> None:
    """Check what several blocks share, over steps of the first pass and the turn-around."""
    for shared in shared_values:
        numbers(f"shared value {shared.name}", shared)
        known = 0 <= shared.last_step < n_steps
        require(known, f"shared value {shared.name}: last step {shared.last_step}")


def require(holds: bool, message: str) -> None:
    """Raise ProblemError with a message unless a condition holds."""
    if not holds:
        raise ProblemError(message)


def numbers(row: str, record: object) -> None:
    """Check that a row's bytes, seconds and counts are finite and not negative, and whole where they count things."""
    for name, value in vars(record).items():
        if name.endswith(("bytes", "_s", "_steps", "_batches")) and not isinstance(value, tuple):
            whole = not name.endswith("_s")
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            require(number, f"{row}: {name} is {value!r}; it must be a {'whole ' * whole}number")
            require(0 <= value < float("inf"), f"{row}: {name} is {value}; it must be finite and not negative")


def _rows(row: str, tensor: TensorSize) -> None:
    rows, piece, size = tensor.rows, tensor.piece_rows, tensor.state_bytes
    for name, value in (("rows", rows), ("piece_rows", piece)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(whole, f"{row}: {name} is {value!r}; it must be a whole number of at least 1")
    require(size % rows == 0, f"{row}: a state of {size} bytes cannot be cut into {rows} equal rows")


def steps_within(row: str, name: str, steps: tuple[int, ...], low: int, high: int) -> None:
    """Check that steps ascend without repeats and lie between two of them."""
    require(list(steps) == sorted(set(steps)), f"{row}: {name} {steps} must ascend without repeats")
    require(all(low <= s <= high for s in steps), f"{row}: {name} {steps} must lie in {low}..{high}")
