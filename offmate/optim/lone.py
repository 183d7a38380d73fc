"""Copies of an optimizer that hold only some of its tensors."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

from ..runtime.torch_names.modules import STEP_HOOKS

OWN = ("param_groups", "state", "step", *STEP_HOOKS)  # `step` may be wrapped; hooks run once per whole step


def lone(
    kind: type, attributes: Mapping[str, Any], groups: list[dict[str, Any]], state: Mapping[Any, dict[str, Any]]
) -> Any:
    """Build an optimizer of a class that holds only these groups, and calls no hooks.

    Parameters
    ----------
    attributes: those of the optimizer that it stands in for. groups: hyperparameters and tensors. state: by tensor.
    """
    single: Any = object.__new__(kind)
    # Of a copy, since the loop may set an attribute meanwhile: workers update while schedulers and scalers are made.
    single.__dict__.update({key: value for key, value in dict(attributes).items() if key not in OWN})
    single.__dict__.update({hooks: OrderedDict() for hooks in STEP_HOOKS})
    single.param_groups = groups
    single.state = defaultdict(dict, state)
    return single
