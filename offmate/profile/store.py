"""A cache of measurements of a model on a machine, in memory and on disk: the same problem then gives the same plan."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import keep, kept
from ..lowering.stored import StoredOption
from ..machines.links import LinkRates
from ..optim.updater import UpdateCost
from ..programs.programs import NodeCost

log = logging.getLogger("offmate")

FORMAT = 8

_kept: dict[str, Measured] = {}
_measured_s: dict[str, float] = {}  # when this process measured, by `time.monotonic`


@dataclass(frozen=True)
class Measured:
    """Times, bytes and the options that follow from them; they do not depend on any budget.

    Parameters
    ----------
    costs: per class key and node name; those of the prelude are under "".
    updates: per canonical parameter name. options: per class key.
    """

    rates: LinkRates
    costs: dict[str, dict[str, NodeCost]]
    updates: dict[str, UpdateCost]
    options: dict[str, tuple[StoredOption, ...]]


def recall(fingerprint: str, cache_dir: str | None, since_s: float | None = None) -> Measured | None:
    """Return what was measured under this fingerprint, in this process or on disk; None if nothing was.

    Parameters
    ----------
    since_s: a time of `time.monotonic`; only what this process has measured since then counts.
    """
    if since_s is not None:
        return _kept[fingerprint] if _measured_s.get(fingerprint, -math.inf) >= since_s else None
    if fingerprint in _kept or cache_dir is None:
        return _kept.get(fingerprint)
    path = _path(fingerprint, cache_dir)
    text = kept(path)
    if text is None:
        return None
    try:
        measured = _kept[fingerprint] = _from_json(_opened(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("a cached profile is ignored (%s: %s)", path.name, error)
        return None
    return measured


def remember(fingerprint: str, cache_dir: str | None, measured: Measured) -> None:
    """Keep a measurement, on disk as well if there is a cache folder."""
    _kept[fingerprint], _measured_s[fingerprint] = measured, time.monotonic()
    if cache_dir is not None:
        keep(_path(fingerprint, cache_dir), _closed(_to_json(measured)))


def _path(fingerprint: str, cache_dir: str) -> Path:
    return Path(cache_dir, f"profile-{fingerprint}.json")


def _closed(data: dict[str, Any]) -> str:
    """Write data with a digest, so that damage of any kind is noticed before a figure is believed."""
    body = json.dumps(data)
    return json.dumps({"format": FORMAT, "sha256": _digest(body), "body": body})


def _opened(text: str) -> dict[str, Any]:
    """Read what `_closed` wrote; raises ValueError if it is of another format or has changed."""
    outer = json.loads(text)
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        found = outer.get("format") if isinstance(outer, dict) else type(outer).__name__
        raise ValueError(f"format {str(found)[:40]}, this version reads {FORMAT}")
    body = outer.get("body")
    if not isinstance(body, str) or _digest(body) != outer.get("sha256"):
        raise ValueError("it has changed since it was written")
    data: dict[str, Any] = json.loads(body)
    return data


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _to_json(measured: Measured) -> dict[str, Any]:
    return {
        "rates": asdict(measured.rates),
        "costs": {
            key: {name: [c.seconds, c.workspace_bytes, c.storage_bytes, c.launch_s] for name, c in nodes.items()}
            for key, nodes in measured.costs.items()
        },
        "updates": {name: asdict(cost) for name, cost in measured.updates.items()},
        "options": {key: [[o.name, o.kept, o.offloaded] for o in found] for key, found in measured.options.items()},
    }


def _from_json(data: dict[str, Any]) -> Measured:
    return Measured(
        rates=LinkRates(**data["rates"]),
        costs={
            key: {n: NodeCost(s, w, tuple(b), h) for n, (s, w, b, h) in nodes.items()}
            for key, nodes in data["costs"].items()
        },
        updates={name: UpdateCost(**cost) for name, cost in data["updates"].items()},
        options={
            key: tuple(StoredOption(n, tuple(k), tuple(o)) for n, k, o in found)
            for key, found in data["options"].items()
        },
    )
