"""A forked child has an attachment of its own and gives back nothing of its parent's."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
from hostile import (
    KIB,
    MIB,
    PROMPT,
    Stopwatch,
    assert_only_published,
    assert_sound,
    eventually,
    files_of,
    instance,
    join,
    small,
    store,
    uniform,
)

import shmcache
from shmcache import StaleHandleError

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_a_child_uses_the_cache_with_a_slot_of_its_own(name, fork):
    with small(name) as cache:
        store(cache, "parent's", 3)
        obj = cache.get("parent's")
        kv = cache.namespace("kv", parts=2)

        def use(child: Any) -> None:
            with cache.get("parent's") as mine:
                uniform(mine, 3)
            assert store(cache, "child's", 4)
            for part in range(2):
                with kv.allocate(4096) as half:
                    assert kv.put("both", half, part=part)
            assert cache.check_fork() is False, "it has attached at its first use"
            assert cache.stats().counts.attachments == 2
            child.tell("attached")
            child.await_parent()
            cache.close()
            child.tell("closed")
            child.await_parent()

        child = fork(use)
        assert child.listen() == "attached"
        assert cache.stats().counts.attachments == 2
        with cache.get("child's") as theirs:
            uniform(theirs, 4)
        assert kv.contains("both")
        child.go()
        assert child.listen() == "closed"
        assert cache.stats().counts.attachments == 1
        assert cache.stats().counts.holds == 1
        uniform(obj, 3)
        child.go()
        assert child.wait() == 0
        obj.release()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_check_fork_attaches_before_the_first_use(name, fork):
    with small(name) as cache:

        def use(child: Any) -> None:
            assert cache.check_fork() is True
            assert cache.check_fork() is False
            child.tell("attached")
            child.await_parent()

        child = fork(use)
        child.listen()
        assert cache.stats().counts.attachments == 2
        child.kill()
        child.wait()
        assert cache.reap().slots == 1
        assert cache.check_fork() is False
    shmcache.unlink(name)


def test_a_child_that_does_nothing_takes_no_slot_and_gives_nothing_back(name, fork):
    with small(name) as cache:
        store(cache, "k", 3)
        kept = [cache.get("k"), cache.allocate(4096), cache.lookup(["k"], pin=True)]
        cache.pin("k")
        before = cache.stats().counts

        def nothing(child: Any) -> None:
            gc.collect()

        for _ in range(3):
            assert fork(nothing).wait() == 0
        assert cache.stats().counts == before
        assert cache.reap().slots == 0
        assert cache.stats().counts == before
        kept[2].release()
        kept[1].release()
        uniform(kept[0], 3)
        kept[0].release()
        assert cache.unpin("k")
        assert_only_published(cache)
    shmcache.unlink(name)


@pytest.mark.parametrize("first", ["release", "use"])
def test_inherited_objects_are_readable_and_not_the_childs_to_release(name, fork, first):
    with small(name) as cache:
        store(cache, "k", 3)
        obj = cache.get("k")
        view = obj.byte_array
        fresh = cache.allocate(4096)
        hit = cache.lookup(["k"], pin=True)
        reservation = cache.reserve("r", 4096)
        cache.pin("k")
        before = cache.stats().counts.holds

        def try_it(child: Any) -> None:
            if first == "use":
                assert cache.contains("k")
            uniform(obj, 3)
            assert bytes(view[:3]) == b"\x03\x03\x03"
            for what in (
                obj.release,
                obj.ref_count_down,
                fresh.release,
                hit.release,
                reservation.release,
                lambda: cache.put("new", fresh),
                lambda: hit.get(0),
            ):
                with pytest.raises(StaleHandleError, match="fork"):
                    what()
            assert cache.unpin("k") is False, "pins are the parent's"
            with cache.get("k") as own:
                uniform(own, 3)
                assert own.get_ref_count() == 3, "the cache's, the parent's, its own"
            uniform(obj, 3)
            child.tell("tried")
            child.await_parent()

        child = fork(try_it)
        assert child.listen() == "tried"
        assert cache.stats().counts.holds == before
        child.go()
        assert child.wait() == 0
        assert cache.stats().counts.holds == before
        uniform(obj, 3)
        fresh.byte_array[:] = b"\x05" * 4096
        assert cache.put("new", fresh)
        for held in (obj, fresh, hit, reservation):
            held.release()
        assert cache.unpin("k")
        cache.reap()
        assert cache.stats().counts.holds == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def test_dropping_and_closing_in_the_child_touches_nothing_of_the_parents(name, fork):
    with small(name) as cache:
        store(cache, "k", 3)
        kept: list[Any] = [cache.get("k"), cache.allocate(4096), cache.lookup(["k"], pin=True), cache.reserve("r", 64)]
        before = cache.stats()

        def drop(child: Any) -> None:
            kept.clear()
            gc.collect()
            cache.close()
            assert cache.closed
            with pytest.raises(shmcache.SegmentClosedError):
                cache.get("k")
            with pytest.raises(shmcache.SegmentBusyError, match=str(os.getppid())):
                shmcache.unlink(name)  # the parent's presence did not end with the child's close
            child.tell("dropped")
            child.await_parent()

        child = fork(drop)
        assert child.listen() == "dropped"
        assert cache.stats().counts == before.counts
        child.go()
        assert child.wait() == 0
        assert cache.stats().counts == before.counts
        uniform(kept[0], 3)
        for held in kept:
            held.release()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_grandchildren_attach_too_whether_or_not_the_child_did(name, fork):
    with small(name) as cache:
        store(cache, "k", 3)
        obj = cache.get("k")

        def child_main(child: Any) -> None:
            for child_uses_it in (False, True):
                if child_uses_it:
                    assert cache.contains("k")
                mine = cache.get("k") if child_uses_it else None
                pid = os.fork()
                if pid == 0:
                    code = 1
                    with contextlib.suppress(BaseException):
                        uniform(obj, 3)
                        if mine is not None:
                            uniform(mine, 3)
                            with pytest.raises(StaleHandleError):
                                mine.release()
                        with pytest.raises(StaleHandleError):
                            obj.release()
                        assert store(cache, f"grandchild {child_uses_it}", 9)
                        # us, the grandchild, and the child when it has used the cache
                        assert cache.stats().counts.attachments == 2 + child_uses_it
                        cache.close()
                        code = 0
                    os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                if mine is not None:
                    mine.release()
            cache.close()

        child = fork(child_main)
        assert child.wait() == 0
        assert cache.contains("grandchild False") and cache.contains("grandchild True")
        assert cache.stats().counts.holds == 1
        assert cache.stats().counts.attachments == 1
        obj.release()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_the_slot_of_a_child_that_exits_is_reaped_and_only_its_holds_go(name, fork):
    with small(name) as cache:
        store(cache, "k", 3)
        obj = cache.get("k")
        cache.pin("k")

        def leave_everything(child: Any) -> None:
            kept = [cache.get("k"), cache.allocate(4096), cache.lookup(["k"], pin=True)]
            cache.pin("k")
            assert cache.stats().counts.holds == 6
            child.tell("holding")
            child.await_parent()
            os._exit(0 if len(kept) == 3 else 1)

        child = fork(leave_everything)
        assert child.listen() == "holding"
        assert cache.stats().counts.holds == 6
        child.go()
        child.wait()
        report = cache.reap()
        assert (report.slots, report.holds, report.blocks) == (1, 3, 1)
        assert cache.stats().counts.holds == 2
        uniform(obj, 3)
        obj.release()
        assert cache.unpin("k")
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_child_lives_on_when_its_parent_has_died(name, fork):
    """The parent's holds go, what the child holds stays."""
    with small(name) as watcher:
        store(watcher, "k", 3)

        def parent(child: Any) -> None:
            mine = join(name)
            held = mine.get("k")
            pid = os.fork()
            if pid == 0:
                own = mine.get("k")
                os.write(child._up_w, b"child holds\n")
                os.read(child._down_r, 1)
                uniform(own, 3)
                assert store(mine, "orphan's", 4)
                own.release()
                mine.close()
                os.write(child._up_w, b"orphan done\n")
                os._exit(0)
            uniform(held, 3)
            child.tell(f"parent holds, {pid}")
            os.kill(os.getpid(), signal.SIGSTOP)

        child = fork(parent)
        lines = [child.listen(), child.listen()]
        assert sorted(line.split(",")[0] for line in lines) == ["child holds", "parent holds"]
        assert watcher.stats().counts.holds == 2
        child.kill()
        child.wait()
        report = watcher.reap()
        assert (report.slots, report.holds) == (1, 1)
        watcher.remove("k")
        child.go()
        assert child.listen() == "orphan done"
        assert watcher.contains("orphan's")
        eventually(lambda: watcher.stats().counts.attachments == 1, "the orphan has left")
        assert_only_published(watcher)
    shmcache.unlink(name)


