"""The benchmark for cards: the order of its cases, its table, the reasons in it, and a run on the emulated device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent
MACHINE = {
    "card": "Some Card 4090", "card_bytes": 24 * 10**9, "driver": "570.1", "cuda": "13.0", "torch": "2.13.0",
    "cpu": "Some CPU", "cores": 8, "host_bytes": 64 * 10**9, "in_bytes_per_s": 25e9, "out_bytes_per_s": 24e9,
    "both_bytes_per_s": 40e9,
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import gpu

    return gpu


def test_the_most_telling_cases_come_first(gpu: Any) -> None:
    cases = gpu.planned(["7b", "1b"], gpu.DTYPES, gpu.BUDGETS, "cuda")
    first = cases[0]
    assert (first.model, first.dtype, first.budget_bytes, first.way) == ("7b", "bf16", 10 * 10**9, "offmate")
    early = {(case.model, case.dtype, case.budget_bytes, case.way) for case in cases[:15]}
    assert {
        ("7b", "bf16", 24 * 10**9, "offmate"),
        ("7b", "bf16", None, "plain"),
        ("1b", "fp32", 10**10, "offmate"),
    } < early
    assert len(set(cases)) == len(cases) == 4 * (4 * 7 + 3)
    assert {case.way for case in cases if case.budget_bytes is None} == {"offmate", "plain", "checkpointing"}


def test_what_time_does_not_allow_is_listed(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "_child", lambda arguments, scratch, seconds: pytest.fail("no time is left"))
    cases = gpu.planned(["tiny"], ["fp32"], [10**9], "emulated")
    rows = list(gpu.measured(cases, time.monotonic(), tmp_path, None))
    assert [row["way"] for row in rows] == [case.way for case in cases]
    assert {row["reason"] for row in rows} <= {"time", "torchao is not installed", "deepspeed is not installed"}


def test_what_cannot_fit_is_not_tried(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []

    def child(arguments: list[str], scratch: Path, seconds: float) -> dict[str, Any]:
        tried.append(json.loads(arguments[1]))
        return {"status": "does not fit", "reason": "out of device memory"}

    monkeypatch.setattr(gpu, "_child", child)
    monkeypatch.setattr(gpu, "available_host_bytes", lambda: 200 * 10**9)
    cases = [
        gpu.Case("7b", "bf16", budget * 10**9, way, "cuda", 0.0) for way in ("plain", "offmate") for budget in (40, 10)
    ]
    rows = list(gpu.measured(cases, time.monotonic() + 600, tmp_path, 80 * 10**9))
    # 6.74 billion parameters of two bytes, four times.
    assert "take at least 53.9 GB of the device" in rows[0]["reason"] and "53.9 GB" in rows[1]["reason"]
    assert [(case["way"], case["budget_bytes"]) for case in tried] == [("offmate", 40 * 10**9)]
    assert rows[3]["reason"] == "not even at 40 GB: out of device memory"


def test_a_table_shows_figures_and_reasons(gpu: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = {"model": "7b", "dtype": "bf16", "budget_bytes": 10**10, "device": "cuda", "seconds": 60.0}
    rows = [
        {**case, "way": "torchao", "status": "cannot run", "reason": "torchao is not installed"},
        {
            **case, "way": "offmate", "status": "measured", "step_s": 1.234, "tokens_per_s": 3319.3,
            "predicted_step_s": 1.2, "peak_device_bytes": 9_876_543_210, "predicted_peak_bytes": 9_900_000_000,
            "peak_host_bytes": 61 * 10**9,
            "plan_s": 40.0, "losses": [10.5, 10.4, 10.31],
        },
    ]  # fmt: skip
    file = tmp_path / "gpu-some-card.json"
    file.write_text(json.dumps({"machine": MACHINE, "batches": {"7b": vars(gpu.MODELS["7b"])}, "rows": rows}))
    assert gpu.main(["--table", str(file)]) == 0
    text = capsys.readouterr().out
    assert "Some Card 4090 (24 GB), driver 570.1, CUDA 13.0" in text
    assert "**llama2-7b, bf16, 4 × 1024 tokens, 10 GB**" in text
    assert "| offmate | 1.23 | 1.2 | 3,319 | 9.9 GB | 9.9 GB | 61 GB | 40 | 10.3100 |  |" in text
    assert "cannot run: torchao is not installed |" in text
    assert text.index("| offmate |") < text.index("| torchao ")


def test_offmate_trains_what_pytorch_trains(gpu: Any, tmp_path: Path) -> None:
    cases = [
        gpu.Case("tiny", "fp32", budget, way, "emulated", 0.0)
        for budget, way in ((4 * 10**6, "offmate"), (None, "plain"))
    ]
    ours, plain = gpu.measured(cases, time.monotonic() + 400, tmp_path, None)
    assert (ours["status"], plain["status"]) == ("measured", "measured"), (ours, plain)
    assert ours["losses"] == plain["losses"] and len(ours["losses"]) > 2
    assert ours["peak_device_bytes"] == ours["predicted_peak_bytes"] <= 4 * 10**6
    assert 0 < ours["launch_s"] <= ours["recorded_step_s"] > sum(ours["stall_s"].values())
    assert ours["plan_s"] > 0 and ours["step_s"] > 0 and plain["peak_host_bytes"] > 0


def test_what_a_card_reserves_is_capped_and_predicted(gpu: Any, sim: Any, tmp_path: Path) -> None:
    case = gpu.Case("tiny", "fp32", 32 * 10**6, "offmate", "sim", 0.0)
    (row,) = gpu.measured([case], time.monotonic() + 400, tmp_path, sim.mem_get_info()[1])
    assert row["status"] == "measured", row
    assert row["peak_device_bytes"] <= row["predicted_peak_bytes"] == row["ledger_peak_bytes"] <= 32 * 10**6


def test_a_process_that_fails_says_why(gpu: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    found = gpu._child(["--describe", "cuda"], tmp_path, 100.0)
    assert found["status"] == "failed" and "device='cuda'" in found["reason"]
