"""A fine-tuning run from its settings to its result. This is the only file that knows all phases."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..api import compile as compile_model
from ..api import plan as plan_model
from ..config import Config
from ..errors import InfeasibleBudget, OffmateError
from ..machines.devices import EMULATED, device_kind
from ..planning.orders import in_faster_order
from ..plans.plan import Plan
from ..progress import working
from ..split import Split
from .checkpoint import (
    load_moment,
    newest_checkpoint,
    remove_unfinished,
    restore_random,
    restore_updates,
    save_result,
)
from .folders import ENTRY_FILES
from .forecast import Loaded, Position, batch_of, glimpse, prepared, saved_plan, training_config
from .hub import check_push, push
from .lock import Place, place_for
from .loop import TrainingRun, resuming, train
from .names import CHECKPOINTS, TOKENS
from .needs import device_words
from .packing import TOKEN_FILES
from .preview import MEASURED, Preview, Work, device_line
from .report import check_reporters, make_reporters
from .result import LastFigures, card, is_merged, merge
from .samples import read_prompts
from .settings import Settings
from .sources import Sources, check_description, check_weights, read_sources, warn_if_unknown, with_model
from .start import check_vocabulary, n_positions, resolved, settings_of
from .state_folders import measured
from .talk import Talk
from .tokenizing import Example
from .updates import UpdateRule
from .weights import build_model, load_tokenizer, model_folder

log = logging.getLogger("offmate")

_LATE = {"output", "merge", "push"}  # settings that count for a run that is finished


def finetune(given: Mapping[str, Any], *, resume: bool, dry_run: bool, yes: bool, mode: str) -> None:
    """Fine-tune a model.

    Parameters
    ----------
    given: settings by name, as in `Settings`. resume: continue the run in `output`.
    dry_run: stop before weights are read, and leave no files behind. yes: continue even if something looks wrong.
    mode: "normal", "quiet" or "json".

    Raises: OffmateError for everything that cannot work, nearly always before weights are read.
    """
    with _hushed(mode):
        _finetune(given, resume=resume, dry_run=dry_run, yes=yes, mode=mode)


def _finetune(given: Mapping[str, Any], *, resume: bool, dry_run: bool, yes: bool, mode: str) -> None:
    talk = Talk(mode, yes, dry_run)
    settings = settings_of(given, resume)
    output = Path(settings.output)
    if resume and _finished(output) and (dry_run or not (settings.merge or settings.push)):
        _say_finished(output, given, talk)
        return
    with place_for(output, keep=resume, dry_run=dry_run) as place, _explained(settings, place, resume, dry_run):
        if resume and not dry_run:
            settings = settings_of(given, resume)  # an earlier run may have ended before the lock was taken
        if resume and _finished(output):
            _say_finished(output, given, talk)
            _ended(settings, talk)
            return
        _begin(settings, place, resume, talk)


def _begin(settings: Settings, place: Place, resume: bool, talk: Talk) -> None:
    """Begin a run, or continue it from its newest checkpoint."""
    output = Path(settings.output)
    check_reporters(settings.report)
    check_push(settings.push)
    if settings.merge:
        is_merged(output)  # refuses what could not be merged at the end
    kind = device_kind(settings.device)
    talk.say([device_line(kind)], event="device", device=kind, words=device_words(kind))
    if resume and not talk.dry_run:
        remove_unfinished(output / CHECKPOINTS)
    checkpoint = newest_checkpoint(output / CHECKPOINTS, settings.storage) if resume else None
    moment = load_moment(checkpoint) if checkpoint is not None else None
    folders = measured(settings.storage, settings.storage_parameters)
    sources = read_sources(output) if resume else Sources()
    folder = model_folder(settings.model, weights=False, revision=sources.revision)
    check_description(sources, folder, weights=checkpoint is None or settings.lora is not None)
    settings = resolved(settings, folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, folder)
    prompts = read_prompts(settings, tokenizer, n_positions(folder))
    known = resume and (output / TOKENS).is_dir()
    shown = [] if known else glimpse(settings, tokenizer)
    at = Position(
        settings, kind, folder, tokenizer, prompts, output if known else place.folder, checkpoint, moment, sources,
        folders,
    )  # fmt: skip
    _run(at, shown, talk, place)


def _run(at: Position, shown: list[Example], talk: Talk, place: Place) -> None:
    """Forecast a run; unless this is a dry run, load its model and train it."""
    at, work, needs, asked = prepared(at, shown, talk)
    if talk.dry_run:
        return
    gc.collect()  # what the forecast has held should not lie beside the weights
    with working("reading weights"):
        at, loaded = _load(at)
    plan, config = _plan(at, loaded)
    preview = Preview(at.settings, at.kind, needs, plan, work, at.done, held_bytes=needs.hosted_bytes)
    lines = preview.speed_lines(MEASURED)
    if at.checkpoint is not None:
        lines = preview.lines(MEASURED) + at.folders.lines(plan, at.settings.keep_checkpoints)
    tight = at.tight(preview)
    talk.say(lines, event="plan", lines=lines, doubts=preview.doubts() + tight)
    if tight:
        raise OffmateError(tight[0])
    talk.agree(preview.doubts() if not asked else [])
    place.begun = True
    _train(at, loaded, plan, config, work, talk.mode)
    del loaded, plan, preview
    gc.collect()  # a merge reads the base again, and files of optimizer states are no longer needed
    _ended(at.settings, talk)
    loads_with = "peft" if at.settings.lora else "transformers"
    talk.say([f"done: {at.settings.output} loads with plain {loads_with}"], event="done")


# -- with weights -----------------------------------------------------------------------------------------------------


def _load(at: Position) -> tuple[Position, Loaded]:
    """Read the weights of a run, and the states of its optimizer; return the position that knows its base model.

    Raises: OffmateError if the base model has changed since the run began.
    """
    moment = at.moment
    if moment is not None:
        # The last bits of a sum depend on how many threads share it.
        torch.set_num_threads(moment.threads)
        if moment.torch != torch.__version__:
            log.warning(
                "the run began with torch %s, this is %s: last bits may differ", moment.torch, torch.__version__
            )
    folder = model_folder(at.settings.model, revision=at.sources.revision)
    digests: dict[str, str] = {}
    model = build_model(at.settings, folder, at.checkpoint, digests, at.base.in_files or at.mapped.in_files)
    check_weights(at.sources, folder, digests)
    if at.settings.lora is not None and at.checkpoint is not None:
        warn_if_unknown(at.sources, folder)
    if not at.sources.model:
        at = replace(at, sources=with_model(at.sources, at.settings, folder, digests))
        at.sources.save(at.place)
    updates = UpdateRule(model, at.settings)
    if at.checkpoint is not None:
        restore_updates(at.checkpoint, updates, at.settings.storage)
    return at, Loaded(model, updates)


def _plan(at: Position, loaded: Loaded) -> tuple[Plan, Config]:
    """Return the plan and its configuration; a resumed run updates every parameter where it did before."""
    split = at.moment.split if at.moment is not None else Split()
    free = training_config(at.settings)
    config = replace(free, updates=split) if split != Split() else free
    steps = at.settings.micro_batches
    try:
        plan, config = in_faster_order(lambda own: _planned(at, loaded, own), config, steps)
    except InfeasibleBudget:
        if at.kind != EMULATED or split == Split():
            raise
        log.info(
            "the earlier split of updates does not fit the new budget, so a new one is used; on this device, this "
            "changes no bits"
        )
        plan, config = in_faster_order(lambda own: _planned(at, loaded, own), free, steps)
    # The plan that the earlier run followed, if it is for the same problem.
    saved = saved_plan(at.checkpoint)
    return saved if saved is not None and saved.fingerprint == plan.fingerprint else plan, config


def _planned(at: Position, loaded: Loaded, config: Config) -> Plan:
    settings = at.settings
    return plan_model(
        loaded.model,
        settings.gpu_budget,
        example_inputs=batch_of(settings, "cpu"),
        optimizer=loaded.updates.optimizer,
        **settings.gate,
        device=settings.device,
        cpu_budget=settings.cpu_budget,
        storage=at.folders.given,
        config=config,
    )


def _train(at: Position, loaded: Loaded, plan: Plan, config: Config, work: Work, mode: str) -> None:
    settings, output = at.settings, Path(at.settings.output)
    model = compile_model(
        loaded.model,
        settings.gpu_budget,
        optimizer=loaded.updates.optimizer,
        **settings.gate,
        device=settings.device,
        cpu_budget=settings.cpu_budget,
        storage=at.folders.given,
        plan=plan,
        config=config,
    )
    figures = LastFigures(at.moment.loss if at.moment is not None else None)
    reporters = [*make_reporters(settings.report, output, settings.to_dict(), mode), figures]
    if at.checkpoint is not None:
        restore_random(at.checkpoint)
    else:
        torch.manual_seed(settings.seed)
    try:
        run = TrainingRun(
            settings, model, loaded.updates, work.packed, work.batches, at.done, work.n_steps, output / CHECKPOINTS,
            reporters, at.tokenizer, at.prompts,
        )  # fmt: skip
        train(run)
    finally:
        for reporter in reporters:
            reporter.close()
    save_result(output, model, at.tokenizer, card(settings, work.n_steps, figures))
    _remove_tokens(output / TOKENS)


def _ended(settings: Settings, talk: Talk) -> None:
    """Merge and push a result if the settings ask for it; what is merged already is not merged again."""
    output = Path(settings.output)
    if settings.merge and not is_merged(output):
        sources = read_sources(output)
        folder = model_folder(settings.model, revision=sources.revision)
        where = merge(resolved(settings, folder), folder, sources)
        talk.say([f"merged: {where} loads with plain transformers"], event="merged", folder=str(where))
    if settings.push is not None:
        url = push(output, settings.push, aside=(CHECKPOINTS, TOKENS))
        talk.say([f"pushed: {url}"], event="pushed", url=url)


def _remove_tokens(folder: Path) -> None:
    """Remove the tokens of a run that is done; a file of somebody else's in their folder stays."""
    for name in TOKEN_FILES:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


# -- surroundings -----------------------------------------------------------------------------------------------------


def _finished(output: Path) -> bool:
    return any((output / name).is_file() for name in ENTRY_FILES)


def _say_finished(output: Path, given: Mapping[str, Any], talk: Talk) -> None:
    late = sorted(given.keys() - _LATE)
    words = f"; {', '.join(late)} can no longer change anything" if late else ""
    talk.say([f"{output}: the run is finished{words}"], event="finished")


@contextlib.contextmanager
def _explained(settings: Settings, place: Place, resume: bool, dry_run: bool) -> Iterator[None]:
    """Let an interruption say how to go on, unless it does."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if str(interrupt):
            raise
        if dry_run:
            words = "stopped; a dry run leaves no files behind"
        elif resume or place.begun:
            words = f"stopped. Continue with: {resuming(settings)}"
        else:
            words = "stopped before training, and what it made is removed; the same command begins again"
        raise KeyboardInterrupt(words) from None


@contextlib.contextmanager
def _hushed(mode: str) -> Iterator[None]:
    """Silence the libraries' progress bars, which would disturb the run's own, and their advice to themselves."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    level = log.level
    if mode == "quiet":
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
