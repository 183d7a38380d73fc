"""`offmate init`: print a configuration file for `offmate finetune`, with every setting and what it means."""

from __future__ import annotations

import argparse
import io
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ..libraries import check_installed
from .arguments import Help
from .finetune import given_settings, settings_options

_FIRST = ("model", "data", "output", "gpu_budget", "lora")  # what nearly every run has to say
_WIDTH = 98
_END = "...\n"  # which YAML writes behind a lone value
_EXAMPLES = """examples:
  offmate init > run.yaml
  offmate init --model ./chat --data chats.jsonl --output ./tuned > run.yaml
  offmate finetune --config run.yaml --dry-run
"""
_HEAD = """\
# Settings of `offmate finetune`; a line that you delete keeps its default.
#   offmate finetune --config run.yaml --dry-run   says what the run takes, and reads no weights
#   offmate finetune --config run.yaml             trains
"""


def add_parser(verbs: Any) -> None:
    """Add the command `init` to the command line's subparsers; its `run` is `run`."""
    parser = verbs.add_parser(
        "init",
        help="print a configuration file for finetune, with every setting and what it means",
        description="Print a YAML file for `offmate finetune --config`: every setting with its default, or with the "
        "value that is given here, and what it means.",
        parents=[settings_options()[0]],
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the configuration file.

    Returns: the exit status, 0. Raises: ArgumentValueError for a value that cannot be; LibraryError without PyYAML.
    """
    check_installed("yaml")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as YAML is read
    print("\n".join(lines(given_settings(arguments))))
    return 0


def lines(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a configuration file.

    Parameters
    ----------
    given: settings by name, as the command line has them; the others get their defaults.

    Raises: ArgumentValueError for a value that cannot be.
    """
    from dataclasses import MISSING, fields

    from ..finetune.settings import Settings, make_settings

    needed = [field.name for field in fields(Settings) if field.default is field.default_factory is MISSING]
    values = make_settings({**dict.fromkeys(needed, "any"), **given}).to_dict()
    values |= {name: None for name in needed if name not in given}
    _, words = settings_options()
    first = [name for name in (*needed, *_FIRST) if name in values]
    yield _HEAD
    yield "# ---- change these first\n"
    for name in dict.fromkeys(first):
        yield from _setting(name, values[name], words.get(name, ""))
    yield "# ---- the others\n"
    for name in values:
        if name not in first:
            yield from _setting(name, values[name], words.get(name, ""))


def _setting(name: str, value: Any, words: str) -> Iterator[str]:
    import yaml

    yield from textwrap.wrap(words, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    if value is None:
        yield f"{name}:\n"  # YAML reads it as null
        return
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    yield f"{name}: {text.removesuffix(_END).strip()}\n"
