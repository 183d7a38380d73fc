"""A forecast of a run in a few lines, and warnings about what looks wrong."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..machines.devices import EMULATED
from ..machines.host_memory import available_host_bytes
from ..plans.drives import cast_words
from ..plans.plan import Plan
from ..reports.units import format_count, format_seconds
from ..sizes import format_bytes, format_least_bytes
from .data import is_of_hub
from .lora import ALL_LINEAR
from .needs import Needs, device_words, memory_doubt, storage_advice
from .packing import Batches, Packed
from .report import format_left, format_steps
from .settings import Settings
from .source_files import skipped_line, source_files
from .state_folders import stored_bytes, stored_weights_bytes
from .tokenizing import BEGIN, END, LEFT_OUT, Example

_SLOW, _SLOW_S = 5.0, 1.0  # multiple of the compute; steps of fewer seconds are never called slow
_UNEVEN = 4.0  # multiple of the share that is to be held out
_LONG_S = 7 * 24 * 3600
DEVICE_RATES, MEASURED = "the device's rates", "measured operators"


@dataclass(frozen=True)
class Work:
    """The tokens of a run, the sequences that its steps read, and the number of steps of the whole run."""

    packed: Packed
    batches: Batches
    n_steps: int

    def lines(self, settings: Settings) -> list[str]:
        """Write how much of which data there is, what of it is trained on and not read, and what a step does."""
        return [self._data_line(settings), *not_read_lines(settings.data), self._training_line(settings)]

    def _data_line(self, settings: Settings) -> str:
        batches, tally = self.batches, self.packed.tally
        kinds = ", ".join(f"{count:,} as {kind}" for kind, count in tally.items() if kind != LEFT_OUT)
        without = {
            "document": tally.get(LEFT_OUT, 0),
            "sequence": batches.n_unused,
        }
        unused = "".join(
            f"{format_steps(count, name)} left out, with nothing to learn; " for name, count in without.items() if count
        )
        trained = "the assistant's tokens of chats, completions and text" if settings.assistant_only else "all tokens"
        return (
            f"data: {f'documents: {kinds}; ' if kinds else ''}{unused}{batches.n_sequences:,} sequences of "
            f"{batches.sequence_length} tokens, {batches.steps_per_epoch:,} steps per epoch; {self._leftover()}"
            f"{len(self.packed.eval):,} tokens held out; training on {trained}"
        )

    def _leftover(self) -> str:
        """Write what fills no sequence and no step."""
        tokens, sequences = self.batches.n_leftover_tokens, self.batches.n_leftover_sequences
        found = f"{format_steps(tokens, 'token')} at the end left out, too few for a sequence; " if tokens else ""
        if sequences:
            found += f"{format_steps(sequences, 'sequence')} left out of each epoch at random, too few for a step; "
        return found

    def _training_line(self, settings: Settings) -> str:
        clipped = "no clipping" if settings.max_grad_norm is None else f"clipping at {settings.max_grad_norm:g}"
        warmup = format_steps(settings.warmup(self.n_steps), "warm-up step")
        rate = f"{settings.learning_rate:g}".replace("e-0", "e-")
        return (
            f"training: {settings.optimizer}, learning rate {rate} ({settings.schedule}, "
            f"{warmup}), {clipped}, weight decay {settings.weight_decay:g}, "
            f"{settings.micro_batches} × {settings.batch_size} sequences per step"
        )

    def doubts(self, settings: Settings) -> list[str]:
        """List what looks wrong whatever the plan is."""
        found, warmup = [], settings.warmup(self.n_steps)
        if warmup >= self.n_steps > 1 or warmup > self.n_steps:
            found.append(
                f"warmup_steps is {warmup} of {self.n_steps} steps, so the warm-up never ends; lower it, or train for "
                "more steps"
            )
        if settings.eval_fraction > 0 and len(self.packed.eval) < 2:
            found.append("no document is held out, so nothing is evaluated; raise eval_fraction, or set it to 0")
        held, total = len(self.packed.eval), len(self.packed.eval) + len(self.packed.train)
        if held > _UNEVEN * settings.eval_fraction * total:
            found.append(
                f"{held / total:.0%} of all tokens are held out, although eval_fraction is {settings.eval_fraction:g}, "
                "because the documents differ in length; split long ones, or set eval_fraction to 0"
            )
        return found


@dataclass(frozen=True)
class Preview:
    """A forecast of what a run will take.

    Parameters
    ----------
    kind: the device, as `device_kind` returns it. done: steps that an earlier run has done.
    held_bytes: what this process already holds of the run's RAM. short_of_bytes: the RAM that was named and is too
        little; None if none was.
    """

    settings: Settings
    kind: str
    needs: Needs
    plan: Plan
    work: Work
    done: int
    held_bytes: int = 0
    short_of_bytes: int | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update sees."""
        return self.work.batches.sequence_length * self.settings.batch_size * self.settings.micro_batches

    @property
    def step_s(self) -> float:
        """Predicted seconds of one update."""
        return self.plan.predicted_step_s

    @property
    def left_s(self) -> float:
        """Predicted seconds to the end."""
        return self.step_s * (self.work.n_steps - self.done)

    @property
    def host_bytes(self) -> int:
        """Predicted memory of tensors in RAM, which also holds those of a device that the CPU emulates."""
        emulated = self.plan.predicted_peak_bytes if self.kind == EMULATED else 0
        return max(self.plan.host_bytes + emulated, self.needs.hosted_bytes)

    @property
    def disk_bytes(self) -> int:
        """Predicted bytes of checkpoints and the result in the output folder."""
        return self.needs.disk_bytes(self.settings, stored_bytes(self.plan), stored_weights_bytes(self.plan))

    def lines(self, source: str = DEVICE_RATES) -> list[str]:
        """Write a line each: data, training, whether it fits, RAM and disk, speed, how long it takes.

        Parameters
        ----------
        source: what the speed is predicted from.
        """
        return [
            *self.work.lines(self.settings),
            self._fit_line(),
            f"RAM: {format_bytes(self.host_bytes)} of tensors{self._of_device()}; "
            f"{format_bytes(self.disk_bytes)} of disk for {self.settings.keep_checkpoints} "
            "checkpoints and the result",
            *([f"base: {self.plan.read_words}"] if self.plan.read_bytes else []),
            *([f"storage: {self.plan.stored_words}", *self.plan.path_words] if any(self.plan.stored_bytes) else []),
            *(f"casts: {words}" for words in cast_words(self.plan.schedule)),
            *([f"order: {self.plan.order_words}"] if self.plan.order_words else []),
            *([f"clipping: {self.plan.break_even.words()}"] if self.plan.break_even is not None else []),
            *self.speed_lines(source),
        ]

    def advice(self) -> str:
        """Write what `--storage` would do about a lack of RAM; nothing if RAM suffices, or it would not help."""
        needed, has = self._ram()
        return storage_advice(self.needs.kept_bytes(self.settings), needed - has) if needed > has else ""

    def _ram(self) -> tuple[int, int]:
        """Return how much RAM the run needs, and how much there is."""
        if self.short_of_bytes is not None:
            return max(self.plan.host_bytes, self.needs.hosted_bytes), self.short_of_bytes
        return self.host_bytes, available_host_bytes() + self.held_bytes

    def _fit_line(self) -> str:
        """Write whether the run fits; if not, how much RAM it needs, and how much there is."""
        plan, budget = self.plan, format_bytes(self.plan.budget_bytes)
        needed, has = self._ram()
        if self.short_of_bytes is None and needed <= has:
            return (
                f"fits: GPU memory peak {format_bytes(plan.predicted_peak_bytes)} of {budget}; the least budget that "
                f"works is {format_least_bytes(plan.least_budget_bytes)}"
            )
        if needed <= has or self.settings.storage:
            # The plan is one for more RAM, which keeps nothing in files. The reason follows in the refusal.
            drives = ", also with optimizer states in files" if self.settings.storage else ""
            return f"does not fit {budget} of GPU memory and {format_bytes(has)} of RAM{drives}; with more RAM:"
        whose = "free" if self.short_of_bytes is None else "(cpu_budget)"
        return (
            f"does not fit: with {budget} of GPU memory, training needs about {format_least_bytes(needed)} of RAM, and "
            f"there are {format_bytes(has)} {whose}{self.advice()}"
        )

    def speed_lines(self, source: str) -> list[str]:
        """Write the predicted speed, with what it is predicted from, and when the run ends."""
        steps = f"{self.done:,} of {self.work.n_steps:,} steps done" if self.done else format_steps(self.work.n_steps)
        return [
            f"speed: {format_seconds(self.step_s)} per step predicted from {source}, "
            f"{self.tokens_per_step / self.step_s:,.0f} tokens/s",
            f"run: {steps}, about {format_left(self.left_s)} left",
        ]

    def _of_device(self) -> str:
        return ", including those of the emulated device" if self.kind == EMULATED else ""

    def doubts(self, memory: bool = True) -> list[str]:
        """List what looks wrong, a sentence each; empty if nothing does.

        Parameters
        ----------
        memory: include a lack of RAM.
        """
        found = self.work.doubts(self.settings)
        schedule = self.plan.schedule
        share = schedule.per_update / schedule.per_step
        compute_s = share * sum(c.seconds for c in schedule.computes.values())
        if self.plan.predicted_step_s > max(_SLOW * compute_s, _SLOW_S):
            found.append(
                f"a step takes {self.plan.predicted_step_s / compute_s:.1f} times as long as its compute, so data "
                "movement limits it; raise gpu_budget or batch_size"
            )
        if self.left_s > _LONG_S:
            found.append(f"the run takes {self.left_s / 86400:.0f} days; try fewer steps or a shorter sequence_length")
        kept_bytes = self.needs.kept_bytes(self.settings)
        return found + (memory_doubt(self.host_bytes - self.held_bytes, kept_bytes) if memory else [])


