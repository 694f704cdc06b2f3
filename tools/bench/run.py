#!/usr/bin/env python3
"""What shmcache costs, by itself and through Python, against floors measured in the same run.

    tools/bench/run.py [--seconds 20] [--json FILE]

Medians over interleaved rounds, so that a busy machine shifts a row and its floor alike; read the
ratios. Absolute times hold only for the machine they were taken on. The C core is measured by
core_bench.c, built twice: with its undo journal and without. Comparison with peers is not in here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shmcache
from shmcache._core import ffi, lib

ROOT = Path(__file__).parents[2]
GRAN = 4096


def build_core_bench(folder: Path, *, journal: bool) -> Path:
    out = folder / f"core_bench{'' if journal else '_nojournal'}"
    sources = [str(p) for f in ("native", "native/core", "native/os") for p in sorted((ROOT / f).glob("*.c"))]
    flags = ["-O2", "-std=c11", "-D_GNU_SOURCE", "-pthread", *([] if journal else ["-DSHMC_NO_JOURNAL", "-w"])]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, *flags, "-o", str(out), str(ROOT / "tools/bench/core_bench.c"), *sources], check=True)
    return out


def core(rounds: int) -> dict[str, dict[str, float]]:
    """{measure: {with, without}}; the two builds take turns."""
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            "with": build_core_bench(Path(folder), journal=True),
            "without": build_core_bench(Path(folder), journal=False),
        }
        seen: dict[str, dict[str, list[float]]] = {}
        for _ in range(rounds):
            for which, program in programs.items():
                out = json.loads(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
                for name, value in out.items():
                    seen.setdefault(name, {}).setdefault(which, []).append(value)
    return {name: {which: statistics.median(v) for which, v in both.items()} for name, both in seen.items()}


class Row:
    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        times: int,
        floor: str,
        floor_call: Callable[[], object],
        floor_times: int,
        goal: float | None,
    ) -> None:
        self.name, self.call, self.times, self.goal = name, call, times, goal
        self.floor, self.floor_call, self.floor_times = floor, floor_call, floor_times
        self.us: list[float] = []
        self.floor_us: list[float] = []

    @staticmethod
    def once(call: Callable[[], object], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times * 1e6

    def round(self) -> None:
        self.us.append(self.once(self.call, self.times))
        self.floor_us.append(self.once(self.floor_call, self.floor_times))


def rows(
    cache: shmcache.SharedCache, full: shmcache.SharedCache, plain: shmcache.SharedCache, summed: shmcache.SharedCache
) -> list[Row]:
    ns = cache.default
    keys = [hashlib.sha256(str(i).encode()).digest() for i in range(1000)]
    for k in keys:
        with ns.allocate(GRAN) as obj:
            ns.put(k, obj)
    packed = shmcache.pack(keys)
    key = keys[500]
    base = torch.empty(1 << 20, dtype=torch.uint8)
    handle = cache._attachment.handle
    count = 0

    def fresh() -> bytes:
        nonlocal count
        count += 1
        return count.to_bytes(32, "little")

    def put() -> None:
        obj = ns.allocate(GRAN)
        ns.put(fresh(), obj)
        obj.release()

    def evicting() -> None:
        obj = full.allocate(GRAN)
        full.put(fresh(), obj)
        obj.release()

    def view() -> None:
        obj = ns.get(key)
        _ = obj.tensor
        obj.release()

    def pinned() -> None:
        with ns.lookup(packed, pin=True):
            pass

    def batch() -> None:
        for obj in ns.allocate_many(GRAN, None, 32):
            obj.release()

    source = torch.ones(2 << 20, dtype=torch.uint8)
    into = torch.empty(2 << 20, dtype=torch.uint8)

    def store() -> None:
        obj = full.allocate(2 << 20)
        obj.tensor.copy_(source)
        full.put(fresh(), obj)
        obj.release()

    # by one thread, unlike torch's copies: a checksum is computed by one too
    raw, buffer = bytes(source.numpy()), bytearray(2 << 20)

    def stores(where: shmcache.SharedCache) -> Callable[[], None]:
        def call() -> None:
            with where.allocate(2 << 20) as obj:
                obj.byte_array[:] = raw
                where.put(fresh(), obj)

        return call

    def loads(verify: bool) -> Callable[[], None]:
        def call() -> None:
            with summed.get(b"large", verify=verify) as obj:
                buffer[:] = obj.byte_array
            summed.touch([b"large"])  # so that the row before does not evict it

        return call

    def call() -> None:
        lib.shmc_check(handle)  # into C and back, and no lock

    def strided() -> None:
        base.as_strided((64, 64), (64, 1), 4096)

    def joined() -> None:
        b"".join(keys)

    def nothing() -> None:
        pass

    for i in range(20_000):
        if full.stats().evictions:
            break
        with full.allocate(GRAN) as obj:
            full.put(i, obj)
    with summed.allocate(2 << 20) as obj:
        obj.byte_array[:] = raw
        summed.put(b"large", obj)
    return [
        Row("contains, one key", lambda: ns.contains(key), 2000, "a call into C", call, 2000, None),
        Row("get + release", lambda: ns.get(key).release(), 1000, "a call into C", call, 2000, None),
        Row("get + tensor + release", view, 500, "as_strided", strided, 1000, None),
        Row("allocate + release", lambda: ns.allocate(GRAN).release(), 1000, "a call into C", call, 2000, None),
        Row("allocate + put + release", put, 500, "a call into C", call, 2000, None),
        Row("the same, evicting", evicting, 300, "a call into C", call, 2000, None),
        Row("allocate_many of 32 + release", batch, 50, "a call into C", call, 2000, None),
        Row("lookup of 1,000 keys, a list", lambda: ns.lookup(keys, touch=False), 20, "b''.join", joined, 100, None),
        Row("lookup of 1,000 keys, packed", lambda: ns.lookup(packed, touch=False), 20, "b''.join", joined, 100, None),
        Row("the same, pin + touch + release", pinned, 20, "b''.join", joined, 100, None),
        Row("touch 1,000 keys, packed", lambda: ns.touch(packed), 20, "b''.join", joined, 100, None),
        Row("store 2 MiB with copy, evicting", store, 10, "a bare copy of 2 MiB", lambda: into.copy_(source), 10, None),
        Row("store 2 MiB with a checksum", stores(summed), 10, "without", stores(plain), 10, None),
        Row("load 2 MiB, verified", loads(True), 10, "not verified", loads(False), 10, None),
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=20.0, help="how long the Python rows take turns")
    options.add_argument("--json", type=Path, help="write all figures there")
    chosen = options.parse_args()

    figures = core(rounds=3)
    versions = f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, {versions}")
    print("\nC core, ns                             with journal   without   ratio")
    for name in (
        "hit_ns",
        "get_release_ns",
        "touch_ns",
        "alloc_free_ns",
        "alloc_put_remove_ns",
        "lookup_pin_touch_ns_per_key",
    ):
        both = figures[name]
        print(f"  {name:<36} {both['with']:>12.0f} {both['without']:>9.0f} {both['with'] / both['without']:>7.2f}")

    names = [f"bench{os.getpid()}-{i}" for i in range(4)]
    with (
        shmcache.create(names[0], "512MiB", max_chunks=400_000, prefault="wait") as cache,
        shmcache.create(names[1], "64MiB", prefault="wait") as full,
        shmcache.create(names[2], "64MiB", prefault="wait") as plain,
        shmcache.create(names[3], "64MiB", prefault="wait", checksum="xxh3") as summed,
    ):
        try:
            table = rows(cache, full, plain, summed)
            end = time.monotonic() + chosen.seconds
            while time.monotonic() < end or len(table[0].us) < 5:
                for row in table:
                    row.round()
            python = {}
            print("\nPython, us                              median     floor   ratio   floor is")
            for row in table:
                us, floor = statistics.median(row.us), statistics.median(row.floor_us)
                python[row.name] = {"us": us, "floor_us": floor, "rounds": len(row.us)}
                print(f"  {row.name:<34} {us:>10.2f} {floor:>9.2f} {us / floor:>7.1f}   {row.floor}")
        finally:
            for each in (cache, full, plain, summed):
                each.unlink()
    plan = ffi.new("shmc_geometry *", {"capacity": 64 << 30, "align": GRAN, "max_attachments": 64})
    lib.shmc_plan(plan)
    share = plan.control_bytes / plan.capacity
    per_entry = 128 + 112 + 4 * (plan.n_buckets + plan.n_part_buckets) / plan.max_chunks
    print(
        f"\nmemory: {per_entry:.0f} bytes for a published chunk of one part; all tables {share:.3%} of a 64 GiB arena"
    )
    if chosen.json:
        chosen.json.write_text(
            json.dumps(
                {"core": figures, "python": python, "bytes_per_entry": per_entry, "control_share": share}, indent=1
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
