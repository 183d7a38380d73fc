"""What tests of all kinds share: a cache of plans, and the simulated accelerator for those that ask for it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# Two processes share two cores, and a part of the suite does as all of it. Where threads matter tests set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# One folder for a run of the suite, however many processes share it: the caches of plans of those who name none, which
# must not be the user's, and what is solved once (tests/fuzz/solved.py). A module of tests may make a Config when it is
# imported, before any fixture.
_OF_THE_RUN = tempfile.mkdtemp(prefix="offmate-tests-") if "PYTEST_XDIST_WORKER" not in os.environ else None
if _OF_THE_RUN is not None:
    for _name in ("OFFMATE_CACHE_DIR", "OFFMATE_TESTS_SOLVED"):
        os.environ[_name] = str(Path(_OF_THE_RUN, _name.lower()))
        Path(os.environ[_name]).mkdir()

# `make test` tries the same examples every time; `make fuzz` tries others, and more. A test whose examples are cheap
# says how many it takes itself.
settings.register_profile("same", derandomize=True, max_examples=10, deadline=None)
settings.register_profile("fuzz", derandomize=False, max_examples=60, deadline=None, print_blob=True)
settings.load_profile("same")

# What `make fast` leaves out: tests marked slow, those on the simulated accelerator, all cases of a test but its first,
# and these folders, which take long or need no torch. What is left touches everything once that torch may change.
_NOT_FAST = (
    "fuzz", "golden", "solver",
    "offmate/cli", "offmate/finetune", "offmate/integrations", "offmate/reports", "offmate/training",
)  # fmt: skip
SOLVER, STANDIN = (Path(__file__).parent / name for name in ("solver", "standin"))
LONG = {
    "test_accelerator.py", "test_finetune_runs.py", "test_parity_language.py", "test_parity_gate.py",
    "test_reports_notebooks.py", "test_protocol.py",
}  # fmt: skip


def pytest_unconfigure() -> None:
    """The folder of the run goes with it."""
    if _OF_THE_RUN is not None:
        shutil.rmtree(_OF_THE_RUN, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the fast part of the suite be asked for."""
    parser.addoption("--fast", action="store_true", help="leave out what takes long; tests/conftest.py says what")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that all tests of a session plan with: one cache of plans and profiles."""
    return str(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module", autouse=True)
def quick_plans(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans rest on a hardware file, skip the passes that take longest, and are made once; not in the solver's tests.

    Over the stand-in for CUDA, and on a card, they rest on what is measured there. A module marked `as_users` has plans
    as users get them: from what is measured, after all passes.
    """
    if SOLVER in request.path.parents:
        yield
        return
    from .fuzz.figures import from_hardware_file  # not before: the solver's tests need no torch
    from .fuzz.lasting_cpsat import one_cpsat
    from .fuzz.solved import remembered, solved_once

    marked = request.node.get_closest_marker
    with contextlib.ExitStack() as stack:
        if marked("as_users") is not None:
            stack.enter_context(one_cpsat())
            stack.enter_context(remembered())
        elif marked("cuda") is not None or STANDIN in request.path.parents:
            stack.enter_context(one_cpsat())
            stack.enter_context(solved_once())
        else:
            stack.enter_context(from_hardware_file())
        yield


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """What a test sets of the log's level ends with the test, so that later tests see the messages they ask for."""
    logger = logging.getLogger("offmate")
    before = logger.level, logging.root.manager.disable
    yield
    logger.setLevel(before[0])
    logging.disable(before[1])


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A training thread with more threads than its workers, as users have it; sums may round otherwise."""
    import torch  # not before: the solver's tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """`torch.sim`, with nothing under way, no delays and no limits; the test is skipped where it cannot be built."""
    from .accelerator import device, load, why_not

    if load() is None:
        pytest.skip(why_not())
    device.reset()
    yield device
    device.reset()
    if device.memory_allocated():  # held by cycles of objects, and counted by the next test
        gc.collect()


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


def sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """All tests, but of those marked `sampled(n)` one case in n, and whatever else each of the few values needs."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for cases in tests.values() for item in cases} - {
        item for cases in tests.values() for item in _one_in_so_many(cases)
    }
    return [item for item in items if item not in left_out]


def _one_in_so_many(cases: list[Any]) -> Iterator[pytest.Item]:
    """Yield one case in so many, and the first one with a value that none has, of parameters with few values."""
    every = cases[0].get_closest_marker("sampled").args[0]
    given = [case.callspec.params if hasattr(case, "callspec") else {} for case in cases]
    values = [{(name, repr(value)) for name, value in params.items()} for params in given]
    number = Counter(name for name, _ in set().union(*values))
    missing = {value for value in set().union(*values) if number[value[0]] <= len(cases) / every}
    for i, (case, own) in enumerate(zip(cases, values)):
        if i % every == 0 or own & missing:
            missing -= own
            yield case


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on the simulated accelerator come last: once torch has an accelerator it has it until the process ends.

    Long files come first, so that no process is left with one at the end. `make fuzz` tries all cases.
    """
    items.sort(key=lambda item: (needs_device(item), item.path.name not in LONG))
    one_by_one = any("::" in argument for argument in config.args)
    if os.environ.get("OFFMATE_TESTS_EVERY") != "1" and not one_by_one:
        kept = sampled(items)
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept
    if config.getoption("--fast"):
        kept = fast_part(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several processes share the suite, that order is kept."""
    from .processes import Stretches  # not before: pytest-xdist may be absent

    config.option.loadscopereorder = False
    return Stretches(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Autograd has to meet the device before the first backward of the process.

    What was imported by now stays: the collector need not look through it again and again.
    """
    if any(map(needs_device, session.items)):
        from .accelerator import prepare  # not before: the solver's tests need no torch

        prepare()
    gc.collect()
    gc.freeze()
