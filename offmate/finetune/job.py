"""A fine-tuning run from its settings to its result. This is the only file that knows all phases."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..api import compile as compile_model
from ..api import plan as plan_model
from ..config import Config
from ..errors import ArgumentValueError, InfeasibleBudget, OffmateError, PlanFileError
from ..machines.devices import EMULATED, device_kind
from ..plans.plan import Plan, load_plan
from ..split import Split
from .checkpoint import (
    PLAN,
    Moment,
    checkpoint_bytes,
    load_moment,
    newest_checkpoint,
    restore_random,
    restore_updates,
    save_result,
)
from .data import check_source, pieces
from .lock import is_free, place_for
from .loop import TrainingRun, train
from .packing import Batch, Batches, Packed, read_tokens, tokenized, verify_tokens, write_tokens
from .preview import Preview, check_disk
from .report import check_reporters, make_reporters
from .settings import Settings, differences, make_settings, read_yaml
from .updates import UpdateRule, base_learning_rate
from .weights import build_model, load_config, load_tokenizer, model_folder

log = logging.getLogger("offmate")

SETTINGS, TOKENS, CHECKPOINTS = "finetune.yaml", "tokens", "checkpoints"

_DEFAULT_LENGTH = 1024
_GLIMPSE_PIECES = 256


_OUTPUTS = ("loss",)  # nothing else is read of a training forward


@dataclass(frozen=True)
class _Loaded:
    """A run's model with its optimizer, and the position where an earlier run stopped."""

    folder: Path
    tokenizer: Any
    model: torch.nn.Module
    updates: UpdateRule
    checkpoint: Path | None
    moment: Moment | None


def finetune(given: Mapping[str, Any], *, resume: bool, dry_run: bool, yes: bool, mode: str) -> None:
    """Fine-tune a model.

    Parameters
    ----------
    given: settings by name, as in `Settings`. resume: continue the run in `output`.
    dry_run: stop before training, and leave no files behind. yes: continue even if something looks wrong.
    mode: "normal", "quiet" or "json".

    Raises: OffmateError for everything that cannot work, nearly always before training.
    """
    _hush()
    settings = _settings(given, resume)
    output = Path(settings.output)
    if resume and _finished(output):
        _say(mode, f"{output}: the run is finished", event="finished")
        return
    check_reporters(settings.report)
    if settings.device is not None:
        device_kind(settings.device)
    folder = model_folder(settings.model)
    settings = _resolved(settings, folder)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(tokenizer, folder)
    if not (resume and (output / TOKENS).is_dir()):
        check_source(settings.data)
        list(tokenized(islice(pieces(settings.data), _GLIMPSE_PIECES), tokenizer, settings.assistant_only))
    with place_for(output, keep=resume, dry_run=dry_run) as (place, begun):
        if not resume and not dry_run:
            _save_settings(settings, place)
        loaded = _load(settings, folder, tokenizer, output if resume else place)
        weights_bytes, states_bytes = checkpoint_bytes(loaded.model, loaded.updates, settings.lora is not None)
        plan, config = _plan(settings, loaded)
        packed = _tokens(settings, loaded, output if resume else place)
        batches = Batches(
            packed.train, settings.sequence_length or 0, settings.batch_size, settings.accumulation, settings.seed
        )
        batches.check()
        n_steps = settings.steps or settings.epochs * batches.steps_per_epoch
        done = loaded.moment.step if loaded.moment else 0
        preview = Preview(settings, plan, packed, batches, n_steps, done, weights_bytes, states_bytes)
        check_disk(output, preview.disk_bytes)
        _say(mode, "\n".join(preview.lines()), event="plan", lines=preview.lines(), doubts=preview.doubts())
        if dry_run:
            return
        _agree(preview.doubts(), yes, mode)
        begun.append(True)
        _train(settings, loaded, plan, config, packed, batches, n_steps, mode)
        _say(mode, f"done: {output} loads with plain {'peft' if settings.lora else 'transformers'}", event="done")


# -- settings ---------------------------------------------------------------------------------------------------------


def _settings(given: Mapping[str, Any], resume: bool) -> Settings:
    if not resume:
        settings = make_settings(given)
        output = Path(settings.output)
        if not is_free(output):
            hint = "continue it with --resume, or " if (output / SETTINGS).is_file() else ""
            raise ArgumentValueError(f"output {settings.output!r} exists already; {hint}name another folder")
        return settings
    if not given.get("output"):
        raise ArgumentValueError("--resume needs --output, the folder of the run to continue")
    path = Path(given["output"]) / SETTINGS
    if not path.is_file():
        raise ArgumentValueError(f"there is no run to resume in {given['output']!r}: it has no {SETTINGS}")
    saved = make_settings(read_yaml(path))
    found = differences(saved, given)
    if found:
        raise ArgumentValueError(
            "the run was started with other settings, and the new ones would change its numbers:\n  "
            + "\n  ".join(found)
            + "\nResume without the new settings, or start a new run in another folder"
        )
    return make_settings({**saved.to_dict(), **given})


def _resolved(settings: Settings, folder: Path) -> Settings:
    """Fill in every default that depends on the model."""
    limit = getattr(load_config(folder).get_text_config(), "max_position_embeddings", None)
    length = settings.sequence_length
    if length is not None and limit is not None and length > limit:
        raise ArgumentValueError(f"sequence_length is {length}; the model takes at most {limit} tokens")
    length = length or min(_DEFAULT_LENGTH, limit or _DEFAULT_LENGTH)
    return replace(settings, sequence_length=length, learning_rate=base_learning_rate(settings))


