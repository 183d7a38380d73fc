"""python -m tests.golden: compare all problems and plan files with the golden ones, or write them anew."""

from __future__ import annotations

import argparse
import sys
from multiprocessing import get_context

from . import files
from .models import CASES, plan_file
from .problems import hashes_of


def main() -> int:
    """Returns: 1 if anything is not as it was."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="what is found becomes what is expected")
    parser.add_argument("--problems-only", action="store_true", help="leave the plan files out")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    given = parser.parse_args()
    expected = files.problems()
    with get_context("spawn").Pool(given.workers) as pool:
        hashes = dict(zip(expected, pool.imap(hashes_of, expected)))
        plans = {} if given.problems_only else dict(zip(CASES, pool.imap(plan_file, CASES)))
    if given.write:
        files.write(hashes, plans)
        return 0
    changed = [f"problem {seed}: {what}" for seed in expected for what in files.changed(expected[seed], hashes[seed])]
    changed += [f"{name}: {line}" for name, plan in plans.items() for line in files.differences(name, plan)]
    print("\n".join([*changed, f"{len(changed)} differences in {len(expected)} problems and {len(plans)} plan files"]))
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
