"""What of a device with streams is CUDA's own: the cap on what the process may reserve, and what is said of a card."""

from __future__ import annotations

import torch

from .streams import StreamDevice


class CudaDevice(StreamDevice):
    """A CUDA card, or a part of one: the allocator refuses what would go beyond the budget.

    Parameters
    ----------
    device, limit_bytes, update_threads: as of a StreamDevice.
    """

    def __init__(self, device: torch.device, limit_bytes: int, update_threads: int | None = None) -> None:
        super().__init__(device, limit_bytes, update_threads)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def close(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)
        super().close()
