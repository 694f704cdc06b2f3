"""Soaks: workers that do everything at once, killed at random, with every read checked byte for byte."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest
from hostile import (
    KIB,
    MIB,
    Patience,
    assert_only_published,
    check_stamp,
    eventually,
    join,
    small,
    stamp,
    uniform,
)

import shmcache


def random_work(cache: Any, dice: random.Random, keys: int, seconds: float, least: int = 0) -> int:
    """One process's share; how many objects it has read and found right: `least`, also where that takes longer."""
    kv = cache.namespace("kv")
    sizes = [4 * KIB, 16 * KIB, 60 * KIB, 100 * KIB]
    checked = 0
    patience = Patience(seconds)
    while patience.lasts(checked >= least):
        key = dice.randrange(keys)
        what = dice.random()
        if what < 0.25:
            obj = kv.allocate(dice.choice(sizes))
            if obj is not None:
                with obj:
                    stamp(obj, key)
                    kv.put(key, obj, parent=key - 1 if key % 3 else None)
        elif what < 0.55:
            obj = kv.get(key)
            if obj is not None:
                with obj:
                    check_stamp(obj, key)
                    checked += 1
        elif what < 0.7:
            run = [(key + i) % keys for i in range(4)]
            with kv.lookup(run, pin=True) as hit:
                for i in range(hit.n):
                    with hit.get(i) as obj:
                        check_stamp(obj, run[i])
                        checked += 1
        elif what < 0.8:
            kv.remove(key)
        elif what < 0.87:
            with kv.reserve(key, dice.choice(sizes)) as r:
                if r.state == "WRITE":
                    stamp(r.obj, key)
                    if dice.random() < 0.8:
                        r.put()
                elif r.state == "PUBLISHED":
                    check_stamp(r.obj, key)
                elif r.state == "PENDING":
                    obj = r.wait(timeout=0.01)
                    if obj is not None:
                        with obj:
                            check_stamp(obj, key)
        elif what < 0.9:
            objs = kv.allocate_many(16 * KIB, n=3)
            if objs is not None:
                run = [(key + i) % keys for i in range(3)]
                for k, obj in zip(run, objs, strict=True):
                    stamp(obj, k)
                kv.put_many(run, objs)
                for obj in objs:
                    obj.release()
        elif what < 0.94:
            for i, obj in enumerate(kv.get_many([(key + i) % keys for i in range(8)])):
                if obj is not None:
                    check_stamp(obj, (key + i) % keys)
                    checked += 1
        elif what < 0.97:
            if kv.pin(key):
                kv.touch([key])
                kv.unpin(key)
        elif what < 0.98:
            kv.allocate(100 * KIB, timeout=0.002)
        elif what < 0.985:
            kv.clear()
        elif what < 0.987:
            kv.bump()
        else:
            cache.reap()
    return checked


def test_random_kills_of_four_workers(name, fork):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    def worker(child: Any) -> None:
        cache = join(name, lock_timeout=30.0)
        child.tell("working")
        random_work(cache, random.Random(seed ^ os.getpid()), 60, 100.0)

    with small(name, capacity=2 * MIB, region_bytes=512 * KIB, lock_timeout=30.0) as cache:
        kv = cache.namespace("kv")
        children = [fork(worker) for _ in range(4)]
        for child in children:
            assert child.listen() == "working"
        kills = 0
        patience = Patience(9.0)
        while patience.lasts(kills > 5):
            time.sleep(dice.random() * 0.03)
            i = dice.randrange(4)
            children[i].kill()
            assert children[i].wait() == -signal.SIGKILL, "it ended by itself: see what it said"
            children[i].close()
            kills += 1
            children[i] = fork(worker)
            assert children[i].listen() == "working"
            key = dice.randrange(60)
            obj = kv.get(key)
            if obj is not None:
                with obj:
                    check_stamp(obj, key)
            if kills % 10 == 0:
                assert cache.verify() == []
        for child in children:
            child.kill()
            assert child.wait() == -signal.SIGKILL
        cache.reap()
        s = cache.stats()
        print(f"{kills + 4} kills, {s.lock.recoveries} inside the lock, {s.lock.acquisitions} calls")
        assert kills > 5
        assert s.counts.attachments == 1
        assert s.counts.holds == 0
        assert_only_published(cache)
        for key in kv.keys():
            with kv.get(key) as obj:
                check_stamp(obj, key)
        kv.clear()
        assert cache.stats().bytes.used == 0
        assert cache.verify() == []
    shmcache.unlink(name)


