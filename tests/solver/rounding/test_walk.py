"""Whole tensors that leave and return."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from offmate.solver.rounding.walk import envelope, walk


def test_a_curve_rises_once_and_falls_once() -> None:
    assert envelope([3, 1, 5, 2, 4, 0]) == [3, 3, 5, 4, 4, 0]


def test_tensors_return_as_soon_as_fewer_bytes_need_be_absent() -> None:
    dropped, back = walk({"a": 60, "b": 40}, [100, 50, 0], [], lambda k: ("a", "b"), lambda k, there: ("a", "b"))
    assert dropped == {"a": 0, "b": 0}
    assert back == {"b": 2, "a": 3}


@pytest.mark.parametrize("candidates", [(), ("a",)])
def test_where_more_should_be_absent_than_can_leave_nothing_returns(candidates: tuple[str, ...]) -> None:
    """Solvers are exact to some bytes of gigabytes, so that fractions may ask for more than all tensors have."""

    def may_return(k: int, there: Collection[str]) -> tuple[str, ...]:
        return candidates

    dropped, back = walk({"a": 100}, [100, 101, 0], ["a"], lambda k: (), may_return)
    assert (dropped, back) == ({}, {"a": 3})
