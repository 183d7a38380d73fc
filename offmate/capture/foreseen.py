"""Questions about hidden values whose answers can be foreseen: whether they are finite, whether a layer is dropped.

A forward that asks whether all its values are finite, and takes another path if not, is captured as if they were. The
graph asks again in every replay, and stops the iteration if they are not.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.operators.checks import check_flag
from ..runtime.torch_names.tensors import version_of
from .data_dependent import NotFollowed, line_now

# What is asked of single values, and whether a finite one passes; what makes one answer of these; what combines them.
_ASKED: dict[Any, bool] = {torch.isfinite: True, torch.isnan: False, torch.isinf: False}
_ASKED |= {torch.Tensor.isfinite: True, torch.Tensor.isnan: False, torch.Tensor.isinf: False}
_ALL, _ANY = (torch.all, torch.Tensor.all), (torch.any, torch.Tensor.any)
_COUNTS = (torch.sum, torch.Tensor.sum)
_IS_ZERO = (torch.eq, torch.Tensor.eq, torch.Tensor.__eq__)
_IS_NOT_ZERO = (torch.ne, torch.Tensor.ne, torch.Tensor.__ne__)
_DRAWS = (torch.rand,)
_BELOW = (torch.lt, torch.Tensor.lt, torch.Tensor.__lt__)
_EITHER = (torch.logical_or, torch.Tensor.logical_or, torch.Tensor.__or__)
_NOT = (torch.logical_not, torch.Tensor.logical_not, torch.Tensor.__invert__)
_READ_AS_BOOL = (torch.Tensor.__bool__, torch.Tensor.item)


class Foreseen(torch.overrides.TorchFunctionMode):
    """Answers, within a block, the forward's questions about hidden values whose answers can be foreseen.

    Values are taken for finite. A random number between 0 and 1 is never below 0, and always below 1: a layer is
    dropped by chance (LayerDrop) only if the probability lies in between, which no plan can follow.

    State: `_answers`, tensors that are questions under way: what they are (an answer per element, one for all of them,
    how many are not finite, a random number, one answer that is certain, one by chance) and what is expected;
    `_versions`, theirs when they were noted.

    Parameters
    ----------
    checks: whether the operator that asks again is called.
    """

    def __init__(self, checks: bool) -> None:
        super().__init__()
        self._checks = checks
        self._answers: dict[int, tuple[torch.Tensor, str, bool]] = {}
        self._versions: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, expected = self._answer(args[0]) if args else ("", False)
        if func in _READ_AS_BOOL and kind in ("all", "certain", "chance"):
            return self._read(args[0], kind, expected)
        result = func(*args, **(kwargs or {}))
        if func in _ASKED:
            self._note(result, "each", _ASKED[func])
        elif func in _DRAWS:
            self._note(result, "drawn", False)
        elif kind:
            self._follow(func, args, result, kind, expected)
        return result

    def _read(self, answer: torch.Tensor, kind: str, expected: bool) -> bool:
        if version_of(answer) != self._versions[id(answer)]:
            raise NotFollowed(
                "the forward checks hidden values, writes into the result of the check and then branches on "
                f"it{line_now()}, which a plan cannot follow; make a new tensor instead of writing in place"
            )
        if kind == "chance":
            raise NotFollowed(
                f"the forward draws a random number and branches on it in Python{line_now()}, which a plan cannot "
                "follow. LayerDrop, for example, skips whole layers in this way. Set that probability to 0, for "
                "example by model.config.layerdrop = 0.0"
            )
        if kind == "all" and self._checks:
            check_flag(answer, expected, line_now())
        return expected

    def _follow(self, func: Any, args: Any, result: Any, kind: str, expected: bool) -> None:
        """Note what an operator makes of a question."""
        if version_of(args[0]) != self._versions[id(args[0])]:
            del self._answers[id(args[0])]  # it was written into
            return
        other = args[1] if len(args) > 1 else None
        number = other if type(other) in (int, float) else None
        if kind == "each" and func in (_ALL if expected else _ANY):
            self._note(result, "all", expected)
        elif kind == "each" and func in _COUNTS and not expected:
            self._note(result, "count", expected)
        elif kind == "count" and func in _IS_ZERO + _IS_NOT_ZERO and number == 0:
            self._note(result, "all", func in _IS_ZERO)
        elif kind in ("all", "certain") and func in _NOT:
            self._note(result, kind, not expected)
        elif kind in ("each", "all") and func in _EITHER and not expected and self._answer(other) == (kind, expected):
            self._note(result, kind, expected)
        elif kind == "drawn" and func in _BELOW and number is not None:
            self._note(result, "certain" if number <= 0 or number >= 1 else "chance", number >= 1)

    def _answer(self, value: Any) -> tuple[str, bool]:
        return self._answers.get(id(value), (None, "", False))[1:]

    def _note(self, result: Any, kind: str, expected: bool) -> None:
        self._answers[id(result)] = result, kind, expected
        self._versions[id(result)] = version_of(result)