def not_read_lines(data: str) -> list[str]:
    """Write which files of a folder of data are not read; nothing if all are, or if it is no folder."""
    if is_of_hub(data) or not Path(data).is_dir():
        return []
    line = skipped_line(source_files(data).skipped)
    return [f"data: {line}"] if line else []


def device_line(kind: str) -> str:
    """Write the first line of a run."""
    return f"device: {device_words(kind)}"


def first_lines(settings: Settings, kind: str, needs: Needs) -> list[str]:
    """Write what is known before anything is planned: the model, and what it needs at the least."""
    host_bytes = needs.host_bytes(kind, settings)  # none where all weights can stay in files
    return [
        model_line(settings, needs),
        f"needs at least: {f'{format_least_bytes(host_bytes)} of RAM, ' if host_bytes else ''}"
        f"{format_least_bytes(needs.largest_bytes)} of GPU memory, "
        f"{format_bytes(needs.disk_bytes(settings))} of disk; at best {needs.tokens_per_s:,.0f} tokens/s",
    ]


def model_line(settings: Settings, needs: Needs) -> str:
    """Write how many parameters are trained, and in which precision."""
    precision = {
        "fp32": "in fp32",
        "bf16": "in bf16",
        "bf16-master": "in bf16, with fp32 copies that are updated",
    }[settings.precision]
    if settings.lora is None:
        return f"model: {format_count(needs.n_params)} parameters {precision}, all of them trained"
    lora, base = settings.lora, needs.n_params - needs.n_trained
    layers = {(ALL_LINEAR,): "all linear layers", (): "the layers that peft chooses"}
    where = layers.get(lora.targets, ", ".join(lora.targets))
    own = "" if settings.precision == "fp32" else " in fp32"
    return (
        f"model: {format_count(base)} frozen parameters {precision}; LoRA of rank {lora.r} (alpha {lora.alpha}, "
        f"dropout {lora.dropout:g}) on {where} trains {format_count(needs.n_trained)}{own}"
    )


def example_lines(shown: list[Example]) -> list[str]:
    """Write examples, each as a heading and its text."""
    found = []
    for number, example in enumerate(shown, start=1):
        found.append(
            f"example {number}: {example.place} ({example.kind}), {example.n_tokens:,} tokens, "
            f"{example.n_trained:,} trained on, between {BEGIN} and {END}"
        )
        found += ["  " + line for line in example.text.splitlines()]
    return found


def disk_doubt(folder: Path, needed_bytes: int) -> list[str]:
    """Return a sentence if a folder's disk has less room than is needed."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free >= needed_bytes:
        return []
    return [
        f"{folder}: checkpoints and the result need up to {format_bytes(needed_bytes)}, but the disk has "
        f"{format_bytes(free)} free; keep fewer (keep_checkpoints), or write elsewhere"
    ]
