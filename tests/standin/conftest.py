"""These tests need the stand-in: `make standin` runs them."""

from __future__ import annotations

from .card import is_here

collect_ignore_glob = [] if is_here() else ["test_*.py"]
