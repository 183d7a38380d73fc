"""A new kind of item stays a local change: a patch, kept beside this file and applied to a copy of the packages.

`scratch.patch` adds the scratch memory of blocks by what CONTRIBUTING.md says of a kind of item; `scratch.py` tests it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCH = HERE / "scratch.patch"
PACKAGES = ("solver", "runtime", "offmate")
MOST_FILES = 12
LIMIT_S = 300

ANEW = f"""\
{PATCH.relative_to(ROOT)} does not apply to the packages any more. Make it anew in a clean clone:
    git apply --3way {PATCH.relative_to(ROOT)}    # marks the places where it does not fit
    (put these right; CONTRIBUTING.md, "A kind of item", says what belongs where)
    git diff HEAD -- {" ".join(PACKAGES)} > /tmp/scratch.patch
    git checkout HEAD -- {" ".join(PACKAGES)}
    mv /tmp/scratch.patch {PATCH.relative_to(ROOT)}
git apply said:
"""


def touched() -> list[str]:
    """The files that the patch changes or adds."""
    return re.findall(r"^diff --git a/\S+ b/(\S+)$", PATCH.read_text(), re.MULTILINE)


def applied(folder: Path) -> None:
    """Copy the packages to a folder, lay them out as they are imported, and apply the patch there."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    # Git must not take the folder for a part of a repository, or it would skip files outside of it without a word.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    outside["GIT_CEILING_DIRECTORIES"] = str(folder.resolve().parent)
    result = subprocess.run(
        ["git", "apply", "--verbose", PATCH], cwd=folder, env=outside, capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.fail(ANEW + result.stderr, pytrace=False)
    for package in ("solver", "runtime"):
        (folder / "offmate" / package).symlink_to(folder / package)
    (folder / "tests").symlink_to(ROOT / "tests")


def test_it_is_a_local_change():
    files = touched()
    assert 0 < len(files) <= MOST_FILES, files
    assert {file.split("/")[0] for file in files} <= set(PACKAGES)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git, which applies the patch, is not installed")
def test_planned_simulated_and_replayed(tmp_path):
    """With the patch, problems with scratch memory are planned, simulated and validated, and a model trains exactly."""
    applied(tmp_path)
    result = subprocess.run(
        [sys.executable, "-m", "tests.extensions.scratch", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout
