#!/usr/bin/env python3
"""shmcache's backend beside LMCache's own, in one process, through LMCache's own keys and objects.

    tools/bench/peers.py [--rounds 15] [--json FILE]

Needs LMCache 0.5.6 (tools/run-replay installs it into .venv). Both backends get the same memory and do
the same work in turns; a row shows medians over the rounds and their ratio (LMCache's time over ours).
Time is that of the CPU: no row waits for anything or has work done by another thread, and on a busy machine
the longer call of the two would be interrupted more often, to its disadvantage.
Absolute times hold only for the machine they were taken on; ours pays for a lock that other processes
share and for an undo journal, LMCache's for neither.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.pin_monitor import PinMonitor  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402

import shmcache  # noqa: E402
from shmcache.integrations.lmcache import ShmLocalCPUBackend  # noqa: E402

MIB = 1 << 20
DTYPE = torch.bfloat16
GOALS = {
    "contains, one key": 0.8, "get + release": 1, "get + tensor view + release": 2, "put": 2, "allocate + free": 8,
    "allocate + evict + put + release, full arena": 10, "the same, 5,000 oldest pinned": 500,
    "allocate that fits none of 50,000 holes": 500, "batched_allocate of 32": 4,
    "leading hits of 1,000 keys, one call": 1.5, "the same and pin, touch 1,000": 10,
    "unpin 1,000, one by one": 10, "unpin 1,000, in one call": 10,
    "remove": 4, "list 100,000 keys": 0.25,
}  # fmt: skip


def key(i: int) -> CacheEngineKey:
    return CacheEngineKey("bench", 1, 0, i * 0x9E3779B97F4A7C15 & (1 << 63) - 1, DTYPE)


class Side:
    """One backend of a size, and a fresh start for each row."""

    def __init__(self, ours: bool, mib: int, segment: str) -> None:
        self.ours = ours
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, DTYPE, (4, 2, 256, 8, 64), role="worker")
        extra = {"shmcache.segment": segment, "shmcache.capacity": mib * MIB, "shmcache.max_chunks": 1 << 18,
                 "shmcache.prefault": "wait"}  # fmt: skip
        config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=mib / 1024, extra_config=extra)
        PinMonitor.GetOrCreate(config, metadata)
        self.backend: Any = (ShmLocalCPUBackend if ours else LocalCPUBackend)(config, metadata, "cpu")

    def fill(self, n: int, size: int, first: int = 0) -> list[CacheEngineKey]:
        """n chunks of `size` bytes, unreferenced; their keys."""
        keys = [key(first + i) for i in range(n)]
        for k in keys:
            obj = self.backend.allocate(torch.Size([size // 4, 2]), DTYPE, MemoryFormat.KV_T2D, busy_loop=False)
            self.backend.submit_put_task(k, obj)
            obj.ref_count_down()
        return keys


def per(n: int, work: Callable[[], object]) -> float:
    """Microseconds of one of the n things that `work` does: of the calling thread's CPU time."""
    start = time.thread_time()
    work()
    return (time.thread_time() - start) / n * 1e6


Row = Callable[[Side], Callable[[], float]]


def row_contains(s: Side) -> Callable[[], float]:
    keys = s.fill(500, 65536)
    has = s.backend.contains
    return lambda: per(500, lambda: [has(k) for k in keys])


def row_get(s: Side) -> Callable[[], float]:
    keys = s.fill(500, 65536)
    get = s.backend.get_blocking
    return lambda: per(500, lambda: [get(k).ref_count_down() for k in keys])


def row_get_tensor(s: Side) -> Callable[[], float]:
    keys = s.fill(500, 65536)

    def work() -> None:
        for k in keys:
            obj = s.backend.get_blocking(k)
            obj.tensor  # noqa: B018
            obj.ref_count_down()

    return lambda: per(500, work)


def _objects(s: Side, n: int) -> list[Any]:
    size = torch.Size([16384, 2])
    return [s.backend.allocate(size, DTYPE, MemoryFormat.KV_T2D, busy_loop=False) for _ in range(n)]


def row_put(s: Side) -> Callable[[], float]:
    keys = [key(i) for i in range(400)]

    def once() -> float:
        objs = _objects(s, 400)
        took = per(400, lambda: [s.backend.submit_put_task(k, o) for k, o in zip(keys, objs, strict=True)])
        for o in objs:
            o.ref_count_down()
        s.backend.batched_remove(keys)
        return took

    return once


def row_allocate(s: Side) -> Callable[[], float]:
    size = torch.Size([16384, 2])

    def work() -> None:
        for _ in range(300):
            s.backend.allocate(size, DTYPE, MemoryFormat.KV_T2D, busy_loop=False).ref_count_down()

    return lambda: per(300, work)


