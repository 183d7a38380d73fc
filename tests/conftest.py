"""The simulated accelerator, for the tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from .accelerator import load, why_not


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """`torch.sim`, with nothing under way, no delays and no limits; the test is skipped where it cannot be built."""
    if load() is None:
        pytest.skip(why_not())
    from .accelerator import device

    device.reset()
    yield device
    device.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the simulated accelerator come last: once torch knows a device it knows it until the process ends."""
    items.sort(key=lambda item: "sim" in getattr(item, "fixturenames", ()))
