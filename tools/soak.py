#!/usr/bin/env python3
"""Kill workers at random for as long as you like, and say what that did to the segment.

    tools/soak.py --minutes 10 --seed 1

Builds tests/crash/soak.c with the core's sources in a temporary folder (it needs a C compiler and
nothing else) and runs it in rounds of a minute, each under the next policy and with the next seed.
Prints the figures of each round and their sums. Ends with status 1 at the first violation.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "crash"))

import crash_build  # noqa: E402

POLICIES = ("lru", "fifo", "mru", "lfu")
SUMMED = (
    "kills", "deaths inside the lock", "stops", "forks", "execs", "operations", "bytes checked", "reaped", "violations",
)  # fmt: skip


def figures(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"([a-z][a-z ]*?) (\d+)(?:,|$)", text, re.MULTILINE)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--no-journal", action="store_true", help="build without the journal: this is to go wrong")
    options = parser.parse_args()
    total = dict.fromkeys(SUMMED, 0)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        exe = crash_build.build(Path(folder), "soak", crash_build.NO_JOURNAL if options.no_journal else ())
        left = max(1, round(options.minutes * 60))
        for seed in range(options.seed, sys.maxsize):
            seconds = min(60, left)
            policy = seed % len(POLICIES)
            words = {"seconds": seconds, "workers": options.workers, "seed": seed, "policy": policy}
            command = [str(exe), *(w for name, value in words.items() for w in (f"--{name}", str(value)))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300)
            found = figures(done.stdout)
            for name in SUMMED:
                total[name] += found.get(name, 0)
            shown = ", ".join(f"{name} {found.get(name, 0):,}" for name in SUMMED)
            print(f"{POLICIES[policy]}, seed {seed}, {seconds} s: {shown}", flush=True)
            if done.returncode:
                print(f"status {done.returncode}\n{done.stdout}{done.stderr}", file=sys.stderr)
            left -= seconds
            if left <= 0 or done.returncode:
                break
    print("in all: " + ", ".join(f"{name} {value:,}" for name, value in total.items()))
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
