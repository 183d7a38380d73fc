"""Argument types that several commands share; nothing heavy is loaded."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from ..files import reason
from ..sizes import parse_budget, parse_rate

if TYPE_CHECKING:
    from ..runtime.storage.folders import StoragePath

_MOST_POINTS = 64
_MOST_COUNT = 10**9
_MOST_MICRO_BATCHES = 1_000_000  # as `offmate.plan` takes, which needs torch to say so
_RATES = r"([^/]*,)*[^/,]*\d *[kKMGTP]?i?[bB]/s *(,.*)?"  # one at least, and nothing before it that is a path
_DIGITS = 40  # Python refuses to read thousands of digits

# What an error calls the arguments of Python, and what the command line has instead of them.
_OPTIONS = (
    (re.compile(r",? or keep fewer outputs \(Config\(outputs=\.\.\.\)\)"), ""),
    (re.compile(r"Config\(updates='auto'\)"), "a new run"),
    (re.compile(r"\(Config\(updates=Split\(\.\.\.\)\), a checkpoint's split, or that of the session's first plan\)"),
     "by the checkpoint"),
    (re.compile(r"storage=('[^']*') is a rate, and training needs a folder: .*"),
     r"--storage \1 is a rate, and a folder on that drive is needed, such as /mnt/nvme/offmate"),
    (re.compile(r"storage=(?='[^']*' names no folder)"), "--storage "),
    (re.compile(r"(?<![\w-])storage=(?=[,.;) ]|$)"), "--storage"),
    (re.compile(r", or give its rates: offmate\.StoragePath\(folder, read=\.\.\., write=\.\.\.\)"), ""),
    (re.compile(r'Config\(accumulation_order="by batch"\)'), "--order by-batch"),
    (re.compile(r"(?<=--order by-batch without )micro_batches_per_pass=(\d+)"), r"--micro-batches-per-pass \1"),
    (re.compile(r"(?<![\w-])(gpu|cpu)_budget"), r"--\1-budget"),
)  # fmt: skip


class OptionNames(logging.Filter):
    """Lets log lines name the command line's options."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite a line; all of them pass."""
        record.msg, record.args = with_options(record.getMessage()), ()
        return True


class Help(argparse.HelpFormatter):
    """A help formatter that folds sentences to the terminal's width, and keeps indented examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(
            line if line.startswith(" ") else fill(line, width, indent) for line in text.rstrip().splitlines()
        )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a card, and RAM and drive beside it: `hardware`, `cpu_budget` and `storage`."""
    card = parser.add_mutually_exclusive_group()
    card.add_argument(
        "--card",
        dest="hardware",
        default="rtx3060",
        metavar="NAME",
        help="a card that `offmate cards` lists, or the path of a hardware file (default: %(default)s)",
    )
    card.add_argument("--hardware", default=argparse.SUPPRESS, metavar="NAME", help="the same as --card")
    ram = parser.add_mutually_exclusive_group()
    ram.add_argument(
        "--ram",
        dest="cpu_budget",
        type=size,
        metavar="SIZE",
        help="RAM (default: what the card's file says, or any amount if it says nothing)",
    )
    ram.add_argument("--cpu-budget", type=size, default=argparse.SUPPRESS, metavar="SIZE", help="the same as --ram")
    parser.add_argument(
        "--storage",
        type=drive,
        action="append",
        metavar="DIR|READ[,WRITE[,BOTH]]",
        help="a drive of the machine: a folder that its hardware file lists, or rates. READ alone, such as 3GB/s: the "
        "part of a frozen model that RAM has no room for is read from it in every step. With WRITE, such as "
        "7GB/s,5GB/s, or with a folder: optimizer states may lie on it, too. BOTH is the rate of reads and writes "
        "together (default: as if they took turns). It may be given several times, for several drives",
    )
    parser.add_argument(
        "--storage-parameters",
        action="store_true",
        help="trained parameters may lie on the drives of --storage, too, where RAM has no room for their values",
    )


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exit with a parser's usage and the arguments that it does not know, with the option that was probably meant."""
    near = get_close_matches(unknown[0].partition("=")[0], re.findall(r"--[a-z-]+", parser.format_usage()), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    parser.error(f"unknown arguments: {' '.join(unknown)}{hint}")


def with_options(message: str) -> str:
    """Return a message with the names of the command line's options."""
    for argument, option in _OPTIONS:
        message = argument.sub(option, message)
    return message


def size(text: str) -> int:
    """Parse a size such as "12GiB" into bytes."""
    try:
        return parse_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rate(text: str) -> float:
    """Parse a rate such as "3GB/s" into bytes per second."""
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def drive(text: str) -> float | StoragePath:
    """Parse a drive: a folder, the rate of reads alone, or those of reads and writes, and perhaps of both together."""
    if "/" not in text or re.fullmatch(_RATES, text) or re.match(r"\s*[-+.\d][^/]*/s\s*(,|$)", text):
        return _rates(text)
    from ..runtime.storage.folders import StoragePath  # needs torch

    return StoragePath(text)


def _rates(text: str) -> float | StoragePath:
    rates = text.split(",")
    if "/" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a rate, such as 7GB/s or 7GB/s,5GB/s, nor a folder, such as /mnt/nvme or ./{text}"
        )
    if len(rates) == 1:
        return rate(text)
    if len(rates) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(rates)} rates; write READ, READ,WRITE or READ,WRITE,BOTH")
    from ..runtime.storage.folders import StoragePath  # needs torch

    return StoragePath("the drive", *map(rate, rates))


def count(text: str, most: int = _MOST_COUNT) -> int:
    """Parse a whole number from 1 to `most`."""
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {most:,}")
    return int(text)


def count_or_auto(text: str, most: int = _MOST_COUNT) -> int | Literal["auto"]:
    """Parse a whole number from 1 to `most`, or "auto"."""
    if text == "auto":
        return "auto"
    try:
        return count(text, most)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto") from None


def micro_batches(text: str) -> int | Literal["auto"]:
    """Parse a number of micro-batches per update, or "auto"."""
    return count_or_auto(text, _MOST_MICRO_BATCHES)


def positive(text: str) -> float:
    """Parse a number above 0; "inf" is one."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def device(text: str) -> str:
    """Check that a device's name has torch's form; whether the device exists is checked when torch is loaded."""
    if not re.fullmatch(r"[a-z]+(:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f'{text!r} is not a device, such as "cuda", "cuda:1" or "emulated"')
    return text


def output_file(text: str) -> Path:
    """Refuse a file that cannot be written before the run, not minutes later; leave no file behind."""
    path = Path(text)
    try:
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    except (OSError, ValueError) as error:  # a null byte is a ValueError
        raise argparse.ArgumentTypeError(f"{text[:80]!r} cannot be written: {reason(error)}") from None
    return path


def sweep(text: str) -> tuple[int, ...]:
    """Parse LOW:HIGH:STEP into the budgets from LOW to HIGH, in bytes."""
    parts = text.split(":")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH:STEP, such as 6GiB:24GiB:2GiB")
    low, high, step = map(size, parts)
    if low > high:
        raise argparse.ArgumentTypeError(f"{text!r} starts above its end; put the smaller budget first")
    if (high - low) // step >= _MOST_POINTS:
        raise argparse.ArgumentTypeError(f"{text!r} has more than {_MOST_POINTS} budgets; take a larger step")
    return tuple(range(low, high + 1, step))
