"""A fine-tuning run from its settings to its result. This is the only file that knows all phases."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..api import compile as compile_model
from ..api import plan as plan_model
from ..config import Config
from ..errors import InfeasibleBudget, OffmateError, PlanFileError
from ..machines.devices import EMULATED, check_budget, default_budget_bytes, device_kind
from ..machines.host_memory import default_host_budget_bytes
from ..plans.plan import Plan, load_plan
from ..progress import working
from ..sizes import parse_budget
from ..split import Split
from .checkpoint import PLAN, Moment, load_moment, newest_checkpoint, restore_random, restore_updates, save_result
from .data import check_source, pieces
from .lock import place_for
from .loop import TrainingRun, train
from .needs import Needs, device_words, machine_of, memory_doubt, model_without_weights, needs_of, no_card
from .packing import Batch, Batches, read_tokens, verify_tokens, write_tokens
from .preview import Preview, Work, device_line, disk_doubt, example_lines, first_lines
from .report import check_reporters, make_reporters
from .result import MERGED, LastFigures, card, merge
from .settings import AUTO, Settings
from .start import SETTINGS, check_vocabulary, resolved, settings_of
from .talk import Talk
from .tokenizing import Example, examples
from .updates import UpdateRule
from .weights import build_model, load_tokenizer, model_folder

log = logging.getLogger("offmate")

TOKENS, CHECKPOINTS = "tokens", "checkpoints"

_GLIMPSE_PIECES = 256
_SHOWN_EXAMPLES = 3
_AMPLE_BYTES = 2**44  # more CPU memory than any machine has, and few enough for the solver's arithmetic
# A forecast need not be the best plan: hours to a few percent, in less time. Measuring is followed by a full search.
_FORECAST_GAP = 0.05
_OUTPUTS = ("loss",)  # nothing else is read of a training forward


@dataclass(frozen=True)
class _Position:
    """A run that is prepared: its device, its folders, and the newest checkpoint of an earlier run.

    Parameters
    ----------
    kind: the device, as `device_kind` returns it. folder: the model's. place: that of tokens and checkpoints.
    """

    settings: Settings
    kind: str
    folder: Path
    tokenizer: Any
    place: Path
    checkpoint: Path | None
    moment: Moment | None

    @property
    def done(self) -> int:
        """Steps that are done."""
        return self.moment.step if self.moment is not None else 0


@dataclass(frozen=True)
class _Loaded:
    """A run's model with its optimizer; on the meta device for a forecast."""

    model: torch.nn.Module
    updates: UpdateRule


def finetune(given: Mapping[str, Any], *, resume: bool, dry_run: bool, yes: bool, mode: str) -> None:
    """Fine-tune a model.

    Parameters
    ----------
    given: settings by name, as in `Settings`. resume: continue the run in `output`.
    dry_run: stop before weights are read, and leave no files behind. yes: continue even if something looks wrong.
    mode: "normal", "quiet" or "json".

    Raises: OffmateError for everything that cannot work, nearly always before weights are read.
    """
    _hush()
    talk = Talk(mode, yes, dry_run)
    settings = settings_of(given, resume)
    output = Path(settings.output)
    if resume and _finished(output):
        talk.say([f"{output}: the run is finished"], event="finished")
        if settings.merge and not dry_run and not (output / MERGED).exists():
            _merge(resolved(settings, model_folder(settings.model)), talk)
        return
    check_reporters(settings.report)
    kind = device_kind(settings.device)
    talk.say([device_line(kind)], event="device", device=kind, words=device_words(kind))
    folder = model_folder(settings.model, weights=False)
    settings = resolved(settings, folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, folder)
    shown = [] if resume and (output / TOKENS).is_dir() else _glimpse(settings, tokenizer)
    with place_for(output, keep=resume, dry_run=dry_run) as (aside, begun):
        place = output if resume and (not dry_run or (output / TOKENS).is_dir()) else aside
        checkpoint = newest_checkpoint(output / CHECKPOINTS) if resume else None
        moment = load_moment(checkpoint) if checkpoint is not None else None
        _run(_Position(settings, kind, folder, tokenizer, place, checkpoint, moment), shown, talk, begun)


