"""Of autograd while it runs, and of the modes that torch works under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function as _function

# The functions behind these modes and questions are called at every step, so they have names here and nothing around.

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Treats subclasses of tensors as plain tensors, for a block; torch's notes on extending it name no public spelling."""

without_torch_function_modes = torch._C.DisableTorchFunction
"""The same, and modes such as `torch.device` as a context manager see nothing either."""

without_autocast = torch._C._DisableAutocast
"""Switches autocast off for every kind of device at once; `torch.autocast` does one kind."""

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward() under way goes through a node; publicly there is no asking."""

backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""A number of the backward() that this thread is in, -1 outside; publicly it has none."""

profiler_is_on: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler runs in this thread; starting a second one publicly ends in an error."""

FunctionBase = _function._SingleLevelFunction
"""What `torch.autograd.Function.apply` asks last; only there all functions can be seen, whoever holds a reference."""


def after_backward(call: Callable[[], None]) -> None:
    """Have something called when the backward() under way ends; public hooks belong to one tensor or node."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def hooks_on_saved() -> tuple[Any, Any] | None:
    """Give the innermost `saved_tensors_hooks` in force, pack and unpack; publicly they can only be set."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def autocast_depth() -> int:
    """Count how many `torch.autocast` are open; publicly only whether one is that is enabled."""
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1
