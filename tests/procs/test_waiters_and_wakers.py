"""Those who wait for memory or for a publication get it at once, also when those who should wake them die."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hostile import (
    KIB,
    MIB,
    PROMPT,
    SIGSYS,
    Stopwatch,
    assert_only_published,
    die_instead_of_waking,
    eventually,
    join,
    need_seccomp,
    small,
    store,
    uniform,
)

import shmcache


def memory_waiter(fork: Any, name: str, nbytes: int, timeout: float = 60.0) -> Any:
    """Tells "waiting", then "got it" or "nothing"; its object is put as "waiter's pid" when let go."""

    def main(child: Any) -> None:
        mine = join(name)
        child.tell("waiting")
        obj = mine.allocate(nbytes, timeout=timeout)
        child.tell("nothing" if obj is None else "got it")
        child.await_parent()
        if obj is not None:
            obj.byte_array[:] = b"\x42" * nbytes
            assert mine.put(f"by {os.getpid()}", obj)
            obj.release()
        mine.close()

    child = fork(main)
    assert child.listen() == "waiting"
    return child


def await_waits(cache: Any, more: int = 1) -> None:
    """Until somebody has begun to wait, again."""
    before = cache.stats().waits
    eventually(lambda: cache.stats().waits >= before + more, "somebody waits")


def test_memory_that_another_process_frees_is_had_at_once(name, fork):
    with small(name) as cache:
        keep = cache.allocate(cache.capacity)
        child = memory_waiter(fork, name, 1 * MIB)
        await_waits(cache)
        watch = Stopwatch()
        keep.release()
        assert child.listen() == "got it"
        assert watch.seconds < PROMPT
        child.go()
        assert child.wait() == 0
        assert cache.contains(f"by {child.pid}")
        assert_only_published(cache)
    shmcache.unlink(name)


@pytest.mark.parametrize("how", ["unpin", "remove", "publish", "close", "bump"])
def test_every_way_in_which_memory_becomes_free_wakes(name, fork, how):
    with small(name) as cache:
        other = join(name)
        kv = other.namespace("kv")
        obj = kv.allocate(cache.capacity)
        if how != "publish":
            assert kv.put("k", obj)
        if how in ("unpin", "remove", "bump"):
            kv.pin("k")
            obj.release()
        child = memory_waiter(fork, name, 1 * MIB)
        await_waits(cache)
        watch = Stopwatch()
        if how == "unpin":
            assert kv.unpin("k")
        elif how == "remove":
            assert kv.remove("k")
            assert kv.unpin("k")
        elif how == "bump":
            kv.bump()
            assert kv.unpin("k")
        elif how == "publish":
            assert kv.put("k", obj)
            obj.release()
        else:
            other.close()
        assert child.listen() == "got it"
        assert watch.seconds < PROMPT
        child.go()
        assert child.wait() == 0
        other.close()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_memory_of_a_process_that_dies_is_had_within_a_slice_or_two(name, fork):
    with small(name) as cache:

        def owner(child: Any) -> None:
            mine = join(name)
            kept = [mine.allocate(1 * MIB) for _ in range(4)]
            child.tell("holding")
            child.await_parent()
            del kept

        holding = fork(owner)
        holding.listen()
        child = memory_waiter(fork, name, 2 * MIB)
        await_waits(cache)
        watch = Stopwatch()
        holding.kill()
        holding.wait()
        assert child.listen() == "got it"
        assert watch.seconds < PROMPT
        child.go()
        assert child.wait() == 0
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_waker_killed_before_it_wakes_costs_a_slice_and_not_the_timeout(name, fork):
    """It has freed the memory and let go of the lock, and dies in place of the call that wakes."""
    need_seccomp()
    with small(name) as cache:

        def waker(child: Any) -> None:
            mine = join(name)
            obj = mine.allocate(mine.capacity)
            child.tell("holding")
            child.await_parent()
            die_instead_of_waking()
            obj.release()
            child.tell("lived on")

        holding = fork(waker)
        holding.listen()
        child = memory_waiter(fork, name, 1 * MIB)
        await_waits(cache)
        watch = Stopwatch()
        holding.go()
        assert holding.listen() == "", "it had somebody to wake"
        assert holding.wait() == -SIGSYS
        assert child.listen() == "got it"
        assert watch.seconds < PROMPT
        child.go()
        assert child.wait() == 0
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_waiter_that_is_killed_is_in_nobodys_way(name, fork):
    with small(name) as cache:
        keep = [cache.allocate(1 * MIB) for _ in range(4)]
        dying = [memory_waiter(fork, name, 1 * MIB) for _ in range(3)]
        living = memory_waiter(fork, name, 1 * MIB)
        await_waits(cache, 4)
        for child in dying:
            child.kill()
            child.wait()
        watch = Stopwatch()
        for obj in keep:
            obj.release()
        for i in range(100):
            cache.pin("absent")
            store(cache, i, 7)
            cache.remove(i)
        assert watch.seconds < PROMPT, "freeing never waits for a waiter"
        assert living.listen() == "got it"
        living.go()
        assert living.wait() == 0
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_stopped_waiter_is_in_nobodys_way(name, fork):
    with small(name) as cache:
        keep = cache.allocate(cache.capacity)
        stopped = memory_waiter(fork, name, 1 * MIB)
        await_waits(cache)
        stopped.kill(signal.SIGSTOP)
        other = memory_waiter(fork, name, 1 * MIB)
        await_waits(cache)
        watch = Stopwatch()
        keep.release()
        assert other.listen() == "got it"
        assert watch.seconds < PROMPT
        stopped.kill(signal.SIGCONT)
        assert stopped.listen() == "got it"
        for child in (other, stopped):
            child.go()
            assert child.wait() == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_timeout_is_kept(name, fork):
    with small(name) as cache:
        keep = cache.allocate(cache.capacity)
        watch = Stopwatch()
        assert cache.allocate(4096, timeout=0.5) is None
        assert 0.45 < watch.seconds < 0.5 + PROMPT
        watch = Stopwatch()
        assert cache.allocate(4096) is None
        assert watch.seconds < PROMPT
        keep.release()
        assert_only_published(cache)
    shmcache.unlink(name)


# ---- waiting for a publication ----------------------------------------------------------------------


def publication_waiter(fork: Any, name: str) -> Any:
    """Tells its reservation's state; then what wait() gave, "None" or the fill byte; then what reserving again gave."""

    def main(child: Any) -> None:
        mine = join(name)
        pending = mine.reserve("k", 64 * KIB)
        child.tell(pending.state)
        obj = pending.wait(timeout=60.0)
        child.tell("None" if obj is None else str(uniform(obj)))
        if obj is not None:
            obj.release()
        with mine.reserve("k", 64 * KIB) as again:
            child.tell(again.state)
            if again.state == "WRITE":
                again.obj.byte_array[:] = b"\x09" * (64 * KIB)
                assert again.put()
        child.await_parent()
        mine.close()

    return fork(main)


