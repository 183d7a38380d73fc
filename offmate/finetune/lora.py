"""The setting of a low-rank adapter, from a rank, a line of text, or YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentValueError
from .values import NONE, as_float, check_number, check_whole, short

ALL_LINEAR = "all-linear"  # peft's name for every linear layer but the last, which predicts the words

_MOST_RANK = 2**16
_DIGITS = re.compile(r"[0-9]{1,20}")
_EXAMPLE = "write 16 for a rank, or r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"
_PARTS = {"r", "alpha", "dropout", "targets"}


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter: rank, scale, dropout, and names of the layers that get one.

    Parameters
    ----------
    targets: parts of the layers' names, or `ALL_LINEAR` alone; empty for peft's choice, as runs of older versions have.
    """

    r: int
    alpha: int = 16
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self) -> None:
        check_whole("lora r", self.r, 1, _MOST_RANK)
        check_whole("lora alpha", self.alpha, 1)
        check_number("lora dropout", self.dropout, 0.0, below=1.0)
        if not all(isinstance(target, str) and target for target in self.targets):
            raise ArgumentValueError(f"lora targets is {self.targets!r}; name layers, such as q_proj and v_proj")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ArgumentValueError(f"lora targets is {self.targets!r}; {ALL_LINEAR} stands alone, or name layers")


def parse_lora(value: Any) -> Lora | None:
    """Parse a LoRA setting: a rank, text such as "r=16,alpha=32,targets=q_proj+v_proj", "none", or a mapping.

    Raises: ArgumentValueError for anything else.
    """
    if value is None or isinstance(value, Lora):
        return value
    if isinstance(value, str) and value.strip().lower() == NONE:
        return None
    typed = value
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"r": value}
    if isinstance(value, str):
        given = f"r={value}" if _DIGITS.fullmatch(value.strip()) else value
        parts = [part.partition("=") for part in given.split(",")]
        value = {name.strip(): text.strip() for name, _, text in parts}
        if len(value) < len(parts):
            raise ArgumentValueError(f"lora is {short(typed)}, which names a part twice; {_EXAMPLE}")
    if not isinstance(value, Mapping) or "r" not in value or not value.keys() <= _PARTS:
        raise ArgumentValueError(f"lora is {short(typed)}; {_EXAMPLE}")
    try:
        return _lora_of(value)
    except TypeError:
        raise ArgumentValueError(f"lora is {short(typed)}; {_EXAMPLE}") from None


def _lora_of(value: Mapping[str, Any]) -> Lora:
    """Make an adapter from its parts, of which those that are None take their defaults; no part is rounded.

    Raises: ArgumentValueError for a part that cannot be. TypeError if the targets are no names.
    """
    given = {name: part for name, part in value.items() if part is not None}
    targets = given.get("targets", Lora.targets)
    if isinstance(targets, str):
        targets = [name.strip() for name in targets.split("+")]
    if not isinstance(targets, list | tuple):
        raise TypeError
    if not targets:
        raise ArgumentValueError(
            f"lora targets is empty; name layers, such as q_proj and v_proj, or write {ALL_LINEAR}"
        )
    r, alpha = _integer(given.get("r")), _integer(given.get("alpha", Lora.alpha))
    return Lora(r, alpha, as_float(given.get("dropout", Lora.dropout)), tuple(targets))


def _integer(value: Any) -> Any:
    """Return digits as their number, and anything else as it is, for the check that names it."""
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value.strip()) else value


def saved_lora(value: Any) -> Any:
    """Return the LoRA setting that a run has stored; runs of older versions left the layers to peft by naming none."""
    if isinstance(value, dict) and value.get("targets") == []:
        return replace(_lora_of({**value, "targets": None}), targets=())
    return value
