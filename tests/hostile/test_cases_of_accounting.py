"""Public fault reports that no other test meets: counts of holds, pins and bytes, order of eviction, keys."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import time

import pytest
from hostile import KIB, MIB, PROMPT, Stopwatch, assert_only_published, join, small, store, uniform

import shmcache

GRAN = 4096


@pytest.fixture
def cache(name):
    with small(name, 8 * GRAN) as cache:
        yield cache
        assert_only_published(cache)
        assert cache.stats().counts.holds == 0
        cache.unlink()


def test_rounds_of_pins_and_clears_lose_no_space(cache):
    """B02"""
    r = random.Random(2)
    for n in range(500):
        for key in r.sample(range(32), 4):
            store(cache, key, key)
        pinned = [key for key in r.sample(cache.keys(), 2) if cache.pin(key)]
        if n % 50 == 0:
            cache.clear()
            s = cache.stats().bytes
            assert s.free == s.ready - GRAN * len(pinned) and s.pinned == GRAN * len(pinned)
        for key in pinned:
            assert cache.unpin(key)
    cache.clear()
    assert cache.stats().bytes.free == 8 * GRAN
    with cache.allocate(8 * GRAN):
        pass


LEAVING = {"close": "hit = None; c.close()", "exit": "sys.exit()", "os._exit": "os._exit(0)"}


@pytest.mark.parametrize("leave", LEAVING)
def test_who_leaves_with_pins_takes_them_along(name, leave):
    """B03: other processes can evict all, at once."""
    with small(name, 8 * GRAN) as cache:
        for i in range(5):
            store(cache, i)
        code = f"""
import os, sys, shmcache
c = shmcache.attach({name!r}, prefault="lazy")
hit = c.lookup(list(range(5)), pin=True)
assert hit.n == 5 and all(c.pin(i) for i in range(5))
{LEAVING[leave]}
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        objs = cache.default.allocate_many(GRAN, None, 8, timeout=5.0)
        assert objs is not None and cache.keys() == []
        for obj in objs:
            obj.release()
        cache.unlink()


def test_a_cancelled_task_leaves_no_pin(name, fork):
    """B04: without another call of that process."""
    with small(name, 8 * GRAN) as cache:
        store(cache, "k")

        async def request(mine, inside):
            with mine.lookup(["k"], pin=True) as hit:
                assert hit.n == 1
                inside.set()
                await asyncio.sleep(60)

        async def cancelled(mine):
            inside = asyncio.Event()
            task = asyncio.create_task(request(mine, inside))
            await inside.wait()
            assert cache.stats().bytes.pinned == GRAN
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        def process(child):
            mine = join(name)
            asyncio.run(cancelled(mine))
            child.tell()
            child.await_parent()

        child = fork(process)
        assert child.listen()
        assert cache.stats().bytes.pinned == 0 and cache.stats().counts.holds == 0
        assert cache.clear() == 1
        child.go()
        assert child.wait() == 0
        cache.unlink()


def test_a_second_unpin_says_no_and_counts_nothing(cache):
    """B05, B113: never below zero."""
    store(cache, "k")
    assert cache.pin("k") and cache.unpin("k") and not cache.unpin("k")
    assert cache.stats().bytes.pinned == 0 and cache.stats().counts.holds == 0
    assert cache.pin("k") and cache.unpin("k") and cache.clear() == 1


@pytest.mark.parametrize("first", ["release", "unpin"])
def test_a_removed_key_is_free_after_the_last_of_reference_and_pin(cache, first):
    """B07: in either order."""
    store(cache, "k")
    obj = cache.get("k")
    assert cache.pin("k") and cache.remove("k")
    drops = [obj.release, lambda: cache.unpin("k")]
    drops[first == "unpin"]()
    assert cache.stats().bytes.used == GRAN
    drops[first != "unpin"]()
    assert cache.stats().bytes.used == 0


def test_skipped_puts_count_nothing(cache):
    """B08"""
    store(cache, "k")
    for _ in range(100):
        assert not store(cache, "k", 2) and cache.contains("k")
    assert cache.stats().counts.holds == 0
    assert cache.remove("k") and cache.stats().bytes.used == 0


def test_thousands_of_gets_by_four_processes_leave_the_arena_free(name, fork):
    """B09"""
    with small(name, 16 * GRAN) as cache:
        for i in range(16):
            store(cache, i, i)

        def reader(child):
            with join(name) as mine:
                for i in range(2000):
                    with mine.get(i % 16) as obj:
                        assert obj.byte_array[0] == i % 16

        children = [fork(reader) for _ in range(4)]
        assert [child.wait(60) for child in children] == [0] * 4
        assert cache.stats().counts.holds == 0
        for i in range(16, 32):
            assert store(cache, i)
        assert cache.keys() == list(range(16, 32))
        cache.unlink()


