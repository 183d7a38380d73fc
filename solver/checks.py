"""Checks of a problem: a row that contradicts itself is named, with its value."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from .rows import Side, TensorSize

if TYPE_CHECKING:
    from .problem import Problem

MOST_TURN_AROUND_STEPS = 10_000


class ProblemError(ValueError):
    """A problem that contradicts itself: the message names the row and the value."""


def check(problem: Problem) -> None:
    """Raise ProblemError, naming the row, if the problem contradicts itself."""
    _require(problem.n_blocks > 0, "a problem needs at least one block")
    _check_update(problem)
    for block in problem.blocks:
        _require(bool(block.options), f"block {block.name} has no options")
        for option in block.options:
            _numbers(f"block {block.name}, option {option.name}", option)
    _check_groups(problem)
    _check_values(problem)
    for row, why in problem.rates.faults():
        _require(False, f"{row}: {why}")
    _numbers("problem", problem)


def _check_update(problem: Problem) -> None:
    _require(problem.turn_around_steps >= 2, f"turn_around_steps is {problem.turn_around_steps}; at least 2 are needed")
    many = f"turn_around_steps is {problem.turn_around_steps}; at most {MOST_TURN_AROUND_STEPS:,} can be planned"
    _require(problem.turn_around_steps <= MOST_TURN_AROUND_STEPS, many)
    if problem.gate:
        _require(problem.update == "planned", "a gate needs planned updates, but here the user's own code updates")
        steps = problem.turn_around_steps
        _require(steps >= 3, f"turn_around_steps is {steps}; a gate needs at least 3")
    _require(problem.gate or not problem.speculates, "speculates, but there is no gate that updates could come before")
    _require(problem.gate or problem.gate_s == 0, f"gate_s is {problem.gate_s}, but there is no gate")
    count = problem.micro_batches
    _require(count >= 1, f"micro_batches is {count}; at least 1 is needed")
    _require(count == 1 or problem.gate, f"micro_batches is {count}; more than one needs planned updates and a gate")
    slots = problem.per_step
    _require(slots >= 1, f"per_step is {slots}; at least 1 is needed")
    last = problem.last_per_step
    _require(0 <= last < slots, f"last_per_step is {last}; it must be less than per_step, {slots}, or 0")
    _require(last == 0 or count > 1, f"last_per_step is {last}, but there is one pass")


def _check_groups(problem: Problem) -> None:
    n = problem.n_blocks
    for group in problem.groups:
        row = f"group {group.name}"
        _numbers(row, group)
        _require(bool(group.tensors), f"{row} has no tensors")
        _require(bool(group.uses), f"{row} is used by no step")
        _steps(row, "uses", group.uses, 0, 2 * n - 1)
        _steps(row, "grad_steps", group.grad_steps, n, 2 * n - 1)
        _require(not (group.in_files and group.trainable), f"{row} is in files that are only read, and trained")
        _require(group.side in get_args(Side), f"{row}: side is {group.side!r}, must be any, host or device")
        for tensor in group.tensors:
            _numbers(f"{row}, tensor {tensor.name}", tensor)
            _rows(f"{row}, tensor {tensor.name}", tensor)


def _check_values(problem: Problem) -> None:
    n = problem.n_blocks
    for value in problem.values:
        row = f"value {value.name}"
        _numbers(row, value)
        _require(bool(value.uses), f"{row} is read by no step")
        _require(0 <= value.made < n, f"{row}: made in step {value.made}, forwards are 0..{n - 1}")
        _steps(row, "uses", value.uses, value.made + 1, 2 * n - 1)
        _steps(row, "grad_steps", value.grad_steps, n, problem.backward_step(value.made) - 1)
    for output in problem.outputs:
        _numbers(f"output {output.name}", output)
        _require(0 <= output.made < n, f"output {output.name}: made in step {output.made}, forwards are 0..{n - 1}")
    for shared in problem.shared:
        _numbers(f"shared value {shared.name}", shared)
        known = 0 <= shared.last_step < problem.pass_steps + problem.turn_around_steps
        _require(known, f"shared value {shared.name}: last step {shared.last_step}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ProblemError(message)


def _numbers(row: str, record: object) -> None:
    for name, value in vars(record).items():
        if name.endswith(("bytes", "_s", "_steps", "_batches")) and not isinstance(value, tuple):
            whole = not name.endswith("_s")
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            _require(number, f"{row}: {name} is {value!r}; it must be a {'whole ' * whole}number")
            _require(0 <= value < float("inf"), f"{row}: {name} is {value}; it must be finite and not negative")


def _rows(row: str, tensor: TensorSize) -> None:
    rows, piece, size = tensor.rows, tensor.piece_rows, tensor.state_bytes
    for name, value in (("rows", rows), ("piece_rows", piece)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        _require(whole, f"{row}: {name} is {value!r}; it must be a whole number of at least 1")
    _require(size % rows == 0, f"{row}: a state of {size} bytes cannot be cut into {rows} equal rows")


def _steps(row: str, name: str, steps: tuple[int, ...], low: int, high: int) -> None:
    _require(list(steps) == sorted(set(steps)), f"{row}: {name} {steps} must ascend without repeats")
    _require(all(low <= s <= high for s in steps), f"{row}: {name} {steps} must lie in {low}..{high}")
