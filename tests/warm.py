"""Processes of their own that begin where a warm one stands, which has imported what takes seconds to import."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The warm process is begun by the first who asks, has one thread, and ends with the process of tests.
_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload([
    "torch.export", "torch._functorch.aot_autograd", "torch.fx.experimental.symbolic_shapes", "offmate.cli",
    "offmate.finetune.loop", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
])  # fmt: skip


def run(said: Path, target: Callable[..., None], *args: Any, limit_s: float = 120) -> int:
    """Call a function in a process of its own.

    Parameters
    ----------
    said: the file that gets what it prints.

    Returns: the process's exit code; that of a signal is negative.
    Raises: TimeoutError after `limit_s`; the process is gone then.
    """
    process = _WARM.Process(target=_call, args=(said, dict(os.environ), target, args))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"not done after {limit_s:g} s; it said: {said.read_text()}")
    assert process.exitcode is not None
    return process.exitcode


def _call(said: Path, environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    with said.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
