"""Settings of the real allocator with which no plan can be kept are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)
COMPILE = """
import offmate, torch
try:
    offmate.compile(torch.nn.Linear(8, 8), "1GiB", device="cuda")
except offmate.DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "setting",
    ["max_split_size_mb:128", "roundup_power2_divisions:4", "expandable_segments:True", "backend:cudaMallocAsync", ""],
)
def test_settings_that_break_plans_are_refused(setting):
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    found = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    if setting:
        assert setting in found.stdout, f"PYTORCH_CUDA_ALLOC_CONF={setting} is not refused by name: {found.stdout!r}"
    else:
        assert not found.stdout, f"the allocator's own settings are refused: {found.stdout!r}"
