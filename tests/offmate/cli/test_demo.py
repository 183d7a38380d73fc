import io
import json
import sys

import pytest

pytest.importorskip("transformers")

from rich.console import Console

from offmate import cli
from offmate.cli.demo import run_demo
from offmate.sizes import format_least_bytes

from ... import warm

pytestmark = pytest.mark.as_users  # a process of its own finds the plans of this one

KEYS = {
    "losses", "reference_losses", "identical", "parameters_identical", "budget_bytes", "peak_bytes",
    "predicted_peak_bytes", "reference_peak_bytes", "least_budget_bytes", "host_bytes", "step_s", "predicted_step_s",
    "reference_step_s", "plan_s", "from_cache",
}  # fmt: skip
STEPS = 2


@pytest.fixture(scope="module")
def first(cache_dir):
    """A first run of the demo, and what it printed."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFMATE_CACHE_DIR", cache_dir)
        return run_demo(None, STEPS, "emulated", console), console.file.getvalue()


def test_the_numbers_are_plain_pytorchs_inside_the_budget(first):
    comparison, printed = first
    assert len(comparison.ours.losses) == STEPS
    assert comparison.identical
    assert comparison.parameters_identical
    assert comparison.peak_bytes == comparison.plan.predicted_peak_bytes <= comparison.budget_bytes
    assert comparison.budget_bytes <= 0.15 * comparison.reference_peak_bytes
    verdict = "Losses: identical bit for bit. Final parameters: identical bit for bit. Budget: kept."
    assert verdict in " ".join(printed.split())


def test_a_tenth_of_plain_pytorchs_memory_suffices(first):
    comparison, _ = first
    assert comparison.plan.least_budget_bytes <= 0.10 * comparison.reference_peak_bytes


def test_eighty_columns_suffice(first):
    _, printed = first
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed.replace(" … ", "")


def demo(*argv):
    """What `offmate demo` runs, in a process of its own."""
    sys.exit(cli.main(["demo", *argv]))


def test_a_second_start_plans_from_the_cache_and_ends_well(first, cache_dir, tmp_path, monkeypatch):
    target = tmp_path / "demo.json"
    monkeypatch.setenv("OFFMATE_CACHE_DIR", cache_dir)
    said = tmp_path / "said.txt"
    assert warm.run(said, demo, "--steps", "1", "--json", str(target), limit_s=300) == 0, said.read_text()
    assert "read from the cache" in said.read_text()
    result = json.loads(target.read_text())
    assert result.keys() == KEYS
    assert result["from_cache"]
    assert result["losses"] == list(first[0].ours.losses[:1])


def test_a_budget_that_cannot_work_is_named_in_one_line(first, cache_dir, monkeypatch, capsys):
    monkeypatch.setenv("OFFMATE_CACHE_DIR", cache_dir)
    assert cli.main(["demo", "--gpu-budget", "20MiB"]) == 1
    said = capsys.readouterr().err
    least = format_least_bytes(first[0].plan.least_budget_bytes)
    assert said.startswith(
        f"offmate: a budget of 20 MiB is too small; the least that works is {least}. The tightest point "
    )
    assert "Traceback" not in said