def test_a_batch_that_fails_in_the_middle_drifts_by_nothing(cache):
    """B10"""
    store(cache, "old")
    for _ in range(300):
        objs = cache.default.allocate_many(GRAN, None, 4)
        objs[2].release()
        with pytest.raises(shmcache.StaleHandleError):
            cache.default.put_many(["a", "b", "c", "d"], objs)
        assert cache.keys() == ["old"]
        for obj in objs:
            obj.release()
    assert cache.stats().bytes.used == GRAN


def test_the_death_of_one_writer_leaves_anothers_block(name, fork):
    """B11"""
    with small(name, 8 * GRAN) as cache:

        def writer(child):
            mine = join(name)
            with mine.allocate(GRAN) as obj:
                child.tell()
                child.await_parent()
                obj.byte_array[:] = b"a" * GRAN
                assert mine.put("a", obj)
            mine.close()

        a, b = fork(writer), fork(writer)
        assert a.listen() and b.listen()
        b.kill()
        b.wait()
        assert cache.reap().blocks == 1
        a.go()
        assert a.wait() == 0
        with cache.get("a") as obj:
            uniform(obj, ord("a"))
        assert_only_published(cache)
        cache.unlink()


def test_a_view_of_an_object_that_was_dropped_keeps_its_block(cache):
    """B13: no view of ours reaches into a block that is somebody else's by now, unless it was released by hand."""
    views = [cache.allocate(GRAN).byte_array, cache.allocate(GRAN).tensor]
    gc.collect()
    others = [obj for _ in range(8) if (obj := cache.allocate(GRAN)) is not None]
    for obj in others:
        obj.byte_array[:] = bytes(GRAN)
    for view in views:
        view[:] = bytes([9]) * GRAN if isinstance(view, memoryview) else 9
    for obj in others:
        uniform(obj, 0)
        obj.release()
    del views, view
    gc.collect()


def test_a_key_twice_in_a_batch_takes_one_block(cache):
    """B23"""
    objs = cache.default.allocate_many(GRAN, None, 3)
    assert cache.default.put_many(["k", "k", "j"], objs) == [True, False, True]
    for obj in objs:
        obj.release()
    assert cache.stats().bytes.used == 2 * GRAN


def test_what_was_stored_or_touched_last_goes_last(name):
    """B26, B114: with exact counts. (A get is not a touch, a lookup is.)"""
    with small(name, 4 * GRAN) as cache:
        for key in "abcd":
            store(cache, key)
        assert cache.lookup(["a"]).n == 1
        before = cache.stats()
        for key, victim in zip("ef", "bc", strict=True):
            store(cache, key)
            assert not cache.contains(victim)
        assert cache.keys() == ["d", "a", "e", "f"]
        for i in range(50):
            store(cache, i)
        s = cache.stats()
        assert s.evictions - before.evictions == 52
        gets = [cache.get(key) for key in (48, 49, "gone", "d")]
        assert [obj is not None for obj in gets] == [True, True, False, False]
        after = cache.stats()
        assert (after.hits - s.hits, after.misses - s.misses) == (2, 2)
        del gets
        gc.collect()
        cache.unlink()


def test_keys_are_listed_while_another_process_changes_them(name, fork):
    """B30: it ends, names nothing twice, and misses nothing that was there all the time."""
    with small(name, 4 * MIB) as cache:
        for i in range(500):
            store(cache, i, nbytes=512)

        def changer(child):
            with join(name) as mine:
                r, end = random.Random(1), time.monotonic() + 2
                child.tell()
                while time.monotonic() < end:
                    key = 500 + r.randrange(500)
                    if not mine.remove(key):
                        store(mine, key, nbytes=512)

        child = fork(changer)
        assert child.listen()
        while cache.stats().counts.attachments > 1:
            keys = cache.keys()
            assert len(keys) == len(set(keys)) and set(range(500)) <= set(keys)
        assert child.wait() == 0
        assert_only_published(cache)
        cache.unlink()


def test_two_that_need_more_than_half_wait_for_each_other_and_both_succeed(name, fork):
    """B33: nobody holds a part of his batch while he waits."""
    with small(name, 10 * GRAN) as cache:

        def needs_six(child):
            with join(name) as mine:
                for _ in range(20):
                    objs = mine.default.allocate_many(GRAN, None, 6, timeout=30.0)
                    assert objs is not None
                    time.sleep(0.002)
                    for obj in objs:
                        obj.release()

        children = [fork(needs_six) for _ in range(2)]
        assert [child.wait(60) for child in children] == [0, 0]
        assert_only_published(cache)
        cache.unlink()


FIELDS = {
    "model_name": "other",
    "world_size": 4,
    "worker_id": 1,
    "chunk_hash": 12346,
    "dtype": "float16",
    "request_configs": {"lmcache.tag.tenant": "b"},
}


def engine_key(**changed):
    import torch

    from shmcache.keys import CacheEngineKey

    fields = {"model_name": "m", "world_size": 2, "worker_id": 0, "chunk_hash": 12345, "dtype": "bfloat16"}
    fields |= {"request_configs": {"lmcache.tag.tenant": "a"}, **changed}
    fields["dtype"] = getattr(torch, fields["dtype"])
    return CacheEngineKey(**fields)


