"""A model and its tokenizer from a folder or the Hub; weights are read tensor by tensor into host memory, or mapped."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentValueError, OffmateError
from ..libraries import load
from ..transformers_names import kept_in_float32
from .base_files import InFiles
from .lora import ALL_LINEAR, Lora
from .settings import Settings
from .state_links import linked_states
from .weight_files import DAMAGE, DTYPES_IN_FILES, digests_of, entries_of, read_weights

log = logging.getLogger("offmate")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-master": torch.bfloat16}

_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja"]  # all of a model on the Hub but its weights


def model_folder(model: str, *, weights: bool = True, revision: str | None = None) -> Path:
    """Return the local folder of a model, downloaded first if it is a Hub id.

    Parameters
    ----------
    weights: whether the weights of a Hub model are downloaded, too. revision: the commit of a Hub model; the newest
        one if left out.

    Raises: OffmateError if neither a folder nor a Hub model has that name.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ArgumentValueError(f"model {model!r}: the folder has no config.json; it is not a transformers model")
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ArgumentValueError(f"model {model!r}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        patterns = _DESCRIPTION + ["*.safetensors"] * weights
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:
        kind = OffmateError if weights else ArgumentValueError  # what has been described once does exist
        raise kind(
            f"model {model!r}: no such folder, and it could not be fetched from the Hub: {_why_not_fetched(error)}"
        ) from error


def _why_not_fetched(error: Exception) -> str:
    """Return the first line of an error, or that the Hub cannot be reached."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, (LocalEntryNotFoundError, ConnectionError)):
        return "the Hub cannot be reached, and the cache does not hold it. Check the network, or name a model's folder"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def load_config(folder: Path) -> Any:
    """Load a model's configuration.

    Raises: OffmateError if it cannot be read or transformers does not know it as a causal language model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise OffmateError(f"{folder}: the model's configuration cannot be read: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise OffmateError(f"{folder}: {config.model_type!r} is not a causal language model that transformers knows")
    return config


def load_tokenizer(folder: Path) -> Any:
    """Load a model's tokenizer. Raises: OffmateError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise OffmateError(
            f"{folder}: no tokenizer can be loaded ({said}); copy the model's tokenizer files (tokenizer.json, "
            "tokenizer_config.json, ...) into the folder"
        ) from error


def build_model(
    settings: Settings,
    folder: Path,
    checkpoint: Path | None,
    digests: dict[str, str] | None = None,
    in_files: InFiles | None = None,
) -> torch.nn.Module:
    """Build the model that a run trains, in training mode, with an adapter if the settings ask for one.

    Parameters
    ----------
    folder: that of the base model. checkpoint: folder of the run's newest checkpoint, None at its start.
    digests: is filled with those of the base model's weights by file, as far as they are read.
    in_files: leaves weights in files, those of the base of an adapter or those that are trained and may leave to other
        files; None reads them into RAM.
    """
    torch.manual_seed(settings.seed)
    dtype = DTYPES[settings.precision]
    if settings.lora is None:
        if checkpoint is None:
            return load_model(folder, dtype, digests, in_files).train()
        linked: dict[str, torch.Tensor] = {}
        linked_states(checkpoint, settings.storage).put_into_weights(linked)
        if in_files is None:
            linked = {name: tensor.clone() for name, tensor in linked.items()}
        return load_model(checkpoint, dtype, None, in_files, linked).train()
    model = load_model(folder, dtype, digests, in_files)
    # peft writes the base model's name into the adapter's configuration.
    model.name_or_path = settings.model
    if checkpoint is not None:
        return _peft().PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True).train()
    return with_adapter(model, settings.lora).train()


def load_model(
    folder: Path,
    dtype: torch.dtype,
    digests: dict[str, str] | None = None,
    in_files: InFiles | None = None,
    linked: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Load a causal language model into its own memory, with at most one copy of the weights at any time.

    Parameters
    ----------
    digests: is filled with the SHA-256 digest of the content of each file of weights, by its place below the folder;
        None computes none.
    in_files: maps the weights instead. linked: weights that the folder's files lack, by name.

    Raises: OffmateError if weights are missing or cannot be read.
    """
    from transformers import GenerationConfig

    config = load_config(folder)
    model_class = model_class_of(config)
    with _weights(folder, model_class, dtype, digests, in_files, linked or {}) as state:
        try:
            model, report = model_class.from_pretrained(
                None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
            )
        except OffmateError:
            raise
        except Exception as error:
            raise OffmateError(f"{folder}: the weights do not fit the model: {error}") from error
        missing = sorted(report["missing_keys"])
        if missing:
            raise OffmateError(f"{folder}: {len(missing)} weights are missing ({missing[0]}, ...)")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@contextlib.contextmanager
def _weights(
    folder: Path,
    model_class: Any,
    dtype: torch.dtype,
    digests: dict[str, str] | None,
    in_files: InFiles | None,
    linked: Mapping[str, torch.Tensor],
) -> Iterator[dict[str, Any]]:
    """Yield a model's weights by name, from which transformers makes its parameters inside the body."""
    if linked and not any(folder.glob("*.safetensors")):
        yield dict(linked)
        return
    if in_files is None:
        # The modules that a class keeps in float32 must not lose digits while they are read.
        yield dict(read_weights(folder, dtype, kept_in_float32(model_class), digests)) | dict(linked)
        return
    known = digests_of(folder, keep_cached=False) if digests is not None or in_files.place is not None else {}
    if digests is not None:
        digests |= known
    with in_files.state(folder, model_class, dtype, known) as state:
        yield state | dict(linked)


def model_class_of(config: Any) -> Any:
    """Return the class of causal language models that a configuration is of; the one that it names, if it names one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    choices = classes if isinstance(classes, tuple | list) else (classes,)
    named = [c for c in choices if getattr(c, "__name__", "") in (config.architectures or ())]
    return (named or choices)[0]


def with_adapter(model: Any, lora: Lora) -> Any:
    """Put a new adapter on a causal language model, whose own parameters are frozen.

    Raises: OffmateError if peft is missing, or refuses the setting.
    """
    peft = _peft()
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets) or None,
        task_type="CAUSAL_LM",
    )
    for target in lora.targets if lora.targets != (ALL_LINEAR,) else ():
        # peft looks only for the first of them.
        if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
            raise ArgumentValueError(f"lora targets: no layer is named {target!r}; {_layers(model)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names in transformers, and of layouts that peft sees for itself
            return peft.get_peft_model(model, config)
    except ValueError as error:
        raise ArgumentValueError(f"lora: {error}") from error


def _layers(model: Any) -> str:
    """Say what the linear layers of a model are called."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}
    return f"its linear layers are named {', '.join(sorted(names))}"


def with_saved_adapter(model: Any, folder: Path) -> Any:
    """Put the adapter of a finished run on its base model.

    Raises: OffmateError if peft is missing, or the adapter cannot be read.
    """
    try:
        return _peft().PeftModel.from_pretrained(model, str(folder))
    except DAMAGE as error:
        raise OffmateError(f"{folder}: the adapter cannot be read: {error}") from error


def stored_dtype(folder: Path, config: Any) -> torch.dtype:
    """Return the dtype that most of a checkpoint is in: from the headers of its files, else from its configuration.

    Raises: OffmateError if the weights are quantised, or in a dtype that cannot be trained.
    """
    counted: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        try:
            for entry in entries_of(file).values():
                counted[entry["dtype"]] += math.prod(entry["shape"])
        except DAMAGE:
            continue  # loading names the fault
    stored = counted.most_common(1)[0][0] if counted else None
    dtype = DTYPES_IN_FILES.get(stored) if stored else getattr(config.get_text_config(), "dtype", None) or config.dtype
    if getattr(config, "quantization_config", None) or (stored and (dtype is None or not dtype.is_floating_point)):
        raise ArgumentValueError(
            f"{folder}: the weights are quantised ({stored or 'as config.json says'}), which cannot be trained within "
            "a budget yet; name the model's version in bf16, fp16 or fp32"
        )
    return dtype or torch.float32


def _peft() -> Any:
    return load("peft")
