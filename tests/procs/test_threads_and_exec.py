"""Threads that end, also inside the lock, and processes that become another program."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from hostile import (
    KIB,
    MIB,
    PROMPT,
    Stopwatch,
    assert_only_published,
    assert_sound,
    eventually,
    hold_lock,
    join,
    libc,
    lock_holder,
    recoveries,
    small,
    state_of,
    store,
    uniform,
)

import shmcache
from shmcache._core import ffi, lib


def test_holds_of_a_thread_that_ended_belong_to_its_attachment(name):
    with small(name) as cache:
        store(cache, "k", 3)
        taken: list[Any] = []

        def take() -> None:
            taken.append(cache.get("k"))
            taken.append(cache.allocate(4096))
            cache.pin("k")

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        report = cache.reap()
        assert (report.slots, report.holds, report.blocks) == (0, 0, 0)
        assert cache.stats().counts.holds == 3
        uniform(taken[0], 3)
        taken[1].byte_array[:] = b"\x04" * 4096
        assert cache.put("from a thread", taken[1])
        assert cache.unpin("k"), "any thread of the attachment may spend its pins"
        for obj in taken:
            obj.release()
        assert cache.stats().counts.holds == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_thread_that_dies_inside_the_lock_is_recovered_and_its_process_keeps_everything(name, fork):
    """EOWNERDEAD says that a thread died: recovery rolls back and reaps nobody."""

    def victim(child: Any) -> None:
        cache = join(name, lock_timeout=30.0)
        obj = cache.get("k")
        fresh = cache.allocate(4096)
        cache.pin("k")
        ids: list[int] = []

        def die_inside() -> None:
            ids.append(threading.get_ident())
            hold_lock(cache, in_transaction=True)

        threading.Thread(target=die_inside, daemon=True).start()
        eventually(lambda: lock_holder(cache) and not cache._raw_stats().exact, "the thread is in a transaction")
        # nanosleep is a cancellation point: the thread ends there, as robust futexes see it
        assert libc.pthread_cancel(ctypes.c_ulong(ids[0])) == 0
        watch = Stopwatch()
        assert cache.contains("k")
        assert watch.seconds < PROMPT
        assert recoveries(cache) == 1
        assert cache.reap().slots == 0
        assert cache.stats().counts.holds == 3
        uniform(obj, 3)
        assert cache.put("survived", fresh)
        fresh.release()
        obj.release()
        assert cache.unpin("k")
        assert cache.verify() == []
        child.tell("fine")
        child.await_parent()

    with small(name) as cache:
        store(cache, "k", 3)
        child = fork(victim)
        assert child.listen(60) == "fine"
        assert cache.contains("survived")
        assert recoveries(cache) == 1
        child.kill()
        child.wait()
        assert cache.reap().slots == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def become_another_program(child: Any) -> None:
    """exec a program that only waits; the parent's listen() ends when the old image has gone."""
    os.set_inheritable(child._down_r, True)
    os.dup2(child._down_r, 0)
    os.execv(sys.executable, [sys.executable, "-c", "import sys; sys.stdin.buffer.read(1)"])


