"""What a run will take, found and said before anything of the weights is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch

from ..api import plan as plan_model
from ..config import Config
from ..errors import InfeasibleBudget, OffmateError, PlanFileError
from ..machines.devices import EMULATED, check_budget, default_budget_bytes
from ..machines.host_memory import default_host_budget_bytes
from ..planning.orders import in_faster_order
from ..plans.accumulation import chosen_words
from ..plans.plan import Plan, load_plan
from ..progress import working
from ..sizes import format_bytes, format_least_bytes, parse_budget
from .base_forecast import BaseForecast, base_forecast
from .checkpoint import PLAN, Moment
from .data import check_source, is_of_hub, pieces
from .mapped_weights import MappedWeights, mapped_weights
from .names import CHECKPOINTS, NEW_TOKENS, SETTINGS, TOKENS
from .needs import Needs, machine_of, memory_doubt, merge_doubt, model_without_weights, needs_of, no_card
from .packing import Batch, Batches, Packed, read_tokens, verify_tokens, write_tokens
from .preview import Preview, Work, disk_doubt, example_lines, first_lines
from .rows import Piece
from .samples import Prompts, sample_lines
from .settings import AUTO, Settings
from .source_files import source_files
from .sources import Sources, changes_of_data, data_marks
from .state_folders import StateFolders
from .talk import Talk
from .tokenizing import Example, examples
from .updates import UpdateRule

_OUTPUTS = ("loss",)  # nothing else is read of a training forward

_GLIMPSE_PIECES = 256
_GLIMPSE_CHARACTERS = 2**14  # of a long text
_SHOWN_EXAMPLES = 3
_SHOWN_CHANGES = 3
_AMPLE_BYTES = 2**44  # more RAM than any machine has, and few enough for the solver's arithmetic
# A forecast need not be the best plan: hours to a few percent, in less time. Measuring is followed by a full search.
_FORECAST_GAP = 0.05


@dataclass(frozen=True)
class Position:
    """A run that is prepared: its device, its folders, and the newest checkpoint of an earlier run.

    Parameters
    ----------
    kind: the device, as `device_kind` returns it. folder: the model's. place: that of tokens and checkpoints.
    sources: the base model and the data as the run began with them. folders: those that optimizer states may leave to.
    base: where the parameters of a frozen base can lie. mapped: where trained ones do before the first step.
    """

    settings: Settings
    kind: str
    folder: Path
    tokenizer: Any
    prompts: Prompts
    place: Path
    checkpoint: Path | None
    moment: Moment | None
    sources: Sources
    folders: StateFolders
    base: BaseForecast = field(default_factory=BaseForecast)
    mapped: MappedWeights = field(default_factory=MappedWeights)

    @property
    def done(self) -> int:
        """Steps that are done."""
        return self.moment.step if self.moment is not None else 0

    def tight(self, preview: Preview) -> list[str]:
        """Return a sentence for each disk without room for checkpoints, once it is known which states lie in files."""
        if not self.settings.storage:
            return []  # it was looked at before
        output, keep = Path(self.settings.output), self.settings.keep_checkpoints
        found = self.folders.doubts(preview.plan, keep, output / CHECKPOINTS, preview.disk_bytes)
        return found or disk_doubt(output, preview.disk_bytes)


@dataclass(frozen=True)
class Loaded:
    """A run's model with its optimizer; on the meta device for a forecast."""

    model: torch.nn.Module
    updates: UpdateRule