def hammer(cache: Any, stop: threading.Event, number: int) -> None:
    """Calls of every kind, most of the time inside the lock."""
    n = 0
    while not stop.is_set():
        n += 1
        key = (number << 20) + n % 50
        with cache.allocate(4096) as obj:
            cache.put(key, obj)
        with cache.lookup([key, "k"], pin=True) as hit:
            for i in range(hit.n):
                with hit.get(i):
                    pass
        cache.pin(key)
        cache.unpin(key)
        if n % 10 == 0:
            cache.remove(key)


@pytest.mark.parametrize("prefault", ["lazy", "background"])
def test_fork_while_other_threads_are_inside_the_lock(name, fork, prefault):
    """The child may be born while any thread of the parent holds the lock, or any lock of Python's."""
    with small(name, capacity=16 * MIB, region_bytes=1 * MIB, prefault=prefault) as cache:
        store(cache, "k", 3)
        obj = cache.get("k")
        stop = threading.Event()
        threads = [threading.Thread(target=hammer, args=(cache, stop, i + 1)) for i in range(4)]
        for thread in threads:
            thread.start()

        def use(child: Any) -> None:
            watch = Stopwatch()
            uniform(obj, 3)
            with pytest.raises(StaleHandleError):
                obj.release()
            for i in range(20):
                assert store(cache, f"{os.getpid()}-{i}", 5)
                with cache.get(f"{os.getpid()}-{i}") as mine:
                    uniform(mine, 5)
            assert watch.seconds < 30
            cache.close()

        try:
            for _ in range(25):
                children = [fork(use) for _ in range(2)]
                for child in children:
                    assert child.wait(60) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        uniform(obj, 3)
        obj.release()
        cache.reap()
        s = cache.stats()
        assert s.counts.holds == 0
        assert s.counts.attachments == 1
        assert s.lock.recoveries == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def test_children_killed_while_the_parents_threads_hammer(name, fork):
    with small(name, capacity=16 * MIB) as cache:
        store(cache, "k", 3)
        obj = cache.get("k")
        stop = threading.Event()
        threads = [threading.Thread(target=hammer, args=(cache, stop, i + 1)) for i in range(2)]
        for thread in threads:
            thread.start()

        def use(child: Any) -> None:
            child.tell("going")
            hammer(cache, threading.Event(), os.getpid())

        try:
            for i in range(20):
                child = fork(use)
                child.listen()
                time.sleep(0.002 * (i % 10))
                child.kill()
                child.wait()
                if i % 5 == 0:
                    cache.reap()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        uniform(obj, 3)
        obj.release()
        cache.reap()
        assert cache.stats().counts.holds == 0
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_fork_while_regions_are_being_committed(name, fork):
    """The child has the mapping but not the threads; it grows the arena by itself."""
    for _ in range(5):
        with small(name, capacity=64 * MIB, region_bytes=4 * MIB, prefault="background") as cache:

            def use(child: Any, cache: Any = cache) -> None:
                for i in range(64):
                    assert store(cache, f"{os.getpid()}-{i}", i, 1 * MIB - 64 * KIB)
                assert cache.stats().bytes.ready == 64 * MIB
                assert cache.verify() == []
                cache.close()

            children = [fork(use) for _ in range(2)]
            for child in children:
                assert child.wait(60) == 0
            cache.reap()
            eventually(lambda: cache.stats().bytes.ready == 64 * MIB, "all is committed")
            assert cache.stats().counts.attachments == 1
            assert_only_published(cache)
        shmcache.unlink(name)


