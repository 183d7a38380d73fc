"""Hugging Face architectures as subjects: with random weights and batches, in a tiny size or as configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import OffmateError
from .random_batches import batch_maker
from .subject import Subject, WithLoss
from .tiny import shrunk

MOST_PARAMETERS = 60_000_000  # of a tiny model

# What a model of an architecture is made by, the task that gives it a loss first.
_MAKERS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
    ("MODEL_MAPPING", "AutoModel"),
)


def subject_of(name: str, config: Any, tiny: bool = True) -> Subject:
    """Make a subject of an architecture, with the first of its models that can be built and trains on random data.

    Parameters
    ----------
    name: what reports call it. config: its configuration, which is not changed.
    tiny: whether it is built in a tiny size; numbers are as exact in any size, and small ones take seconds.

    Raises: OffmateError with what its class says, if no model can be built or no batch is found.
    """
    said: list[str] = []
    for build in _builders(config, tiny):
        try:
            # Nothing is allocated before it is known to be small.
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in build().parameters())
            if tiny and count > MOST_PARAMETERS:
                said.append(f"its smallest size has {count:,} parameters, more than {MOST_PARAMETERS:,}")
                continue
            torch.manual_seed(0)
            model = build().train()
            batch = batch_maker(model)
        except Exception as error:
            said.append(_first_line(error))
            continue
        if "labels" in batch(0):
            return Subject(name, build, batch)
        return Subject(name, lambda build=build: WithLoss(build()), batch)  # type: ignore[misc]
    raise OffmateError(
        f"model {name!r} cannot be built and run in plain PyTorch: "
        f"{said[0] if said else 'transformers has no such model'}"
    )


def _builders(config: Any, tiny: bool) -> Iterator[Callable[[], torch.nn.Module]]:
    """Yield what builds the models of an architecture, the narrowest ones first."""
    import transformers
    from transformers.models.auto import modeling_auto

    for widths in (True, False) if tiny else (False,):
        small = shrunk(config, widths) if tiny else config
        for mapping, maker in _MAKERS:
            if type(config) in getattr(modeling_auto, mapping):
                made_by = getattr(transformers, maker)
                yield lambda made_by=made_by, small=small: made_by.from_config(small)  # type: ignore[misc]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
