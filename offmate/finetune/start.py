"""The settings with which a run starts: those given, those of an earlier run, and what follows from the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentValueError, OffmateError
from ..machines.devices import EMULATED, device_kind
from .lock import check_free
from .names import SETTINGS
from .needs import resolved_precision
from .settings import Settings, continued, differences, make_settings, saved_settings
from .updates import base_learning_rate
from .weights import load_config, stored_dtype

_DEFAULT_LENGTH = 1024


def settings_of(given: Mapping[str, Any], resume: bool) -> Settings:
    """Return the settings of a new run, or of an earlier one with the given ones that do not change its numbers.

    Raises: OffmateError if the output is taken, if there is no run to resume, or if its numbers would change.
    """
    if not resume:
        settings = make_settings(given)
        check_free(Path(settings.output))
        return settings
    if not given.get("output"):
        raise ArgumentValueError("--resume needs --output, the folder of the run to continue")
    path = Path(given["output"]) / SETTINGS
    if not path.is_file():
        raise ArgumentValueError(f"there is no run to resume in {given['output']!r}: it has no {SETTINGS}")
    saved = saved_settings(path)
    if saved.device is None and given.get("device") == EMULATED == device_kind(None):
        saved = replace(saved, device=EMULATED)  # as older versions ran here without saying so
    found = differences(saved, given)
    if found:
        raise ArgumentValueError(
            "the run was started with other settings, and the new ones would change its numbers:\n  "
            + "\n  ".join(found)
            + "\nResume without the new settings, or start a new run in another folder"
        )
    return continued(saved, given)


def resolved(settings: Settings, folder: Path) -> Settings:
    """Return the settings with a value for every one that depends on the model.

    Raises: OffmateError if the model takes no such sequences, or if its weights cannot be trained.
    """
    limit = n_positions(folder)
    length = settings.sequence_length
    if length is not None and limit is not None and length > limit:
        raise ArgumentValueError(f"sequence_length is {length}, but the model takes at most {limit} tokens")
    length = length or min(_DEFAULT_LENGTH, limit or _DEFAULT_LENGTH)
    settings = resolved_precision(settings, stored_dtype(folder, load_config(folder)))
    return replace(settings, sequence_length=length, learning_rate=base_learning_rate(settings))


def n_positions(folder: Path) -> int | None:
    """Return how many tokens a model takes at most; None if its configuration does not say."""
    return getattr(load_config(folder).get_text_config(), "max_position_embeddings", None)


def check_vocabulary(tokenizer: Any, folder: Path) -> None:
    """Raise OffmateError if a tokenizer has tokens that the model does not."""
    size = load_config(folder).get_text_config().vocab_size
    if len(tokenizer) > size:
        raise OffmateError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, but the model has only {size}; use the tokenizer "
            "that belongs to the model"
        )
