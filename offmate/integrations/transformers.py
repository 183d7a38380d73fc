"""`transformers.Trainer`, and trainers derived from it, with updates that are part of the plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..api import compile as compile_model
from ..config import Config
from ..errors import OffmateError
from ..planning.storage import Folder
from ..session.module import PlannedModule
from ..transformers_names import PlannedSteps, let_see_one_gpu
from .trl import DIFFERENTIATED, make_plannable

log = logging.getLogger("offmate")

PLANS = "offmate"


class OffmateCallback(TrainerCallback):
    """A callback that adds step times, peaks and stalls to the Trainer's log and saves the plans with checkpoints.

    Logged with every loss: `offmate_step_s` (seconds of a step, the mean since the last log) beside
    `offmate_predicted_step_s`, `offmate_peak_gib` beside `offmate_predicted_peak_gib`, and `offmate_stall_s`, the
    seconds of the last step in which the device waited for a copy or an update.

    Reporters see these figures if this callback comes before them: use `OffmateTrainerMixin`, or `add_to(trainer)`.

    State: `_taken_s`, seconds of the steps since the last log; `_recording`, the recording of the current step.
    """

    def __init__(self) -> None:
        self._taken_s: list[float] = []
        self._began_s = 0.0
        self._recording: Any = None

    def add_to(self, trainer: Trainer) -> None:
        """Make a trainer call this callback before all others."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start the clock and the recording of the step."""
        handle = _handle(model)
        if handle is not None:
            self._recording = handle.record()
            self._recording.__enter__()
        self._began_s = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock and the recording, so that evaluation and saving do not count."""
        self._taken_s.append(time.perf_counter() - self._began_s)
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
            self._recording = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """Add offmate's figures to the logged ones."""
        handle = _handle(model)
        if handle is None or handle.plan is None or logs is None or "loss" not in logs:
            return
        found = {
            "offmate_predicted_step_s": handle.plan.predicted_step_s,
            "offmate_peak_gib": handle.peak_bytes / 2**30,
            "offmate_predicted_peak_gib": handle.plan.predicted_peak_bytes / 2**30,
        }
        if self._taken_s:
            found["offmate_step_s"] = sum(self._taken_s) / len(self._taken_s)
        if handle.trace is not None:
            found["offmate_stall_s"] = sum(handle.trace.stall_s.values())
        self._taken_s.clear()
        logs.update(found)
        state.log_history[-1].update(found)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Save the plans and the split of updates beside the weights, for `OffmateTrainerMixin` when it resumes."""
        handle = _handle(model)
        if handle is not None:
            handle.save_plans(Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", PLANS))


class OffmateTrainerMixin(PlannedSteps):
    """A mixin whose Trainer compiles its model with its optimizer, clipping and accumulation when training starts.

    Write `class MyTrainer(OffmateTrainerMixin, Trainer)`; TRL's `SFTTrainer` works the same way. The mixin takes from
    the trainer's arguments: `max_grad_norm`, `gradient_accumulation_steps`, the optimizer (`optim`, or the one passed
    in) and its scheduler, `bf16`, and `fp16` with its gradient scaler. With `max_grad_norm=0` no gradient norm is
    logged, and, without a scaler and without accumulation, updates overlap the backward. Where `compute_loss` is the
    Trainer's own, a training step reads nothing but the loss. Logits then need not stay (`Config(outputs=("loss",))`).
    Evaluation gets all outputs. The model stays in RAM, where the trainer would move it to the GPU, and is compiled
    when training or an evaluation starts.

    Parameters
    ----------
    gpu_budget, cpu_budget, device, config, storage: as in `offmate.compile`. All others: as in the trainer.

    Raises: OffmateError when training starts with what a plan cannot do: torch.compile, FSDP, several processes; or
        with a model that was compiled before.
    """

    def __init__(
        self,
        *args: Any,
        gpu_budget: int | str = "auto",
        cpu_budget: int | str | None = None,
        device: str | torch.device | None = None,
        config: Config | None = None,
        storage: Folder | Sequence[Folder] | None = None,
        **kwargs: Any,
    ) -> None:
        self._offmate_settings: dict[str, Any] = {
            "gpu_budget": gpu_budget, "cpu_budget": cpu_budget, "device": device, "config": config, "storage": storage,
        }  # fmt: skip
        self._compiled: Any = None  # the model, once this trainer has compiled it
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            _check_arguments(given)
            let_see_one_gpu(given)
        super().__init__(*args, **kwargs)
        OffmateCallback().add_to(self)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer, and compile the model with it."""
        optimizer = super().create_optimizer(model)
        assert self.model is not None
        if isinstance(self.model, PlannedModule):
            if self._compiled is not self.model:
                raise OffmateError(
                    f"the model of this {type(self).__name__} is already compiled by offmate, so the trainer's "
                    "max_grad_norm, gradient_accumulation_steps, optimizer and gpu_budget would have no effect. Pass "
                    "the plain model, or a copy (copy.deepcopy(model)), and the trainer compiles it when training "
                    "starts. Or train the compiled model with an unmodified Trainer"
                )
            return optimizer
        settings = dict(self._offmate_settings)
        if make_plannable(self.model):
            settings["config"] = replace(settings["config"] or Config(), gradients_into=(DIFFERENTIATED,))
        elif self._reads_the_loss_alone and (settings["config"] or Config()).outputs == "all":
            settings["config"] = replace(settings["config"] or Config(), outputs=("loss",))
        norm = self.args.max_grad_norm
        compile_model(
            self.model,
            optimizer=optimizer,
            max_grad_norm=norm if norm else None,
            grad_scaler=self.accelerator.scaler,
            accumulation_steps=self.args.gradient_accumulation_steps,
            **settings,
        )
        self._compiled = self.model
        return optimizer

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict within the budget, also before training: the model is compiled for it, too."""
        if not isinstance(self.model, PlannedModule):
            self.create_optimizer()
        return super().evaluation_loop(*args, **kwargs)

    @property
    def _reads_the_loss_alone(self) -> bool:
        """Whether a training step reads nothing but the loss of what the model returns."""
        model: Any = self.model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
        own = type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None
        return own and self.label_smoother is None and isinstance(inner, PreTrainedModel)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Take the batches of the next update, and let the plan know them before the first forward."""
        found = super().get_batch_samples(*args, **kwargs)
        handle = _handle(self.model)
        if handle is not None:
            handle.announce(found[0])
        return found

    def loaded_from(self, checkpoint: str) -> None:
        """Load the plans that were saved with a checkpoint."""
        handle = _handle(self.model)
        if handle is not None:
            handle.load_plans(Path(checkpoint, PLANS))

    def planned_norm(self, grad_norm: Any) -> Any:
        """Return the gradient norm that the plan measured; `grad_norm` itself if the model is not compiled."""
        handle = _handle(self.model)
        return grad_norm if handle is None else handle.grad_norm


class OffmateTrainer(OffmateTrainerMixin, Trainer):
    """`transformers.Trainer` within a GPU memory budget; see `OffmateTrainerMixin`."""


def _handle(model: Any) -> Any:
    return model.offmate if isinstance(model, PlannedModule) else None


def _check_arguments(args: Any) -> None:
    """Refuse arguments that a plan cannot follow, each with the reason and what to do instead."""
    refused = {
        "torch_compile=True": (args.torch_compile, "offmate runs its own graph of the model; turn it off"),
        "fsdp": (args.fsdp, "offmate plans one unsharded model on one device; turn it off"),
        "deepspeed": (args.deepspeed, "DeepSpeed places tensors itself; turn it off"),
        "auto_find_batch_size=True": (args.auto_find_batch_size, "a plan keeps its budget; choose a batch size"),
        f"{args.world_size} processes": (args.world_size > 1, "offmate supports only one process on one device so far"),
    }
    for name, (asked, why) in refused.items():
        if asked:
            raise OffmateError(f"OffmateTrainerMixin cannot train with {name}: {why}")
