"""What tests of all kinds share: a cache of plans, and the simulated accelerator for those that ask for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# `make test` tries the same examples every time; `make fuzz` tries others.
settings.register_profile("same", derandomize=True)
settings.register_profile("fuzz", derandomize=False, print_blob=True)
settings.load_profile("same")

# What `make fast` leaves out: tests marked slow, those on the simulated accelerator, all cases of a test but its first,
# and these folders, which take long or need no torch. What is left touches everything once that torch may change.
_NOT_FAST = (
    "fuzz", "golden", "solver",
    "offmate/cli", "offmate/finetune", "offmate/integrations", "offmate/reports", "offmate/training",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the fast part of the suite be asked for."""
    parser.addoption("--fast", action="store_true", help="leave out what takes long; tests/conftest.py says what")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that all tests of a session plan with: one cache of plans and profiles."""
    return str(tmp_path_factory.mktemp("plans"))


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """What a test sets of the log's level ends with the test, so that later tests see the messages they ask for."""
    logger = logging.getLogger("offmate")
    before = logger.level, logging.root.manager.disable
    yield
    logger.setLevel(before[0])
    logging.disable(before[1])


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """`torch.sim`, with nothing under way, no delays and no limits; the test is skipped where it cannot be built."""
    from .accelerator import device, load, why_not

    if load() is None:
        pytest.skip(why_not())
    device.reset()
    yield device
    device.reset()


def needs_device(item: pytest.Item) -> bool:
    return "sim" in getattr(item, "fixturenames", ())


def is_fast(item: pytest.Item) -> bool:
    """Whether a test may be in the fast part."""
    folder = item.path.parent.relative_to(Path(__file__).parent).as_posix()
    takes_long = any(f"{folder}/".startswith(f"{name}/") for name in _NOT_FAST)
    return not takes_long and not needs_device(item) and item.get_closest_marker("slow") is None


def fast_part(items: list[pytest.Item]) -> list[pytest.Item]:
    """One case of each test that may be in it."""
    first: dict[str, pytest.Item] = {}
    for item in filter(is_fast, items):
        first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on the simulated accelerator come last: once torch has an accelerator it has it until the process ends."""
    items.sort(key=needs_device)
    if config.getoption("--fast"):
        kept = fast_part(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Autograd has to meet the device before the first backward of the process."""
    if any(map(needs_device, session.items)):
        from .accelerator import prepare  # not before: the solver's tests need no torch

        prepare()