def test_keys_that_differ_in_one_field_are_different_keys():
    """B44"""
    base = engine_key()
    keys = [base, *(engine_key(**{field: value}) for field, value in FIELDS.items()), base.split_layers(2)[0]]
    keys += [base.split_layers(2)[1]]
    assert len({key.to_string() for key in keys}) == len(set(keys)) == len(keys)
    assert engine_key() == base and hash(engine_key()) == hash(base)


def test_interpreters_with_other_hash_seeds_find_each_others_keys(name):
    """B45: neither str hashes nor addresses are in a key."""
    with small(name, MIB) as cache:
        code = f"""
import sys, shmcache
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_cases_of_accounting import engine_key
with shmcache.attach({name!r}, prefault="lazy") as c:
    texts = [engine_key().to_string(), engine_key(request_configs=None).to_string()]
    keys = [*texts, "text", b"bytes", 2**64 + 1, 7, -1]
    for key in keys:
        with c.allocate(100) as obj:
            c.put(key, obj)
    print(repr(keys))
"""
        said = set()
        for seed in ("1", "2"):
            path = os.pathsep.join(p for p in sys.path if p)
            env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
            run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
            assert run.returncode == 0, run.stderr
            said.add(run.stdout)
        assert len(said) == 1
        s = cache.stats()
        assert (s.stores, s.duplicates, s.counts.chunks) == (7, 7, 7)
        cache.unlink()


@pytest.mark.timeout(100)
def test_one_death_costs_the_same_among_many_entries(name, fork):
    """B60, B118: neither a reap nor an eviction looks at what is not concerned."""
    costs = {}
    for n in (500, 200_000):  # so many that looking at each takes some ms
        with small(f"{name}{n}", 64 * MIB, max_chunks=n, align=64) as cache:
            for i in range(0, n, 500):
                objs = cache.default.allocate_many(64, None, 500)
                assert all(cache.default.put_many(list(range(i, i + 500)), objs))
                shmcache.release_many(objs)
            hit = cache.lookup(list(range(min(n // 4, 4000))), pin=True, touch=False)  # held ones, at the cold end

            def holder(child, name=cache.name):
                mine = join(name)
                kept = [mine.get(i) for i in range(3)]
                child.tell(str(len(kept)))
                child.await_parent()

            reaps, evictions = [], []
            for i in range(7):
                child = fork(holder)
                assert child.listen()
                child.kill()
                child.wait()
                watch = Stopwatch()
                assert cache.reap().slots == 1
                reaps.append(watch.seconds)
                for j in range(40):
                    watch = Stopwatch()
                    store(cache, f"{i} {j}", nbytes=64)
                    evictions.append(watch.seconds)
            costs[n] = (sorted(reaps)[3], sorted(evictions)[140])
            assert cache.stats().evictions >= 250
            hit.release()
            cache.unlink()
    few, many = costs[500], costs[200_000]
    assert many[0] < 0.2 and many[0] < 5 * few[0] + 0.002, costs
    assert many[1] < 5 * few[1] + 0.0002, costs


def test_pinned_bytes_end_at_nothing_whatever_the_order(name, fork):
    """B113: two pins, a remove, two unpins; and a death in the middle."""
    with small(name, 8 * GRAN) as cache:

        def sequence(child):
            with join(name) as mine:
                for n in range(200):
                    store(mine, n)
                    assert mine.pin(n) and mine.pin(n)
                    mine.remove(n)
                    if n == 150:
                        child.tell()
                        child.await_parent()
                    assert mine.unpin(n) and mine.unpin(n) and not mine.unpin(n)

        child = fork(sequence)
        assert child.listen()
        child.kill()
        child.wait()
        cache.reap()
        s = cache.stats()
        assert (s.bytes.pinned, s.counts.holds, s.bytes.used) == (0, 0, 0)
        assert_only_published(cache)
        cache.unlink()


def test_the_time_of_a_call_on_a_full_cache_of_held_chunks_is_short(name):
    """B118: of 4,000 held ones each is passed once."""
    with small(name, 4000 * 64, max_chunks=4000, align=64, region_bytes=4000 * 64) as cache:
        for i in range(4000):
            store(cache, i, nbytes=64)
        hit = cache.lookup(list(range(4000)), pin=True)
        watch = Stopwatch()
        for _ in range(200):
            assert cache.allocate(64) is None
        assert watch.seconds < PROMPT / 5
        hit.release()
        cache.unlink()


def test_the_capacity_is_had_in_one_piece_at_any_alignment(name):
    """B37, B110: addresses are aligned, not only offsets. One byte more can never be had."""
    for align in (64, GRAN, 64 * KIB):
        with small(f"{name}{align}", MIB, align=align) as cache:
            with cache.allocate(MIB) as obj:
                assert obj.data_ptr % align == 0
            with pytest.raises(shmcache.CapacityError):
                cache.allocate(MIB + 1)
            cache.unlink()
