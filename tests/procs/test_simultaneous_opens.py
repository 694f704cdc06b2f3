"""Any number of processes may open one name at once: exactly one generation results."""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any

import pytest
from hostile import (
    KIB,
    MIB,
    PROMPT,
    Patience,
    assert_only_published,
    files_of,
    instance,
    join,
    small,
    store,
    uniform,
)

import shmcache
from shmcache import SegmentBusyError, SegmentExistsError, SegmentNotFoundError

N = 16


def run_together(fork: Any, n: int, work: Any) -> list[Any]:
    """n children that have started before any begins `work(child, i)`."""

    def ready(i: int) -> Any:
        def main(child: Any) -> None:
            child.tell("ready")
            child.await_parent()
            work(child, i)

        return main

    children = [fork(ready(i)) for i in range(n)]
    for child in children:
        assert child.listen() == "ready"
    for child in children:
        child.go()
    return children


def finish(children: list[Any]) -> None:
    for child in children:
        assert child.wait() == 0
        child.close()


@pytest.mark.parametrize("prefault", ["lazy", "background"])
def test_sixteen_opens_make_one_generation_that_all_share(name, fork, prefault):
    for _ in range(4):

        def work(child: Any, i: int) -> None:
            with small(name, region_bytes=1 * MIB, prefault=prefault) as cache:
                assert store(cache, f"from {i}", i + 1, 64 * KIB)
                child.tell(f"{instance(cache):x}")
                child.await_parent()
                for j in range(N):
                    with cache.get(f"from {j}") as obj:
                        uniform(obj, j + 1)
                assert cache.stats().counts.chunks == N
                child.tell("read all")
                child.await_parent()

        children = run_together(fork, N, work)
        seen = {child.listen() for child in children}
        assert len(seen) == 1, f"generations: {seen}"
        assert len(files_of(name)) == 1 + 4
        for child in children:
            child.go()
        for child in children:
            assert child.listen() == "read all"
        with join(name) as cache:
            assert cache.stats().counts.attachments == N + 1
            assert {f"{instance(cache):x}"} == seen
            for child in children:
                child.go()
            finish(children)
            assert cache.stats().counts.attachments == 1
            assert_only_published(cache)
        shmcache.unlink(name)
        assert files_of(name) == []


def test_of_sixteen_creates_exactly_one_succeeds(name, fork):
    def work(child: Any, i: int) -> None:
        try:
            cache = shmcache.create(name, "4MiB", prefault="lazy")
        except SegmentExistsError:
            child.tell("exists")
        else:
            child.tell("created")
            child.await_parent()
            cache.close()

    for _ in range(4):
        children = run_together(fork, N, work)
        said = [child.listen() for child in children]
        assert sorted(said) == ["created"] + ["exists"] * (N - 1)
        children[said.index("created")].go()
        finish(children)
        shmcache.unlink(name)


def test_attaching_while_others_create_finds_it_or_nothing(name, fork):
    """attach never sees half a segment."""

    def work(child: Any, i: int) -> None:
        if i % 2:
            with small(name) as cache:
                child.tell(f"{instance(cache):x}")
                child.await_parent()
            return
        try:
            cache = join(name)
        except SegmentNotFoundError:
            child.tell("absent")
            return
        with cache:
            assert cache.verify() == []
            child.tell(f"{instance(cache):x}")
            child.await_parent()

    for _ in range(6):
        children = run_together(fork, N, work)
        said = [child.listen() for child in children]
        assert len(set(said) - {"absent"}) == 1
        for child, word in zip(children, said, strict=True):
            if word != "absent":
                child.go()
        finish(children)
        shmcache.unlink(name)


def test_of_many_replacements_one_is_made_and_nobody_loses_what_he_attached_to(name, fork):
    """All ask for another capacity with on_incompatible="replace": one replaces, the rest share."""
    for _ in range(3):
        small(name, capacity=128 * KIB).close()

        def work(child: Any, i: int) -> None:
            with small(name, capacity=4 * MIB, on_incompatible="replace") as cache:
                child.tell(f"{instance(cache):x}")
                assert store(cache, i, i + 1)
                child.await_parent()
                with cache.get((i + 1) % 8) as obj:
                    uniform(obj, (i + 1) % 8 + 1)

        children = run_together(fork, 8, work)
        assert len({child.listen() for child in children}) == 1
        with join(name) as cache:
            deadline = time.monotonic() + 20
            while len(cache.keys()) < 8 and time.monotonic() < deadline:
                time.sleep(0.001)
            for child in children:
                child.go()
            finish(children)
        shmcache.unlink(name)


