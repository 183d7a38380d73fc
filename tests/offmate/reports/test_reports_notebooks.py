"""The notebooks run from top to bottom, and what is saved of their outputs is small and free of errors."""

import re
from pathlib import Path

import pytest

from ... import warm

nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = sorted((Path(__file__).parents[3] / "notebooks").glob("*.ipynb"))
MOST_BYTES = 200_000
OWN_FOLDERS = ("home", "tmp", "root")  # a path below one of these is of the machine that ran the notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_saved_is_small_and_complete(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MOST_BYTES
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    assert all(output.get("name") != "stderr" for cell in code for output in cell.outputs)
    plots = [cell for cell in code if re.search(r"\bplot_\w+\(.*\);$", cell.source)]
    assert all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in plots)
    assert not re.search(rf"site-packages|/({'|'.join(OWN_FOLDERS)})/", path.read_text())


def run_cells(path):
    """Run a notebook's cells in the shell that its kernel has, in a process of its own."""
    from IPython.core.interactiveshell import InteractiveShell

    from ...fuzz.lasting_cpsat import one_cpsat
    from ...fuzz.solved import solved_once

    shell = InteractiveShell.instance()
    with one_cpsat(), solved_once():
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                shell.run_cell(cell.source).raise_error()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    pytest.importorskip("IPython")
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    said = tmp_path / "said.txt"
    assert warm.run(said, run_cells, path, limit_s=900) == 0, said.read_text()
