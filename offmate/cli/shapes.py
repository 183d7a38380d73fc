"""Models without weights, on the meta device, from a built-in name, a configuration on disk or a Hub id."""

from __future__ import annotations

import contextlib
import difflib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentValueError, OffmateError
from ..optim.masters import with_master_weights

MASTERS = "bf16-master"  # bfloat16 parameters, and float32 copies of them that the optimizer updates
DTYPES = {"bf16": torch.bfloat16, MASTERS: torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}


def names() -> tuple[str, ...]:
    """List the names of the built-in shapes."""
    return tuple(_shapes())


def build(model: str, dtype: str) -> Any:
    """Build a language model on the meta device, in training mode.

    Parameters
    ----------
    model: a built-in name; a folder with a config.json, or such a file; or a Hub id, of which only the configuration
        is downloaded. dtype: a name in `DTYPES`.

    Raises: OffmateError with the nearest names, or with what is wrong with the configuration.
    """
    config = configuration(model)
    config.use_cache = False
    try:
        with torch.device("meta"):
            built = _class_for(config, model).from_config(config)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise OffmateError(f"model {model!r}: its configuration cannot be built: {error}") from error
    return built.to(DTYPES[dtype]).train()


def batch_for(model: Any, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Make tokens and labels on the meta device, of shape (batch, seq_len).

    Raises: OffmateError if the model has fewer positions.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise ArgumentValueError(f"a sequence of {seq_len} tokens is longer than the model's {positions} positions")
    tokens = torch.zeros(batch, seq_len, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def optimizer_for(model: Any, name: str, dtype: str = "bf16") -> torch.optim.Optimizer | None:
    """Make an optimizer of all parameters that are trained; None for "none": the user's code updates.

    Parameters
    ----------
    name: "none" or one in `OPTIMIZERS`. dtype: in `DTYPES`; decides whether float32 copies are updated.
    """
    if name == "none":
        return None
    settings: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9} if name == "sgd" else {}
    kind = with_master_weights(OPTIMIZERS[name]) if dtype == MASTERS else OPTIMIZERS[name]
    made: torch.optim.Optimizer = kind([p for p in model.parameters() if p.requires_grad], **settings)
    return made


def autocast(dtype: str | None) -> contextlib.AbstractContextManager[Any]:
    """Enter autocast to a dtype named in `DTYPES`, as models without memory are captured: on the CPU; None for none."""
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", DTYPES[dtype])


def configuration(model: str) -> Any:
    """Read the configuration of a built-in name, a folder, a file or a Hub id.

    Raises: OffmateError with the nearest names, or with what is wrong with it.
    """
    from transformers import AutoConfig

    shapes, path = _shapes(), Path(model).expanduser()
    if model.lower() in shapes:
        return AutoConfig.for_model(**shapes[model.lower()])
    if path.is_dir() and not (path / "config.json").is_file():
        raise ArgumentValueError(f"model {model!r}: the folder has no config.json; it is not a transformers model")
    if not path.exists():
        _check_hub_id(model, tuple(shapes))
    try:
        return AutoConfig.from_pretrained(path if path.exists() else model)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        missing = "" if path.exists() else "no such folder, and it could not be fetched from the Hub: "
        raise OffmateError(f"model {model!r}: {missing}{reason}") from error


def _check_hub_id(model: str, known: tuple[str, ...]) -> None:
    """Refuse a name that cannot be a Hub id (owner/name) before using the network."""
    if model.startswith((".", "/", "~")) or model.endswith(".json") or model.count("/") > 1:
        raise ArgumentValueError(f"model {model!r}: no such file or folder")
    if "/" not in model:
        near = difflib.get_close_matches(model.lower(), known, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ArgumentValueError(
            f"model {model!r} is not known. {hint}Known models: {', '.join(known)}. Or name a folder with a "
            "config.json, or a Hub id as OWNER/NAME"
        )


def _class_for(config: Any, model: str) -> Any:
    import transformers as hf

    kinds = [
        (hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, hf.AutoModelForSeq2SeqLM),
        (hf.MODEL_FOR_MASKED_LM_MAPPING, hf.AutoModelForMaskedLM),
        (hf.MODEL_FOR_CAUSAL_LM_MAPPING, hf.AutoModelForCausalLM),
    ]
    if getattr(config, "is_decoder", False):
        kinds.reverse()
    for mapping, maker in kinds:
        if type(config) in mapping:
            return maker
    raise OffmateError(
        f"model {model!r}: {config.model_type!r} is not a language model that transformers knows; for another model "
        "call offmate.plan(model, ..., hardware=...) in Python"
    )


def _shapes() -> dict[str, dict[str, Any]]:
    return json.loads((resources.files("offmate") / "cli" / "shapes.json").read_text())
