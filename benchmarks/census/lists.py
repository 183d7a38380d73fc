"""The lists: names, and the subjects to check for each of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from offmate.check.hugging_face import subject_of
from offmate.check.subject import Subject

from . import torch_tables, vision


@dataclass(frozen=True)
class List:
    """A list of models.

    Parameters
    ----------
    names: lists all names. subjects: makes what is checked for a name, one subject for each of its inputs.
    """

    names: Callable[[], list[str]]
    subjects: Callable[[str], Iterable[Subject]]


def _model_types() -> list[str]:
    if importlib.util.find_spec("torchvision") is not None:
        # Many of transformers' modules import it.
        vision.import_torchvision()
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_MAPPING_NAMES)


def _of_type(name: str) -> list[Subject]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[name]()
    return [subject_of(name, config)]


LISTS = {
    "transformers": List(_model_types, _of_type),
    "timm": List(vision.timm_names, vision.timm_subjects),
    "torchvision": List(vision.torchvision_names, vision.torchvision_subjects),
    "diffusers": List(vision.diffusers_names, vision.diffusers_subjects),
    "modules": List(torch_tables.module_names, torch_tables.module_subjects),
    "optimizers": List(torch_tables.optimizer_names, torch_tables.optimizer_subjects),
}
