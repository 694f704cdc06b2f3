"""kill -9 at the worst moments: inside the lock, on the way to it, half way through a store."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hostile import (
    PROMPT,
    Stopwatch,
    assert_only_published,
    assert_sound,
    await_holder,
    eventually,
    hold_lock,
    join,
    recoveries,
    small,
    store,
    uniform,
)

import shmcache


def killed_inside(fork: Any, cache: Any, in_transaction: bool) -> int:
    """A process that took the lock and was killed in it; its pid."""

    def holder(child: Any) -> None:
        mine = join(cache.name)
        child.tell("ready")
        hold_lock(mine, in_transaction=in_transaction)

    child = fork(holder)
    child.listen()
    await_holder(cache, child.pid, in_transaction=in_transaction)
    child.kill()
    child.wait()
    return int(child.pid)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_next_to_lock_recovers_at_once(name, fork, in_transaction):
    with small(name) as cache:
        store(cache, "k", 7)
        before = cache.stats()
        killed_inside(fork, cache, in_transaction)
        watch = Stopwatch()
        with cache.get("k") as obj:
            assert watch.seconds < PROMPT
            uniform(obj, 7)
        assert recoveries(cache) == before.lock.recoveries + 1
        assert store(cache, "after", 8)
        assert cache.stats().bytes.used == before.bytes.used + 4096
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
        assert recoveries(cache) == before.lock.recoveries + 1
    shmcache.unlink(name)


def first_calls() -> dict[str, Callable[[Any, Any], object]]:
    """Each public call that takes the lock, given the cache and a held object of key "held"."""

    def expect(value: object, wanted: object) -> None:
        assert value == wanted, f"{value!r}, expected {wanted!r}"

    def attach_and_close(cache: Any, obj: Any) -> None:
        with join(cache.name) as other:
            assert other.contains("k")

    def reserve(cache: Any, obj: Any) -> None:
        with cache.reserve("reserved", 4096) as r:
            expect(r.state, "WRITE")

    def look(cache: Any, obj: Any) -> None:
        with cache.lookup(["k", "absent"], pin=True) as hit:
            expect(hit.n, 1)

    return {
        "get": lambda cache, obj: cache.get("k").release(),
        "get_many": lambda cache, obj: [o.release() for o in cache.get_many(["k"])],
        "put": lambda cache, obj: cache.put("new", obj),
        "allocate": lambda cache, obj: cache.allocate(4096).release(),
        "allocate_many": lambda cache, obj: [o.release() for o in cache.allocate_many(4096, n=3)],
        "contains": lambda cache, obj: expect(cache.contains("k"), True),
        "lookup": look,
        "pin": lambda cache, obj: expect(cache.pin("k"), True),
        "unpin": lambda cache, obj: expect(cache.unpin("absent"), False),
        "touch": lambda cache, obj: cache.touch(["k"]),
        "remove": lambda cache, obj: expect(cache.remove("absent"), False),
        "clear": lambda cache, obj: cache.namespace("other").clear(),
        "keys": lambda cache, obj: expect("k" in cache.keys(), True),
        "bump": lambda cache, obj: cache.namespace("other").bump(),
        "namespace": lambda cache, obj: cache.namespace("other"),
        "reserve": reserve,
        "release": lambda cache, obj: obj.release(),
        "ref_count_up": lambda cache, obj: obj.ref_count_up(),
        "get_ref_count": lambda cache, obj: expect(obj.get_ref_count(), 1),
        "object pin": lambda cache, obj: expect(obj.pin(), True),
        "reap": lambda cache, obj: cache.reap(),
        "verify": lambda cache, obj: expect(cache.verify(), []),
        "attach, close": attach_and_close,
    }


@pytest.mark.parametrize("in_transaction", [False, True])
def test_every_call_can_be_the_first_after_a_death(name, fork, in_transaction):
    with small(name) as cache:
        store(cache, "k", 7)
        cache.namespace("other")
        for what, call in first_calls().items():
            obj = cache.allocate(4096)
            before = recoveries(cache)
            killed_inside(fork, cache, in_transaction)
            watch = Stopwatch()
            call(cache, obj)
            assert watch.seconds < PROMPT, what
            assert recoveries(cache) == before + 1, what
            obj.release()
            cache.unpin("k")
            cache.remove("new")
            assert cache.verify() == [], what
        assert_only_published(cache)
    shmcache.unlink(name)


def test_close_can_be_the_first_call_after_a_death(name, fork):
    cache = small(name)
    with join(name) as watcher:
        cache.get("absent")
        killed_inside(fork, cache, True)
        watch = Stopwatch()
        cache.close()
        assert watch.seconds < PROMPT
        assert recoveries(watcher) == 1
        watcher.reap()
        assert watcher.stats().counts.attachments == 1
        assert_sound(watcher)
    shmcache.unlink(name)


def test_looking_without_the_lock_works_while_its_holder_is_dead(name, fork):
    """stats, events and segments() take no lock, so they neither recover nor hang."""
    with small(name) as cache:
        store(cache, "k")
        assert [e.key for e in cache.events()] == ["k"]
        killed_inside(fork, cache, True)
        assert cache.stats().counts.chunks == 1
        assert [e.key for e in cache.events()] == ["k"]
        assert [(s.alive, s.dead) for s in shmcache.segments() if s.name == name] == [(1, 1)]
        assert recoveries(cache) == 0
        assert cache.contains("k")
        assert recoveries(cache) == 1
    shmcache.unlink(name)


def test_many_deaths_in_a_row_leave_nothing_behind(name, fork):
    with small(name) as cache:
        store(cache, "k", 7)
        for i in range(20):
            killed_inside(fork, cache, i % 2 == 0)
        # each successor recovered from the one before it, and the last is ours
        assert cache.contains("k")
        assert recoveries(cache) == 20
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_death_while_waiting_for_the_lock_is_nothing_to_recover_from(name, fork):
    with small(name, lock_timeout=20.0) as cache:
        store(cache, "k", 7)

        def holder(child: Any) -> None:
            mine = join(name)
            child.tell("ready")
            hold_lock(mine, 400_000_000)
            child.tell("let go")
            child.await_parent()

        def waiter(child: Any) -> None:
            mine = join(name, lock_timeout=60.0)
            child.tell("ready")
            child.await_parent()
            child.tell("going in")
            mine.get("k")

        waiting = fork(waiter)
        waiting.listen()
        held = fork(holder)
        held.listen()
        await_holder(cache, held.pid)
        contended = cache.stats().lock.contended
        waiting.go()
        waiting.listen()
        eventually(lambda: cache.stats().lock.contended > contended, "the other waits for the lock")
        waiting.kill()
        waiting.wait()
        assert held.listen() == "let go"
        watch = Stopwatch()
        assert cache.contains("k")
        assert watch.seconds < PROMPT
        assert recoveries(cache) == 0
        held.go()
        held.wait()
        assert cache.reap().slots == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_holder_and_waiter_die_together(name, fork):
    with small(name) as cache:
        store(cache, "k", 7)

        def waiter(child: Any) -> None:
            mine = join(name, lock_timeout=60.0)
            child.tell("ready")
            child.await_parent()
            mine.get("k")

        waiting = [fork(waiter) for _ in range(3)]
        for child in waiting:
            child.listen()

        def holder(child: Any) -> None:
            mine = join(name)
            child.tell("ready")
            hold_lock(mine, in_transaction=True)

        held = fork(holder)
        held.listen()
        await_holder(cache, held.pid)
        contended = cache.stats().lock.contended
        for child in waiting:
            child.go()
        eventually(lambda: cache.stats().lock.contended >= contended + 3, "three wait for the lock")
        for child in [held, *waiting]:
            child.kill()
        for child in [held, *waiting]:
            child.wait()
        watch = Stopwatch()
        with cache.get("k") as obj:
            uniform(obj, 7)
        assert watch.seconds < PROMPT
        assert recoveries(cache) >= 1
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_the_heir_of_the_lock_is_killed_too(name, fork):
    """Owner dies, the kernel gives the lock to the one who waits, that one dies inside: the third goes on."""
    with small(name) as cache:
        store(cache, "k", 7)

        def holder(child: Any) -> None:
            mine = join(name, lock_timeout=60.0)
            child.tell("ready")
            child.await_parent()
            hold_lock(mine, in_transaction=True)

        chain = [fork(holder) for _ in range(4)]
        for child in chain:
            child.listen()
        chain[0].go()
        await_holder(cache, chain[0].pid, in_transaction=True)
        for dying, heir in itertools.pairwise(chain):
            contended = cache.stats().lock.contended
            heir.go()
            eventually(lambda c=contended: cache.stats().lock.contended > c, "the heir waits for the lock")
            dying.kill()
            dying.wait()
            await_holder(cache, heir.pid, in_transaction=True)
        chain[-1].kill()
        chain[-1].wait()
        with cache.get("k") as obj:
            uniform(obj, 7)
        assert recoveries(cache) == 4
        assert cache.reap().slots == 4
        assert_only_published(cache)
    shmcache.unlink(name)


def test_sigterm_ends_a_process_that_waits_for_the_lock(name, fork):
    with small(name) as cache:

        def holder(child: Any) -> None:
            mine = join(name)
            child.tell("ready")
            hold_lock(mine)

        def waiter(child: Any) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            mine = join(name, lock_timeout=60.0)
            child.tell("ready")
            child.await_parent()
            mine.get("k")

        waiting = fork(waiter)
        waiting.listen()
        held = fork(holder)
        held.listen()
        await_holder(cache, held.pid)
        contended = cache.stats().lock.contended
        waiting.go()
        eventually(lambda: cache.stats().lock.contended > contended, "it waits for the lock")
        watch = Stopwatch()
        waiting.kill(signal.SIGTERM)
        assert waiting.wait() == -signal.SIGTERM
        assert watch.seconds < PROMPT
        held.kill()
        held.wait()
        assert cache.contains("k") is False
        cache.reap()
        assert_sound(cache)
    shmcache.unlink(name)


def test_a_half_written_block_never_becomes_a_hit(name, fork):
    with small(name) as cache:
        store(cache, "other", 3)
        before = cache.stats()

        def writer(child: Any) -> None:
            mine = join(name)
            plain = mine.allocate(64 * 1024)
            plain.byte_array[:1000] = b"x" * 1000
            reserved = mine.reserve("k", 64 * 1024)
            assert reserved.state == "WRITE"
            reserved.obj.byte_array[:1000] = b"y" * 1000
            child.tell("half written")
            os.kill(os.getpid(), signal.SIGKILL)

        child = fork(writer)
        assert child.listen() == "half written"
        assert child.wait() == -signal.SIGKILL
        assert cache.get("k") is None
        assert not cache.contains("k")
        assert cache.lookup(["k"]).n == 0
        assert cache.stats().bytes.used > before.bytes.used
        report = cache.reap()
        assert (report.slots, report.holds, report.blocks) == (1, 0, 2)
        after = cache.stats()
        assert after.bytes == before.bytes
        assert after.counts == before.counts
        assert after.aborts == before.aborts + 2
        assert cache.get("k") is None
        assert [e.key for e in cache.events()] == ["other"]
        assert store(cache, "k", 9)
        with cache.get("k") as obj:
            uniform(obj, 9)
        assert_only_published(cache)
    shmcache.unlink(name)