def writer(fork: Any, name: str, act: Any) -> Any:
    """Has reserved "k" and written half of it; then does `act(reservation)` when let go."""

    def main(child: Any) -> None:
        mine = join(name)
        reservation = mine.reserve("k", 64 * KIB)
        assert reservation.state == "WRITE"
        reservation.obj.byte_array[: 32 * KIB] = b"\x05" * (32 * KIB)
        child.tell("reserved")
        child.await_parent()
        reservation.obj.byte_array[32 * KIB :] = b"\x05" * (32 * KIB)
        act(reservation)
        child.tell("acted")
        child.await_parent()

    child = fork(main)
    assert child.listen() == "reserved"
    return child


def test_a_publication_is_seen_at_once_by_all_who_wait_for_it(name, fork):
    with small(name) as cache:
        writing = writer(fork, name, lambda r: r.put())
        waiting = [publication_waiter(fork, name) for _ in range(3)]
        for child in waiting:
            assert child.listen() == "PENDING"
        await_waits(cache, 3)
        watch = Stopwatch()
        writing.go()
        for child in waiting:
            assert child.listen() == "5"
        assert watch.seconds < PROMPT
        for child in waiting:
            assert child.listen() == "PUBLISHED"
            child.go()
            assert child.wait() == 0
        writing.go()
        writing.wait()
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)


