"""What is used of transformers without being public there: the one place to look at when another version comes.

Everything here is known to be right in transformers 5.23.0. Deciders that an older one lacks are passed over.
`tests/house/private_names.py` lists the names, as those of torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
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

COLLECTING = "transformers.utils.output_capturing"
"""The module of hooks that only collect outputs, put on at the first forward; they carry no mark."""

HOOKS_INSTALLED = "_output_capturing_hooks_installed"
"""The attribute that says that they are there."""


def masking() -> Any:
    """Give the module that the deciders are in, None where there is none."""
    if importlib.util.find_spec("transformers") is None:
        return None
    try:
        return importlib.import_module("transformers.masking_utils")
    except ImportError:
        return None


@contextlib.contextmanager
def deciders_replaced(module: Any, by: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have other functions decide while the block runs.

    Parameters
    ----------
    module: what `masking` gives. by: from a decider's name and itself to what takes its place.
    """
    with contextlib.ExitStack() as stack:
        for name in DECIDERS:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, by(name, getattr(module, name))))
        yield


@contextlib.contextmanager
def masks_as_in_eager(module: Any) -> Iterator[None]:
    """Have deciders look at the batch during export too.

    Parameters
    ----------
    module: what `masking` gives.
    """
    if not hasattr(module, "is_torchdynamo_exporting"):  # not in all versions
        yield
        return
    with mock.patch.object(module, "is_torchdynamo_exporting", lambda: False):
        yield


@contextlib.contextmanager
def experts_as_in_export() -> Iterator[None]:
    """Have experts take the road that export takes: their grouped product has no fake kernel for float32."""
    found = importlib.util.find_spec("transformers.integrations.moe") is not None
    experts = importlib.import_module("transformers.integrations.moe") if found else None
    if not hasattr(experts, "is_torchdynamo_compiling"):
        yield
        return
    with mock.patch.object(experts, "is_torchdynamo_compiling", lambda: True):
        yield


def kept_in_float32(model_class: Any) -> list[str]:
    """Give the names of the modules that a class keeps in float32, whatever dtype it is loaded in."""
    return [*(model_class._keep_in_fp32_modules or ()), *(model_class._keep_in_fp32_modules_strict or ())]


def let_see_one_gpu(arguments: Any) -> None:
    """Have training arguments know of one GPU at most; several would be for DataParallel, which has no switch."""
    arguments._n_gpu = min(arguments.n_gpu, 1)


class PlannedSteps(_Base):
    """Mixed into a Trainer whose plan clips: where it clips, logs and loads without a public way to join in."""

    def loaded_from(self, checkpoint: str) -> None:
        """Tell that the optimizer and the scheduler were loaded."""
        raise NotImplementedError

    def planned_norm(self, grad_norm: Any) -> Any:
        """Give the gradient norm to log, from what the Trainer would."""
        raise NotImplementedError

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.loaded_from(checkpoint)

    def _clip_grad_norm(self, model: Any) -> None:
        """The plan clips."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """The plan measures the norm when the optimizer steps."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(tr_loss, self.planned_norm(grad_norm), *args, **kwargs)
