"""python -m tests.fuzz: random sequences of user actions against plain PyTorch, in pieces if need be."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import campaign


def main() -> int:
    """Returns: 1 if anything but equal bits or a clear error was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--sequences", type=int, default=2000, help="how many (2000)")
    parser.add_argument(
        "--start", type=int, help="the first seed; by default what the results file is at, or a fresh one"
    )
    parser.add_argument(
        "--results", type=Path, default=Path(".fuzz", "results.jsonl"), help="one line per finished seed"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--minutes", type=float, default=55, help="stop after so long; the same command goes on (55)")
    parser.add_argument("--shrink", type=int, default=5, help="kinds of findings to make small (5)")
    parser.add_argument("--seed", type=int, help="play one sequence only")
    parser.add_argument("-v", action="store_true", help="with --seed: print its actions")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay(given.seed, given.v, given.shrink)
    results = campaign.Results(given.results, given.start, given.sequences)
    campaign.run(results, given.workers, 60 * given.minutes, given.shrink, lambda words: print(words, flush=True))
    print(campaign.summary(results))
    if results.left:
        print(f"{len(results.left)} are left; the same command goes on with them")
    return int(any(line["result"] == "finding" for line in results.asked))


def _replay(seed: int, verbose: bool, smaller: int) -> int:
    import torch

    from . import sequence
    from .figures import from_hardware_file

    torch.set_num_threads(1)
    folder = campaign.cache_dir()
    with from_hardware_file(all_passes=True):
        given = sequence.sequence(seed)
        outcome = sequence.run(given, folder)
        print(sequence.text(given, outcome) if verbose else f"seed {seed}: {outcome.result} {outcome.kind}")
        found = outcome.result == sequence.FINDING
        if found and smaller:
            print(
                "\nThe smallest sequence that still does:\n" + sequence.text(*sequence.shrink(given, outcome, folder))
            )
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
