"""One cache of plans and profiles for the whole session."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that all tests of a session plan with."""
    return str(tmp_path_factory.mktemp("plans"))