@pytest.mark.slow
def test_a_long_soak_of_random_kills(name, fork):
    """The same for a minute, with everybody killed at once now and then."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    def worker(child: Any) -> None:
        cache = join(name, lock_timeout=30.0)
        child.tell("working")
        random_work(cache, random.Random(seed ^ os.getpid()), 200, 100.0)

    small(name, capacity=4 * MIB, region_bytes=1 * MIB).close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = [fork(worker) for _ in range(6)]
        for child in children:
            assert child.listen(30) == "working"
        time.sleep(dice.random() * 0.3)
        for child in children:
            child.kill()
        for child in children:
            assert child.wait() == -signal.SIGKILL
            child.close()
        with join(name) as cache:
            assert cache.stats().counts.attachments == 1
            assert cache.stats().counts.holds == 0
            assert_only_published(cache)
    shmcache.unlink(name)


def test_six_processes_on_few_keys_in_a_small_arena_never_see_a_wrong_stamp(name, fork):
    """A get is a miss, or a whole block of its own key: never nothing, never another's."""

    def worker(child: Any) -> None:
        cache = join(name, lock_timeout=30.0)
        child.tell("working")
        checked = random_work(cache, random.Random(os.getpid()), 12, 4.0, least=11)
        cache.close()
        child.tell(str(checked))

    with small(name, capacity=8 * 64 * KIB) as cache:
        children = [fork(worker) for _ in range(6)]
        for child in children:
            assert child.listen() == "working"
        checked = [int(child.listen(60) or -1) for child in children]
        for child in children:
            assert child.wait() == 0
        print(f"objects checked: {checked}")
        assert all(n > 10 for n in checked)
        assert cache.stats().counts.holds == 0
        assert cache.stats().counts.attachments == 1
        assert cache.stats().lock.recoveries == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def test_eight_processes_put_the_same_key_at_once(name, fork):
    """In each round one is first, all read its bytes, and one block is in use."""
    n, turns = 8, 150

    def racer(rank: int) -> Any:
        def main(child: Any) -> None:
            cache = join(name, lock_timeout=30.0)
            child.tell("ready")
            for i in range(turns):
                obj = cache.allocate(8 * KIB)
                obj.byte_array[:] = bytes([rank + 1]) * (8 * KIB)
                child.await_parent()
                first = cache.put(i, obj)
                obj.release()
                with cache.get(i) as found:
                    fill = uniform(found)
                assert fill == rank + 1 or not first
                child.tell(f"{int(first)} {fill}")
            cache.close()

        return main

    with small(name, capacity=8 * MIB) as cache:
        children = [fork(racer(rank)) for rank in range(n)]
        for child in children:
            assert child.listen() == "ready"
        firsts = set()
        for i in range(turns):
            for child in children:
                child.go()
            said = [tuple(map(int, child.listen().split())) for child in children]
            assert sum(first for first, _ in said) == 1, said
            assert len({fill for _, fill in said}) == 1, said
            firsts.add(said[0][1])
            assert cache.stats().counts.chunks == i + 1
        for child in children:
            assert child.wait() == 0
        print(f"{len(firsts)} of {n} were first at least once")
        s = cache.stats()
        assert s.bytes.used == turns * 8 * KIB
        assert s.duplicates == turns * (n - 1)
        assert s.counts.holds == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def test_counters_never_go_backwards_and_always_add_up_under_load(name, fork):
    def worker(child: Any) -> None:
        cache = join(name, lock_timeout=30.0)
        child.tell("working")
        random_work(cache, random.Random(os.getpid()), 60, 2.5)
        cache.close()

    with small(name, capacity=2 * MIB, region_bytes=512 * KIB) as cache:
        children = [fork(worker) for _ in range(4)]
        for child in children:
            assert child.listen() == "working"
        last = cache.stats()
        samples = 0
        patience = Patience(2.0)
        while patience.lasts(samples > 10):
            s = cache.stats()
            assert s.bytes.used + s.bytes.free == s.bytes.ready <= s.bytes.capacity, s.bytes
            assert s.bytes.evictable + s.bytes.pinned <= s.bytes.used, s.bytes
            assert 0 <= s.counts.complete <= s.counts.chunks < 1 << 20, s.counts
            assert 0 <= s.counts.holds < 1 << 20 and 1 <= s.counts.attachments <= 5, s.counts
            for counter in ("hits", "misses", "stores", "evictions", "aborts", "duplicates", "reaps"):
                assert getattr(s, counter) >= getattr(last, counter), counter
            last = s
            samples += 1
        for child in children:
            assert child.wait() == 0
        assert samples > 10
        eventually(lambda: cache.stats().counts.attachments == 1, "all have left")
        assert_only_published(cache)
    shmcache.unlink(name)
