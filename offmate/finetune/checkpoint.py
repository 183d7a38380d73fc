"""Checkpoints: written aside, verified, then renamed, so that a folder with a checkpoint's name is complete."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ..errors import OffmateError, StorageError
from ..runtime.torch_names.trees import tree_leaves
from ..session.linked_states import STATES, all_taken_out, check_whole, handing_out_none, session_of, taken_out
from ..split import Split
from .folders import faults, move_in, read_manifest, remove, write_aside
from .state_links import Record, linked_states
from .updates import UpdateRule

log = logging.getLogger("offmate")

_UPDATES, _RANDOM, _MOMENT, PLAN = "optimizer.pt", "random.pt", "moment.json", "plan.json"
_RESULT = ".result"
EVALUATED = "evaluated"  # an empty file in a checkpoint: the evaluation of its step is done
_NEEDED_FILES = (_UPDATES, _RANDOM, _MOMENT)
_CHUNK_ELEMENTS = 1 << 22
_MOST = 10**12  # of steps and threads
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}(\.old)?\.tmp")


@dataclass(frozen=True)
class Moment:
    """The position of a run, besides weights and states.

    Parameters
    ----------
    step: steps done, from which the data position follows. tokens: digest of the run's tokens.
    threads, torch: number of threads and version of torch, on which the last bits depend.
    split: who updates which parameter; on an accelerator the last bits depend on it, too.
    loss: of the last step; None if it is not known.
    """

    step: int
    tokens: str
    threads: int
    torch: str
    split: Split = field(default_factory=Split)
    loss: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("threads", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _MOST:
                raise ValueError(f"{name} is {str(value)[:40]}, not a whole number from {least} to {_MOST:,}")
        if not isinstance(self.tokens, str) or not isinstance(self.torch, str):
            raise TypeError("tokens and torch must be text")
        if self.loss is not None and not isinstance(self.loss, float):
            raise TypeError("loss must be a number")


def save_checkpoint(
    folder: Path, moment: Moment, model: Any, updates: UpdateRule, plan: Any, keep: int, storage: Sequence[str] = ()
) -> Path:
    """Write a checkpoint below `folder`, and remove all but the newest `keep`.

    Optimizer states and weights that lie in files are linked, in a folder on each of their paths.

    Parameters
    ----------
    storage: the paths that states may lie on.

    Raises: OffmateError if weights are not finite or the checkpoint cannot be written; earlier checkpoints stay then.
    """
    _check_finite(model, moment.step)
    session, record = session_of(model), Record(folder)
    check_whole(session)
    with handing_out_none(session):
        whole = updates.state_dict()

    def write(aside: Path) -> None:
        below = record.new_folder(step_name(moment.step), storage)
        if hasattr(model, "peft_config"):  # what an adapter trains is small
            state, linked = taken_out(session, whole, below)
            model.save_pretrained(aside)
        else:
            state, rest, linked = all_taken_out(session, whole, model.state_dict(), below)
            model.save_pretrained(aside, state_dict=rest)
        if linked.tensors:
            linked.save(aside / STATES)
        torch.save(state, aside / _UPDATES)
        torch.save(_random_state(), aside / _RANDOM)
        (aside / _MOMENT).write_text(json.dumps(asdict(moment)))
        if plan is not None:
            plan.save(aside / PLAN)
        _verify_weights(aside, model)
        _verify_updates(aside / _UPDATES, state)

    target = folder / step_name(moment.step)
    write_aside(target, write, f"the checkpoint of step {moment.step}")
    for old in checkpoints(folder)[keep:]:
        remove(old)
    record.sweep()
    return target


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def newest_checkpoint(folder: Path, storage: Sequence[str] = ()) -> Path | None:
    """Return the newest intact checkpoint, or None if the folder has none.

    Parameters
    ----------
    storage: folders that may have optimizer states of checkpoints, if they are elsewhere now.

    Raises: OffmateError if there are checkpoints but all are damaged, or if one names a folder that is missing.
    """
    found = checkpoints(folder)
    for path in found:
        fault = _fault(path, storage)
        if fault is None:
            return path
        log.warning("%s is damaged (%s); an older checkpoint is used", path, fault)
    if found:
        raise OffmateError(f"{folder}: all {len(found)} checkpoints are damaged; start a new run in another folder")
    return None


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that were not written to the end; no other run may be writing into the folder."""
    for path in folder.glob(".step-*"):
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    Record(folder).sweep()


def load_moment(path: Path) -> Moment:
    """Read the position of the run at a checkpoint."""
    data = json.loads((path / _MOMENT).read_text())
    # Older checkpoints have no split.
    split = Split.from_dict(data.pop("split", Split().to_dict()))
    return Moment(**data, split=split)