def prepared(at: Position, shown: list[Example], talk: Talk) -> tuple[Position, Work, Needs, list[str]]:
    """Say what a run takes, ask where something looks wrong, and make its tokens; nothing of the weights is read.

    Returns: the position with every setting that was open, tokens and steps, what the run needs, and all doubts.
    """
    with working("building the model without weights"):
        bare = model_without_weights(at.settings, at.folder)
    forecast = Loaded(bare, UpdateRule(bare, at.settings))
    machine, strange = machine_of(at.kind)
    host_bytes = _host_budget_bytes(at.settings)
    at = replace(
        at,
        base=base_forecast(bare, at.folder, at.folders.paths, host_bytes),
        mapped=mapped_weights(at.settings, bare, at.folder, at.checkpoint, at.folders, host_bytes),
    )
    needs = needs_of(at.settings, bare, forecast.updates, machine)
    needs = replace(needs, file_bytes=at.base.file_bytes, leaving_bytes=at.mapped.leaving_bytes)
    disk = disk_doubt(Path(at.settings.output), needs.disk_bytes(at.settings))
    first = _first_doubts(at, needs) + [strange] * bool(strange) + disk
    lines = first_lines(at.settings, at.kind, needs) + at.base.lines() + at.mapped.lines()
    talk.say(lines, event="needs", lines=lines, doubts=first)
    if disk and not talk.dry_run:
        raise OffmateError(disk[0])
    talk.agree(first)
    at = _settled(at, talk)
    at, work = _work(at, forecast, machine, talk)
    at = replace(at, settings=replace(at.settings, warmup_steps=at.settings.warmup(work.n_steps)))
    _keep_settings(at, talk)
    talk.say(example_lines(shown), event="examples", examples=[vars(example) for example in shown])
    doubts = first
    if talk.dry_run or at.checkpoint is None:
        doubts = _forecast(at, work, needs, forecast, machine, first, talk)
    return at, work, needs, doubts


