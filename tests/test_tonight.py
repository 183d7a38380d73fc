"""The whole evening, as its script runs it: planned, trained, killed, resumed, merged, and used without offmate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "tonight.sh"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_evening(tmp_path: Path, cache_dir: str, dtype: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OFFMATE_CACHE_DIR": cache_dir, "DTYPE": dtype, "COLUMNS": "120"}
    done = subprocess.run([SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    planned, fits, dry, killed, resumed, used = done.stdout.split("\n== ")[-6:]
    assert "fits: " in planned and "gpt2 at 1,024" in fits
    assert "EMULATED ON THE CPU" in dry and "⟦Paris</s>⟧" in dry and "samples: 1 of up to 16 tokens" in dry
    assert "checkpoint" in killed and "held-out loss" in resumed and "the model writes" in resumed
    assert used.splitlines()[-1] == "Paris"

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny" / "model", dtype=getattr(torch, dtype))
    expected = peft.PeftModel.from_pretrained(plain, tmp_path / "tuned").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned" / "merged", dtype="auto").state_dict()
    assert expected.keys() == merged.keys()
    assert all(torch.equal(value, merged[name]) for name, value in expected.items())
    if dtype == "float32":
        *_, sample = resumed.split("the model writes\n")
        assert sample.splitlines()[0].strip() == used.splitlines()[-1]
