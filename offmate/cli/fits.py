"""`offmate fits`: what can be trained on a card with so much RAM, by model and by way to train it."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import Help, add_machine, count, output_file, size
from .drives import planned_storage
from .fits_table import FitsTable, Row
from .training import Training, check_packages, parse_adapter

if TYPE_CHECKING:
    from ..machines.hardware import Hardware
    from ..planning.outlook import Outlook

_DOES_NOT_FIT = 1
_TOY = "tiny-"  # shapes for trying commands, which nobody trains
_WITH_FILES = 3  # times as long, where states may lie in files
_LAYER_S = 1.0  # about what a model takes per layer on two cores, if its rows have to be worked out
_EXAMPLES = """examples:
  offmate fits --card rtx3060 --ram 32GiB
  offmate fits --card rtx4090 --only llama3-8b qwen2.5-7b --seq-len 4096
exit status: 0 something fits, 1 nothing does, 2 the arguments cannot work
"""


def add_parser(verbs: Any) -> None:
    """Add the command `fits` to the command line's subparsers; its `run` is `run`."""
    parser = verbs.add_parser(
        "fits",
        help="list which models can be trained on a card, how fast, and with how much RAM",
        description="List for known models whether and how fast they train on a card: all of the model in bfloat16, "
        "the same with float32 copies, and a LoRA adapter of rank 16, each with AdamW. Rows come as they are found, "
        "and are kept for the next time.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    add_machine(parser)
    parser.add_argument(
        "--gpu-budget", type=size, metavar="SIZE", help="GPU memory (default: that of the card, less 1/16)"
    )
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="these models only: as in `offmate plan`")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="sequences per step (default: %(default)s)")
    parser.add_argument(
        "--seq-len", type=count, default=2048, metavar="N", help="tokens per sequence (default: %(default)s)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a row per model and way.

    Returns: the exit status. Raises: OffmateError for models and cards that do not exist.
    """
    from .training import has_adapters

    check_packages(lora=False)
    from ..machines.hardware import load
    from .screen import console
    from .shapes import configuration, names

    machine = load(arguments.hardware)
    arguments.storage = planned_storage(arguments.storage, machine, arguments.storage_parameters)
    arguments.gpu_budget = arguments.gpu_budget or machine.default_budget_bytes
    models = arguments.only or [name for name in names() if not name.startswith(_TOY)]
    configurations = {model: configuration(model) for model in models}
    asked = [(model, str(config.to_dict())) for model, config in configurations.items()]
    known = {model: _kept(_path(shape, arguments, machine)) for model, shape in asked}
    screen = console(arguments.quiet)
    table = FitsTable(screen, arguments, machine)
    layers = [configurations[model].num_hidden_layers for model, _ in asked if known[model] is None]
    per_layer_s = _LAYER_S * (_WITH_FILES if arguments.storage else 1)
    table.begin(len(models), sum(layers) * per_layer_s, has_adapters())
    rows: list[Row] = []
    for model, shape in asked:
        found = []
        for row in known[model] or _worked_out(model, _length(configurations[model], arguments.seq_len), arguments):
            table.add(row)
            found.append(row)
        if known[model] is None:
            _keep(_path(shape, arguments, machine), found)
        rows += found
    table.end()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0 if any(row.step_s is not None for row in rows) else _DOES_NOT_FIT


def _length(config: Any, seq_len: int) -> int:
    """Return the tokens per sequence that are asked for, or the most that a model takes."""
    return min(seq_len, getattr(config, "max_position_embeddings", None) or seq_len)


def _worked_out(model: str, seq_len: int, arguments: argparse.Namespace) -> Iterator[Row]:
    from ..errors import OffmateError
    from .advice import outlooks_of
    from .training import has_adapters

    full = Training(model, batch=arguments.batch, seq_len=seq_len)
    asked: list[tuple[Training, tuple[str, ...], list[str]]] = [(full, ("full bf16", "fp32 copies"), ["adamw-master"])]
    if has_adapters():
        asked.append((replace(full, lora=parse_adapter("16")), ("LoRA 16",), []))
    budgets = {
        "gpu_budget": arguments.gpu_budget, "cpu_budget": arguments.cpu_budget, "hardware": arguments.hardware,
        "storage": arguments.storage,
    }  # fmt: skip
    for training, ways, others in asked:
        done = 0
        try:
            for way, outlook in zip(ways, outlooks_of(training, budgets, others)):
                yield _row(training, way, outlook)
                done += 1
        except OffmateError as error:
            yield from (Row(model, way, seq_len, refused=str(error)) for way in ways[done:])


def _row(training: Training, way: str, outlook: Outlook) -> Row:
    rough = outlook.rough() if outlook.fits else None
    least = outlook.least_device_bytes
    if rough is None:
        return Row(
            training.model, way, training.seq_len, least_device_bytes=least, least_host_bytes=outlook.least_host_bytes
        )
    return Row(
        training.model, way, training.seq_len, rough.step_s, training.tokens / rough.step_s, rough.device_bytes, least,
        rough.host_bytes,
    )  # fmt: skip


def _path(shape: str, arguments: argparse.Namespace, machine: Hardware) -> Path | None:
    """Return where a model's rows are kept; None if nothing is cached."""
    import torch

    from ..config import Config
    from ..version import VERSION
    from .training import has_adapters

    folder = Config().cache_dir
    if folder is None:
        return None
    asked = (arguments.gpu_budget, arguments.cpu_budget, arguments.batch, arguments.seq_len, has_adapters(),
             arguments.storage)  # fmt: skip
    known_as = hashlib.sha256(repr((VERSION, torch.__version__, shape, machine, asked)).encode()).hexdigest()[:20]
    return Path(folder, f"fits-{known_as}.json")


def _kept(path: Path | None) -> list[Row] | None:
    from ..files import kept

    text = kept(path) if path is not None else None
    try:
        return None if text is None else [Row(**row) for row in json.loads(text)]
    except (ValueError, TypeError):  # not one of ours, or of another version
        return None


def _keep(path: Path | None, rows: list[Row]) -> None:
    from ..files import keep

    if path is not None and not any(row.refused for row in rows):
        keep(path, json.dumps([asdict(row) for row in rows]))
