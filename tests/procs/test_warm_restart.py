"""Everybody is killed in the middle of whatever it did; the next engine starts warm."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from hostile import (
    KIB,
    MIB,
    PROMPT,
    Stopwatch,
    assert_only_published,
    check_stamp,
    instance,
    join,
    small,
    stamp,
    store,
    uniform,
)

import shmcache


def busy(cache: Any, number: int, told: Any) -> None:
    """Stores, reads, pins and removes for ever; every 8th chunk has four parts."""
    kv = cache.namespace("kv")
    parts = cache.namespace("parts", parts=4)
    dice = random.Random(os.getpid())
    n = 0
    while True:
        key = (number << 24) + n
        with kv.allocate(dice.choice([4, 8, 20, 64]) * KIB, timeout=20.0) as obj:
            stamp(obj, key)
            kv.put(key, obj)
        if n % 8 == 0:
            for part in range(4):
                with parts.allocate(8 * KIB, timeout=20.0) as obj:
                    stamp(obj, key + part)
                    parts.put(key, obj, part=part)
        back = (number << 24) + max(0, n - dice.randrange(1, 40))
        with kv.lookup([back, back + 1, back + 2], pin=True) as hit:
            for i in range(hit.n):
                with hit.get(i) as obj:
                    check_stamp(obj, back + i)
        if n % 16 == 0:
            kv.remove((number << 24) + n - 20)
            if n < 100:
                kv.pin(back)
        reservation = kv.reserve(f"r{n}", 4 * KIB)
        if n % 2:
            reservation.release()
        n += 1
        if n == 50:
            told()


def check_all(cache: Any) -> int:
    """Every published chunk is a hit with the right bytes; how many there are."""
    kv = cache.namespace("kv")
    parts = cache.namespace("parts")
    keys = [key for key in kv.keys() if isinstance(key, int)]
    for key, obj in zip(keys, kv.get_many(keys), strict=True):
        assert obj is not None
        with obj:
            check_stamp(obj, key)
    complete = parts.keys()
    for key in complete:
        with parts.lookup([key], pin=True) as hit:
            assert hit.n == 1
            for part in range(4):
                with hit.get(0, part=part) as obj:
                    check_stamp(obj, key + part)
    return len(keys) + len(complete)


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_after_kill_9_of_everybody_all_that_was_published_is_there(name, fork, policy):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    def worker(number: int) -> Any:
        def main(child: Any) -> None:
            cache = small(name, capacity=16 * MIB, region_bytes=4 * MIB, policy=policy, prefault="background")
            busy(cache, number, lambda: child.tell("busy"))

        return main

    found = None
    for _ in range(6):
        children = [fork(worker(i + 1)) for i in range(4)]
        for child in children:
            assert child.listen(60) == "busy"
        time.sleep(dice.random() * 0.05)
        for child in children:
            child.kill()
        for child in children:
            assert child.wait() == -signal.SIGKILL
            child.close()
        watch = Stopwatch()
        with join(name) as cache:
            assert watch.seconds < PROMPT
            assert found in (None, instance(cache)), "the same generation all along"
            found = instance(cache)
            s = cache.stats()
            assert s.counts.attachments == 1, "attaching reaped all"
            assert s.counts.holds == 0
            assert_only_published(cache)
            n = check_all(cache)
            assert n > 50
            assert cache.stats().counts.holds == 0
            assert_only_published(cache)
    with join(name) as cache:
        for kv in (cache.namespace("kv"), cache.namespace("parts")):
            kv.clear()
        # chunks of which only some parts had been put are gone with clear, too
        assert cache.stats().bytes.used == 0
        assert cache.verify() == []
    shmcache.unlink(name)


def test_a_new_interpreter_finds_what_a_killed_one_had_stored(name, fork):
    """Not a child of the old one, and with its own layout of memory."""

    def main(child: Any) -> None:
        cache = small(name, capacity=8 * MIB)
        kv = cache.namespace("llama", descriptor={"model": "llama", "dtype": "bf16"})
        for i in range(32):
            assert store(kv, f"chunk {i}", i + 1, 64 * KIB)
        unfinished = kv.allocate(64 * KIB)
        unfinished.byte_array[:100] = b"x" * 100
        child.tell("stored")
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(main)
    assert child.listen() == "stored"
    child.wait()
    code = f"""
import shmcache
with shmcache.open({name!r}, capacity="8MiB", prefault="wait") as cache:
    kv = cache.namespace("llama", descriptor={{"dtype": "bf16", "model": "llama"}})
    keys = [f"chunk {{i}}" for i in range(40)]
    with kv.lookup(keys, pin=True) as hit:
        assert hit.n == 32, hit.n
        for i in range(hit.n):
            with hit.get(i) as obj:
                assert bytes(obj.byte_array) == bytes([i + 1]) * 65536, i
    s = cache.stats()
    assert s.bytes.used == 32 * 65536, s
    assert s.counts.attachments == 1, s
    assert cache.verify() == []
print("warm")
"""
    folder = os.path.dirname(os.path.dirname(shmcache.__file__))
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=folder), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "warm"
    shmcache.unlink(name)


def test_counters_and_events_outlive_their_processes(name, fork):
    def main(child: Any) -> None:
        cache = small(name)
        for i in range(5):
            store(cache, i, i)
        cache.get(0).release()
        cache.get("absent")
        cache.remove(4)
        child.tell("done")
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(main)
    assert child.listen() == "done"
    child.wait()
    with join(name) as cache:
        s = cache.stats()
        assert (s.stores, s.hits, s.misses) == (5, 1, 1)
        events = cache.events()
        assert [(e.kind, e.key, e.pid) for e in events] == [
            *(("admit", i, child.pid) for i in range(5)),
            ("remove", 4, child.pid),
        ]
        assert [e.seq for e in events] == list(range(6))
        with cache.get(3) as obj:
            uniform(obj, 3)
    shmcache.unlink(name)
