"""Copies of flows in and out, counted on their links."""

from __future__ import annotations

from ..linear import Flow
from ..resources import Resource
from .account import Account


def leave(
    amount_bytes: float,
    made: int,
    gone: Flow,
    account: Account,
    link: Resource = Resource.OUT,
    *,
    copies: int = 1,
    last: float = 1.0,
) -> None:
    """Count the copies of a flow out of values that step `made` makes; in that step they follow its compute.

    Parameters
    ----------
    last: the part that its last compute makes, if the values of several micro-batches leave.
    """
    for step, part in gone.each():
        account.move(link, step, amount_bytes, part, copies=copies, serial=last if step == made else 0.0)


def come(amount_bytes: float, back: Flow, account: Account, link: Resource = Resource.IN, *, copies: int) -> None:
    """Count the copies of a flow in."""
    for step, part in back.each():
        account.move(link, step, amount_bytes, part, copies=copies)
