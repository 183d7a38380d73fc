"""Private names of autograd while it runs, and of the modes that torch works under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function as _function

# These functions are called at every step, so they are bound directly, without wrappers.

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Treats tensor subclasses as plain tensors within a block; torch's notes on extending it give no public name."""

without_torch_function_modes = torch._C.DisableTorchFunction
"""The same, and hides calls from modes such as `torch.device` as a context manager, too."""

without_autocast = torch._C._DisableAutocast
"""Switches autocast off for every kind of device at once; `torch.autocast` does so for one kind."""

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Returns whether the backward() under way will run a node; there is no public way to ask."""

backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward() that this thread is in, -1 outside; there is no public one."""

profiler_is_on: Callable[[], bool] = torch.autograd._profiler_enabled
"""Returns whether a profiler runs in this thread; publicly, starting a second one raises an error."""

FunctionBase = _function._SingleLevelFunction
"""The base that `torch.autograd.Function.apply` calls last, where every function passes, however it was imported."""


def after_backward(call: Callable[[], None]) -> None:
    """Have something called when the backward() under way ends; public hooks belong to one tensor or node."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def hooks_on_saved() -> tuple[Any, Any] | None:
    """Give the innermost `saved_tensors_hooks` in force, pack and unpack; the public API can only set them."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def autocast_depth() -> int:
    """Count how many `torch.autocast` are open; the public API only tells whether autocast is enabled."""
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1
