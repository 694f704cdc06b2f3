"""A /dev/shm that is too small, or fills up meanwhile: an error or a miss, and never a SIGBUS.

Each test runs in a child with a small tmpfs of its own on /dev/shm.
"""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hostile import (
    CLONE_NEWNS,
    KIB,
    MIB,
    PROMPT,
    Stopwatch,
    assert_only_published,
    assert_sound,
    eventually,
    files_of,
    join,
    need_namespaces,
    own_shm,
    small,
    store,
    uniform,
)

import shmcache
from shmcache import OutOfSharedMemoryError

NAME = "full"


@pytest.fixture
def in_small_shm(fork: Any) -> Callable[[str, Callable[[], object]], None]:
    """Runs a function in a child that has a /dev/shm of that size to itself."""
    need_namespaces(CLONE_NEWNS)

    def run(size: str, test: Callable[[], object]) -> None:
        def main(child: Any) -> None:
            own_shm(size)
            assert os.listdir("/dev/shm") == []
            test()

        code = fork(main).wait(90)
        assert code == 0, f"the child ended with {code}; what it said is in the captured stderr"

    return run


def free_bytes() -> int:
    fs = os.statvfs("/dev/shm")
    return fs.f_bavail * fs.f_frsize


class Filler:
    """A file that takes all that is left, but for `leave` bytes."""

    def __init__(self, leave: int = 0) -> None:
        self._path = "/dev/shm/filler"
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR)
        size = (free_bytes() - leave) // 4096 * 4096
        if size > 0:
            os.posix_fallocate(self._fd, 0, size)

    def remove(self) -> None:
        os.close(self._fd)
        os.unlink(self._path)


def put_all(cache: Any, n: int, nbytes: int = 256 * KIB) -> int:
    """Store until nothing more is to be had; every byte is written and read. How many were stored."""
    stored = 0
    for i in range(n):
        obj = cache.allocate(nbytes, evict=False)
        if obj is None:
            break
        with obj:
            obj.byte_array[:] = bytes([i % 251]) * nbytes
            assert cache.put(i, obj)
        stored += 1
    for i in range(stored):
        with cache.get(i) as obj:
            uniform(obj, i % 251)
    return stored


