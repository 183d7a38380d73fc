"""Private names of a card's caching allocator: the settings that it runs with."""

from __future__ import annotations

from typing import Any

import torch


def settings_of_cuda() -> dict[str, Any]:
    """Give the settings of CUDA's own allocator, wherever they were made; the environment shows only some of them.

    The backend must be "native": no other one tells.
    """
    found: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return found