def _evicting(s: Side, n: int) -> Callable[[], float]:
    numbers, size = itertools.count(10_000_000), torch.Size([16384, 2])

    def once() -> float:
        def work() -> None:
            for k in keys:
                obj = s.backend.allocate(size, DTYPE, MemoryFormat.KV_T2D, busy_loop=False)
                s.backend.submit_put_task(k, obj)
                obj.ref_count_down()

        keys = [key(next(numbers)) for _ in range(n)]  # making LMCache's keys is not what is measured
        return per(n, work)

    return once


def row_evict(s: Side) -> Callable[[], float]:
    s.fill(512 * MIB // 65536, 65536)
    return _evicting(s, 200)


def row_evict_pinned(s: Side) -> Callable[[], float]:
    for k in s.fill(512 * MIB // 65536, 65536)[:5000]:
        s.backend.pin(k)
    return _evicting(s, 200 if s.ours else 10)


def row_holes(s: Side) -> Callable[[], float]:
    keys = s.fill(100_000, 4096)
    rest = s.fill((512 * MIB - 100_000 * 4096) // 65536, 65536, 200_000)
    held = [s.backend.get_blocking(k) for k in [*keys[1::2], *rest]]  # nothing else can be evicted
    s.backend.batched_remove(keys[::2])
    size, n = torch.Size([16384, 2]), 200 if s.ours else 5

    def work() -> None:
        assert held
        for _ in range(n):
            assert s.backend.allocate(size, DTYPE, MemoryFormat.KV_T2D, eviction=False) is None

    return lambda: per(n, work)


def row_batch(s: Side) -> Callable[[], float]:
    def once() -> float:
        def work() -> None:
            objs.extend(s.backend.batched_allocate(torch.Size([16384, 2]), DTYPE, 32, MemoryFormat.KV_T2D))

        objs: list[Any] = []
        took = per(1, work)
        for o in objs:
            o.ref_count_down()
        return took

    return lambda: statistics.median(once() for _ in range(20))


def row_leading(s: Side) -> Callable[[], float]:
    keys = s.fill(1000, 65536)
    return lambda: per(10, lambda: [s.backend.batched_contains(keys) for _ in range(10)])


def row_pin_touch(s: Side) -> Callable[[], float]:
    keys = s.fill(1000, 65536)

    def once() -> float:
        def work() -> None:
            s.backend.batched_contains(keys, pin=True)
            s.backend.touch_cache()

        took = per(1, work)
        for k in keys:
            s.backend.unpin(k)
        return took

    return once


def row_unpin(s: Side) -> Callable[[], float]:
    keys = s.fill(1000, 65536)

    def once() -> float:
        s.backend.batched_contains(keys, pin=True)
        s.backend.touch_cache()
        return per(1, lambda: [s.backend.unpin(k) for k in keys])

    return once


def row_unpin_batch(s: Side) -> Callable[[], float]:
    if not s.ours:
        return row_unpin(s)  # it has no call for many
    keys = s.fill(1000, 65536)

    def once() -> float:
        s.backend.batched_contains(keys, pin=True)
        s.backend.touch_cache()
        return per(1, lambda: s.backend.batched_unpin(keys))

    return once


def row_remove(s: Side) -> Callable[[], float]:
    def once() -> float:
        keys = s.fill(400, 65536)
        return per(400, lambda: [s.backend.remove(k) for k in keys])

    return once


def row_list(s: Side) -> Callable[[], float]:
    s.fill(100_000, 4096)
    return lambda: per(1, s.backend.get_keys)


ROWS: dict[str, Row] = dict(zip(GOALS, (
    row_contains, row_get, row_get_tensor, row_put, row_allocate, row_evict, row_evict_pinned, row_holes, row_batch,
    row_leading, row_pin_touch, row_unpin, row_unpin_batch, row_remove, row_list,
), strict=True))  # fmt: skip


def measure(name: str, row: Row, rounds: int) -> tuple[float, float]:
    """Median microseconds of LMCache's and of ours."""
    segment = f"bench-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    sides = [Side(False, 512, segment), Side(True, 512, segment)]
    try:
        work = [row(side) for side in sides]
        seen: list[list[float]] = [[], []]
        for _ in range(rounds):
            for one, times in zip(work, seen, strict=True):
                times.append(one())
        del work
    finally:
        for side in sides:
            side.backend.close()
        shmcache.unlink(segment, force=True)
    return statistics.median(seen[0]), statistics.median(seen[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="rows whose name contains this")
    args = parser.parse_args()
    print(f"{'microseconds':46}{'LMCache':>10}{'shmcache':>10}{'ratio':>9}{'goal':>8}")
    out = {}
    for name, row in ROWS.items():
        if args.only and args.only not in name:
            continue
        theirs, ours = measure(name, row, args.rounds)
        out[name] = {"lmcache": theirs, "shmcache": ours, "ratio": theirs / ours, "goal": GOALS[name]}
        print(f"{name:46}{theirs:>10.2f}{ours:>10.2f}{theirs / ours:>8.2f}x{GOALS[name]:>7}x", flush=True)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    sys.exit(main())