@pytest.mark.parametrize("how", ["kill", "release", "close"])
def test_a_writer_that_dies_or_gives_up_lets_one_of_those_who_wait_write(name, fork, how):
    def act(reservation: Any) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "release":
            reservation.release()
        else:
            reservation._namespace.cache.close()

    with small(name) as cache:
        writing = writer(fork, name, act)
        waiting = [publication_waiter(fork, name) for _ in range(3)]
        for child in waiting:
            assert child.listen() == "PENDING"
        await_waits(cache, 3)
        watch = Stopwatch()
        writing.go()
        if how == "kill":
            assert writing.wait() == -signal.SIGKILL
        # wait() ends with None for all, except for those who see the next writer's bytes already
        waited = [child.listen() for child in waiting]
        assert watch.seconds < PROMPT
        assert set(waited) <= {"None", "9"} and "None" in waited
        states = [child.listen() for child in waiting]
        assert states.count("WRITE") == 1, states
        assert set(states) <= {"WRITE", "PENDING", "PUBLISHED"}
        for child in waiting:
            child.go()
            assert child.wait() == 0
        if how != "kill":
            writing.go()
            writing.wait()
        cache.reap()
        with cache.get("k") as obj:
            uniform(obj, 9)
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_writer_killed_between_publishing_and_waking_has_published(name, fork):
    need_seccomp()

    def act(reservation: Any) -> None:
        die_instead_of_waking()
        reservation.put()

    with small(name) as cache:
        writing = writer(fork, name, act)
        child = publication_waiter(fork, name)
        assert child.listen() == "PENDING"
        await_waits(cache)
        watch = Stopwatch()
        writing.go()
        assert writing.wait() == -SIGSYS
        assert child.listen() == "5"
        assert watch.seconds < PROMPT
        assert child.listen() == "PUBLISHED"
        child.go()
        assert child.wait() == 0
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_put_by_somebody_else_ends_the_wait_and_the_reservers_put_gives_false(name, fork):
    told: list[bool] = []
    with small(name) as cache:
        writing = writer(fork, name, lambda r: os._exit(3) if r.put() else None)
        child = publication_waiter(fork, name)
        assert child.listen() == "PENDING"
        await_waits(cache)
        watch = Stopwatch()
        told.append(store(cache, "k", 6, 64 * KIB))
        assert child.listen() == "6"
        assert watch.seconds < PROMPT
        assert told == [True]
        writing.go()
        assert writing.listen() == "acted"
        writing.go()
        assert writing.wait() == 0
        assert child.listen() == "PUBLISHED"
        child.go()
        assert child.wait() == 0
        cache.reap()
        with cache.get("k") as obj:
            uniform(obj, 6)
        assert_only_published(cache)
    shmcache.unlink(name)


def test_many_wait_and_none_is_forgotten(name, fork):
    """Eight processes pass one block around through a full cache; kills in between lose nobody."""
    with small(name, capacity=1 * MIB) as cache:
        keep = cache.allocate(cache.capacity)
        children = [memory_waiter(fork, name, 512 * KIB) for _ in range(8)]
        await_waits(cache, 8)
        children[3].kill()
        children[3].wait()
        keep.release()
        left = [child for i, child in enumerate(children) if i != 3]
        watch = Stopwatch()
        for _ in range(len(left)):
            # each who has got it publishes and releases, and what it published is evicted for the next
            for child in list(left):
                try:
                    said = child.listen(0.01)
                except TimeoutError:
                    continue
                assert said == "got it"
                child.go()
                assert child.wait() == 0
                left.remove(child)
        while left and watch.seconds < 30:
            child = left.pop(0)
            assert child.listen() == "got it"
            child.go()
            assert child.wait() == 0
        assert not left
        cache.reap()
        assert_only_published(cache)
    shmcache.unlink(name)