def restore_updates(path: Path, updates: UpdateRule, storage: Sequence[str] = ()) -> None:
    """Restore the optimizer states of a checkpoint; `storage` is as in `newest_checkpoint`."""
    with _readable(path / _UPDATES):
        state = torch.load(path / _UPDATES, weights_only=True, mmap=True)
        linked_states(path, storage).put_into(state)
        updates.load_state_dict(state)


def restore_random(path: Path) -> None:
    """Restore the states of all random generators at a checkpoint."""
    with _readable(path / _RANDOM):
        state = torch.load(path / _RANDOM, weights_only=True)
        torch.set_rng_state(state["torch"])
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
        device = _accelerator()
        if state["device"] and hasattr(device, "set_rng_state_all"):
            device.set_rng_state_all(state["device"])


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn any error of the body, which reads a file that is as long as it was written, into a sentence."""
    try:
        yield
    except OffmateError:
        raise
    except Exception as error:
        words = (str(error).splitlines() or [""])[0][:200]
        raise OffmateError(
            f"{file} does not hold what a run writes there ({type(error).__name__}: {words}); remove {file.parent} to "
            "resume from an older checkpoint, or start a new run"
        ) from error


def save_result(output: Path, model: Any, tokenizer: Any, card: str) -> None:
    """Write the folder that transformers or peft loads; its configuration, which makes it loadable, appears last.

    Parameters
    ----------
    card: the text of its README.md.
    """

    def write(aside: Path) -> None:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        _verify_weights(aside, model)
        (aside / "README.md").write_text(card, encoding="utf-8")

    aside = output / _RESULT
    write_aside(aside, write, "the result")
    move_in(aside, output)


def checkpoint_bytes(model: torch.nn.Module, updates: UpdateRule, lora: bool) -> tuple[int, int]:
    """Return the bytes on disk of a checkpoint's weights and of its states."""
    saved = [p for p in model.parameters() if p.requires_grad or not lora]
    return sum(p.numel() * p.element_size() for p in saved), updates.state_bytes()


def _fault(path: Path, storage: Sequence[str]) -> str | None:
    """Describe what is wrong with a checkpoint; None if it is intact. Raises: OffmateError for a missing folder."""
    fault = _changed(path, _NEEDED_FILES)
    if fault is not None:
        return fault
    try:
        load_moment(path)
        linked = linked_states(path, storage)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    try:
        linked.check()
    except StorageError as error:
        return str(error)
    return None


def _changed(path: Path, needed: tuple[str, ...]) -> str | None:
    """Describe what differs in a folder from its manifest, which has to name the needed files; None if nothing does."""
    try:
        files = read_manifest(path)
    except ValueError as error:
        return str(error)
    lacking = [name for name in needed if name not in files]
    if lacking:
        return f"its manifest does not name {lacking[0]}"
    return next((f"{name} {fault}" for name, fault in faults(path, files)), None)


def _verify_weights(folder: Path, model: Any) -> None:
    """Compare the weights on disk, tensor by tensor, with those in memory."""
    values = _saved_values(model)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                # Some architectures are stored in a different layout from the one they run in.
                if name in values and not torch.equal(opened.get_tensor(name), values[name]):
                    raise OSError(f"{name} does not read back from {file.name} as it was written")


def _saved_values(model: Any) -> dict[str, torch.Tensor]:
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(model)
    return model.state_dict()


def _verify_updates(file: Path, state: dict[str, Any]) -> None:
    written = tree_leaves(torch.load(file, weights_only=True, mmap=True))
    own = tree_leaves(state)
    same = len(written) == len(own) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(written, own)
    )
    if not same:
        raise OSError(f"{file.name} does not read back as it was written")


def _check_finite(model: torch.nn.Module, step: int) -> None:
    """Raise OffmateError if a value that training changes is not finite; a frozen one stays as it was."""
    frozen = {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
    for name, value in model.state_dict().items():
        if name not in frozen and value.is_floating_point() and not _is_finite(value):
            raise OffmateError(
                f"{name} has become infinite or NaN by step {step}; training stops and no checkpoint is written. "
                "Earlier ones are untouched. Try a lower learning_rate, or max_grad_norm"
            )


def _is_finite(value: torch.Tensor) -> bool:
    """Return whether all elements are finite; a part at a time, since torch makes copies of what it looks at."""
    return all(bool(torch.isfinite(part).all()) for part in value.reshape(-1).split(_CHUNK_ELEMENTS))


def _accelerator() -> Any:
    """Return torch's module of the current accelerator, None without one."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else torch.get_device_module(found)


def _random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    device = _accelerator()
    return {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        "device": device.get_rng_state_all() if hasattr(device, "get_rng_state_all") else [],
    }


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints, the newest first; a copy under another name is none."""
    found = [(int(name[1]), path) for path in folder.glob("step-*") if (name := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]
