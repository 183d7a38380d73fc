"""MLP-Offload's ablation, run: `python -m benchmarks.mlp_offload_run --dir DIR [--steps 4] [--json FILE]`.

Trains the wide model of `benchmarks.states_in_files` on the emulated device with each of the paper's switches (figures
14 and 15) added to those before, each time in a process of its own. The storage paths in DIR are held to 600 and 200
MB/s by the engine. Device memory has room for the weights and hardly any states, as on the paper's cards.

**DeepSpeed ZeRO-3**: one path, and RAM for no states beside those that are updated. It writes gradients in float32 and
reads them again for the update. A fourth float32 state stands for them, that of AMSGrad, which moves as many bytes.
**Caching**: RAM has room for a quarter of the states. **No flushed gradients**: three states. **Exclusive access** is a
rule between processes, and has no counterpart in one. **Second path**: both.

The published gains are those of whole iterations on the paper's machines. Bits are compared with plain PyTorch.
"""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from .overhead import machine
from .own_processes import in_a_process, read_arguments
from .states_in_files import RATES, WIDE, Way, trained

_UNCACHED, _CACHED = 0.42, 0.67  # of the states' bytes; weights and gradients are there, too
_BOTH = tuple(RATES)
_ROOM = {"gpu_bytes": 230 << 20, **WIDE}
_WAYS = {
    "plain, flushed": Way(None, amsgrad=True, **WIDE),
    "plain": Way(None, **WIDE),
    "DeepSpeed ZeRO-3": Way(_UNCACHED, _BOTH[:1], amsgrad=True, **_ROOM),
    "+ caching": Way(_CACHED, _BOTH[:1], amsgrad=True, **_ROOM),
    "+ no flushed gradients": Way(_CACHED, _BOTH[:1], **_ROOM),
    "+ second path": Way(_CACHED, _BOTH, **_ROOM),
}
_PUBLISHED = {"+ no flushed gradients": "up to 1.6", "+ second path": "2.5"}


def main() -> None:
    """Train in each way, print the table, write it if asked."""
    arguments = read_arguments(__doc__, _WAYS, steps=4)
    if arguments.way:
        print(json.dumps(trained(arguments.dir, _WAYS[arguments.way], arguments.steps)))
        return
    rows = {way: in_a_process("mlp_offload_run", arguments, way) for way in _WAYS}
    table = Table(
        "switches", "s per step", "predicted", "read and written, MiB", "gain so far", "predicted", "published", "bits"
    )
    first = rows["DeepSpeed ZeRO-3"]
    for way, row in rows.items():
        if way.startswith("plain"):
            continue
        plain = rows["plain, flushed" if _WAYS[way].amsgrad else "plain"]
        row["exact"] = (row["losses"], row["hash"]) == (plain["losses"], plain["hash"])
        row["gain"], row["predicted gain"] = (first[name] / row[name] for name in ("step_s", "predicted_s"))
        row["published"] = _PUBLISHED.get(way, "")
        table.add_row(
            way, f"{row['step_s']:.2f}", f"{row['predicted_s']:.2f}", f"{row['stored_bytes'] / 2**20:.0f}",
            f"{row['gain']:.2f}", f"{row['predicted gain']:.2f}", row["published"],
            "the same" if row["exact"] else "DIFFER",
        )  # fmt: skip
    Console(width=120).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
