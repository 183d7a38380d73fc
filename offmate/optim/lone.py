"""An optimizer for some tensors alone, with everything else as another one has it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

from ..runtime.torch_names.modules import STEP_HOOKS

OWN = ("param_groups", "state", "step", *STEP_HOOKS)  # `step` may be wrapped; hooks are for the whole step, once


def lone(
    kind: type, attributes: Mapping[str, Any], groups: list[dict[str, Any]], state: Mapping[Any, dict[str, Any]]
) -> Any:
    """An optimizer of a kind that holds these groups and nothing else, and calls no hooks.

    Parameters
    ----------
    attributes: of the optimizer that it stands for. groups: hyperparameters and tensors. state: by tensor.
    """
    single: Any = object.__new__(kind)
    single.__dict__.update({key: value for key, value in attributes.items() if key not in OWN})
    single.__dict__.update({hooks: OrderedDict() for hooks in STEP_HOOKS})
    single.param_groups = groups
    single.state = defaultdict(dict, state)
    return single