def _run(at: _Position, shown: list[Example], talk: Talk, begun: list[bool]) -> None:
    """Forecast a run; unless this is a dry run, load its model and train it."""
    at, work, needs, asked = _prepared(at, shown, talk)
    if talk.dry_run:
        return
    gc.collect()  # what the forecast has held should not lie beside the weights
    with working("reading weights"):
        loaded = _load(at)
    plan, config = _plan(at, loaded)
    preview = Preview(at.settings, at.kind, needs, plan, work, at.done, held_bytes=needs.weights_bytes)
    lines = preview.lines() if at.checkpoint is not None else preview.speed_lines("measured operators")
    talk.say(lines, event="plan", lines=lines, doubts=preview.doubts())
    talk.agree(preview.doubts() if not asked else [])
    begun.append(True)
    _train(at, loaded, plan, config, work, talk.mode)
    del loaded, plan, preview  # a merge reads the base again
    if at.settings.merge:
        _merge(at.settings, talk)
    loads_with = "peft" if at.settings.lora else "transformers"
    talk.say([f"done: {at.settings.output} loads with plain {loads_with}"], event="done")


# -- before weights are read ------------------------------------------------------------------------------------------


def _prepared(at: _Position, shown: list[Example], talk: Talk) -> tuple[_Position, Work, Needs, list[str]]:
    """Say what a run takes, ask where something looks wrong, and make its tokens; nothing of the weights is read.

    Returns: the position with every setting that was open, tokens and steps, what the run needs, and all doubts.
    """
    with working("building the model without weights"):
        bare = model_without_weights(at.settings, at.folder)
    forecast = _Loaded(bare, UpdateRule(bare, at.settings))
    machine, strange = machine_of(at.kind)
    needs = needs_of(at.settings, bare, forecast.updates, machine)
    disk = disk_doubt(Path(at.settings.output), needs.disk_bytes(at.settings))
    first = _first_doubts(at, needs) + [strange] * bool(strange) + disk
    lines = first_lines(at.settings, at.kind, needs)
    talk.say(lines, event="needs", lines=lines, doubts=first)
    if disk and not talk.dry_run:
        raise OffmateError(disk[0])
    talk.agree(first)
    at = _settled(at, talk)
    with working("making tokens"):
        work = _work(at)
    at = replace(at, settings=replace(at.settings, warmup_steps=at.settings.warmup(work.n_steps)))
    _keep_settings(at, talk)
    talk.say(example_lines(shown), event="examples", examples=[vars(example) for example in shown])
    doubts = first
    if talk.dry_run or at.checkpoint is None:
        doubts = _forecast(at, work, needs, forecast, machine, first, talk)
    return at, work, needs, doubts


def _glimpse(settings: Settings, tokenizer: Any) -> list[Example]:
    """Return the first documents as the model sees them, after a look at more of them."""
    check_source(settings.data)
    seen = list(examples(islice(pieces(settings.data), _GLIMPSE_PIECES), tokenizer, settings.assistant_only))
    return seen[:_SHOWN_EXAMPLES]


def _first_doubts(at: _Position, needs: Needs) -> list[str]:
    """List what looks wrong before anything is planned."""
    found = [no_card()] if at.settings.device is None and at.kind == EMULATED and not _was_emulated(at) else []
    return found + memory_doubt(needs.host_bytes(at.kind))


def _was_emulated(at: _Position) -> bool:
    """Return whether the earlier run trained on the emulated device, too."""
    plan = _saved_plan(at.checkpoint)
    return plan is not None and plan.problem is not None and plan.problem.rates.shared_cores


def _settled(at: _Position, talk: Talk) -> _Position:
    """Return the position with the device that the user has agreed to; a new run can be resumed from here on."""
    if at.kind == EMULATED:
        at = replace(at, settings=replace(at.settings, device=EMULATED))
    _keep_settings(at, talk)
    return at


def _keep_settings(at: _Position, talk: Talk) -> None:
    if not talk.dry_run and at.checkpoint is None:
        at.settings.save(at.place / SETTINGS)


def _work(at: _Position) -> Work:
    """Return the tokens of a run, made or found, and its steps. Raises: OffmateError if they are too few, or others."""
    settings, folder = at.settings, at.place / TOKENS
    if not folder.is_dir():
        packed = write_tokens(
            settings.data, at.tokenizer, settings.eval_fraction, folder, assistant_only=settings.assistant_only
        )
    else:
        packed = read_tokens(folder)
        if not verify_tokens(packed):
            raise OffmateError(f"{folder}: the run's tokens have changed; start a new run in another folder")
    if at.moment is not None and packed.digest != at.moment.tokens:
        raise OffmateError(f"{settings.data!r} is not the data that the run began with; restore it, or start a new run")
    length, size = settings.sequence_length or 0, settings.batch_size
    batches = Batches(packed.train, length, size, settings.accumulation, settings.seed, keeps_all=not packed.tally)
    batches.check()
    return Work(packed, batches, settings.steps or settings.epochs * batches.steps_per_epoch)


