"""A fine-tuning run from its settings to its result. This is the only file that knows all phases."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..api import compile as compile_model
from ..api import plan as plan_model
from ..config import Config
from ..errors import InfeasibleBudget
from ..machines.devices import EMULATED, device_kind
from ..plans.plan import Plan
from ..progress import working
from ..split import Split
from .checkpoint import is_merged, load_moment, newest_checkpoint, restore_random, restore_updates, save_result
from .forecast import OUTPUTS, TOKENS, Loaded, Position, batch_of, glimpse, prepared, saved_plan
from .hub import check_push, push
from .lock import place_for
from .loop import TrainingRun, train
from .needs import device_words
from .preview import MEASURED, Preview, Work, device_line
from .report import check_reporters, make_reporters
from .result import MERGED, LastFigures, card, merge
from .samples import read_prompts
from .settings import Settings
from .start import check_vocabulary, n_positions, resolved, settings_of
from .talk import Talk
from .tokenizing import Example
from .updates import UpdateRule
from .weights import build_model, load_tokenizer, model_folder

log = logging.getLogger("offmate")

CHECKPOINTS = "checkpoints"
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
    if resume and _finished(output):
        late = sorted(given.keys() - _LATE)
        words = f"; {', '.join(late)} can no longer change anything" if late else ""
        talk.say([f"{output}: the run is finished{words}"], event="finished")
        if not dry_run:
            _ended(resolved(settings, model_folder(settings.model)), talk)
        return
    check_reporters(settings.report)
    check_push(settings.push)
    kind = device_kind(settings.device)
    talk.say([device_line(kind)], event="device", device=kind, words=device_words(kind))
    folder = model_folder(settings.model, weights=False)
    settings = resolved(settings, folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, folder)
    prompts = read_prompts(settings, tokenizer, n_positions(folder))
    shown = [] if resume and (output / TOKENS).is_dir() else glimpse(settings, tokenizer)
    with place_for(output, keep=resume, dry_run=dry_run) as (aside, begun):
        place = output if resume and (not dry_run or (output / TOKENS).is_dir()) else aside
        checkpoint = newest_checkpoint(output / CHECKPOINTS) if resume else None
        moment = load_moment(checkpoint) if checkpoint is not None else None
        _run(Position(settings, kind, folder, tokenizer, prompts, place, checkpoint, moment), shown, talk, begun)


def _run(at: Position, shown: list[Example], talk: Talk, begun: list[bool]) -> None:
    """Forecast a run; unless this is a dry run, load its model and train it."""
    at, work, needs, asked = prepared(at, shown, talk)
    if talk.dry_run:
        return
    gc.collect()  # what the forecast has held should not lie beside the weights
    with working("reading weights"):
        loaded = _load(at)
    plan, config = _plan(at, loaded)
    preview = Preview(at.settings, at.kind, needs, plan, work, at.done, held_bytes=needs.weights_bytes)
    lines = preview.lines(MEASURED) if at.checkpoint is not None else preview.speed_lines(MEASURED)
    talk.say(lines, event="plan", lines=lines, doubts=preview.doubts())
    talk.agree(preview.doubts() if not asked else [])
    begun.append(True)
    _train(at, loaded, plan, config, work, talk.mode)
    del loaded, plan, preview  # a merge reads the base again
    _ended(at.settings, talk)
    loads_with = "peft" if at.settings.lora else "transformers"
    talk.say([f"done: {at.settings.output} loads with plain {loads_with}"], event="done")


# -- with weights -----------------------------------------------------------------------------------------------------


def _load(at: Position) -> Loaded:
    """Read the weights of a run, and the states of its optimizer."""
    moment = at.moment
    if moment is not None:
        # The last bits of a sum depend on how many threads share it.
        torch.set_num_threads(moment.threads)
        if moment.torch != torch.__version__:
            log.warning(
                "the run began with torch %s, this is %s: last bits may differ", moment.torch, torch.__version__
            )
    model = build_model(at.settings, model_folder(at.settings.model), at.checkpoint)
    updates = UpdateRule(model, at.settings)
    if at.checkpoint is not None:
        restore_updates(at.checkpoint, updates)
    return Loaded(model, updates)


def _plan(at: Position, loaded: Loaded) -> tuple[Plan, Config]:
    """Return the plan and its configuration; a resumed run updates every parameter where it did before."""
    split = at.moment.split if at.moment is not None else Split()
    config = Config(updates=split, outputs=OUTPUTS) if split != Split() else Config(outputs=OUTPUTS)
    try:
        plan = _planned(at.settings, loaded, config)
    except InfeasibleBudget:
        if at.kind != EMULATED or split == Split():
            raise
        log.info(
            "the earlier split of updates does not fit the new budget, so a new one is used; on this device, this "
            "changes no bits"
        )
        config = Config(outputs=OUTPUTS)
        plan = _planned(at.settings, loaded, config)
    # The plan that the earlier run followed, if it is for the same problem.
    saved = saved_plan(at.checkpoint)
    return saved if saved is not None and saved.fingerprint == plan.fingerprint else plan, config


def _planned(settings: Settings, loaded: Loaded, config: Config) -> Plan:
    return plan_model(
        loaded.model,
        settings.gpu_budget,
        example_inputs=batch_of(settings, "cpu"),
        optimizer=loaded.updates.optimizer,
        **settings.gate,
        device=settings.device,
        cpu_budget=settings.cpu_budget,
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
        plan=plan,
        config=config,
    )
    figures = LastFigures()
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
    shutil.rmtree(output / TOKENS)


def _ended(settings: Settings, talk: Talk) -> None:
    """Merge and push a result if the settings ask for it; what is merged already is not merged again."""
    output = Path(settings.output)
    if settings.merge and not is_merged(output / MERGED):
        gc.collect()
        where = merge(settings, model_folder(settings.model))
        talk.say([f"merged: {where} loads with plain transformers"], event="merged", folder=str(where))
    if settings.push is not None:
        url = push(output, settings.push, aside=(CHECKPOINTS, TOKENS))
        talk.say([f"pushed: {url}"], event="pushed", url=url)


# -- surroundings -----------------------------------------------------------------------------------------------------


def _finished(output: Path) -> bool:
    return any((output / name).is_file() for name in ("config.json", "adapter_config.json"))


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
