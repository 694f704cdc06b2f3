"""A stopped process is not a dead one: whatever it has stays its own, and nothing hangs because of it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any

import pytest
from hostile import (
    KIB,
    LONG_NS,
    MIB,
    PROMPT,
    Stopwatch,
    assert_only_published,
    assert_sound,
    await_holder,
    await_stopped,
    eventually,
    files_of,
    hold_lock,
    join,
    lock_holder,
    small,
    store,
    uniform,
)

import shmcache
from shmcache import LockTimeoutError
from shmcache._core import ffi, lib


@contextlib.contextmanager
def stopped_holder(fork: Any, cache: Any, ns: int = LONG_NS, in_transaction: bool = False) -> Any:
    """A process that is stopped inside the lock; killed at the end."""

    def holder(child: Any) -> None:
        mine = join(cache.name)
        child.tell("ready")
        hold_lock(mine, ns, in_transaction=in_transaction)
        child.tell("let go")
        child.await_parent()

    child = fork(holder)
    child.listen()
    await_holder(cache, child.pid, in_transaction=in_transaction)
    child.kill(signal.SIGSTOP)
    await_stopped(child.pid)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_timeout_names_the_stopped_holder_then_calls_fail_fast_until_it_goes_on(name, fork):
    with small(name, lock_timeout=0.3) as cache:
        store(cache, "k", 5)
        with stopped_holder(fork, cache, ns=1_500_000_000) as child:
            watch = Stopwatch()
            with pytest.raises(LockTimeoutError) as caught:
                cache.get("k")
            assert 0.25 < watch.seconds < 0.3 + PROMPT
            text = str(caught.value)
            assert str(child.pid) in text
            assert "read" in text  # what shmc_debug_hold_lock says it is doing
            age = float(text.partition(" for ")[2].partition(" s")[0])
            assert 0.2 < age < 0.3 + PROMPT
            assert isinstance(caught.value, TimeoutError)

            watch = Stopwatch()
            for _ in range(50):
                with pytest.raises(LockTimeoutError, match=str(child.pid)):
                    cache.get("k")
            assert watch.seconds < PROMPT, "later calls fail fast, all 50 together"

            child.kill(signal.SIGCONT)
            assert child.listen() == "let go"
            with cache.get("k") as obj:
                uniform(obj, 5)
            assert store(cache, "after", 6)
            assert cache.stats().lock.recoveries == 0
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_lock_is_never_stolen_and_what_the_stopped_one_began_is_not_seen(name, fork, in_transaction):
    with small(name, lock_timeout=0.05) as cache:
        store(cache, "k", 5)
        with stopped_holder(fork, cache, in_transaction=in_transaction) as child:
            before = cache.stats().lock.acquisitions
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                with pytest.raises(LockTimeoutError):
                    cache.contains("k")
            assert lock_holder(cache) == child.pid
            assert cache.stats().lock.acquisitions == before
        # killed: now it is to be had at once
        watch = Stopwatch()
        with cache.get("k") as obj:
            uniform(obj, 5)
        assert watch.seconds < PROMPT
        assert cache.stats().lock.recoveries == 1
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_every_call_says_so_with_a_typed_error_and_changes_nothing(name, fork):
    with small(name, lock_timeout=0.05) as cache:
        store(cache, "k", 5)
        kv = cache.namespace("kv")
        obj = cache.allocate(4096)
        hit = cache.lookup(["k"], pin=True)
        cache.keys()  # imports what it needs
        before = cache.stats()
        calls = {
            "get": lambda: cache.get("k"),
            "get_many": lambda: cache.get_many(["k", "k"]),
            "put": lambda: cache.put("new", obj),
            "put_many": lambda: cache.put_many(["new"], [obj]),
            "allocate": lambda: cache.allocate(4096),
            "allocate, waiting": lambda: cache.allocate(4096, timeout=30.0),
            "allocate_many": lambda: cache.allocate_many(4096, n=2),
            "contains": lambda: cache.contains("k"),
            "lookup": lambda: cache.lookup(["k"], pin=True),
            "pin": lambda: cache.pin("k"),
            "unpin": lambda: cache.unpin("k"),
            "touch": lambda: cache.touch(["k"]),
            "remove": lambda: cache.remove("k"),
            "clear": lambda: kv.clear(),
            "keys": lambda: cache.keys(),
            "bump": lambda: kv.bump(),
            "namespace": lambda: cache.namespace("another"),
            "reserve": lambda: cache.reserve("r", 4096),
            "release": lambda: obj.release(),
            "ref_count_up": lambda: obj.ref_count_up(),
            "ref_count_down": lambda: obj.ref_count_down(),
            "get_ref_count": lambda: obj.get_ref_count(),
            "object pin": lambda: obj.pin(),
            "lookup get": lambda: hit.get(0),
            "lookup release": lambda: hit.release(),
            "attach": lambda: join(name, lock_timeout=0.05),
            "open": lambda: small(name, lock_timeout=0.05),
        }
        with stopped_holder(fork, cache) as child:
            for what, call in calls.items():
                watch = Stopwatch()
                with pytest.raises(LockTimeoutError, match=str(child.pid)):
                    call()
                assert watch.seconds < PROMPT, what
            assert any(str(child.pid) in line for line in cache.verify()), "verify reports it and does not raise"
            assert "kv" in {n.name for n in cache.namespaces()}, "looking at namespaces needs no lock"
        assert cache.contains("k")
        assert obj.is_valid()
        obj.byte_array[:1] = b"x"
        assert cache.put("new", obj)
        obj.release()
        with hit.get(0) as through_the_pin:
            uniform(through_the_pin, 5)
        hit.release()
        cache.remove("new")
        cache.reap()
        after = cache.stats()
        assert after.counts.holds == 0
        assert after.counts.attachments == 1, "a failed attach leaves no slot"
        assert after.bytes.used == before.bytes.used - 4096
        assert_only_published(cache)
    shmcache.unlink(name)
    assert files_of(name) == []


def test_stats_events_and_segments_work_while_the_holder_is_stopped(name, fork):
    """They take no lock, as their documentation says."""
    with small(name, lock_timeout=0.05) as cache:
        store(cache, "k", 5)
        with stopped_holder(fork, cache, in_transaction=True):
            watch = Stopwatch()
            assert cache.stats().counts.chunks == 1
            assert [s.alive for s in shmcache.segments() if s.name == name] == [2]
            assert [e.key for e in cache.events()] == ["k"]
            assert watch.seconds < PROMPT
        cache.reap()
        assert_sound(cache)
    shmcache.unlink(name)


def test_dropped_objects_do_not_wait_for_a_stopped_holder_and_are_given_back_later(name, fork):
    with small(name, lock_timeout=0.5) as cache:
        store(cache, "k", 5)
        objs = [cache.get("k") for _ in range(100)]
        hit = cache.lookup(["k"], pin=True)
        assert cache.stats().counts.holds == 101
        with stopped_holder(fork, cache):
            watch = Stopwatch()
            with pytest.warns(ResourceWarning):
                del hit
            objs.clear()
            assert watch.seconds < PROMPT, "a destructor waits 1 ms at most"
            assert cache.stats().counts.holds == 101
        assert cache.contains("k")
        eventually(lambda: cache.contains("k") and cache.stats().counts.holds == 0, "given back by later calls")
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_close_does_not_hang_on_a_stopped_holder(name, fork):
    with small(name, lock_timeout=0.1) as watcher:
        store(watcher, "k", 5)
        leaving = join(name, lock_timeout=0.1)
        obj = leaving.get("k")
        with stopped_holder(fork, watcher):
            watch = Stopwatch()
            leaving.close()
            assert watch.seconds < PROMPT
            assert leaving.closed
            del obj
        # the attachment could not be given back, so it still has its slot, which is this live process's;
        # it must not stay for as long as the process does
        eventually(
            lambda: watcher.reap() and watcher.stats().counts.attachments == 1,
            "the slot of a closed handle comes back while its process lives on",
            timeout=5.0,
        )
        assert watcher.stats().counts.holds == 0
        assert_only_published(watcher)
    shmcache.unlink(name)


def test_a_late_leaver_does_not_wipe_out_the_note_of_the_next_owner_of_its_slot(name, fork):
    """It timed out in leaving, was reaped, and times out once more when its slot is another's, who leaves too."""

    def leave(cache: Any) -> int:
        return int(lib.shmc_detach(cache._attachment.handle, 0, ffi.new("uint32_t *")))

    with small(name, lock_timeout=0.05) as watcher:
        store(watcher, "k", 5)
        first = join(name, lock_timeout=0.05)
        with stopped_holder(fork, watcher):
            assert leave(first) == lib.SHMC_E_LOCK_TIMEOUT
        watcher.reap()
        assert watcher.stats().counts.attachments == 1
        second = join(name, lock_timeout=0.05)
        obj = second.get("k")
        assert second._attachment._slot[0] == first._attachment._slot[0]
        with stopped_holder(fork, watcher):
            second.close()
            assert leave(first) == lib.SHMC_E_LOCK_TIMEOUT
        watcher.reap()
        assert watcher.stats().counts.attachments == 1
        assert watcher.stats().counts.holds == 0
        first.close()
        del obj
        assert_only_published(watcher)
    shmcache.unlink(name)


