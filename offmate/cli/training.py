"""What a step of training is, as the command line says it: the model, its adapter, optimizer and batch."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..libraries import check_installed, is_installed

if TYPE_CHECKING:
    from ..finetune.lora import Lora
    from ..plans.about import About

_ALL_LINEAR = ("all-linear",)
_MATRIX_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FOR_ADAPTERS = ("peft", "yaml")


@dataclass(frozen=True)
class Training:
    """One step of training.

    Parameters
    ----------
    model, dtype, optimizer, autocast: as in `offmate.cli.shapes`. batch, seq_len: sequences per micro-batch, and the
        tokens of each. lora: an adapter on a frozen model; None trains the model itself.
    max_grad_norm, grad_scaler, accumulation: as in `offmate.plan`. speculate: as in `offmate.Config`.
    """

    model: str
    dtype: str = "bf16"
    optimizer: str = "adamw"
    batch: int = 1
    seq_len: int = 2048
    lora: Lora | None = None
    autocast: str | None = None
    max_grad_norm: float | None = None
    grad_scaler: bool = False
    accumulation: int = 1
    speculate: bool = False

    @property
    def tokens(self) -> int:
        """The tokens that one step sees."""
        return self.accumulation * self.batch * self.seq_len

    @property
    def matrix_dtype(self) -> str:
        """The dtype of most matrix products, by torch's name."""
        return _MATRIX_DTYPES[(self.autocast or self.dtype).removesuffix("-master")]

    def built(self) -> tuple[Any, dict[str, Any]]:
        """Build the model and a batch on the meta device.

        Raises: OffmateError if there is no such model, or no adapter for it.
        """
        from .shapes import batch_for, build

        model = build(self.model, self.dtype)
        batch = batch_for(model, self.batch, self.seq_len)
        if self.lora is None:
            return model, batch
        from ..finetune.weights import with_adapter

        return with_adapter(model, self.lora).train(), batch

    def optimizer_of(self, model: Any) -> Any:
        """Make the optimizer of a model that was built for this; None if the user's code updates."""
        from .shapes import optimizer_for

        return optimizer_for(model, self.optimizer, self.dtype)

    def arguments(self) -> dict[str, Any]:
        """Return those arguments of `offmate.plan` that say how training updates."""
        import torch

        return {
            "max_grad_norm": self.max_grad_norm,
            "grad_scaler": torch.amp.GradScaler("cpu") if self.grad_scaler else None,
            "accumulation_steps": self.accumulation,
        }

    def words(self) -> str:
        """Describe dtype, adapter, updates and batch."""
        return ", ".join((self._dtype, self._updates, self._batch))

    def about(self, known: About) -> About:
        """Describe a plan of this training in the command line's words.

        Parameters
        ----------
        known: what `offmate.plan` found out.
        """
        return replace(
            known, model=self.model, dtype=self._dtype, optimizer=self._updates, batch=self._batch, tokens=self.tokens
        )

    @property
    def _dtype(self) -> str:
        dtype = "bf16 with float32 copies" if self.dtype == "bf16-master" else self.dtype
        return f"{dtype} under autocast to {self.autocast}" if self.autocast else dtype

    @property
    def _updates(self) -> str:
        words = [f"LoRA of rank {self.lora.r}"] if self.lora else []
        words += ["your own optimizer" if self.optimizer == "none" else self.optimizer]
        words += ["losses scaled"] if self.grad_scaler else []
        words += [f"gradients clipped to {self.max_grad_norm:g}"] if self.max_grad_norm is not None else []
        waits = self.max_grad_norm is not None or self.grad_scaler or self.accumulation > 1
        words += ["CPU updates before that is known"] if self.speculate and waits else []
        return ", ".join(words)

    @property
    def _batch(self) -> str:
        batch = f"{self.batch} × {self.seq_len} tokens"
        return batch if self.accumulation == 1 else f"{self.accumulation} micro-batches of {batch}"


def check_packages(lora: bool) -> None:
    """Look for what models of transformers need, and adapters; make the libraries quiet.

    Raises: LibraryError for one that is not installed.
    """
    check_installed("transformers", *(_FOR_ADAPTERS if lora else ()))
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    for variable in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(variable, "error")  # the warnings concern weights, and no weights are loaded


def has_adapters() -> bool:
    """Return whether what adapters need is installed."""
    return all(map(is_installed, _FOR_ADAPTERS))


def parse_adapter(text: str | None) -> Lora | None:
    """Parse `--lora`, as `offmate finetune` does; all linear layers get an adapter if none are named.

    Raises: ArgumentValueError with an example.
    """
    from ..finetune.lora import parse_lora

    lora = parse_lora(text)
    return lora if lora is None or lora.targets else replace(lora, targets=_ALL_LINEAR)