def test_a_region_that_a_dead_process_was_committing_is_taken_over_at_once(name, fork):
    """An allocation waits for a commit in progress, but not for a dead committer."""
    from shmcache._core import ffi, lib

    with small(name, capacity=8 * MIB, region_bytes=4 * MIB) as cache:
        assert cache.stats().bytes.ready == 4 * MIB

        def committer(child: Any) -> None:
            mine = join(name)
            assert lib.shmc_region_claim(mine._attachment.handle, ffi.new("uint32_t *")) == 0
            os.kill(os.getpid(), signal.SIGKILL)

        assert fork(committer).wait() == -signal.SIGKILL
        keep = cache.allocate(4 * MIB)
        assert keep is not None
        watch = Stopwatch()
        obj = cache.allocate(4 * MIB)
        assert obj is not None, f"the second region was not to be had, after {watch.seconds:.2f} s"
        assert watch.seconds < PROMPT
        obj.byte_array[:] = b"x" * (4 * MIB)
        obj.release()
        keep.release()
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)


def _spawned_with_cache(cache: Any, kv: Any, results: Any) -> None:
    """Runs in a new interpreter, which got the cache by its name."""
    with cache.get("k") as obj:
        results.put(bytes(obj.byte_array[:2]))
    with kv.allocate(4096) as obj:
        obj.byte_array[:] = b"\x06" * 4096
        results.put(kv.put("spawned", obj, part=1))
    results.put((instance(cache), kv.parts, cache.stats().counts.attachments))
    cache.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pickled_cache_attaches_in_a_new_interpreter(name, method):
    context = multiprocessing.get_context(method)
    with small(name) as cache:
        store(cache, "k", 3)
        kv = cache.namespace("kv", parts=2)
        results = context.Queue()
        process = context.Process(target=_spawned_with_cache, args=(cache, kv, results))
        process.start()
        try:
            assert results.get(timeout=60) == b"\x03\x03"
            assert results.get(timeout=60) is True
            found, parts, attachments = results.get(timeout=60)
        finally:
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()
        assert process.exitcode == 0
        assert (found, parts) == (instance(cache), 2)
        assert attachments >= 2, "ours, and the new process's"
        with kv.get("spawned", part=1) as obj:
            uniform(obj, 6)
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)
    assert files_of(name) == []


def test_fork_after_the_name_was_given_to_a_new_generation(name, fork):
    """The child goes on with the memory it inherited, and never meets the new segment."""
    with small(name) as old:
        store(old, "k", 3)
        shmcache.unlink(name, force=True)
        with small(name) as new:

            def use(child: Any) -> None:
                with old.get("k") as obj:
                    uniform(obj, 3)
                assert store(old, "old's", 4)
                assert store(new, "new's", 5)
                assert not new.contains("old's") and not old.contains("new's")
                old.close()
                new.close()

            assert fork(use).wait() == 0
            assert old.contains("old's") and not new.contains("old's")
            assert new.contains("new's") and not old.contains("new's")
            assert_sound(old)
            assert_sound(new)
    shmcache.unlink(name)
    assert files_of(name) == []