def test_exec_gives_back_holds_at_reap_but_unpublished_blocks_only_at_exit(name, fork):
    """Its GPU, or an RDMA card, may still be writing what the old image had asked for."""
    with small(name) as cache:
        store(cache, "k", 3)
        store(cache, "other", 4)
        clean = cache.stats()

        def old_image(child: Any) -> None:
            mine = join(name)
            keep = [mine.get("k"), mine.lookup(["k", "other"], pin=True), mine.allocate(64 * KIB)]
            mine.pin("k")
            keep.append(mine.reserve("unfinished", 64 * KIB))
            assert mine.stats().counts.holds == 6
            child.tell("holding")
            become_another_program(child)

        child = fork(old_image)
        assert child.listen() == "holding"
        assert child.listen() == "", "the pipe closes at exec"
        # it lives, but the image that held is gone
        report = cache.reap()
        assert (report.slots, report.holds, report.blocks, report.quarantined) == (0, 4, 0, 1)
        s = cache.stats()
        assert s.counts.holds == 2, "those of the two unpublished blocks"
        assert s.bytes.used == clean.bytes.used + 128 * KIB
        assert cache.reserve("unfinished", 4096).state == "PENDING"
        for _ in range(3):
            report = cache.reap()
            assert (report.slots, report.holds, report.blocks) == (0, 0, 0), "as long as it lives"
        assert cache.allocate(cache.capacity, timeout=0.3) is None, "waiting reaps, and must not free them either"
        assert_sound(cache)
        assert cache.stats().bytes.used >= 128 * KIB

        child.go()
        assert child.wait() == 0
        report = cache.reap()
        assert (report.slots, report.holds, report.blocks) == (1, 0, 2)
        s = cache.stats()
        assert s.counts.holds == 0
        assert s.counts.attachments == 1
        with cache.reserve("unfinished", 4096) as r:
            assert r.state == "WRITE"
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_waiter_gets_the_quarantined_blocks_as_soon_as_the_program_exits(name, fork):
    with small(name, capacity=4 * MIB) as cache:

        def old_image(child: Any) -> None:
            mine = join(name)
            keep = mine.allocate(4 * MIB)
            child.tell("holding")
            become_another_program(child)
            del keep

        child = fork(old_image)
        assert child.listen() == "holding"
        assert child.listen() == ""
        assert cache.reap().quarantined == 1

        def waiter(other: Any) -> None:
            mine = join(name)
            other.tell("waiting")
            watch = Stopwatch()
            obj = mine.allocate(4 * MIB, timeout=60.0)
            assert obj is not None
            assert watch.seconds < 30
            other.tell("got it")
            mine.close()

        waiting = fork(waiter)
        assert waiting.listen() == "waiting"
        eventually(lambda: cache.stats().waits >= 3, "it waits, slice after slice")
        child.go()
        assert child.wait() == 0
        watch = Stopwatch()
        assert waiting.listen() == "got it"
        assert watch.seconds < PROMPT
        waiting.wait()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_program_that_execs_itself_attaches_again_beside_its_old_slot(name, fork):
    with small(name) as cache:
        store(cache, "k", 3)

        def old_image(child: Any) -> None:
            mine = join(name)
            keep = [mine.get("k"), mine.allocate(64 * KIB)]
            os.set_inheritable(child._down_r, True)
            os.set_inheritable(child._up_w, True)
            code = f"""
import os, sys, shmcache
with shmcache.attach({name!r}, prefault="lazy") as cache:
    with cache.get("k") as obj:
        assert bytes(obj.byte_array) == b"\\3" * 4096
    # attaching reaped: the hold of the old image has gone, its unpublished block has not
    s = cache.stats()
    assert s.counts.holds == 1, s
    assert s.bytes.used == 4096 + 65536, s
    obj = cache.allocate(4096)
    cache.reap()
    assert cache.stats().counts.holds == 2
    obj.release()
    os.write({child._up_w}, b"second image\\n")
    os.read({child._down_r}, 1)
os.write({child._up_w}, b"done\\n")
os.read({child._down_r}, 1)
"""
            child.tell("first image")
            folder = os.path.dirname(os.path.dirname(shmcache.__file__))
            environment = dict(os.environ, PYTHONPATH=folder)
            os.execve(sys.executable, [sys.executable, "-c", code], environment)
            del keep

        child = fork(old_image)
        assert child.listen() == "first image"
        assert child.listen(60) == "second image"
        report = cache.reap()
        assert (report.slots, report.blocks) == (0, 0)
        assert cache.stats().counts.attachments == 3, "ours, the old image's in quarantine, the new one's"
        child.go()
        assert child.listen() == "done"
        assert cache.stats().bytes.used == 4096 + 64 * KIB
        child.go()
        assert child.wait() == 0
        report = cache.reap()
        assert (report.slots, report.holds, report.blocks) == (1, 0, 1)
        assert_only_published(cache)
    shmcache.unlink(name)


def test_liveness_is_pid_and_start_time_and_stack_and_any_doubt_means_alive():
    pid, start, stack = ffi.new("int32_t *"), ffi.new("uint64_t *"), ffi.new("uint64_t *")
    assert lib.shmc_self(pid, start, stack) == 0
    me, began, image = pid[0], start[0], stack[0]
    assert me == os.getpid()
    alive, execed, gone = lib.SHMC_ALIVE, lib.SHMC_EXECED, lib.SHMC_GONE
    assert lib.shmc_liveness(me, began, image) == alive
    assert lib.shmc_liveness(me, began + 1, image) == gone, "the pid was given to another process"
    assert lib.shmc_liveness(me, began - 1, image) == gone
    assert lib.shmc_liveness(me, began, image + 4096) == execed
    assert lib.shmc_liveness(me, began, 0) == alive, "a stack that was not readable proves nothing"
    assert lib.shmc_liveness(0, began, image) == alive
    assert lib.shmc_liveness(-1, began, image) == alive

    child = os.fork()
    if child == 0:
        os._exit(0)
    eventually(lambda: state_of(child) == "Z", "it is a zombie")
    with open(f"/proc/{child}/stat") as f:
        childs_start = int(f.read().rpartition(")")[2].split()[19])
    assert lib.shmc_liveness(child, childs_start, image) == gone, "a zombie has gone"
    os.waitpid(child, 0)
    assert lib.shmc_liveness(child, childs_start, image) == gone
