"""The checksum of a request: xxh3, 64 bits."""

from __future__ import annotations

import functools
from typing import Any

from ...libraries import load
from .host_bytes import view


@functools.cache
def xxh3() -> Any:
    """Return the maker of checksums. Raises: LibraryError if xxhash is not installed."""
    return load("xxhash").xxh3_64


def checksum(address: int, n_bytes: int) -> int:
    """Return the checksum of memory."""
    digest = xxh3()()
    digest.update(view(address, n_bytes))  # leaves Python's lock to others, unlike the short form in older versions
    return int(digest.intdigest())