def test_a_storm_of_opens_and_unlinks(name, fork):
    """Whoever got a segment can use it to the end, forced away or not; nothing else is ever raised."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")

    def work(child: Any, i: int) -> None:
        dice = random.Random(seed + i)
        opened = removed = 0
        patience = Patience(2.5)
        while patience.lasts(opened + removed > 0):
            if i < 5:
                with small(name, region_bytes=1 * MIB) as cache:
                    key = dice.randrange(20)
                    found = cache.get(key)
                    if found is not None:
                        with found:
                            uniform(found, key + 1)
                    store(cache, key, key + 1, 64 * KIB)
                    for _ in range(dice.randrange(5)):
                        with cache.allocate(64 * KIB) as obj:
                            obj.byte_array[:] = b"x" * (64 * KIB)
                    if dice.random() < 0.2:
                        assert cache.verify() == []
                opened += 1
            else:
                try:
                    shmcache.unlink(name, force=i == 5)
                    removed += 1
                except (SegmentNotFoundError, SegmentBusyError):
                    pass
                if dice.random() < 0.2:
                    shmcache.segments()
                time.sleep(dice.random() * 0.004)
        assert opened or removed
        child.tell(f"{opened} {removed}")

    children = run_together(fork, 7, work)
    counts = [tuple(map(int, child.listen(60).split())) for child in children]
    finish(children)
    print(f"opens and unlinks of each: {counts}")
    with small(name, region_bytes=1 * MIB) as cache:
        tag = f"{instance(cache):016x}"
        assert all(tag in file for file in files_of(name)[1:]), files_of(name)
        assert_only_published(cache)
        assert cache.stats().counts.attachments == 1
    shmcache.unlink(name)
    assert files_of(name) == []


def test_a_storm_of_opens_by_processes_that_are_killed(name, fork):
    """kill -9 during open, again and again: the name can always be opened again, and nothing piles up."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    done = 0

    def work(child: Any, i: int) -> None:
        while True:
            with small(name, region_bytes=1 * MIB) as cache:
                store(cache, i, i + 1, 64 * KIB)
            if i == 0:
                with contextlib.suppress(SegmentNotFoundError, SegmentBusyError):
                    shmcache.unlink(name)

    patience = Patience(3.0)
    while patience.lasts(done > 3):
        children = run_together(fork, 4, work)
        time.sleep(dice.random() * 0.05)
        for child in children:
            child.kill()
        for child in children:
            child.wait()
            child.close()
        started = time.monotonic()
        with small(name, region_bytes=1 * MIB) as cache:
            assert time.monotonic() - started < PROMPT
            tag = f"{instance(cache):016x}"
            assert [tag in file for file in files_of(name)] == [False, True, True, True, True]
            for key in range(4):
                obj = cache.get(key)
                if obj is not None:
                    with obj:
                        uniform(obj, key + 1)
            assert cache.stats().counts.attachments == 1
            assert_only_published(cache)
        done += 1
    shmcache.unlink(name)
    assert done > 3


def test_ephemeral_segments_in_a_storm_of_comings_and_goings(name, fork):
    """The last to leave removes it, while others may be arriving: they get that one or a new one, whole."""

    def work(child: Any, i: int) -> None:
        n = 0
        patience = Patience(1.5)
        while patience.lasts(n > 5):
            with small(name, lifetime="ephemeral", region_bytes=1 * MIB) as cache:
                store(cache, n, 1 + n % 200, 64 * KIB)
                assert cache.stats().counts.attachments >= 1
            n += 1
        child.tell(str(n))
        os._exit(0)

    children = run_together(fork, 6, work)
    assert all(int(child.listen(60)) > 5 for child in children)
    finish(children)
    assert files_of(name) == []
