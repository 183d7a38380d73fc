"""What to say when a plan does not fit: what lacks, and what does fit in the memory that there is."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..errors import InfeasibleBudget, OffmateError
from ..sizes import format_bytes, format_least_bytes
from .arguments import with_options
from .screen import pairs
from .training import Training, has_adapters, parse_adapter

if TYPE_CHECKING:
    from ..machines.hardware import Hardware
    from ..planning.outlook import Outlook

_RANK = "16"
_MASTER = "-master"
_DRIVE = "7GB/s,5GB/s"  # reads and writes of a usual NVMe drive
_BY_BATCH = "--order by-batch"
_SHORTEST = 64  # tokens; a shorter sequence is no advice


@dataclass(frozen=True)
class Way:
    """Another way to train: its name, the options that ask for it, and its outlook."""

    name: str
    options: str
    outlook: Outlook


def print_refusal(
    screen: Console,
    error: InfeasibleBudget,
    training: Training,
    arguments: argparse.Namespace,
    machine: Hardware,
    budget_bytes: int,
) -> None:
    """Print what a plan lacks, and other ways to train with their RAM; never more GPU memory than the card has.

    Parameters
    ----------
    arguments: with those of `add_machine`. budget_bytes: of the GPU.
    """
    budgets = {"gpu_budget": budget_bytes} | {
        name: getattr(arguments, name) for name in ("cpu_budget", "hardware", "storage")
    }
    try:
        asked = next(outlooks_of(training, budgets))
    except InfeasibleBudget:
        screen.print(_refused(with_options(str(error))))
        return
    together = _runs_together(arguments)
    screen.print(_refused(with_options(str(error)) if together else _lack(asked, error, machine)))
    screen.print(f"{training.model}: {training.words()}, on {machine.name}\n", markup=False)
    if together and asked.fits:
        least_ram = asked.least_host_bytes
        said = "" if least_ram is None else f"about {format_least_bytes(least_ram)} of RAM at least: "
        screen.print(pairs([("micro-batches one after the other", f"{said}{_BY_BATCH}{_instead_of(arguments)}")]))
        return
    least = asked.least_device_bytes or error.least_budget_bytes
    if asked.least_host_bytes is None and least is not None and least <= machine.device_memory_bytes:
        return  # the card has more than was asked for
    screen.print(
        "Looking for what does fit: an adapter, another optimizer, a drive, half the sequence ...", style="dim"
    )
    fitting, others = [], []
    for way in ways(training, budgets):
        needed = way.outlook.least_host_bytes
        ram = "" if needed is None else f"{format_least_bytes(needed)} of RAM"
        if way.outlook.fits and needed is not None:
            order = f" {_BY_BATCH}{_instead_of(arguments)}" if together else ""
            fitting.append((way.name, f"about {ram} at least: {way.options}{order}"))
        else:
            others.append(f"{way.name} ({f'needs about {ram}' if ram else 'needs more GPU memory'})")
    screen.print(pairs(fitting) if fitting else "None of them fits either.")
    if others and fitting:
        screen.print(f"Not enough: {', '.join(others)}.", markup=False)


def _runs_together(arguments: argparse.Namespace) -> bool:
    """Return whether micro-batches are to run together, which the outlooks of other ways do not look at."""
    per_pass = getattr(arguments, "micro_batches_per_pass", None)
    return getattr(arguments, "accumulation", 1) != 1 and (
        getattr(arguments, "order", None) == "by-block" or (per_pass or 1) > 1
    )


def _instead_of(arguments: argparse.Namespace) -> str:
    per_pass = arguments.micro_batches_per_pass
    return "" if per_pass is None else f", without --micro-batches-per-pass {per_pass}"


def _refused(words: str) -> Text:
    return Text.assemble(("does not fit", "red"), f": {words}")


def _lack(asked: Outlook, error: InfeasibleBudget, machine: Hardware) -> str:
    """Say which memory lacks, and how much of it there would have to be."""
    device = format_bytes(asked.problem.device_budget_bytes + asked.fixed_bytes)
    host = format_bytes(asked.problem.host_budget_bytes)
    if asked.fits:
        return with_options(str(error))  # only whole tensors do not
    if asked.least_host_bytes is not None:
        needed = format_least_bytes(asked.least_host_bytes)
        return f"with {device} of GPU memory, training needs about {needed} of RAM, and there are {host}"
    least = asked.least_device_bytes or error.least_budget_bytes
    if least is None:
        return with_options(str(error))
    has = machine.device_memory_bytes
    end = (
        f"raise --gpu-budget to that (the card has {format_bytes(has)})"
        if least <= has
        else (f"the card has {format_bytes(has)}")
    )
    place = f". The tightest point is {error.place}" if error.place else ""
    return f"{device} of GPU memory are not enough; the least that works is {format_least_bytes(least)}: {end}{place}"


def ways(training: Training, budgets: dict[str, object]) -> Iterator[Way]:
    """Yield other ways to train the same model, with their outlooks; those that cannot be captured are left out."""
    from ..runtime.storage.folders import StoragePath

    if training.lora is None and has_adapters():
        adapter = replace(training, lora=parse_adapter(_RANK), dtype=training.dtype.removesuffix("-master"))
        yield from _found((f"LoRA of rank {_RANK}", f"--lora {_RANK}", adapter), budgets=budgets)
    plain = replace(training, dtype=training.dtype.removesuffix("-master"))
    if training.optimizer in ("adamw", "adam") and training.lora is None:
        dtype = f" --dtype {plain.dtype}" if plain.dtype != training.dtype else ""
        yield from _found(
            ("SGD with momentum", f"--optimizer sgd{dtype}", replace(plain, optimizer="sgd")),
            ("Adafactor", f"--optimizer adafactor{dtype}", replace(plain, optimizer="adafactor")),
            budgets=budgets,
        )
    if training.lora is None and training.optimizer != "none" and not isinstance(budgets["storage"], tuple):
        name, drive = "optimizer states on an NVMe drive", (StoragePath("the drive", *_DRIVE.split(",")),)
        yield from _found((name, f"--storage {_DRIVE}", training), budgets=budgets | {"storage": drive})
    half = training.seq_len // 2
    if half >= _SHORTEST:
        shorter = replace(training, seq_len=half)
        yield from _found((f"{half} tokens", f"--seq-len {half}", shorter), budgets=budgets)


def _found(*asked: tuple[str, str, Training], budgets: dict[str, object]) -> Iterator[Way]:
    """Yield the ways with their outlooks; they differ in their optimizers only, so that the model is traced once."""
    first = asked[0][2]
    try:
        others = [one.optimizer for _, _, one in asked[1:]]
        for (name, options, _), outlook in zip(asked, outlooks_of(first, budgets, others)):
            yield Way(name, options, outlook)
    except OffmateError:
        return


def outlooks_of(training: Training, budgets: dict[str, object], others: list[str] | None = None) -> Iterator[Outlook]:
    """Yield the outlook of training, and those with other optimizers; the model is traced once.

    Parameters
    ----------
    others: names of optimizers; "-master" after a name is one with float32 copies.
    budgets: gpu_budget, cpu_budget, hardware and storage of `offmate.plan`.
    """
    from ..api import outlooks
    from .shapes import autocast

    model, batch = training.built()
    optimizers = [training.optimizer_of(model)]
    for name in others or []:
        dtype = f"{training.dtype}-master" if name.endswith(_MASTER) else training.dtype
        optimizers.append(replace(training, optimizer=name.removesuffix(_MASTER), dtype=dtype).optimizer_of(model))
    with autocast(training.autocast):
        yield from outlooks(
            model,
            example_inputs=batch,
            optimizers=optimizers,
            **training.arguments(),
            **budgets,  # type: ignore[arg-type]
        )