def _forecast(
    at: _Position, work: Work, needs: Needs, bare: _Loaded, machine: str, first: list[str], talk: Talk
) -> list[str]:
    """Plan the run without weights, say what it takes, and ask if something looks wrong.

    Returns: all doubts. Raises: InfeasibleBudget, after everything else is said.
    """
    settings = at.settings
    budget = default_budget_bytes(at.kind) if settings.gpu_budget == AUTO else parse_budget(settings.gpu_budget)
    check_budget(at.kind, budget)
    host = default_host_budget_bytes() if settings.cpu_budget == AUTO else parse_budget(settings.cpu_budget)
    short = needs.host_bytes(at.kind) > host
    try:
        plan = plan_model(
            bare.model,
            budget,
            example_inputs=_batch(settings, "meta"),
            optimizer=bare.updates.optimizer,
            **settings.gate,
            cpu_budget=_AMPLE_BYTES if short else host,
            hardware=machine,
            config=Config(outputs=_OUTPUTS, solver_gap=_FORECAST_GAP),
        )
    except InfeasibleBudget as error:
        talk.say(work.lines(settings), event="plan", lines=work.lines(settings), doubts=[*first, str(error)])
        raise
    preview = Preview(settings, at.kind, needs, plan, work, at.done)
    new = preview.doubts(memory=not short)
    talk.say(preview.lines(), event="plan", lines=preview.lines(), doubts=first + new)
    talk.agree(new)
    return first + new


def _batch(settings: Settings, device: str) -> Batch:
    ids = torch.zeros(settings.batch_size, settings.sequence_length or 0, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids.clone()}


# -- with weights -----------------------------------------------------------------------------------------------------


def _load(at: _Position) -> _Loaded:
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
    return _Loaded(model, updates)


def _plan(at: _Position, loaded: _Loaded) -> tuple[Plan, Config]:
    """Return the plan and its configuration; a resumed run updates every parameter where it did before."""
    split = at.moment.split if at.moment is not None else Split()
    config = Config(updates=split, outputs=_OUTPUTS) if split != Split() else Config(outputs=_OUTPUTS)
    try:
        plan = _planned(at.settings, loaded, config)
    except InfeasibleBudget:
        if at.kind != EMULATED or split == Split():
            raise
        log.info("the earlier split of updates does not fit the new budget; a new one changes no bits on this device")
        config = Config(outputs=_OUTPUTS)
        plan = _planned(at.settings, loaded, config)
    # The plan that the earlier run followed, if it is for the same problem.
    saved = _saved_plan(at.checkpoint)
    return saved if saved is not None and saved.fingerprint == plan.fingerprint else plan, config


def _planned(settings: Settings, loaded: _Loaded, config: Config) -> Plan:
    return plan_model(
        loaded.model,
        settings.gpu_budget,
        example_inputs=_batch(settings, "cpu"),
        optimizer=loaded.updates.optimizer,
        **settings.gate,
        device=settings.device,
        cpu_budget=settings.cpu_budget,
        config=config,
    )


def _saved_plan(checkpoint: Path | None) -> Plan | None:
    """Return the plan that a checkpoint holds; None if there is none that can be read."""
    if checkpoint is None:
        return None
    try:
        return load_plan(checkpoint / PLAN)
    except PlanFileError:
        return None


def _train(at: _Position, loaded: _Loaded, plan: Plan, config: Config, work: Work, mode: str) -> None:
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
            reporters,
        )  # fmt: skip
        train(run)
    finally:
        for reporter in reporters:
            reporter.close()
    save_result(output, model, at.tokenizer, card(settings, work.n_steps, figures))
    shutil.rmtree(output / TOKENS)


def _merge(settings: Settings, talk: Talk) -> None:
    gc.collect()
    where = merge(settings, model_folder(settings.model))
    talk.say([f"merged: {where} loads with plain transformers"], event="merged", folder=str(where))


# -- surroundings -----------------------------------------------------------------------------------------------------


def _finished(output: Path) -> bool:
    return any((output / name).is_file() for name in ("config.json", "adapter_config.json"))


def _hush() -> None:
    """Silence the libraries' progress bars, which would disturb the run's own, and their advice to themselves."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