def test_creation_that_cannot_fit_names_both_numbers_and_leaves_nothing(in_small_shm):
    def test() -> None:
        for capacity in (16 * MIB, 32 * MIB, 1 << 40, 1 << 50):
            free = free_bytes()
            with pytest.raises(OutOfSharedMemoryError) as caught:
                shmcache.open(NAME, capacity=capacity)
            assert caught.value.errno == errno.ENOSPC
            text = str(caught.value)
            assert str(free) in text, text
            needed = [int(word) for word in text.replace(",", " ").split() if word.isdigit()]
            assert any(capacity <= n < capacity + capacity // 10 + 8 * MIB for n in needed), text
            assert os.listdir("/dev/shm") == []
            assert free_bytes() == free
        with shmcache.open(NAME, capacity=8 * MIB, prefault="wait") as cache:
            assert put_all(cache, 100) == 32
        shmcache.unlink(NAME)

    in_small_shm("16m", test)


def test_the_capacity_that_is_accepted_can_be_had_to_the_last_page(in_small_shm):
    def test() -> None:
        whole = free_bytes()
        accepted = None
        for capacity in range(whole, 0, -64 * KIB):
            try:
                cache = shmcache.open(NAME, capacity=capacity, region_bytes=1 * MIB, prefault="wait")
            except OutOfSharedMemoryError:
                assert os.listdir("/dev/shm") == []
                continue
            accepted = capacity
            break
        assert accepted is not None
        assert accepted > whole - 4 * MIB, "the tables are what else it needs"
        with cache:
            s = cache.stats()
            assert s.bytes.ready == accepted, s
            assert put_all(cache, 1000, 64 * KIB) == accepted // (64 * KIB)
            assert_only_published(cache)
        shmcache.unlink(NAME)
        assert free_bytes() > whole - 4 * MIB, "a closed cache, of which there is no view left, keeps no memory"
        del cache
        gc.collect()
        assert free_bytes() == whole

    in_small_shm("16m", test)


def test_many_processes_that_ask_for_too_much_all_get_the_same_error(in_small_shm):
    def test() -> None:
        pids = []
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                try:
                    shmcache.open(NAME, capacity=64 * MIB)
                except OutOfSharedMemoryError:
                    os._exit(0)
                os._exit(1)
            pids.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 10
        assert os.listdir("/dev/shm") == []

    in_small_shm("16m", test)


@pytest.mark.parametrize("leave", [0, 4096, 300 * KIB, 1 * MIB + 300 * KIB])
def test_a_lazily_grown_arena_on_a_tmpfs_that_fills_up(in_small_shm, leave):
    """allocate gives None, or evicts; what is committed stays usable; room that comes back is used."""

    def test() -> None:
        with small(NAME, capacity=8 * MIB, region_bytes=1 * MIB) as cache:
            filler = Filler(leave)
            before = free_bytes()
            watch = Stopwatch()
            stored = put_all(cache, 100)
            ready = cache.stats().bytes.ready
            assert ready < 8 * MIB
            assert stored == ready // (256 * KIB)
            assert free_bytes() == before - (ready - 1 * MIB), "a failed commit gives back what it had got"
            assert cache.allocate(256 * KIB, evict=False) is None
            assert cache.allocate(256 * KIB, evict=False, timeout=0.3) is None
            assert store(cache, "evicts", 7, 256 * KIB), "without room to grow it evicts"
            assert cache.stats().evictions == 1
            assert watch.seconds < 2 * PROMPT
            assert cache.verify() == []
            filler.remove()

            def grown() -> bool:
                obj = cache.allocate(256 * KIB, evict=False)
                if obj is not None:
                    obj.byte_array[:] = b"x" * (256 * KIB)
                    obj.release()
                return obj is not None

            eventually(grown, "it grows again once there is room")
            cache.clear()
            assert put_all(cache, 100) == 32
            assert_only_published(cache)
        shmcache.unlink(NAME)

    in_small_shm("24m", test)


def test_the_background_stops_growing_and_says_so(in_small_shm):
    def test() -> None:
        small(NAME, capacity=8 * MIB, region_bytes=1 * MIB).close()
        filler = Filler(2 * MIB + 100 * KIB)
        with shmcache.open(NAME, capacity=8 * MIB) as cache:
            eventually(lambda: "failed" in cache.stats().prefault, "the background has met the end")
            assert "full" in cache.stats().prefault
            assert cache.stats().bytes.ready == 3 * MIB
            assert put_all(cache, 100) == 12
            filler.remove()
            eventually(lambda: cache.allocate(256 * KIB, evict=False) is not None, "an allocation grows it again")
            assert_sound(cache)
        with shmcache.open(NAME, capacity=8 * MIB, prefault="wait") as cache:
            assert cache.stats().bytes.ready == 8 * MIB, "the next to attach goes on"
        shmcache.unlink(NAME)

    in_small_shm("24m", test)


def test_attaching_to_what_exists_needs_no_room(in_small_shm):
    def test() -> None:
        with small(NAME, capacity=4 * MIB) as cache:
            store(cache, "k", 7)
            filler = Filler()
            assert free_bytes() == 0
            for prefault in ("lazy", "background", "wait"):
                with shmcache.open(NAME, capacity=4 * MIB, prefault=prefault) as other:
                    with other.get("k") as obj:
                        uniform(obj, 7)
                    assert store(other, prefault, 8)
                    kv = other.namespace(prefault, descriptor={"model": "x"})
                    assert store(kv, "k", 9)
            assert shmcache.segments()[0].state == "ready"
            filler.remove()
            assert_only_published(cache)
        shmcache.unlink(NAME)

    in_small_shm("16m", test)


@pytest.mark.parametrize("leave", [0, 4096, 64 * KIB, 2 * MIB])
def test_a_race_for_the_last_room_fails_cleanly(in_small_shm, leave):
    """The check of the free space was right when it was made; then somebody else took it."""

    def test() -> None:
        from shmcache import _create, _request

        filler = Filler(leave)
        before = free_bytes()
        for module in (_create, _request):
            module.check_room = lambda *args: None
        with pytest.raises(OutOfSharedMemoryError) as caught:
            shmcache.open(NAME, capacity=64 * MIB, region_bytes=32 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir("/dev/shm") == ["filler"]
        del caught  # its traceback keeps what was mapped
        gc.collect()
        assert free_bytes() == before
        filler.remove()
        with small(NAME) as cache:
            assert store(cache, "k")
            assert_only_published(cache)
        shmcache.unlink(NAME)

    in_small_shm("16m", test)


@pytest.mark.parametrize("size", [4096, 1 * MIB, 3 * MIB])
def test_a_dead_creators_stub_with_holes_is_not_touched_through_a_mapping(in_small_shm, size):
    """A creator that died after ftruncate and before fallocate: reading the hole of a full tmpfs is a SIGBUS."""

    def test() -> None:
        path = f"/dev/shm/shmcache.{NAME}"
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.ftruncate(fd, size)
        os.close(fd)
        filler = Filler()
        assert free_bytes() == 0
        assert [s.state for s in shmcache.segments()] == ["half-made"]
        with pytest.raises(shmcache.SegmentNotFoundError):
            join(NAME)
        with pytest.raises(OutOfSharedMemoryError):
            shmcache.open(NAME, capacity=4 * MIB)
        filler.remove()
        with small(NAME) as cache:
            assert store(cache, "k")
        shmcache.unlink(NAME)
        assert os.listdir("/dev/shm") == []

    in_small_shm("16m", test)


def test_an_unlinked_segment_that_grows_on_a_full_tmpfs(in_small_shm):
    """Its regions have no names any more, so memory is reserved by touching it; still no SIGBUS."""

    def test() -> None:
        with small(NAME, capacity=8 * MIB, region_bytes=1 * MIB) as cache:
            shmcache.unlink(NAME, force=True)
            filler = Filler(2 * MIB + 300 * KIB)
            stored = put_all(cache, 100)
            assert stored == cache.stats().bytes.ready // (256 * KIB)
            assert 4 <= stored <= 12
            assert cache.allocate(256 * KIB, evict=False) is None
            filler.remove()
            time.sleep(1.1)  # no second try sooner
            cache.clear()
            assert put_all(cache, 100) == 32
            assert_only_published(cache)
        assert files_of(NAME) == []

    in_small_shm("24m", test)


def test_two_processes_that_grow_at_once_on_a_tmpfs_that_fills_up(in_small_shm):
    def test() -> None:
        with small(NAME, capacity=8 * MIB, region_bytes=1 * MIB) as cache:
            filler = Filler(3 * MIB + 500 * KIB)
            pids = []
            for i in range(3):
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        for n in range(60):
                            obj = cache.allocate(256 * KIB, evict=bool(n % 2))
                            if obj is not None:
                                with obj:
                                    obj.byte_array[:] = bytes([i + 1]) * (256 * KIB)
                                    cache.put((i << 10) + n, obj)
                        for n in range(60):
                            obj = cache.get((i << 10) + n)
                            if obj is not None:
                                with obj:
                                    uniform(obj, i + 1)
                        code = 0
                    finally:
                        os._exit(code)
                pids.append(pid)
            assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
            cache.reap()
            assert cache.stats().bytes.ready <= 4 * MIB
            assert_only_published(cache)
            filler.remove()
        shmcache.unlink(NAME)

    in_small_shm("24m", test)
