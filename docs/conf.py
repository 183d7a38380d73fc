"""How the documentation is built: `make docs`. Pages are Markdown, the reference comes from the docstrings."""

from __future__ import annotations

import re
from importlib import metadata

project = "offmate"
author = "the offmate authors"
project_copyright = author
release = metadata.version("offmate")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "offmate"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
myst_heading_anchors = 3
highlight_language = "none"  # blocks without a language are commands and their output, not Python
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True

_NOTE = re.compile(r"(?:^|(?<=\. ))(Returns|Raises|Source): ")


def _as_rst(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """The project's docstrings as reStructuredText: parameters as a list, and a paragraph for each note."""
    written: list[str] = []
    in_parameters = False
    for line in lines:
        line = line.replace("`", "``") if "``" not in line else line
        if line.strip() == "Parameters":
            in_parameters = True
            written += ["**Parameters**", ""]
        elif in_parameters and not line.strip().strip("-"):
            in_parameters = bool(line.strip())
            written.append("")
        elif in_parameters and not line.startswith(" "):
            names, _, text = line.partition(": ")
            written.append(f"* **{names.replace('_', chr(92) + '_')}**: {text}" if text else f"* {line}")
        elif in_parameters:
            written.append(f"  {line.strip()}")
        else:
            written += _NOTE.sub(r"\n\n**\1**: ", line).split("\n")
    lines[:] = written


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _as_rst)  # type: ignore[attr-defined]
