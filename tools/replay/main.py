#!/usr/bin/env python3
"""Replay a request trace through two LMCache processes: first on one shared segment, then on private caches.

The processes run LMCache's own StorageManager, keys and configuration, on the CPU; only the cache
behind it differs. KV tensors have the shapes of the demo's model. Both runs get the same memory.

A trace has one JSON object a line (also gzipped), whose `hash_ids` name blocks of 512 tokens, chained:
the format of the Mooncake traces (FAST '25). Without one, requests are made up: conversations that grow.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import rank as ranks

GIB = 1 << 30
ANSWER_WITHIN = 120.0


def made_up(n: int) -> Iterator[list[int]]:
    """Conversations of 4 to 12 turns with a common first block; each turn adds 1 to 4 blocks."""
    rnd = random.Random(1)
    talks: list[list[int]] = []
    fresh = 1
    for _ in range(n):
        talk = rnd.choice(talks) if talks and rnd.random() < 0.7 else [0]
        if len(talk) == 1:
            talks = [*talks[-50:], talk]
        more = rnd.randint(1, 4)
        talk.extend(range(fresh, fresh + more))
        fresh += more
        yield list(talk)


def requests(trace: Path | None, n: int) -> list[list[int]]:
    """Chunks of each request."""
    if trace is None:
        return list(made_up(n))
    opener = gzip.open if trace.suffix == ".gz" else open
    out: list[list[int]] = []
    with opener(trace, "rt", encoding="utf-8") as f:
        for line in f:
            if len(out) == n:
                break
            out.append(json.loads(line)["hash_ids"])
    return out


class Process:
    """One rank, and the pipe to it."""

    def __init__(self, plan: ranks.Plan, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=ranks.run, args=(plan, number, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        if not self._pipe.poll(ANSWER_WITHIN):
            raise SystemExit(f"process {self.process.pid} gave no answer for {ANSWER_WITHIN:g} s")
        status, answer = self._pipe.recv()
        if status == "failed":
            raise SystemExit(f"process {self.process.pid} failed:\n{answer}")
        return answer

    def say(self, *what: Any) -> None:
        self._pipe.send(what)


def ask(processes: list[Process], *what: Any) -> list[Any]:
    """The same of all, at the same time."""
    for p in processes:
        p.say(*what)
    return [p.hear() for p in processes]


def replay(plan: ranks.Plan, work: list[list[int]]) -> dict[str, Any]:
    """Run the trace; figures of it."""
    pair = [Process(plan, i) for i in range(2)]
    for p in pair:
        p.hear()
    looked = hit = agreed = 0
    start = time.perf_counter()
    for number, chunks in enumerate(work):
        team = [pair[number % 2]] if plan.kind == "replicas" else pair
        found = ask(team, "lookup", chunks)
        agreed += len(set(found)) == 1
        looked += len(chunks)
        hit += min(found)
        ask(team, "serve", chunks, min(found))
        if sys.stderr.isatty() and number % 20 == 0:
            print(f"\r  {number} of {len(work)} requests", end="", file=sys.stderr)
    seconds = time.perf_counter() - start
    held = ask(pair, "held")
    sound = all(ask(pair, "sound"))
    ask(pair, "end")
    for p in pair:
        p.process.join(10)
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    readable = [chunks for chunks, _ in held]
    used = held[0][1] if plan.shared else sum(n for _, n in held)
    return {
        "hit_ratio": hit / looked, "agreement": agreed / len(work), "chunks": readable, "bytes": used,
        "seconds": seconds, "sound": sound,
    }  # fmt: skip


def show(kind: str, results: dict[str, dict[str, Any]]) -> None:
    """The table."""
    one = results["shared"]
    copies = 1 if kind == "tp" else 2  # tp: each rank's part is its own; else both read the same bytes
    print(f"{'':34}{'one segment':>16}{'private caches':>16}")
    rows = (
        ("chunks hit, of those looked up", "hit_ratio", "{:.1%}"),
        ("lookups on which the ranks agree", "agreement", "{:.1%}"),
    )
    for text, field, form in rows:
        print(f"{text:34}" + "".join(f"{form.format(r[field]):>16}" for r in results.values()))
    readable = ["/".join(map(str, r["chunks"])) for r in results.values()]
    print(f"{'chunks each process can read':34}" + "".join(f"{text:>16}" for text in readable))
    print(f"{'GiB held by the host':34}" + "".join(f"{r['bytes'] / GIB:>16.2f}" for r in results.values()))
    print(f"\nTo read what they can read here, two private caches would hold {copies * one['bytes'] / GIB:.2f} GiB.")


def main() -> None:
    """Parse, run both, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON lines, also .gz; by default requests are made up")
    kinds = "two ranks of one engine (default), the same with MLA, or two engines of one rank"
    parser.add_argument("--kind", choices=("tp", "mla", "replicas"), default="tp", help=kinds)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--capacity", help="memory for all caches of the host, such as 8GiB (default: up to 4GiB)")
    parser.add_argument("--tokens", type=int, default=32,
                        help="tokens whose KV stands for a block of 512 (default 32), so that a small host shows what "
                        "a large one does")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    if args.trace is not None and not args.trace.is_file():
        parser.error(f"--trace {args.trace}: there is no such file")
    if args.requests < 1 or not 1 <= args.tokens <= 512:
        parser.error("--requests: at least 1; --tokens: 1 to 512")
    from shmcache._sizes import parse_size

    free = shutil.disk_usage("/dev/shm").free
    try:
        capacity = parse_size(args.capacity, "--capacity") if args.capacity else min(4 * GIB, free // 2)
    except ValueError as e:
        parser.error(str(e))
    capacity -= capacity % (4 << 20)
    work = requests(args.trace, args.requests)
    os.environ["PYTHONHASHSEED"] = "0"
    segment = f"replay-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    results = {}
    try:
        for which in ("shared", "private"):
            plan = ranks.Plan(args.kind, which == "shared", segment, capacity, args.tokens)
            results[which] = replay(plan, work)
    finally:
        import shmcache

        if any(s.name == segment for s in shmcache.segments()):
            shmcache.unlink(segment, force=True)
    if args.json:
        print(json.dumps(results))
    else:
        source = args.trace.name if args.trace else "made-up conversations"
        print(
            f"{len(work)} requests of {source}, {args.kind}, {capacity / GIB:.2f} GiB for the host, "
            f"KV of {args.tokens} tokens a block\n"
        )
        show(args.kind, results)
    if not all(r["sound"] for r in results.values()) or results["shared"]["agreement"] < 1:
        raise SystemExit("the caches are not sound, or ranks disagreed")


if __name__ == "__main__":
    main()
