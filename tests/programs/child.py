"""Runs a script as `python SCRIPT ARGUMENTS` would, and writes down its losses and what was planned."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

RECORD = "record.json"


def main(argv: list[str]) -> None:
    """Run a script in the current folder and leave `record.json` there.

    Parameters
    ----------
    argv: the script, and its command line.
    """
    import torch

    script, *_ = argv
    losses: list[str] = []
    backward = torch.Tensor.backward

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self.numel() == 1:
            losses.append(float(self.detach()).hex())
        backward(self, *args, **kwargs)

    torch.Tensor.backward = noted  # type: ignore[method-assign]
    compiled = _note_what_is_compiled()
    sys.argv = argv
    sys.path.insert(0, str(Path(script).resolve().parent))
    found: dict[str, Any] = {"refused": ""}
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        if not _is_refusal(error):
            raise
        found["refused"] = f"{type(error).__name__}: {error}"
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    found |= {"losses": losses, "plans": [_planned(model) for model in compiled]}
    Path(RECORD).write_text(json.dumps(found, indent=1))


def _is_refusal(error: BaseException) -> bool:
    from offmate import OffmateError

    return isinstance(error, OffmateError)


def _note_what_is_compiled() -> list[Any]:
    """Keep every model that is compiled from now on."""
    import offmate
    from offmate import api

    found: list[Any] = []
    compile_model = api.compile

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(compile_model(*args, **kwargs))
        return found[-1]

    api.compile = offmate.compile = noted
    return found


def _planned(model: Any) -> dict[str, Any]:
    handle = model.offmate
    plan = handle.plan
    if plan is None:
        return {}
    return {"peak_bytes": handle.peak_bytes, "predicted_peak_bytes": plan.predicted_peak_bytes}


if __name__ == "__main__":
    main(sys.argv[1:])