def test_other_threads_run_while_one_waits_for_the_lock(name, fork):
    with small(name, lock_timeout=1.0) as cache:
        store(cache, "k", 5)
        with stopped_holder(fork, cache):
            failed = []

            def get() -> None:
                try:
                    cache.get("k")
                except LockTimeoutError as e:
                    failed.append(e)

            thread = threading.Thread(target=get)
            thread.start()
            n = 0
            while thread.is_alive():
                n += 1
            thread.join()
            assert len(failed) == 1
            assert n > 10_000, "pure Python went on"
        cache.reap()
        assert_sound(cache)
    shmcache.unlink(name)


def test_a_stopped_process_keeps_its_holds_pins_and_unpublished_blocks(name, fork):
    with small(name, capacity=4 * MIB) as cache:
        for i in range(16):
            store(cache, i, i + 1, 128 * KIB)

        def owner(child: Any) -> None:
            mine = join(name)
            obj = mine.get(0)
            hit = mine.lookup([1, 2], pin=True)
            assert hit.n == 2
            mine.pin(3)
            fresh = mine.allocate(128 * KIB)
            fresh.byte_array[: 64 * KIB] = b"\xaa" * (64 * KIB)
            child.tell("holding")
            child.await_parent()
            uniform(obj, 1)
            for i in range(2):
                with hit.get(i) as through_the_pin:
                    uniform(through_the_pin, i + 2)
            fresh.byte_array[64 * KIB :] = b"\xaa" * (64 * KIB)
            assert mine.put("mine", fresh)
            assert mine.unpin(3)
            obj.release()
            hit.release()
            fresh.release()
            mine.close()
            child.tell("done")

        child = fork(owner)
        assert child.listen() == "holding"
        child.kill(signal.SIGSTOP)
        await_stopped(child.pid)
        held = cache.stats().counts.holds
        assert held == 5
        for _ in range(3):
            report = cache.reap()
            assert (report.slots, report.holds, report.blocks, report.quarantined) == (0, 0, 0, 0)
        # pressure: twice the capacity passes through, waiting and attaching, which reap, included
        for i in range(100, 164):
            assert store(cache, i, 9, 128 * KIB)
        assert cache.allocate(4 * MIB, timeout=0.3) is None
        with join(name) as another:
            another.reap()
        assert cache.stats().counts.holds == held
        assert [cache.contains(i) for i in range(5)] == [True, True, True, True, False]
        child.kill(signal.SIGCONT)
        child.go()
        assert child.listen() == "done"
        assert child.wait() == 0
        with cache.get("mine") as obj:
            uniform(obj, 0xAA)
        assert cache.stats().counts.holds == 0
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_stopped_writer_is_not_robbed_of_its_reservation(name, fork):
    with small(name) as cache:

        def writer(child: Any) -> None:
            mine = join(name)
            with mine.reserve("k", 4096) as r:
                assert r.state == "WRITE"
                child.tell("reserved")
                child.await_parent()
                r.obj.byte_array[:] = b"\x07" * 4096
                assert r.put()
            child.tell("put")
            mine.close()

        child = fork(writer)
        child.listen()
        child.kill(signal.SIGSTOP)
        await_stopped(child.pid)
        pending = cache.reserve("k", 4096)
        assert pending.state == "PENDING"
        watch = Stopwatch()
        assert pending.wait(timeout=0.35) is None
        assert 0.3 < watch.seconds < 0.35 + PROMPT
        assert cache.reserve("k", 4096).state == "PENDING"
        child.kill(signal.SIGCONT)
        child.go()
        with pending.wait(timeout=20.0) as obj:
            uniform(obj, 7)
        assert child.listen() == "put"
        child.wait()
        assert_only_published(cache)
    shmcache.unlink(name)
