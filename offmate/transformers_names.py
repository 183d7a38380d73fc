"""Private names of transformers that are used: the one place to check when a new version comes out.

Everything in this module is known to be right for transformers 5.23.0. Deciders that an older version lacks are
skipped. `tests/house/private_names.py` lists the names, together with those of torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Trainer  # what a mixin's methods call on the class it is mixed into
else:
    _Base = object

PACKED = "find_packed_sequence_indices"
"""The function that finds where a batch's sequences begin, None if each row is one; models call it by themselves."""

DECIDERS = (PACKED, "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
"""The functions that look at the batch and pick attention kernels for it; models call them by themselves."""

ATTENTION = "_attn_implementation"
"""The attribute of a configuration that says which kernels compute attention; "eager" is the plain formula."""

COLLECTING = "transformers.utils.output_capturing"
"""The module of the hooks that only collect outputs; the first forward installs them, and they carry no mark."""

HOOKS_INSTALLED = "_output_capturing_hooks_installed"
"""The attribute that says that these hooks are installed."""


def masking() -> Any:
    """Return the module that holds the deciders, or None if it cannot be imported."""
    if importlib.util.find_spec("transformers") is None:
        return None
    try:
        return importlib.import_module("transformers.masking_utils")
    except (ImportError, OSError):
        return None


@contextlib.contextmanager
def deciders_replaced(module: Any, by: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let other functions decide inside the `with` block.

    Parameters
    ----------
    module: the one that `masking` returns. by: maps a decider's name and the decider to its replacement.
    """
    with contextlib.ExitStack() as stack:
        for name in DECIDERS:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, by(name, getattr(module, name))))
        yield


@contextlib.contextmanager
def masks_as_in_eager(module: Any) -> Iterator[None]:
    """Let the deciders look at the batch during export, too.

    Parameters
    ----------
    module: the one that `masking` returns.
    """
    if not hasattr(module, "is_torchdynamo_exporting"):  # not in all versions
        yield
        return
    with mock.patch.object(module, "is_torchdynamo_exporting", lambda: False):
        yield


@contextlib.contextmanager
def forwards_as_in_eager(model: Any) -> Iterator[None]:
    """Let the code of a model's own classes take the paths of eager mode during export, not those of export.

    Linear attention, for example, solves triangular systems in eager mode and multiplies by inverses in an export.
    Modules that ask whether they are compiled, too, take the paths of eager mode by themselves in an export.
    """
    own = {sys.modules.get(type(module).__module__) for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for module in own:
            if hasattr(module, "is_torchdynamo_exporting") and not hasattr(module, "is_torchdynamo_compiling"):
                stack.enter_context(mock.patch.object(module, "is_torchdynamo_exporting", lambda: False))
        yield


@contextlib.contextmanager
def experts_as_in_export() -> Iterator[None]:
    """Make experts take the code path of export: their grouped product has no fake kernel for float32."""
    found = importlib.util.find_spec("transformers.integrations.moe") is not None
    experts = importlib.import_module("transformers.integrations.moe") if found else None
    if not hasattr(experts, "is_torchdynamo_compiling"):
        yield
        return
    with mock.patch.object(experts, "is_torchdynamo_compiling", lambda: True):
        yield


def kept_in_float32(model_class: Any) -> list[str]:
    """List the names of the modules that a class keeps in float32, whatever dtype it is loaded in."""
    return [*(model_class._keep_in_fp32_modules or ()), *(model_class._keep_in_fp32_modules_strict or ())]


@contextlib.contextmanager
def parameters_made(by: Callable[[str, Any], Any]) -> Iterator[None]:
    """Make the parameters of a model that is loaded inside the body one after another, each as `by` returns it.

    Parameters
    ----------
    by: is given the name of a parameter or a buffer and its tensor, once it has its final dtype and shape.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    own = loading.set_param_for_module

    def made(model: Any, name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return own(model, name, by(name, tensor), *args, **kwargs)

    with (
        mock.patch.object(loading, "set_param_for_module", made),
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
    ):
        yield


def joins_one_by_one() -> bool:
    """Return whether this version of transformers can make parameters as `parameters_made` says."""
    loading = importlib.import_module("transformers.core_model_loading")
    return hasattr(loading, "set_param_for_module")


def let_see_one_gpu(arguments: Any) -> None:
    """Let training arguments know of one GPU at most: with several, DataParallel would run, which has no switch."""
    arguments._n_gpu = min(arguments.n_gpu, 1)


class PlannedSteps(_Base):
    """Mixin for a Trainer whose plan places and clips: overrides where it moves the model, clips, logs and loads.

    None of these has a public hook.
    """

    def loaded_from(self, checkpoint: str) -> None:
        """Handle that the optimizer and the scheduler were loaded; there is nothing to do by default."""

    def planned_norm(self, grad_norm: Any) -> Any:
        """Return the gradient norm to log, given the one that the Trainer would log: that one by default."""
        return grad_norm

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.loaded_from(checkpoint)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model in RAM, from where the plan takes it: a GPU may not have room for all of it."""

    def _clip_grad_norm(self, model: Any) -> None:
        """Do nothing, since the plan clips."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Return None, since the plan measures the norm; unscale the gradients, as measuring it here would."""
        self.accelerator.unscale_gradients()

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(tr_loss, self.planned_norm(grad_norm), *args, **kwargs)
