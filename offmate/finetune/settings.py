"""The frozen settings of a fine-tuning run, from the command line, from YAML and from an earlier run."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ..errors import ArgumentValueError
from ..files import write_whole
from .lora import Lora, parse_lora, saved_lora
from .unique_keys import UniqueKeyLoader
from .values import NONE, as_float, check_choice, check_name, check_number, check_size, check_whole, is_text, short

SCHEDULES = ("cosine", "linear", "constant")
OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor")
AUTO = "auto"
PRECISIONS = ("fp32", "bf16", "bf16-master", AUTO)
TRAINED_ON = ("all", "assistant")
REPORTERS = ("tensorboard", "wandb")

# Beyond these, a number is a slip.
_MOST_MICRO_BATCHES, _MOST_SEQUENCES, _MOST_TOKENS = 10**6, 2**16, 2**24

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_WARMUP_SHARE = 0.03
_A_FOLDER = "name a folder such as /mnt/nvme/offmate, several of them, or none"

# Values that leave a setting to the run. A run stores what it took, so such a value asks for no change of it.
_OPEN: dict[str, Any] = {
    "precision": AUTO, "device": None, "sequence_length": None, "learning_rate": None, "warmup_steps": None,
    "accumulation": AUTO,
}  # fmt: skip

# Settings that do not change the numbers, so a run may be resumed with other values. Budgets are among them, since
# checkpoints store who updates what and a resumed run keeps that split.
_FREE = (
    "gpu_budget", "cpu_budget", "storage", "storage_parameters", "eval_every", "checkpoint_every", "keep_checkpoints",
    "report", "output", "merge", "sample", "sample_tokens", "push", "speculate",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """All settings of a fine-tuning run.

    Parameters
    ----------
    model: folder or Hub id. data: file, folder, or "hf:NAME[:SPLIT]". output: folder of the result.
    gpu_budget, cpu_budget: sizes or "auto". device: as in `offmate.compile`.
    storage: folders, each on a disk of its own, for what RAM has no room for: optimizer states, and parameters of a
        frozen base that the checkpoint does not have as the run uses them.
    storage_parameters: trained parameters may lie in these folders, too, where RAM has no room for their values.
    sequence_length: tokens per sequence; None takes 1024, or the model's limit if that is less.
    batch_size: sequences per micro-batch. accumulation: micro-batches per step; "auto" lets the planner choose when the
        run begins, and the run keeps what it chose.
    epochs, steps: length of the run; steps wins if both are given.
    learning_rate: None takes 2e-5, or 2e-4 with LoRA. warmup_steps: number of steps in which it rises from zero; None
        takes 3 % of the steps.
    max_grad_norm: gradients are clipped to this global norm; None does not clip, so that updates can begin during the
        backward.
    speculate: the CPU may update before it is known whether gradients are clipped; "auto" decides by how many are. See
        `offmate.Config`.
    precision: "bf16-master" computes in bf16 and updates fp32 copies, which are part of the optimizer's state. "auto"
        takes "bf16-master" for a 16-bit checkpoint, with LoRA "bf16", and "fp32" for a float32 one.
    train_on: "all" tokens, or only the "assistant"'s of a chat and the completion of a prompt; plain text is always
        trained on as a whole.
    eval_fraction: share of the documents that is held out. eval_every: in steps; None evaluates with every checkpoint.
    keep_checkpoints: number of newest checkpoints that stay on disk. report: "tensorboard", "wandb".
    merge: at the end, the adapter is merged into the base model in a folder of its own.
    sample: prompts that the model continues after each evaluation. sample_tokens: new tokens of each at most.
    push: the Hub's repository, as "NAME/REPOSITORY", to which the result goes at the end.

    Raises: OffmateError with the setting, its value and the values that it may have.
    """

    model: str
    data: str
    output: str
    gpu_budget: str = "auto"
    cpu_budget: str = "auto"
    device: str | None = None
    storage: tuple[str, ...] = field(default=())
    storage_parameters: bool = False
    sequence_length: int | None = None
    batch_size: int = 4
    accumulation: int | Literal["auto"] = 1
    epochs: int = 1
    steps: int | None = None
    learning_rate: float | None = None
    schedule: str = "cosine"
    warmup_steps: int | None = None
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    precision: str = AUTO
    lora: Lora | None = None
    seed: int = 0
    train_on: str = "assistant"
    eval_fraction: float = 0.05
    eval_every: int | None = None
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    report: tuple[str, ...] = field(default=())
    speculate: bool | Literal["auto"] = False
    merge: bool = False
    sample: tuple[str, ...] = field(default=())
    sample_tokens: int = 64
    push: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                given = f"{name} is {short(value)}" if value else f"no {name} is given"
                raise ArgumentValueError(f"{given}; name it with --{name}, or with `{name}:` in the configuration file")
            check_name(name, value)
        for folder in self.storage:
            if not isinstance(folder, str) or not folder:
                raise ArgumentValueError(f"storage is {short(folder)}; {_A_FOLDER}")
            check_name("storage", folder)
        for name in ("epochs", "checkpoint_every", "keep_checkpoints"):
            check_whole(name, getattr(self, name), 1)
        check_whole("batch_size", self.batch_size, 1, _MOST_SEQUENCES)
        if self.accumulation != AUTO:
            check_whole("accumulation", self.accumulation, 1, _MOST_MICRO_BATCHES)
        for name, least in (("steps", 1), ("eval_every", 1), ("warmup_steps", 0)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        if self.sequence_length is not None:
            check_whole("sequence_length", self.sequence_length, 2, _MOST_TOKENS)
        check_whole("seed", self.seed, 0)
        for name in ("learning_rate", "max_grad_norm"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0.0, above=True)
        check_number("weight_decay", self.weight_decay, 0.0)
        check_number("eval_fraction", self.eval_fraction, 0.0, below=1.0)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("train_on", self.train_on, TRAINED_ON)
        for name in self.report:
            check_choice("report", name, REPORTERS)
        check_whole("sample_tokens", self.sample_tokens, 1, _MOST_TOKENS)
        for prompt in self.sample:
            if not isinstance(prompt, str) or not prompt.strip() or not is_text(prompt):
                raise ArgumentValueError(f"sample is {short(prompt)}; write a prompt as UTF-8 text, or a list of them")
        if self.push is not None and not (isinstance(self.push, str) and _REPOSITORY.fullmatch(self.push)):
            raise ArgumentValueError(f"push is {short(self.push)}; name a repository of the Hub, such as me/my-model")
        for name in ("merge", "storage_parameters"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentValueError(f"{name} is {short(getattr(self, name))}; it must be true or false")
        if self.storage_parameters and not self.storage:
            raise ArgumentValueError(
                "storage_parameters keeps trained parameters in the folders of storage, and none is named; add "
                "--storage DIR, or leave it out (--no-storage-parameters)"
            )
        if not isinstance(self.speculate, bool) and self.speculate != "auto":
            raise ArgumentValueError(f"speculate is {short(self.speculate)}; it must be true, false or auto")
        if self.merge and self.lora is None:
            raise ArgumentValueError(
                "merge is for adapters, but this run trains all parameters; add --lora, or leave out merge"
            )
        for name in ("gpu_budget", "cpu_budget"):
            check_size(name, getattr(self, name))

    @property
    def assistant_only(self) -> bool:
        """Whether only the assistant's tokens of a chat, and only the completion of a prompt, are trained on."""
        return self.train_on == "assistant"

    def warmup(self, n_steps: int) -> int:
        """Return the number of warm-up steps of a run."""
        return math.ceil(_WARMUP_SHARE * n_steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def gate(self) -> dict[str, Any]:
        """The arguments of `offmate.plan` and `offmate.compile` for clipping and accumulation."""
        return {"max_grad_norm": self.max_grad_norm, "accumulation_steps": self.accumulation}

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step, of settings for which they are chosen."""
        assert isinstance(self.accumulation, int), "the micro-batches of a step are not chosen yet"
        return self.accumulation

    @property
    def measures_norm(self) -> bool:
        """Whether the norm of all gradients is known after a step."""
        return self.max_grad_norm is not None or self.accumulation != 1

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for YAML and JSON."""
        plain = dataclasses.asdict(self)
        if self.max_grad_norm is None:
            plain["max_grad_norm"] = NONE  # nothing would mean that it is left to the default
        plain |= {name: list(getattr(self, name)) for name in ("storage", "report", "sample")}
        if self.lora is not None:
            plain["lora"]["targets"] = list(self.lora.targets)
        return plain

    def save(self, path: Path) -> None:
        """Write the settings as YAML."""
        write_whole(path, yaml.safe_dump(self.to_dict(), sort_keys=False))


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Make settings from plain values; absent ones take their defaults.

    Raises: OffmateError for an unknown name (with the nearest ones), a missing or a bad value.
    """
    known = [f.name for f in dataclasses.fields(Settings)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known settings: {', '.join(known)}"
            raise ArgumentValueError(f"there is no setting {name!r}; {hint}")
    values = {"model": "", "data": "", "output": "", **values}
    converted = {name: _CONVERSIONS.get(name, _same)(value) for name, value in values.items()}
    return Settings(**converted)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the settings in a YAML file, without checking them.

    Raises: OffmateError if the file does not exist, cannot be read as YAML, has a key twice or is no mapping.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except FileNotFoundError:
        raise ArgumentValueError(f"{path}: no such configuration file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # no UTF-8, or a null byte in the name
        raise ArgumentValueError(f"{path}: cannot be read as YAML: {error}") from None
    except RecursionError:
        raise ArgumentValueError(f"{path}: cannot be read as YAML: its lists are nested too deeply") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ArgumentValueError(f"{path}: the file must map names to values, such as 'learning_rate: 2e-5'")
    return data


def differences(saved: Settings, given: Mapping[str, Any]) -> list[str]:
    """List the given settings that would change a run's numbers, each as "NAME: SAVED in the run, GIVEN now"."""
    wanted = continued(saved, given)
    return [
        f"{name}: {getattr(saved, name)!r} in the run, {getattr(wanted, name)!r} now"
        for name in given
        if name not in _FREE and getattr(saved, name) != getattr(wanted, name)
    ]


def continued(saved: Settings, given: Mapping[str, Any]) -> Settings:
    """Return a run's settings with the given ones in their place; one that leaves a value open changes nothing."""
    asked = {name: value for name, value in given.items() if name not in _OPEN or value != _OPEN[name]}
    if "storage" in asked and not _folders(asked["storage"]):
        asked = {"storage_parameters": False, **asked}  # they were for folders that are no longer named
    return make_settings({**vars(saved), **asked})


def saved_settings(path: Path) -> Settings:
    """Read the settings that an earlier run has stored. Raises: OffmateError if they cannot be read."""
    values = read_yaml(path)
    return make_settings({**values, "lora": saved_lora(values.get("lora"))})


def _same(value: Any) -> Any:
    return value


def _norm(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() == NONE:
        return None
    number = as_float(value)
    if isinstance(number, str):
        raise ArgumentValueError(f"max_grad_norm is {short(value)}; write a number above 0, or none to clip nothing")
    return number


def _names(value: Any) -> tuple[Any, ...]:
    return _several("report", value, f"it must be one of {', '.join(REPORTERS)}, or a list of them")


def _prompts(value: Any) -> tuple[Any, ...]:
    return _several("sample", value, "write a prompt, or a list of them")


def _folders(value: Any) -> tuple[Any, ...]:
    found = _several("storage", value, _A_FOLDER)
    named = [one for one in found if not (isinstance(one, str) and one.strip().lower() == NONE)]
    if named and len(named) < len(found):
        raise ArgumentValueError(
            f"storage is {short(value)}: {NONE} names no folder, so no other one can stand beside it; write {NONE} "
            f"alone, or ./{NONE} for a folder of that name"
        )
    return tuple(named)


def _several(name: str, value: Any, hint: str) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, str | list | tuple):
        raise ArgumentValueError(f"{name} is {short(value)}; {hint}")
    return (value,) if isinstance(value, str) else tuple(value or ())


def _count_or_auto(value: Any) -> Any:
    """Return text that is a whole number as one: an option that may also be a word is read as text."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "lora": parse_lora,
    "accumulation": _count_or_auto,
    "storage": _folders,
    "report": _names,
    "sample": _prompts,
    "gpu_budget": str,
    "cpu_budget": str,
    "max_grad_norm": _norm,
    **dict.fromkeys(("learning_rate", "weight_decay", "eval_fraction"), as_float),
}
