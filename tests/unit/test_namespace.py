"""put, get, lookup, pins, remove, bump, reserve: one process, each promise a test."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

import shmcache

GRAN = 4096


@pytest.fixture
def cache(name: str) -> Iterator[shmcache.SharedCache]:
    with shmcache.create(name, 64 * GRAN, prefault="wait") as cache:
        yield cache
        assert cache.verify() == []
        cache.unlink()


def store(ns: shmcache.Namespace, key: object, fill: int = 1, size: int = GRAN, **more: object) -> bool:
    obj = ns.allocate(size)
    assert obj is not None
    with obj:
        obj.byte_array[:] = bytes([fill]) * size
        return ns.put(key, obj, **more)  # type: ignore[arg-type]


def test_first_bytes_stay_and_the_second_writer_keeps_its_object(cache: shmcache.SharedCache) -> None:
    ns = cache.default
    assert store(ns, "k", 1)
    obj = ns.allocate(GRAN)
    assert obj is not None
    obj.byte_array[:] = b"\2" * GRAN
    used = cache.stats().bytes.used
    assert ns.put("k", obj) is False
    assert cache.stats().bytes.used == used and cache.stats().duplicates == 1
    assert bytes(obj.byte_array) == b"\2" * GRAN
    assert ns.put("other", obj) is True
    obj.release()
    with ns.get("k") as got:
        assert bytes(got.byte_array) == b"\1" * GRAN


def test_bytes_turn_read_only_at_put(cache: shmcache.SharedCache) -> None:
    obj = cache.allocate(10)
    assert obj is not None
    obj.byte_array[0] = 1
    cache.put("k", obj)
    with pytest.raises(TypeError):
        obj.byte_array[0] = 2
    obj.release()


def test_what_cannot_be_put_is_refused_before_any_effect(cache: shmcache.SharedCache, name: str) -> None:
    ns, other = cache.default, cache.namespace("other")
    a, b = ns.allocate_many(GRAN, None, 2)
    assert ns.put("a", a)
    with pytest.raises(ValueError, match="before"):
        ns.put("again", a)
    with pytest.raises(ValueError):
        other.put("b", b)
    with pytest.raises(ValueError):
        ns.put_many(["x", "y"], [b, b])
    with pytest.raises(ValueError):
        ns.put_many(["x", "y"], [b])
    released = ns.allocate(GRAN)
    released.release()
    with pytest.raises(shmcache.StaleHandleError):
        ns.put("r", released)
    with pytest.raises(shmcache.StaleHandleError):
        ns.put_many(["x", "r"], [b, released])
    with pytest.raises(ValueError):
        ns.put("part", b, part=1)
    with shmcache.attach(name) as second, pytest.raises(ValueError):
        second.put("x", b)
    assert ns.keys() == ["a"]
    a.release()
    b.release()


@pytest.mark.parametrize("key", [b"x" * 65, "x" * 65, 1 << 520, 1.5, None, True, ("a",), [1]], ids=repr)
def test_bad_keys_are_errors(cache: shmcache.SharedCache, key: object) -> None:
    for call in (cache.contains, cache.get, cache.pin, cache.unpin, cache.remove):
        with pytest.raises((ValueError, TypeError)):
            call(key)  # type: ignore[operator]
    with pytest.raises((ValueError, TypeError)):
        cache.lookup(["fine", key])  # type: ignore[list-item]


def test_types_of_keys_do_not_collide_and_come_back(cache: shmcache.SharedCache) -> None:
    keys = [b"1", "1", 1, -1, 0, b"", "", "ü" * 20, 1 << 500, -(1 << 500), b"\0", b"\0\0", 256, 65, "A", b"A"]
    for i, k in enumerate(keys):
        assert store(cache.default, k, i + 1, 64)
    assert sorted(map(repr, cache.keys())) == sorted(map(repr, keys))
    for i, k in enumerate(keys):
        with cache.get(k) as obj:
            assert obj.byte_array[0] == i + 1


def test_a_chunk_is_a_hit_when_all_its_parts_are_there(cache: shmcache.SharedCache) -> None:
    ns = cache.namespace("tp", parts=3, descriptor={"model": "m"})
    assert store(ns, "k", 1, part=1)
    assert ns.contains("k", part=1) and not ns.contains("k") and not ns.contains("k", part=0)
    assert ns.lookup(["k"]).n == 0 and ns.keys() == [] and ns.keys(part=1) == ["k"]
    assert store(ns, "k", 0, part=0) and store(ns, "k", 2, part=2)
    assert ns.contains("k") and ns.keys() == ["k"]
    with ns.lookup(["k"], pin=True) as hit:
        for r in range(3):
            with hit.get(0, part=r) as obj:
                assert obj.byte_array[0] == r
    assert ns.remove("k") and not ns.contains("k", part=2)
    assert cache.stats().bytes.used == 0


def test_eviction_takes_a_chunk_on_all_parts_or_none(cache: shmcache.SharedCache) -> None:
    ns = cache.namespace("tp", parts=4)
    for i in range(40):
        for r in range(4):
            assert store(ns, i, part=r)
        whole = set(ns.keys())
        for r in range(4):
            assert set(ns.keys(part=r)) == whole
    assert len(ns.keys()) == 16


def test_namespaces_must_agree(cache: shmcache.SharedCache) -> None:
    ns = cache.namespace("m", parts=2, descriptor={"dtype": "bf16", "model": "x"})
    assert cache.namespace("m").parts == 2
    cache.namespace("m", parts=2, descriptor={"model": "x", "dtype": "bf16"})
    for bad in ({"parts": 3}, {"descriptor": {"dtype": "fp8", "model": "x"}}):
        with pytest.raises(shmcache.NamespaceMismatchError) as caught:
            cache.namespace("m", **bad)  # type: ignore[arg-type]
        assert "2" in str(caught.value) or "bf16" in str(caught.value)
    for bad_name in ("", "x" * 257):
        with pytest.raises(ValueError):
            cache.namespace(bad_name)
    for parts in (0, -1, 4097, True, "2"):
        with pytest.raises((ValueError, TypeError)):
            cache.namespace("p", parts=parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        cache.namespace("d", descriptor={"x": "y" * 1100})
    assert {n.name for n in cache.namespaces()} >= {"m"}
    assert ns.contains("k") is False


def test_a_full_namespace_table_names_its_limit(cache: shmcache.SharedCache) -> None:
    with pytest.raises(shmcache.OutOfSharedMemoryError, match="256"):
        for i in range(300):
            cache.namespace(f"n{i}")


def test_sizes_that_make_no_sense_evict_nothing(cache: shmcache.SharedCache) -> None:
    import torch

    for i in range(64):
        store(cache.default, i)
    for shape in (0, -1, (0,), (3, -1), (3, 0), 1 << 70, (1 << 40, 1 << 40)):
        with pytest.raises((ValueError, TypeError)):
            cache.allocate(shape, torch.uint8)
    with pytest.raises(shmcache.CapacityError) as caught:
        cache.allocate(65 * GRAN)
    assert isinstance(caught.value, ValueError) and "256KiB" in str(caught.value)
    with pytest.raises(shmcache.CapacityError):
        cache.default.allocate_many(GRAN, None, 65)
    assert cache.default.allocate_many(GRAN, None, 0) == []
    with pytest.raises(ValueError):
        cache.default.allocate_many(GRAN, None, -1)
    assert cache.stats().evictions == 0 and len(cache.keys()) == 64


def test_a_full_cache_of_held_chunks_gives_none_and_evicts_nothing(cache: shmcache.SharedCache) -> None:
    for i in range(64):
        store(cache.default, i)
    with cache.lookup(range(64), pin=True) as hit:
        assert hit.n == 64
        assert cache.allocate(GRAN) is None
        began = time.monotonic()
        assert cache.allocate(GRAN, timeout=0.3) is None
        assert 0.2 < time.monotonic() - began < 5
        assert cache.stats().evictions == 0 and cache.stats().eviction_failures > 0
    obj = cache.allocate(GRAN)
    assert obj is not None and cache.stats().evictions == 1
    obj.release()
    assert cache.allocate(GRAN, evict=False) is not None


def test_evict_false_takes_free_memory_only(cache: shmcache.SharedCache) -> None:
    for i in range(64):
        store(cache.default, i)
    assert cache.allocate(GRAN, evict=False) is None
    assert len(cache.keys()) == 64


def test_a_waiter_gets_what_another_thread_frees(cache: shmcache.SharedCache) -> None:
    held = cache.default.allocate_many(GRAN, None, 64)
    timer = threading.Timer(0.2, held[7].release)
    timer.start()
    obj = cache.allocate(GRAN, timeout=20)
    assert obj is not None
    timer.join()


@pytest.mark.parametrize("timeout", [None, float("inf")])
def test_a_wait_without_an_end_ends_with_what_it_waits_for(cache: shmcache.SharedCache, timeout: float | None) -> None:
    held = cache.default.allocate_many(GRAN, None, 64)
    timer = threading.Timer(0.2, held[7].release)
    timer.start()
    assert cache.allocate(GRAN, timeout=timeout) is not None
    timer.join()
    held[8].release()
    writer, other = (cache.reserve("k", GRAN) for _ in range(2))
    timer = threading.Timer(0.2, writer.put)
    timer.start()
    got = other.wait() if timeout is None else other.wait(timeout)
    assert got is not None
    timer.join()


def test_batches_of_nothing_are_nothing(cache: shmcache.SharedCache) -> None:
    ns = cache.default
    for call in (ns.pin_many, ns.unpin_many, ns.contains_many, ns.remove_many, ns.get_many):
        assert call([]) == []
    assert ns.put_many([], []) == [] == ns.allocate_many(GRAN, n=0)
    assert ns.leading([], pin=True) == 0 == ns.lookup([], pin=True).n
    ns.touch([])


def test_a_number_of_bytes_may_be_named(cache: shmcache.SharedCache) -> None:
    obj = cache.allocate(nbytes=100)
    assert obj is not None and obj.get_size() == 100 and len(obj.byte_array) == 100
    for both in ({"shape": (4,), "nbytes": 4}, {"dtype": "uint8", "nbytes": 4}):
        with pytest.raises(TypeError, match="not both"):
            cache.allocate(**both)  # type: ignore[arg-type]
    for wrong in (0, -1):
        with pytest.raises(ValueError):
            cache.allocate(nbytes=wrong)
    with pytest.raises(TypeError):
        cache.allocate()


def test_a_batch_is_all_or_nothing(cache: shmcache.SharedCache) -> None:
    held = cache.default.allocate_many(GRAN, None, 40)
    assert cache.default.allocate_many(GRAN, None, 25) is None
    assert cache.stats().bytes.used == 40 * GRAN
    more = cache.default.allocate_many(GRAN, None, 24)
    assert more is not None and len(more) == 24
    assert len({o.shm_offset for o in held + more}) == 64


@pytest.mark.parametrize("parts", [1, 3])
def test_a_batch_that_evicts_what_lies_beside_it_gets_the_whole_arena(cache: shmcache.SharedCache, parts: int) -> None:
    ns = cache.namespace("small", parts=parts)
    for part in range(parts):
        store(ns, "in the way", part=part)
    objs = cache.default.allocate_many(16 * GRAN, None, 4)  # three fit behind it, and then it goes
    assert objs is not None and len({obj.shm_offset for obj in objs}) == 4
    assert cache.stats().evictions == 1 and cache.stats().counts.holds == 4


def test_a_batch_that_a_held_block_keeps_apart_is_none_and_holds_nothing(cache: shmcache.SharedCache) -> None:
    low = cache.allocate(32 * GRAN)
    middle = cache.allocate(GRAN)
    low.release()
    store(cache.default, "in the way")
    assert cache.default.allocate_many(21 * GRAN, None, 3) is None, "63 granules are to be had, in runs of 32 and 31"
    assert cache.stats().counts.holds == 1 and cache.stats().bytes.used <= 2 * GRAN
    middle.release()
    assert cache.default.allocate_many(21 * GRAN, None, 3) is not None


def test_a_large_request_evicts_a_run_of_neighbours_and_spares_the_rest(cache: shmcache.SharedCache) -> None:
    for i in range(64):
        store(cache.default, i)
    pins = [i for i in range(64) if i % 24 == 0]  # 0, 24, 48: runs of 23 in between
    for i in pins:
        assert cache.pin(i)
    assert cache.allocate(32 * GRAN) is None
    assert cache.stats().evictions == 0, "no run is long enough: nothing goes"
    obj = cache.allocate(16 * GRAN)
    assert obj is not None
    assert cache.stats().evictions <= 23 and all(cache.contains(i) for i in pins)


def test_fixed_sizes_off_a_class_boundary_are_found_again(name: str) -> None:
    with shmcache.create(name, "70MiB") as cache:
        held = []
        while (obj := cache.allocate(700 << 10)) is not None:
            held.append(obj)
        held[len(held) // 2].release()
        assert cache.allocate(700 << 10) is not None
        cache.unlink()


def test_lookup_stops_at_the_first_gap_and_pins_only_what_it_found(cache: shmcache.SharedCache) -> None:
    for i in (0, 1, 2, 4):
        store(cache.default, i, i + 1)
    hit = cache.lookup(range(5), pin=True)
    assert hit.n == len(hit) == 3 and hit.keys == [0, 1, 2]
    assert cache.stats().counts.holds == 3
    with pytest.raises(IndexError):
        hit.get(3)
    assert cache.remove(1) and not cache.contains(1)
    with hit.get(1) as obj:
        assert obj.byte_array[0] == 2, "through the pin, also after remove"
    store(cache.default, 1, 99)
    with hit.get(1) as obj:
        assert obj.byte_array[0] == 2, "never a newer version"
    hit.release()
    hit.release()
    with pytest.raises(shmcache.StaleHandleError):
        hit.get(0)
    assert cache.stats().counts.holds == 0
    with cache.get(1) as obj:
        assert obj.byte_array[0] == 99


def test_an_unpinned_lookup_gives_none_for_what_has_gone(cache: shmcache.SharedCache) -> None:
    store(cache.default, "k")
    hit = cache.lookup(["k"])
    assert hit.n == 1
    cache.remove("k")
    store(cache.default, "k", 5)
    assert hit.get(0) is None


def test_a_dropped_lookup_gives_its_pins_back(cache: shmcache.SharedCache) -> None:
    store(cache.default, "k")
    with pytest.warns(ResourceWarning):
        hit = cache.lookup(["k"], pin=True)
        del hit
        gc.collect()
    assert cache.stats().counts.holds == 0


def test_unpin_spends_only_own_pins_the_oldest_version_first(cache: shmcache.SharedCache, name: str) -> None:
    ns = cache.default
    assert ns.pin("k") is False and ns.unpin("k") is False
    store(ns, "k", 1)
    assert ns.pin("k") and ns.pin("k")
    with shmcache.attach(name) as other:
        assert other.unpin("k") is False
    assert ns.remove("k")
    store(ns, "k", 2)
    assert ns.pin("k")
    used = cache.stats().bytes.used
    assert used == 2 * GRAN
    assert ns.unpin("k") and cache.stats().bytes.used == used
    assert ns.unpin("k") and cache.stats().bytes.used == GRAN, "the removed version goes with its last pin"
    assert ns.contains("k")
    assert ns.unpin("k") and not ns.unpin("k")


def test_a_lookups_pins_are_not_unpins_to_spend(cache: shmcache.SharedCache) -> None:
    store(cache.default, "k")
    with cache.lookup(["k"], pin=True):
        assert cache.unpin("k") is False


def test_a_lease_ends_by_itself_when_memory_is_short(cache: shmcache.SharedCache) -> None:
    for i in range(64):
        store(cache.default, i, i + 1)
    hit = cache.lookup(range(64), pin=True, lease=0.2)
    assert cache.allocate(GRAN) is None
    obj = cache.allocate(GRAN, timeout=10)
    assert obj is not None, "the leases have ended"
    gone = [i for i in range(64) if not cache.contains(i)]
    assert len(gone) == 1
    assert hit.get(gone[0]) is None
    hit.release()


def test_clear_spares_what_is_held_or_pinned(cache: shmcache.SharedCache) -> None:
    for i in range(10):
        store(cache.default, i)
    other = cache.namespace("other")
    store(other, 0)
    held = cache.get(3)
    cache.pin(4)
    assert cache.clear() == 8
    assert sorted(cache.keys()) == [3, 4] and other.contains(0)
    assert cache.stats().bytes.used == 3 * GRAN
    held.release()
    cache.unpin(4)
    assert cache.clear() == 2


def test_bump_makes_all_a_miss_at_once_and_frees_it(cache: shmcache.SharedCache) -> None:
    ns = cache.namespace("m")
    for i in range(40):
        store(ns, i, i + 1)
    late = ns.allocate(GRAN)
    held = ns.get(5)
    hit = ns.lookup([7], pin=True)
    before = ns.info().generation
    assert ns.bump() == before + 1
    assert not any(ns.contains(i) for i in range(40)) and ns.keys() == []
    assert ns.put("late", late) is False
    assert held.byte_array[0] == 6
    with hit.get(0) as obj:
        assert obj.byte_array[0] == 8
    for _ in range(200):
        ns.contains(0)
    assert cache.stats().bytes.used == 3 * GRAN
    for o in (late, held, hit):
        o.release()
    assert cache.stats().bytes.used == 0
    assert store(ns, 5, 77)


def test_a_prefix_outlives_its_extensions(cache: shmcache.SharedCache) -> None:
    parent = None
    for i in range(60):  # one prompt, stored chunk by chunk
        store(cache.default, f"p{i}", parent=parent)
        parent = f"p{i}"
    assert cache.keys() == [f"p{i}" for i in reversed(range(60))]
    cache.lookup([f"p{i}" for i in range(60)])
    assert cache.keys() == [f"p{i}" for i in reversed(range(60))]
    for i in range(34):
        store(cache.default, i)
    left = [i for i in range(60) if cache.contains(f"p{i}")]
    assert left == list(range(30)), "the tail went first"


def test_put_many_chains_from_a_parent(cache: shmcache.SharedCache) -> None:
    store(cache.default, "root")
    objs = cache.default.allocate_many(GRAN, None, 3)
    assert cache.put_many(["a", "b", "c"], objs, parent="root") == [True] * 3
    assert cache.keys() == ["c", "b", "a", "root"]
    for o in objs:
        o.release()


def test_reserve_is_single_flight(cache: shmcache.SharedCache) -> None:
    ns = cache.default
    first = ns.reserve("k", (GRAN,), "uint8")
    assert first.state == "WRITE"
    second = ns.reserve("k", (GRAN,), "uint8")
    assert second.state == "PENDING" and second.obj is None
    assert second.wait(0.05) is None and not ns.contains("k") and ns.get("k") is None

    def write() -> None:
        first.obj.byte_array[:] = b"\7" * GRAN
        assert first.put()
        first.release()

    timer = threading.Timer(0.1, write)
    timer.start()
    obj = second.wait(20)
    timer.join()
    assert obj is not None and obj.byte_array[0] == 7
    obj.release()
    third = ns.reserve("k", (GRAN,), "uint8")
    assert third.state == "PUBLISHED" and third.obj.byte_array[0] == 7
    third.release()


def test_a_reservation_given_up_wakes_those_who_wait(cache: shmcache.SharedCache) -> None:
    first = cache.default.reserve("k", (GRAN,), "uint8")
    second = cache.default.reserve("k", (GRAN,), "uint8")
    threading.Timer(0.1, first.release).start()
    began = time.monotonic()
    assert second.wait(20) is None and time.monotonic() - began < 5
    assert cache.stats().bytes.used == 0
    with cache.default.reserve("k", (GRAN,), "uint8") as r:
        assert r.state == "WRITE"


def test_a_put_by_anybody_publishes_before_the_reserver(cache: shmcache.SharedCache) -> None:
    with cache.default.reserve("k", (GRAN,), "uint8") as r:
        assert r.state == "WRITE"
        assert store(cache.default, "k", 3)
        assert r.put() is False
    with cache.get("k") as obj:
        assert obj.byte_array[0] == 3


def test_reserve_in_a_full_cache_says_so(cache: shmcache.SharedCache) -> None:
    held = cache.default.allocate_many(GRAN, None, 64)
    assert cache.default.reserve("k", (GRAN,), "uint8").state == "FULL"
    with pytest.raises(shmcache.CapacityError):
        cache.default.reserve("k", (65 * GRAN,), "uint8")
    assert held


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def until(what: object, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.002)


def test_release_after_an_event_keeps_the_hold_until_then(cache: shmcache.SharedCache) -> None:
    store(cache.default, "k")
    event = Event()
    obj = cache.get("k")
    obj.release(after=event)
    assert obj.tensor is None and cache.stats().counts.holds == 1
    event.done = True
    until(lambda: cache.stats().counts.holds == 0)


def test_put_after_an_event_publishes_then(cache: shmcache.SharedCache) -> None:
    event = Event()
    obj = cache.allocate(GRAN)
    assert cache.put("k", obj, after=event) is True
    obj.release()
    assert not cache.contains("k")
    event.done = True
    until(lambda: cache.contains("k"))
    until(lambda: cache.stats().counts.holds == 0)


def test_events_tell_what_came_and_went_and_by_whom(cache: shmcache.SharedCache) -> None:
    import os

    start = cache.events()
    for i in range(70):
        store(cache.default, i)
    cache.remove(69)
    seen = cache.events(start.next)
    kinds = [(e.kind, e.cause, e.key) for e in seen]
    assert kinds[:2] == [("admit", "put", 0), ("admit", "put", 1)]
    assert ("remove", "evict", 0) in kinds and kinds[-1] == ("remove", "remove", 69)
    assert {e.pid for e in seen} == {os.getpid()} and seen.lost == 0
    assert [e.seq for e in seen] == list(range(seen[0].seq, seen[0].seq + len(seen)))
    for i in range(3000):
        store(cache.default, i + 1000, size=64)
    late = cache.events(start.next)
    assert late.lost > 0 and late[-1].key == 3999
    for never in (-1, 1 << 64, "first", 1.5):
        with pytest.raises(ValueError, match="since"):
            cache.events(never)  # type: ignore[arg-type]


def test_threads_may_call_at_once(cache: shmcache.SharedCache) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        import random

        rng = random.Random(seed)
        try:
            for _ in range(400):
                k = rng.randrange(80)
                obj = cache.get(k)
                if obj is not None:
                    with obj:
                        assert bytes(obj.byte_array) == bytes([k % 256]) * GRAN
                elif (obj := cache.allocate(GRAN)) is not None:
                    with obj:
                        obj.byte_array[:] = bytes([k % 256]) * GRAN
                        cache.put(k, obj)
                with cache.lookup([k, k + 1], pin=True):
                    pass
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]
    assert cache.stats().counts.holds == 0


def test_packed_keys_are_the_same_keys(cache: shmcache.SharedCache) -> None:
    keys = [bytes([i]) * 32 for i in range(20)]
    for k in keys:
        store(cache.default, k)
    packed = shmcache.pack(keys)
    assert cache.lookup(packed).n == 20 and len(packed) == 20
    assert shmcache.pack([]) is not None and cache.lookup([]).n == 0
    got = cache.get_many(packed)
    assert all(o is not None for o in got)
    for o in got:
        o.release()
    cache.touch(packed)
    assert cache.keys() == keys[::-1]


def test_full_tables_are_pressure_not_errors(name: str) -> None:
    with shmcache.create(name, "16MiB", max_chunks=8) as cache:
        for i in range(50):
            store(cache.default, i, size=100)
        assert len(cache.keys()) == 8 and cache.keys()[-1] == 49
        with cache.lookup(cache.keys(), pin=True) as hit:
            assert hit.n == 8
            assert store(cache.default, "one more", size=100) is False
        assert cache.verify() == []
        cache.unlink()


def test_put_and_get_of_tensors(cache: shmcache.SharedCache) -> None:
    import torch

    t = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).transpose(0, 2)
    assert cache.put_tensor("t", t) is True and cache.put_tensor("t", t) is False
    back = cache.get_tensor("t")
    assert torch.equal(back, t) and cache.get_tensor("none") is None
    out = torch.empty_like(t.contiguous())
    cache.default.get_tensor("t", out=out)
    assert torch.equal(out, t)
    assert cache.stats().counts.holds == 0


def test_a_long_chain_keeps_its_order_when_its_pins_go(cache: shmcache.SharedCache) -> None:
    keys = [f"p{i}" for i in range(60)]
    for i, k in enumerate(keys):
        store(cache.default, k, parent=keys[i - 1] if i else None)
    for i in range(4):
        store(cache.default, i)
    with cache.lookup(keys, pin=True, touch=False):
        assert cache.allocate_many(GRAN, None, 5) is None  # the victim search meets and parks them
        taken = cache.allocate_many(GRAN, None, 4)
        assert taken is not None
    assert cache.keys() == keys[::-1]
    for o in taken:
        o.release()


def test_a_leading_run_counts_parts_and_pins_by_key(cache: shmcache.SharedCache, name: str) -> None:
    """`leading` with a part needs only that part; its pins are spent by `unpin`, in this process only."""
    ns = cache.namespace("two", parts=2)
    for key in (1, 2, 3):
        store(ns, key, part=0)
    store(ns, 1, part=1)
    assert ns.leading([1, 2, 3, 4], part=0) == 3 and ns.leading([1, 2, 3]) == 1 and ns.leading([]) == 0
    assert ns.leading([1, 2, 4, 3], part=0, pin=True) == 2
    assert cache.stats().counts.holds == 2
    with shmcache.attach(name) as other:
        assert other.namespace("two").unpin(1) is False
    assert ns.clear() == 1 and ns.contains(2, part=0), "pinned, though not complete"
    assert ns.unpin_many([1, 2, 3]) == [True, True, False]
    assert ns.pin(1) is True and ns.pin(2) is False and ns.pin(2, part=0) is True
    assert ns.unpin(1) and ns.unpin(2)
    assert cache.stats().counts.holds == 0 and ns.clear() == 2
    with pytest.raises(ValueError, match="part is 2"):
        ns.leading([1], part=2)
    with pytest.raises(ValueError, match="pin=True"):
        ns.leading([1], lease=1.0)


@pytest.mark.parametrize("call", ["leading", "pin_many"])
def test_a_batch_of_pins_that_loses_the_lock_half_way_keeps_none(
    cache: shmcache.SharedCache, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What it had pinned it gives back once the lock is to be had, and no pin that was there before."""
    from shmcache import _finding

    class Lib:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def shmc_leading(self, *args: object) -> int:
            assert real.shmc_leading(*args) == 0
            return real.SHMC_E_LOCK_TIMEOUT

        def shmc_pin(self, *args: object) -> int:
            assert real.shmc_pin(*args) == 0
            return real.SHMC_E_LOCK_TIMEOUT

    ns, real, tries = cache.default, _finding.lib, []
    for key in range(3):
        store(ns, key)
    assert ns.pin(1)
    unpin = type(ns).unpin

    def third_time_lucky(self: shmcache.Namespace, key: int) -> bool:
        tries.append(key)
        if len(tries) < 3:
            raise shmcache.LockTimeoutError("still held")
        return unpin(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(_finding, "lib", Lib())
        patch.setattr(type(ns), "unpin", third_time_lucky)
        with pytest.raises(shmcache.LockTimeoutError):
            ns.leading(range(3), pin=True) if call == "leading" else ns.pin_many(range(4))
        until(lambda: cache.stats().counts.holds == 1)
    assert tries == [2, 2, 2, 1, 0] and ns.unpin(1) and not ns.unpin(1)


def test_an_object_moves_to_another_namespace_before_its_put(cache: shmcache.SharedCache, name: str) -> None:
    ns, other = cache.default, cache.namespace("other")
    obj = ns.allocate(GRAN)
    assert obj is not None
    with pytest.raises(ValueError, match="allocate it here"):
        other.put("k", obj)
    other.bump()
    other.adopt(obj)  # as if allocated there now: the bump before does not count
    assert obj.parent() is other and other.put("k", obj) is True and other.contains("k")
    with pytest.raises(ValueError, match="published before"):
        ns.adopt(obj)
    obj.release()
    with pytest.raises(shmcache.StaleHandleError):
        ns.adopt(obj)
    with ns.reserve("r", GRAN) as r, pytest.raises(ValueError, match="reserved under a key"):
        other.adopt(r.obj)  # type: ignore[arg-type]
    with shmcache.attach(name) as handle, pytest.raises(ValueError, match="not of this open handle"):
        foreign = handle.allocate(GRAN)
        ns.adopt(foreign)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [0, -1, 2**63 - 1, -(2**63), 2**63, 2**200, -(2**200)])
def test_ints_of_any_size_come_back(cache: shmcache.SharedCache, key: int) -> None:
    ns = cache.default
    assert store(ns, key) and ns.contains(key) and not ns.contains(key + 1)
    assert ns.keys() == [key] and list(shmcache.pack([key, 1])) == [key, 1]
    assert ns.leading([key, key + 1]) == 1 and ns.remove(key)
