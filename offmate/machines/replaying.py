"""What the replay itself takes of the host's time for each operator, besides launching it."""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

import torch

from ..runtime.ledger import Ledger
from ..runtime.replay.program import BlockProgram, Instruction, Slot, run
from .stopwatch import clock_of

_INSTRUCTIONS = 500
_REPEATS = 7
_BYTES = 4
_VIEW = torch.ops.aten.view.default
_HOST_CLOCK = clock_of(torch.device("cpu"))


@cache
def replaying_s() -> float:
    """Measure the seconds of the replay per operator: of a chain of views that each count as new memory."""
    size = [1]
    steps = tuple(
        Instruction(
            target=_VIEW,
            args=(Slot(i), size),
            kwargs={},
            outs=((0, i + 1),),
            tupled=False,
            makes=((0, i, _BYTES),),
            promised=((1,),),
            workspace_bytes=0,
            clears=(i,),
            ends=(i,),
        )
        for i in range(_INSTRUCTIONS)
    )
    program = BlockProgram(_INSTRUCTIONS + 1, steps, {}, _BYTES, 0, 0.0)
    one = torch.zeros(1)

    def replayed() -> None:
        registers: list[Any] = [one, *[None] * _INSTRUCTIONS]
        run(program, registers, Ledger(_BYTES * _INSTRUCTIONS), {})

    def called() -> None:
        for _ in range(_INSTRUCTIONS):
            _VIEW(one, size)

    whole_s, alone_s = (statistics.median(_HOST_CLOCK(work) for _ in range(_REPEATS)) for work in (replayed, called))
    return max(0.0, whole_s - alone_s) / _INSTRUCTIONS