def _save_settings(settings: Settings, place: Path) -> None:
    settings.save(place / SETTINGS)


def _check_vocabulary(tokenizer: Any, folder: Path) -> None:
    size = load_config(folder).get_text_config().vocab_size
    if len(tokenizer) > size:
        raise OffmateError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model only {size}; they do not belong together"
        )


# -- phases -----------------------------------------------------------------------------------------------------------


def _load(settings: Settings, folder: Path, tokenizer: Any, place: Path) -> _Loaded:
    checkpoint = newest_checkpoint(place / CHECKPOINTS)
    moment = load_moment(checkpoint) if checkpoint is not None else None
    if moment is not None:
        # The last bits of a sum depend on how many threads share it.
        torch.set_num_threads(moment.threads)
        if moment.torch != torch.__version__:
            log.warning(
                "the run began with torch %s, this is %s: last bits may differ", moment.torch, torch.__version__
            )
    model = build_model(settings, folder, checkpoint)
    updates = UpdateRule(model, settings)
    if checkpoint is not None:
        restore_updates(checkpoint, updates)
    return _Loaded(folder, tokenizer, model, updates, checkpoint, moment)


def _plan(settings: Settings, loaded: _Loaded) -> tuple[Plan, Config]:
    """Return the plan and its configuration; a resumed run updates every parameter where it did before."""
    split = loaded.moment.split if loaded.moment is not None else Split()
    config = Config(updates=split, outputs=_OUTPUTS) if split != Split() else Config(outputs=_OUTPUTS)
    try:
        plan = _planned(settings, loaded, config)
    except InfeasibleBudget:
        if device_kind(settings.device) != EMULATED or split == Split():
            raise
        log.info("the earlier split of updates does not fit the new budget; a new one changes no bits on this device")
        config = Config(outputs=_OUTPUTS)
        plan = _planned(settings, loaded, config)
    return _earlier(plan, loaded.checkpoint) or plan, config


def _planned(settings: Settings, loaded: _Loaded, config: Config) -> Plan:
    ids = torch.zeros(settings.batch_size, settings.sequence_length or 0, dtype=torch.long)
    batch: Batch = {"input_ids": ids, "labels": ids.clone()}
    return plan_model(
        loaded.model,
        settings.gpu_budget,
        example_inputs=batch,
        optimizer=loaded.updates.optimizer,
        **settings.gate,
        device=settings.device,
        cpu_budget=settings.cpu_budget,
        config=config,
    )


def _earlier(plan: Plan, checkpoint: Path | None) -> Plan | None:
    """Return the plan that an earlier run followed, if it is for the same problem."""
    if checkpoint is None:
        return None
    try:
        saved = load_plan(checkpoint / PLAN)
    except PlanFileError:
        return None
    return saved if saved.fingerprint == plan.fingerprint else None


def _tokens(settings: Settings, loaded: _Loaded, place: Path) -> Packed:
    folder = place / TOKENS
    if not folder.is_dir():
        packed = write_tokens(
            settings.data, loaded.tokenizer, settings.eval_fraction, folder, assistant_only=settings.assistant_only
        )
    else:
        packed = read_tokens(folder)
        if not verify_tokens(packed):
            raise OffmateError(f"{folder}: the run's tokens have changed; start a new run in another folder")
    if loaded.moment is not None and packed.digest != loaded.moment.tokens:
        raise OffmateError(f"{settings.data!r} is not the data that the run began with; restore it, or start a new run")
    return packed


def _train(
    settings: Settings,
    loaded: _Loaded,
    plan: Plan,
    config: Config,
    packed: Packed,
    batches: Batches,
    n_steps: int,
    mode: str,
) -> None:
    output = Path(settings.output)
    model = compile_model(
        loaded.model,
        settings.gpu_budget,
        optimizer=loaded.updates.optimizer,
        **settings.gate,
        device=settings.device,
        cpu_budget=settings.cpu_budget,
        plan=plan,
        config=config,
    )
    reporters = make_reporters(settings.report, output, settings.to_dict(), mode)
    start = loaded.moment.step if loaded.moment else 0
    if loaded.checkpoint is not None:
        restore_random(loaded.checkpoint)
    else:
        torch.manual_seed(settings.seed)
    try:
        checkpoints = output / CHECKPOINTS
        train(TrainingRun(settings, model, loaded.updates, packed, batches, start, n_steps, checkpoints, reporters))
    finally:
        for reporter in reporters:
            reporter.close()
    save_result(output, model, loaded.tokenizer)
    shutil.rmtree(output / TOKENS)


# -- messages ---------------------------------------------------------------------------------------------------------


def _finished(output: Path) -> bool:
    return any((output / name).is_file() for name in ("config.json", "adapter_config.json"))


def _agree(doubts: list[str], yes: bool, mode: str) -> None:
    """Ask whether to continue if something looks wrong; refuse if nobody can answer."""
    if not doubts or yes:
        return
    words = "something looks wrong:\n  " + "\n  ".join(doubts)
    if mode != "normal" or not sys.stdin.isatty():
        raise OffmateError(f"{words}\nAdd --yes to continue anyway")
    if input(f"{words}\nContinue anyway? [y/N] ").strip().lower() not in ("y", "yes"):
        raise OffmateError("stopped before training")


def _say(mode: str, words: str, **event: Any) -> None:
    if mode == "json":
        print(json.dumps(event), flush=True)
    elif mode == "normal":
        print(words, flush=True)


def _hush() -> None:
    """Silence the libraries' progress bars, which would disturb the run's own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
