"""Real processes on few keys at once: every key's history is that of one object, used by one at a time.

A killed worker's last call may or may not have happened, but not after its death; what it had reserved
ends when somebody reaps it. `SHMCACHE_LINEAR_SEED` repeats a choice of calls (not their times).
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hostile import Patience
from linear_model import CLEAR, EMPTY, NAMES, PARTS, step
from linear_worker import Notes, Worker
from linearize import NotLinearizable, Op, check

import shmcache

ROOM = 60_000  # notes of one worker
LEAST = 250
SMALL = 24 * 4096  # as many objects as granules


def record(
    name: str, fork: Callable[..., Any], seed: int, seconds: float, *, workers: int = 4, keys: int = 3,
    kills: float = 0.0, liar: bool = False, capacity: int = 4 << 20,
) -> dict[int, list[Op]]:  # fmt: skip
    """Run workers, killing one about `kills` times a second; what was done to each key.

    Where a machine is slow it goes on until half of the kills are done, or, without kills, each has made `LEAST` notes.
    """
    print(f"SHMCACHE_LINEAR_SEED={seed}")
    dice = random.Random(f"{seed} kills")
    history: defaultdict[int, list[Op]] = defaultdict(list)
    options: dict[str, Any] = {"prefault": "lazy", "lock_timeout": 30.0}
    with shmcache.create(name, capacity, prefault="wait", hugepages=False, lock_timeout=30.0) as cache:
        cache.namespace("linear", parts=PARTS)
        began, patience = time.monotonic_ns(), Patience(seconds, longest=seconds + 60)
        enough = mmap.mmap(-1, 1)  # of this process and its children
        running: list[tuple[Any, Notes, int]] = []
        ended: list[tuple[Notes, int, tuple[int, int] | None]] = []
        numbers = itertools.count(1)

        def start() -> None:
            notes, who = Notes(ROOM), next(numbers)

            def work(child: Any) -> None:
                signal.alarm(int(seconds) + 100)  # ends by itself when the test is gone
                with shmcache.attach(name, **options) as mine:
                    child.tell("works")
                    child.await_parent()
                    Worker(mine, notes, who, seed, keys, lies=liar and who == 1).run(lambda: bool(enough[0]))

            running.append((fork(work), notes, who))
            assert running[-1][0].listen() == "works"

        for _ in range(workers):
            start()
        for child, _, _ in running:
            child.go()
        while patience.lasts(len(ended) >= kills * seconds / 2 if kills else all(n.has(LEAST) for _, n, _ in running)):
            time.sleep(dice.random() * 2 / (kills or 100))
            if not kills:
                continue
            child, notes, who = running.pop(dice.randrange(len(running)))
            before = time.monotonic_ns()
            child.kill()
            assert child.wait() == -signal.SIGKILL, "it ended by itself: see what it said"
            ended.append((notes, who, (before, time.monotonic_ns())))
            child.close()
            start()
            running[-1][0].go()
        enough[0] = 1
        for child, notes, who in running:
            assert child.wait(60) == 0
            ended.append((notes, who, None))
        cache.reap()
        reaped = time.monotonic_ns()

        last = Notes(1000)
        me = Worker(cache, last, 0, seed, keys)
        for key in range(keys):
            for part in range(PARTS):
                me.get(key, part, 1.0)
                me.reserve(key, part, 1.0)
                me.contains(key, part, 1.0)
        me.leave()
        ended.append((last, 0, None))
        for notes, who, killed in ended:
            for key, op in notes.read(who, killed, reaped):
                history[key].append(op)
            notes.close()
        s = cache.stats()
        print(f"{len(ended) - 1} workers, {s.evictions} evictions; lock: {s.lock}")
        assert s.counts.attachments == 1 and s.counts.holds == 0
        if s.evictions:  # whichever chunks those were, and whenever
            for ops in history.values():
                ops.append(Op(began, time.monotonic_ns(), (CLEAR, 0, 0), silent=True))
        assert bool(s.evictions) is (capacity < 1 << 20)
        assert cache.verify() == []
        cache.unlink()
    return dict(history)


def check_keys(history: dict[int, list[Op]]) -> None:
    for key, ops in sorted(history.items()):
        most = check(ops, EMPTY, step)
        kinds = Counter(NAMES[op.what[0]] for op in ops)
        cut = sum(op.result is None for op in ops)
        print(f"key {key}: {len(ops)} calls, {cut} cut short or reaped; {most} configurations; {dict(kinds)}")


def seed() -> int:
    return int(os.environ.get("SHMCACHE_LINEAR_SEED", random.randrange(1 << 30)))


def test_every_key_is_one_object(name, fork):
    history = record(name, fork, seed(), 2.5)
    assert sum(map(len, history.values())) >= 4 * LEAST
    check_keys(history)


def test_every_key_is_one_object_when_workers_are_killed(name, fork):
    history = record(name, fork, seed(), 3.5, kills=20)
    assert any(op.result is None for ops in history.values() for op in ops), "somebody was killed in a call"
    check_keys(history)


def test_a_worker_that_remembers_answers_is_found_out(name, fork):
    """The whole way from the notes to the check can fail."""
    history = record(name, fork, seed(), 1.5, workers=3, liar=True)
    with pytest.raises(NotLinearizable):
        check_keys(history)


def test_every_key_is_one_object_that_may_be_evicted(name, fork):
    """Less can be said of a key that may vanish at any moment; but it comes back by a put only."""
    check_keys(record(name, fork, seed(), 2.0, keys=6, kills=10, capacity=SMALL))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capacity", [4 << 20, SMALL], ids=["room", "evicting"])
@pytest.mark.parametrize("kills", [0, 30], ids=["calm", "kills"])
def test_every_key_is_one_object_for_long(name, fork, kills, capacity):
    first = seed()
    for i in range(4):
        more: dict[str, int] = {"workers": 3 + i % 2, "keys": 1 + i if capacity > SMALL else 6 + i}
        check_keys(record(f"{name}-{i}", fork, first + i, 8.0, kills=kills, capacity=capacity, **more))
