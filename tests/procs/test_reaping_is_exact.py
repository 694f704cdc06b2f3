"""A dead process's references, pins and unpublished blocks go, exactly; nobody else's do."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import resource
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hostile import (
    KIB,
    MIB,
    PROMPT,
    SHM,
    SIGSYS,
    Stopwatch,
    assert_only_published,
    assert_sound,
    die_instead_of_waking,
    eventually,
    join,
    need_seccomp,
    small,
    store,
    uniform,
)

import shmcache
from shmcache import OutOfSharedMemoryError, StaleHandleError
from shmcache._core import ffi, lib

HOLDS, BLOCKS = 8, 3  # what take_everything() takes: holds on published chunks, and unpublished blocks


def take_everything(cache: Any, tag: str) -> list[Any]:
    """References, pins of every kind, and unpublished blocks, a reserved one included."""
    kept: list[Any] = [cache.get(i) for i in range(3)]
    kept[0].ref_count_up()
    kept[1].pin()
    kept.append(cache.lookup([3, 4], pin=True))
    assert cache.pin(5)
    kept += [cache.allocate(64 * KIB), cache.allocate(4 * KIB), cache.reserve(f"r{tag}", 4 * KIB)]
    assert kept[-1].state == "WRITE"
    return kept


def release_everything(cache: Any, kept: list[Any]) -> None:
    for thing in kept:
        thing.release()
    assert cache.unpin(5)


def holding_child(fork: Any, name: str, tag: str, times: int = 1) -> Any:
    def main(child: Any) -> None:
        mine = join(name)
        kept = [take_everything(mine, f"{tag}-{i}") for i in range(times)]
        child.tell("holding")
        child.await_parent()
        for things in kept:
            release_everything(mine, things)
        mine.close()

    child = fork(main)
    assert child.listen() == "holding"
    return child


@pytest.fixture
def filled(name: str) -> Any:
    with small(name) as cache:
        for i in range(8):
            store(cache, i, i + 1)
        yield cache
    shmcache.unlink(name)


def test_a_reap_takes_exactly_what_the_dead_one_had(filled, fork):
    cache = filled
    clean = cache.stats()
    mine = take_everything(cache, "mine")
    alone = cache.stats()
    assert alone.counts.holds == clean.counts.holds + HOLDS + BLOCKS
    dying, living = holding_child(fork, cache.name, "dying"), holding_child(fork, cache.name, "living")
    assert cache.stats().counts.holds == 3 * (HOLDS + BLOCKS)
    used = cache.stats().bytes.used
    dying.kill()
    dying.wait()
    report = cache.reap()
    assert (report.slots, report.holds, report.blocks, report.quarantined) == (1, HOLDS, BLOCKS, 0)
    s = cache.stats()
    assert s.counts.holds == 2 * (HOLDS + BLOCKS)
    assert s.bytes.used == used - (64 + 4 + 4) * KIB
    assert s.counts.attachments == 2
    report = cache.reap()
    assert (report.slots, report.holds, report.blocks, report.quarantined) == (0, 0, 0, 0)
    assert_sound(cache)
    assert cache.reserve("rdying-0", 4 * KIB).state == "WRITE", "the dead one's reservation is free"
    assert cache.reserve("rliving-0", 4 * KIB).state == "PENDING", "the living one's is not"
    for i in range(3):
        uniform(mine[i], i + 1)
    living.go()
    assert living.wait() == 0
    assert cache.stats().counts.holds == HOLDS + BLOCKS
    release_everything(cache, mine)
    assert cache.stats().counts.holds == 0
    assert cache.stats().bytes.used == clean.bytes.used
    assert_only_published(cache)


def test_attaching_reaps(filled, fork):
    cache = filled
    clean = cache.stats()
    for i in range(3):
        child = holding_child(fork, cache.name, str(i))
        child.kill()
        child.wait()
        with join(cache.name):
            s = cache.stats()
            assert s.counts.holds == 0
            assert s.counts.attachments == 2
            assert s.bytes.used == clean.bytes.used
    assert cache.stats().reaps == 3, "the dead are counted, those who closed are not"
    assert_only_published(cache)


def test_waiting_reaps(filled, fork):
    """Before it waits: memory that only the dead hold is had without waiting for a slice."""
    cache = filled

    def hog(child: Any) -> None:
        mine = join(cache.name)
        mine.clear()
        kept = [mine.allocate(mine.capacity)]
        child.tell("holding")
        child.await_parent()
        del kept

    child = fork(hog)
    assert child.listen() == "holding"
    child.kill()
    child.wait()
    watch = Stopwatch()
    obj = cache.allocate(2 * MIB, timeout=60.0)
    assert obj is not None
    assert watch.seconds < PROMPT
    obj.release()
    assert_only_published(cache)


def test_what_a_dead_reader_held_after_a_remove_is_freed(filled, fork):
    cache = filled
    child = holding_child(fork, cache.name, "reader")
    for i in range(8):
        assert cache.remove(i)
        assert not cache.contains(i)
        assert store(cache, i, 100 + i)
    child.kill()
    child.wait()
    before = cache.stats()
    assert before.bytes.used > before.bytes.evictable + before.bytes.pinned
    report = cache.reap()
    assert (report.holds, report.blocks) == (HOLDS, BLOCKS)
    for i in range(8):
        with cache.get(i) as obj:
            uniform(obj, 100 + i)
    assert_only_published(cache)


def test_two_reap_the_same_dead_at_once(filled, fork):
    """Every hold is given back once: counts would go below zero otherwise."""
    cache = filled
    for _ in range(5):
        dying = [holding_child(fork, cache.name, str(i), times=4) for i in range(3)]

        def reaper(child: Any) -> None:
            mine = join(cache.name)  # attaching reaps too, but all are still alive
            child.tell("ready")
            child.await_parent()
            report = mine.reap()
            child.tell(f"{report.slots} {report.holds} {report.blocks}")
            child.await_parent()
            mine.close()

        reapers = [fork(reaper) for _ in range(4)]
        for child in reapers:
            assert child.listen() == "ready"
        for child in dying:
            child.kill()
        for child in dying:
            child.wait()
        for child in reapers:
            child.go()
        totals = [0, 0, 0]
        for child in reapers:
            totals = [a + b for a, b in zip(totals, map(int, child.listen().split()), strict=True)]
            child.go()
        for child in reapers:
            assert child.wait() == 0
            child.close()
        assert totals == [3, 3 * 4 * HOLDS, 3 * 4 * BLOCKS]
        assert cache.stats().counts.holds == 0
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)


def owner_of_many(fork: Any, name: str) -> Any:
    """A process with 2,000 references, 100 unpublished blocks and 8 pins."""

    def main(child: Any) -> None:
        own = join(name)
        kept = [own.get(i % 8) for i in range(2000)] + [own.allocate(4 * KIB) for _ in range(100)]
        kept.append(own.lookup(list(range(8)), pin=True))
        child.tell("holding")
        child.await_parent()
        del kept

    child = fork(main)
    assert child.listen() == "holding"
    return child


def test_a_reaper_that_dies_after_its_first_batch_leaves_the_rest_to_the_next(name, fork):
    """Reapers work in batches; each of these dies when it has let go of the lock after its first one."""
    need_seccomp()
    with small(name, capacity=8 * MIB, max_chunks=1 << 16) as cache:
        for i in range(8):
            store(cache, i, i + 1)
        mine = take_everything(cache, "mine")
        clean = cache.stats()

        def reaper(child: Any) -> None:
            own = join(name)
            child.tell("ready")
            child.await_parent()
            die_instead_of_waking()
            own.reap()
            child.tell("got through")

        dying = [owner_of_many(fork, name) for _ in range(2)]
        reapers = [fork(reaper) for _ in range(6)]
        for child in reapers:
            assert child.listen() == "ready"
        for child in dying:
            child.kill()
            child.wait()
        left = cache.stats().counts.holds
        for child in reapers:
            assert cache.allocate(cache.capacity) is None  # from here on somebody wants to be woken
            child.go()
            assert child.listen() == ""
            assert child.wait() == -SIGSYS
            now = cache.stats().counts.holds
            assert left - 200 < now < left, "one batch is done, and no more"
            left = now
            assert cache.verify() == [], "also with a half-reaped dead"
        report = cache.reap()
        assert report.slots == len(dying) + len(reapers)
        assert report.holds + report.blocks == left - clean.counts.holds
        assert cache.stats().counts == clean.counts
        assert cache.stats().bytes == clean.bytes
        for i in range(3):
            uniform(mine[i], i + 1)
        release_everything(cache, mine)
        assert_only_published(cache)
    shmcache.unlink(name)


def test_reapers_killed_at_random_leave_the_rest_to_the_next(name, fork):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with small(name, capacity=8 * MIB, max_chunks=1 << 16) as cache:
        for i in range(8):
            store(cache, i, i + 1)
        mine = take_everything(cache, "mine")
        clean = cache.stats()

        def reaper(child: Any) -> None:
            own = join(name)
            child.tell("ready")
            child.await_parent()
            own.reap()
            child.await_parent()

        in_the_middle = 0
        for _ in range(4):
            dying = [owner_of_many(fork, name) for _ in range(6)]
            reapers = [fork(reaper) for _ in range(3)]
            for child in reapers:
                assert child.listen() == "ready"
            for child in dying:
                child.kill()
            for child in dying:
                child.wait()
                child.close()
            for child in reapers:
                before = cache.stats().counts.holds
                child.go()
                # as soon as the first holds have gone, or a little later
                some = dice.randrange(1, 4000)
                end = time.monotonic() + 1.0
                while cache.stats().counts.holds > max(before - some, clean.counts.holds) and time.monotonic() < end:
                    pass
                child.kill()
                child.wait()
                child.close()
                in_the_middle += clean.counts.holds < cache.stats().counts.holds < before
                assert cache.verify() == [], "also with a half-reaped dead"
            cache.reap()
            assert cache.verify() == []
            assert cache.stats().counts == clean.counts
            assert cache.stats().bytes == clean.bytes
        print(f"killed in the middle of a reap: {in_the_middle} times")
        for i in range(3):
            uniform(mine[i], i + 1)
        release_everything(cache, mine)
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_new_process_takes_over_a_name_while_its_predecessor_is_being_reaped(filled, fork):
    """kill -9 of rank 2, and rank 2 starts at once, while somebody reaps in a loop: the new one keeps everything."""
    cache = filled

    def reaper(child: Any) -> None:
        mine = join(cache.name)
        child.tell("reaping")
        while True:
            mine.reap()

    reaping = fork(reaper)
    reaping.listen()

    def worker(child: Any) -> None:
        mine = join(cache.name, label="worker", rank=2)
        kept = take_everything(mine, str(os.getpid()))
        child.tell("holding")
        child.await_parent()
        for i in range(3):
            uniform(kept[i], i + 1)
        assert mine.stats().counts.holds >= HOLDS + BLOCKS
        child.tell("still")
        child.await_parent()

    child = fork(worker)
    assert child.listen() == "holding"
    for _ in range(15):
        child.kill()
        new = fork(worker)
        child.wait()
        child.close()
        child = new
        assert child.listen() == "holding"
        child.go()
        assert child.listen() == "still"
        eventually(lambda: cache.stats().counts.holds == HOLDS + BLOCKS, "only the new one's are left")
    reaping.kill()
    reaping.wait()
    child.kill()
    child.wait()
    cache.reap()
    assert cache.stats().counts.attachments == 1
    assert_only_published(cache)


def test_coming_and_going_and_dying_is_counted_right(name, fork):
    """16 processes attach and close, half of them are killed: in the end one attachment is left, ours."""
    with small(name) as cache:

        def comer(child: Any) -> None:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                with join(name) as mine:
                    assert 1 <= mine.stats().counts.attachments <= 64
            os._exit(0)

        children = [fork(comer) for _ in range(16)]
        dice = random.Random(7)
        for child in children[::2]:
            time.sleep(dice.random() * 0.05)
            child.kill()
        for i, child in enumerate(children):
            assert child.wait() == (-signal.SIGKILL if i % 2 == 0 else 0)
        cache.reap()
        s = cache.stats()
        assert s.counts.attachments == 1
        assert s.counts.holds == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def test_attachments_up_to_the_limit_and_one_more(name, fork):
    with small(name) as cache:
        more = [join(name) for _ in range(63)]
        assert cache.stats().counts.attachments == 64
        with pytest.raises(OutOfSharedMemoryError, match="64") as caught:
            join(name)
        assert caught.value.errno == errno.ENOSPC
        assert "max_attachments" in str(caught.value)
        assert cache.stats().counts.attachments == 64
        store(more[-1], "k", 7)
        with cache.get("k") as obj:
            uniform(obj, 7)
        more.pop().close()
        more.append(join(name))
        for each in more:
            each.close()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_table_full_of_the_dead_has_room_for_a_newcomer(name, fork):
    with small(name, max_attachments=8) as cache:
        store(cache, "k", 7)

        def dying(child: Any) -> None:
            mine = [join(name) for _ in range(7)]
            kept = [each.get("k") for each in mine]
            child.tell("attached")
            child.await_parent()
            del kept

        child = fork(dying)
        assert child.listen() == "attached"
        assert cache.stats().counts.attachments == 8
        with pytest.raises(OutOfSharedMemoryError, match="8"):
            join(name)
        child.kill()
        child.wait()
        with join(name) as newcomer:
            assert newcomer.stats().counts.attachments == 2
            assert newcomer.stats().counts.holds == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_table_full_of_the_dead_and_nobody_else(name, fork):
    """After kill -9 of everybody, with the table full to the last slot, the newcomer gets in."""

    def dying(child: Any) -> None:
        mine = [small(name, max_attachments=4) for _ in range(4)]
        store(mine[0], "k", 7)
        kept = [each.get("k") for each in mine]
        child.tell("attached")
        child.await_parent()
        del kept

    child = fork(dying)
    assert child.listen() == "attached"
    child.kill()
    child.wait()
    with join(name) as cache:
        with cache.get("k") as obj:
            uniform(obj, 7)
        assert cache.stats().counts.holds == 0
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


# ---- slots that were tampered with --------------------------------------------------------------------


def slot_of(cache: Any, pid: int) -> tuple[int, Any]:
    """Offset in the control file of the slot of `pid`, and what it says."""
    info = ffi.new("shmc_slot_info *")
    for slot in range(cache._attachment.mapping.geometry.max_attachments):
        assert lib.shmc_slot(cache._attachment.handle, slot, info) == 0
        if info.state == lib.SHMC_SLOT_LIVE and info.pid == pid:
            raw = (SHM / f"shmcache.{cache.name}").read_bytes()
            # pid, rank, start time, start of stack, as the slot has them
            pattern = struct.pack("<iIQQ", info.pid, info.rank, info.start_time, info.start_stack)
            at = raw.find(pattern)
            assert at > 0 and raw.find(pattern, at + 1) < 0
            return at, info
    raise AssertionError(f"pid {pid} has no slot")


def rewrite(cache: Any, at: int, data: bytes) -> None:
    with open(SHM / f"shmcache.{cache.name}", "r+b") as f, mmap.mmap(f.fileno(), 0) as view:
        view[at : at + len(data)] = data


def start_time_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_the_old_one(filled, fork):
    """The slot of a dead process whose pid a stranger has: its start time tells them apart."""
    cache = filled

    def stranger(child: Any) -> None:
        time.sleep(0.05)  # start times are counted in hundredths of a second
        child.tell("there")
        child.await_parent()

    dead = holding_child(fork, cache.name, "dead")
    time.sleep(0.05)
    other = fork(stranger)
    other.listen()
    at, info = slot_of(cache, dead.pid)
    assert start_time_of(other.pid) != info.start_time
    dead.kill()
    dead.wait()
    rewrite(cache, at, struct.pack("<i", other.pid))
    report = cache.reap()
    assert (report.slots, report.holds, report.blocks) == (1, HOLDS, BLOCKS)
    assert_only_published(cache)
    other.go()
    other.wait()


def test_a_process_that_cannot_be_looked_at_is_taken_for_alive(fork):
    """Without descriptors there is neither pidfd nor /proc: any doubt means alive."""
    alive = os.getpid()

    def looker(child: Any) -> None:
        child.tell(str(lib.shmc_liveness(alive, 1, 1)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        child.tell(str(lib.shmc_liveness(alive, 1, 1)))

    looks = fork(looker)
    assert looks.listen() == str(lib.SHMC_GONE), "another start time: its pid is somebody else's now"
    assert looks.listen() == str(lib.SHMC_ALIVE)
    assert looks.wait() == 0


def test_a_process_that_cannot_be_told_apart_is_taken_for_alive(filled, fork):
    cache = filled
    dead = holding_child(fork, cache.name, "dead")

    def stranger(child: Any) -> None:
        child.tell("there")
        child.await_parent()

    other = fork(stranger)
    other.listen()
    at, info = slot_of(cache, dead.pid)
    dead.kill()
    dead.wait()
    rewrite(cache, at, struct.pack("<iIQ", other.pid, info.rank, start_time_of(other.pid)))
    report = cache.reap()
    assert (report.slots, report.holds, report.blocks) == (0, 0, 0), "pid and start time fit: it may be it"
    assert cache.stats().counts.holds == HOLDS + BLOCKS
    other.kill()
    other.wait()
    report = cache.reap()
    assert (report.slots, report.holds, report.blocks) == (1, HOLDS, BLOCKS)
    assert_only_published(cache)


def test_a_process_wrongly_taken_for_dead_learns_it_and_harms_nobody(filled, fork):
    """The fence: its next call is refused, then it attaches again; what it held is not given back twice."""
    cache = filled

    def victim(child: Any) -> None:
        mine = join(cache.name)
        kept = take_everything(mine, "victim")
        child.tell("holding")
        child.await_parent()
        with pytest.raises(StaleHandleError, match="taken for dead"):
            mine.get(0)
        with mine.get(0) as obj:
            uniform(obj, 1)
        for thing in kept:
            with contextlib.suppress(StaleHandleError):
                thing.release()
        with pytest.raises((StaleHandleError, ValueError)):
            mine.put("never", kept[4])
        assert mine.unpin(5) is False
        assert store(mine, "again", 9)
        child.tell("back")
        child.await_parent()
        mine.close()

    child = fork(victim)
    child.listen()
    mine = take_everything(cache, "mine")
    at, info = slot_of(cache, child.pid)
    rewrite(cache, at, struct.pack("<iIQ", child.pid, info.rank, info.start_time - 100))
    report = cache.reap()
    assert (report.slots, report.holds, report.blocks) == (1, HOLDS, BLOCKS)
    # the memory that it held is somebody else's by now
    taken = [cache.allocate(64 * KIB), cache.allocate(4 * KIB)]
    for obj in taken:
        obj.byte_array[:] = b"\x77" * obj.get_size()
    child.go()
    assert child.listen() == "back"
    for obj in taken:
        uniform(obj, 0x77)
        assert obj.get_ref_count() == 1
        obj.release()
    assert not cache.contains("never")
    assert cache.contains("again")
    assert cache.stats().counts.holds == HOLDS + BLOCKS, "ours"
    for i in range(3):
        uniform(mine[i], i + 1)
    release_everything(cache, mine)
    child.go()
    assert child.wait() == 0
    assert cache.stats().counts.attachments == 1
    assert_only_published(cache)
