"""What a run needs at the least, from the model's configuration: known before anything of the weights is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import OffmateError
from ..machines.devices import EMULATED, accelerator, words
from ..machines.hardware import load, names
from ..machines.host_memory import available_host_bytes
from ..sizes import format_bytes, format_least_bytes
from ..transformers_names import kept_in_float32
from .checkpoint import checkpoint_bytes
from .settings import AUTO, Settings
from .updates import UpdateRule
from .weights import DTYPES, load_config, model_class_of, with_adapter

# Where no file has a card's rates: its memory is known all the same, and hours are said to be those of this one.
_STAND_IN = "rtx3060"
# Of operations per parameter and token: forward, gradients of activations, and of parameters where they are trained.
_FULL_FLOPS, _FROZEN_FLOPS = 6, 4


@dataclass(frozen=True)
class Needs:
    """Lower bounds of what a run takes, and the figures that they follow from.

    Parameters
    ----------
    n_params, n_trained: numbers of parameters, adapters included. weights_bytes: all of them in RAM.
    file_bytes: of those of a base that can lie in files, because RAM is short. leaving_bytes: of trained ones that may
        lie in the folders of `--storage`.
    largest_bytes: the largest tensor, which has to be on the device as a whole.
    saved_bytes, states_bytes: weights and optimizer states of a checkpoint.
    flops_per_token: of products with weights. tokens_per_s: what the machine's matrix rate would allow.
    """

    n_params: int
    n_trained: int
    weights_bytes: int
    largest_bytes: int
    saved_bytes: int
    states_bytes: int
    flops_per_token: float
    tokens_per_s: float
    file_bytes: int = 0
    leaving_bytes: int = 0

    def disk_bytes(self, settings: Settings, stored_bytes: int | None = None, stored_weights_bytes: int = 0) -> int:
        """Return the most that checkpoints and the result take: a new checkpoint is written before an old one goes.

        Parameters
        ----------
        stored_bytes: of the states and parameters that lie in the folders of `--storage`, where checkpoints link them;
            None if that is not known yet, so that it may be all of them. stored_weights_bytes: those of parameters.
        """
        kept, linked = self.kept_bytes(settings), self.leaving_bytes
        if stored_bytes is not None:
            kept, linked = self.states_bytes - (stored_bytes - stored_weights_bytes), stored_weights_bytes
        weights = self.saved_bytes - (linked if settings.lora is None else 0)  # adapters are copied
        merged = self.weights_bytes if settings.merge else 0
        return (max(0, weights) + max(0, kept)) * (settings.keep_checkpoints + 1) + self.saved_bytes + merged

    def host_bytes(self, kind: str, settings: Settings) -> int:
        """Return the least RAM; where the CPU emulates the device, that also holds the states that cannot leave it."""
        return self.hosted_bytes + (self.kept_bytes(settings) if kind == EMULATED else 0)

    @property
    def hosted_bytes(self) -> int:
        """Bytes of the parameters that have to be in RAM."""
        return self.weights_bytes - self.file_bytes - self.leaving_bytes

    def kept_bytes(self, settings: Settings) -> int:
        """Return the bytes of optimizer states that have to stay in memory, since no folder is named for them."""
        return 0 if settings.storage else self.states_bytes


def model_without_weights(settings: Settings, folder: Path) -> torch.nn.Module:
    """Build the model that a run trains on the meta device, in training mode, with its adapter.

    Raises: OffmateError if the configuration cannot be built.
    """
    config = load_config(folder)
    config.use_cache = False
    model_class = model_class_of(config)
    exact = kept_in_float32(model_class)
    try:
        with torch.device("meta"):
            model = model_class(config).to(DTYPES[settings.precision])
            for name, module in model.named_modules():
                if exact and name.rpartition(".")[2] in exact:
                    module.float()
            model = model if settings.lora is None else with_adapter(model, settings.lora)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        if isinstance(error, OffmateError):
            raise
        raise OffmateError(f"{folder}: the model cannot be built from its config.json: {error}") from error
    return model.train()


def needs_of(settings: Settings, model: torch.nn.Module, updates: UpdateRule, machine: str) -> Needs:
    """Compute what a run needs at the least.

    Parameters
    ----------
    model: may be on the meta device. machine: name of the rates that limit the speed.
    """
    params = list(model.parameters())
    n_params = sum(p.numel() for p in params)
    n_trained = sum(p.numel() for p in updates.params)
    saved, states = checkpoint_bytes(model, updates, settings.lora is not None)
    flops = _FROZEN_FLOPS * n_params + (_FULL_FLOPS - _FROZEN_FLOPS) * n_trained - _lookups(model)
    rate = load(machine).flops_per_s(str(DTYPES[settings.precision]).removeprefix("torch."))
    return Needs(
        n_params, n_trained, _bytes(params), max(map(_size, params)), saved, states, flops, rate / max(flops, 1)
    )  # fmt: skip


def machine_of(kind: str) -> tuple[str, str]:
    """Return the name of the rates to forecast with, and a doubt if they are not the device's; empty if they are.

    Parameters
    ----------
    kind: as `offmate.machines.devices.device_kind` returns it.
    """
    where = accelerator(kind)
    if where is None:
        return EMULATED, ""
    own = _letters(words(where))
    known = [name for name in names() if name != EMULATED and _letters(name) in own and "laptop" not in own]
    if known:
        return max(known, key=len), ""
    return _STAND_IN, (
        f"the speed of {words(where)} is not known, so speed and hours are those of {load(_STAND_IN).name} until the "
        "model is loaded and measured; memory is that of this GPU"
    )


def device_words(kind: str) -> str:
    """Return the first line about a run's device, in words that cannot be missed if it is no card."""
    where = accelerator(kind)
    if where is None:
        return f"EMULATED ON THE CPU (torch {torch.__version__}): much slower than a GPU"
    _, total = torch.accelerator.get_memory_info(where)
    return f"{words(where)}, {format_bytes(total)}"