def glimpse(settings: Settings, tokenizer: Any) -> list[Example]:
    """Return documents of each format as the model sees them, after a look at the beginning of every file."""
    check_source(settings.data)
    sources = [settings.data] if is_of_hub(settings.data) else list(map(str, source_files(settings.data).read))
    each = max(1, _GLIMPSE_PIECES // len(sources))
    seen = [
        example
        for source in sources[:_GLIMPSE_PIECES]
        for example in examples(islice(_beginnings(source), each), tokenizer, settings.assistant_only)
    ]
    firsts = [next(example for example in seen if example.kind == kind) for kind in dict.fromkeys(e.kind for e in seen)]
    chosen = [*firsts, *(example for example in seen if example not in firsts)][:_SHOWN_EXAMPLES]
    return [example for example in seen if example in chosen]


def _beginnings(source: str) -> Iterator[Piece]:
    """Yield the documents of a source, but of a long text, which is a file of its own, only the beginning."""
    for piece in takewhile(lambda piece: piece.first, pieces(source)):
        yield piece if piece.last else replace(piece, content=str(piece.content)[:_GLIMPSE_CHARACTERS])


def _first_doubts(at: Position, needs: Needs) -> list[str]:
    """List what looks wrong before anything is planned."""
    found = [no_card()] if at.settings.device is None and at.kind == EMULATED and not _was_emulated(at) else []
    needed = needs.host_bytes(at.kind, at.settings)
    found += memory_doubt(needed, needed - needs.hosted_bytes) + at.base.doubt() + at.mapped.doubt()
    return found + (merge_doubt(needs.weights_bytes) if at.settings.merge and needs.file_bytes else [])


def _host_budget_bytes(settings: Settings) -> int:
    return default_host_budget_bytes() if settings.cpu_budget == AUTO else parse_budget(settings.cpu_budget)


def _was_emulated(at: Position) -> bool:
    """Return whether the earlier run trained on the emulated device, too."""
    plan = saved_plan(at.checkpoint)
    return plan is not None and plan.problem is not None and plan.problem.rates.shared_cores


def _settled(at: Position, talk: Talk) -> Position:
    """Return the position with the device that the user has agreed to; a new run can be resumed from here on."""
    if at.kind == EMULATED:
        at = replace(at, settings=replace(at.settings, device=EMULATED))
    _keep_settings(at, talk)
    return at


def _keep_settings(at: Position, talk: Talk) -> None:
    if not talk.dry_run and at.checkpoint is None:
        at.settings.save(at.place / SETTINGS)


def _work(at: Position, bare: Loaded, machine: str, talk: Talk) -> tuple[Position, Work]:
    """Return the tokens of a run, made or found, and its steps, and the position that knows their data.

    Parameters
    ----------
    bare, machine: with which the micro-batches of a step are chosen, if the settings leave them open.

    Raises: OffmateError if the tokens are too few, or others than the run's.
    """
    folder = at.place / TOKENS
    if folder.is_dir():
        packed = _found_tokens(at, folder, talk)
    else:
        with working("making tokens"):
            at, packed = _new_tokens(at, folder)
    if at.settings.accumulation == AUTO:
        count = chosen(at, _batches(at.settings, packed, 1).steps_per_epoch, bare, machine, talk)
        at = replace(at, settings=replace(at.settings, accumulation=count))
    settings = at.settings
    batches = _batches(settings, packed, settings.micro_batches)
    batches.check()
    return at, Work(packed, batches, settings.steps or settings.epochs * batches.steps_per_epoch)


def _batches(settings: Settings, packed: Packed, micro_batches: int) -> Batches:
    length, size = settings.sequence_length or 0, settings.batch_size
    return Batches(packed.train, length, size, micro_batches, settings.seed, keeps_all=not packed.tally)


def _found_tokens(at: Position, folder: Path, talk: Talk) -> Packed:
    """Return the tokens that a run has made at its start, and say so if its data have changed since."""
    with working("checking tokens"):
        packed = read_tokens(folder)
        if not verify_tokens(packed) or (at.moment is not None and packed.digest != at.moment.tokens):
            raise OffmateError(f"{folder}: the run's tokens have changed; start a new run in another folder")
        changes = changes_of_data(at.sources, at.settings.data)
    if changes:
        shown = ", ".join(changes[:_SHOWN_CHANGES]) + ", ..." * (len(changes) > _SHOWN_CHANGES)
        words = (
            f"data {at.settings.data!r} have changed since the run began ({shown}); the run goes on with the tokens "
            "that it made from them at its start"
        )
        talk.say([words], event="data", message=words, changes=changes)
    return packed


def _new_tokens(at: Position, folder: Path) -> tuple[Position, Packed]:
    """Make the tokens of a run; they take their place only if they are those that an earlier part of it trained on."""
    settings, aside = at.settings, at.place / NEW_TOKENS
    marks = data_marks(settings.data)
    packed = write_tokens(
        settings.data, at.tokenizer, settings.eval_fraction, aside, assistant_only=settings.assistant_only
    )
    if at.moment is not None and packed.digest != at.moment.tokens:
        shutil.rmtree(aside)
        changes = changes_of_data(at.sources, settings.data)
        named = f" ({', '.join(changes[:_SHOWN_CHANGES])})" if changes else ""
        raise OffmateError(
            f"data {settings.data!r} have changed since the run began{named}, and its tokens are gone; restore the "
            "data, or start a new run in another folder"
        )
    at = replace(at, sources=replace(at.sources, data=marks))
    at.sources.save(at.place)
    os.replace(aside, folder)
    return at, packed


def _forecast(
    at: Position, work: Work, needs: Needs, bare: Loaded, machine: str, first: list[str], talk: Talk
) -> list[str]:
    """Plan the run without weights, say what it takes, and ask if something looks wrong.

    Returns: all doubts. Raises: InfeasibleBudget, after everything else is said.
    """
    settings = at.settings
    budget = _budget_bytes(at)
    host = _host_budget_bytes(settings)
    named = settings.cpu_budget != AUTO
    short = not named and needs.host_bytes(at.kind, settings) > host

    config = _quick_config(settings)

    def planned(host_bytes: int) -> Plan:
        return in_faster_order(lambda own: planned_by(own, host_bytes), config, settings.micro_batches)[0]

    def planned_by(own: Config, host_bytes: int) -> Plan:
        return plan_bare(at, bare, machine, host_bytes, own)

    lack = _lack_of_ram(at, work, needs, host) if named else None
    try:
        plan = planned(_AMPLE_BYTES if short or lack is not None else host)
    except InfeasibleBudget as error:
        lack = lack or error
        try:
            plan = planned(_AMPLE_BYTES)  # says how much RAM would do
        except InfeasibleBudget:
            talk.say(work.lines(settings), event="plan", lines=work.lines(settings), doubts=[*first, str(error)])
            raise error from None
    preview = Preview(settings, at.kind, needs, plan, work, at.done, short_of_bytes=host if lack else None)
    if lack is not None:
        lack = InfeasibleBudget(f"{lack}{preview.advice()}", *lack.args[1:])
        talk.say(preview.lines(), event="plan", lines=preview.lines(), doubts=[*first, str(lack)])
        raise lack
    tight = at.tight(preview)
    new = preview.doubts(memory=not short) + tight
    rate = at.base.read_bytes_per_s if at.base.file_bytes else at.folders.read_bytes_per_s
    files = (rate, host) if at.base.file_bytes or at.mapped.maps else None
    lines = preview.lines() + at.folders.lines(plan, settings.keep_checkpoints)
    lines += sample_lines(settings, at.prompts, bare.model, budget, at.kind, machine, files)
    talk.say(lines, event="plan", lines=lines, doubts=first + new)
    if tight and not talk.dry_run:
        raise OffmateError(tight[0])
    talk.agree(new)
    return first + new


def training_config(settings: Settings) -> Config:
    """Return how the steps of a run are planned."""
    return Config(outputs=_OUTPUTS, speculate=settings.speculate, measure_grad_norm=settings.measures_norm)


def _quick_config(settings: Settings) -> Config:
    """Return how they are planned beforehand. With "auto" a run starts with updates that wait, so these are planned."""
    return replace(training_config(settings), solver_gap=_FORECAST_GAP, speculate=settings.speculate is True)


def _budget_bytes(at: Position) -> int:
    given = at.settings.gpu_budget
    budget = default_budget_bytes(at.kind) if given == AUTO else parse_budget(given)
    check_budget(at.kind, budget)
    return budget


def plan_bare(at: Position, bare: Loaded, machine: str, host_bytes: int, config: Config) -> Plan:
    """Plan the run without weights, for the micro-batches of its settings. Raises: InfeasibleBudget."""
    return plan_model(
        bare.model,
        _budget_bytes(at),
        example_inputs=batch_of(at.settings, "meta"),
        optimizer=bare.updates.optimizer,
        **at.settings.gate,
        cpu_budget=host_bytes,
        hardware=machine,
        storage=(at.base.files(at.kind), *at.folders.paths),
        config=config,
    )


def chosen(at: Position, most: int, bare: Loaded, machine: str, talk: Talk) -> int:
    """Choose the micro-batches of a step, and say so: they change what is learned.

    Parameters
    ----------
    most: micro-batches that the data have for a step.
    """
    settings = at.settings
    config = _quick_config(settings)
    try:
        plan = plan_bare(at, bare, machine, _host_budget_bytes(settings), config)
    except InfeasibleBudget:
        return 1  # the forecast says what is missing
    count = plan.accumulation_steps
    why = chosen_words(plan.accumulation, count)
    if count > most:
        count = max(1, most)
        why = f"{count} micro-batches per update are all that the data have"
    tokens = count * settings.batch_size * (settings.sequence_length or 0)
    line = (
        f"accumulation auto: {why}. A step sees {tokens:,} tokens, and the run keeps this number; a learning rate that "
        "suits another number may not suit this one"
    )
    talk.say([line], event="accumulation", micro_batches=count, trials=[vars(one) for one in plan.accumulation])
    return count


def _lack_of_ram(at: Position, work: Work, needs: Needs, host_bytes: int) -> InfeasibleBudget | None:
    """Return the error of an evaluation or a sample, which stream all weights from more RAM than was named."""
    if needs.hosted_bytes <= host_bytes or not (len(work.packed.eval) or at.settings.sample):
        return None
    needed = format_least_bytes(needs.hosted_bytes)
    return InfeasibleBudget(
        f"evaluations and samples stream {needed} of parameters from RAM, but cpu_budget is "
        f"{format_bytes(host_bytes)}; raise it to {needed} or more",
        budget_bytes=host_bytes,
    )


def batch_of(settings: Settings, device: str) -> Batch:
    ids = torch.zeros(settings.batch_size, settings.sequence_length or 0, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def saved_plan(checkpoint: Path | None) -> Plan | None:
    """Return the plan that a checkpoint holds; None if there is none that can be read."""
    if checkpoint is None:
        return None
    try:
        return load_plan(checkpoint / PLAN)
    except PlanFileError:
        return None