def no_card() -> str:
    """Return the doubt of a run for which no device is named where there is no card."""
    built = "" if torch.version.cuda or torch.version.hip else ", a build for CPUs"
    return (
        f"NO GPU WAS FOUND (torch {torch.__version__}{built}), so the CPU would train, much more slowly. If there is a "
        "GPU, check its driver (nvidia-smi) and install a torch build for it; to train on the CPU, add --device "
        "emulated"
    )


def resolved_precision(settings: Settings, stored: torch.dtype) -> Settings:
    """Return the settings with the precision that "auto" stands for with a checkpoint in this dtype."""
    if settings.precision != AUTO:
        return settings
    if stored.itemsize > torch.bfloat16.itemsize:
        return replace(settings, precision="fp32")
    return replace(settings, precision="bf16" if settings.lora is not None else "bf16-master")


def memory_doubt(needed_bytes: int, kept_bytes: int, available_bytes: int | None = None) -> list[str]:
    """Return a sentence if a run needs more RAM than is free.

    Parameters
    ----------
    kept_bytes: optimizer states among these, which `--storage` could take.
    """
    free = available_host_bytes() if available_bytes is None else available_bytes
    if needed_bytes <= free:
        return []
    return [
        f"the run needs {format_least_bytes(needed_bytes)} of RAM, but {format_bytes(free)} are free; free "
        f"memory, or use a smaller model{storage_advice(kept_bytes, needed_bytes - free)}"
    ]


def merge_doubt(weights_bytes: int) -> list[str]:
    """Return a sentence if merging at the end needs more RAM than is free; training reads the base from files."""
    free = available_host_bytes()
    if weights_bytes <= free:
        return []
    return [
        f"merging needs {format_least_bytes(weights_bytes)} of RAM, but {format_bytes(free)} are free; leave out "
        "--merge, and merge on a machine with more memory"
    ]


def storage_advice(kept_bytes: int, lacking_bytes: int) -> str:
    """Return a further sentence about `--storage` if the optimizer states that it could take are what RAM lacks."""
    if kept_bytes <= lacking_bytes:
        return ""
    return (
        f". Optimizer states take {format_bytes(kept_bytes)} of the RAM: --storage DIR may help, which can keep them "
        "in a folder on an NVMe drive"
    )


def _lookups(model: torch.nn.Module) -> int:
    """Return the operations that were counted for embeddings, which are looked up and not multiplied."""
    tied = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding) and id(m.weight) not in tied]
    return sum((_FULL_FLOPS if t.requires_grad else _FROZEN_FLOPS) * t.numel() for t in tables)


def _bytes(params: Iterable[Any]) -> int:
    return sum(map(_size, params))


def _size(param: torch.Tensor) -> int:
    return param.numel() * param.element_size()


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
