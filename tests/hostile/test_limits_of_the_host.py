"""What a host may refuse: descriptors, threads, address space, large files, a writable /dev/shm, or /dev/shm at all.

Each time: an error that names the limit, or the call works with less; nothing is left, nobody hangs.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import (
    CLONE_NEWNS,
    KIB,
    MIB,
    PROMPT,
    Stopwatch,
    assert_only_published,
    files_of,
    join,
    mount,
    need_namespaces,
    own_mounts,
    own_shm,
    small,
    store,
)

import shmcache
from shmcache import OutOfSharedMemoryError, SegmentNotFoundError, SegmentPermissionError, ShmCacheError

MS_RDONLY, MS_REMOUNT = 1, 32
NOBODY = 12345


def limit(which: int, value: int) -> None:
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# ---- /dev/shm --------------------------------------------------------------------------------------------


def test_a_read_only_shm_is_named(in_child):
    """B93: EROFS, for a newcomer, for who attaches, and for who removes."""
    need_namespaces(CLONE_NEWNS)

    def test() -> None:
        own_shm("16m")
        shmcache.create("there", 1 * MIB).close()
        mount("none", "/dev/shm", None, MS_REMOUNT | MS_RDONLY)
        attempts = [
            lambda: shmcache.open("new", capacity=1 * MIB),
            lambda: shmcache.open("there", capacity=1 * MIB),
            lambda: shmcache.attach("there"),
            lambda: shmcache.unlink("there"),
        ]
        for attempt in attempts:
            watch = Stopwatch()
            with pytest.raises(SegmentPermissionError) as caught:
                attempt()
            assert "/dev/shm" in str(caught.value) and "EROFS" in str(caught.value)
            assert watch.seconds < PROMPT
        assert [s.name for s in shmcache.segments()] == ["there"]  # looking is allowed

    in_child(test)


def test_a_host_without_shm_is_told_at_once(in_child):
    """B93: ENOENT; it was a search for a file that is made and removed all the time, until the timeout."""
    need_namespaces(CLONE_NEWNS)

    def test() -> None:
        own_mounts()
        mount("tmpfs", "/dev", "tmpfs", 0, "size=1m")
        watch = Stopwatch()
        with pytest.raises(OutOfSharedMemoryError) as caught:
            shmcache.open("new", capacity=1 * MIB)
        assert "/dev/shm" in str(caught.value) and "ENOENT" in str(caught.value)
        for attempt in (shmcache.attach, shmcache.unlink):
            with pytest.raises(SegmentNotFoundError):
                attempt("new")
        assert shmcache.segments() == []
        assert watch.seconds < PROMPT

    in_child(test)


# ---- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [4096, 2 * MIB, 8 * MIB])
def test_a_limit_on_the_size_of_files_is_named_and_leaves_nothing(name, in_child, largest):
    """RLIMIT_FSIZE, met by the control file or by a region."""

    def test() -> None:
        limit(resource.RLIMIT_FSIZE, largest)
        with pytest.raises(OutOfSharedMemoryError) as caught:
            shmcache.open(name, capacity=64 * MIB, region_bytes=32 * MIB)
        assert "RLIMIT_FSIZE" in str(caught.value) and str(largest) in str(caught.value)
        assert files_of(name) == []

    in_child(test)


def test_who_dies_of_sigxfsz_leaves_a_stub_that_the_next_one_replaces(name, in_child):
    """Where the host program gave the signal its default back."""

    def test() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        limit(resource.RLIMIT_FSIZE, 2 * MIB)
        pid = os.fork()
        if pid == 0:
            shmcache.open(name, capacity=64 * MIB)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGXFSZ
        limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
        with small(name) as cache:
            assert store(cache, "k")
            cache.unlink()
        assert files_of(name) == []

    in_child(test)


def test_attaching_and_growing_make_no_file_larger(name, in_child):
    """RLIMIT_FSIZE again: everything has its size from the start."""

    def test() -> None:
        with small(name, 8 * MIB, region_bytes=MIB) as cache:
            limit(resource.RLIMIT_FSIZE, 4096)
            with join(name) as other:
                for i in range(8):
                    assert store(other, i, nbytes=MIB)
                assert other.stats().bytes.ready == 8 * MIB
            assert_only_published(cache)
            cache.unlink()

    in_child(test)


# ---- descriptors -------------------------------------------------------------------------------------------


def spare_descriptors(n: int) -> list[int]:
    """From here on this process may open n more. The descriptors given back fill the holes."""
    top = max(map(int, open_files()))
    holes = [os.open("/dev/null", os.O_RDONLY)]
    while holes[-1] <= top:
        holes.append(os.open("/dev/null", os.O_RDONLY))
    limit(resource.RLIMIT_NOFILE, holes[-1] + 1 + n)
    return holes


def said_so(e: Exception) -> None:
    assert "Too many open files" in str(e), e


@pytest.mark.parametrize("spare", range(5))
def test_with_few_descriptors_left_creating_works_or_says_so_and_leaves_nothing(name, in_child, spare):
    """B91: RLIMIT_NOFILE. It left the control file when there was none to look with what else to remove."""

    def test() -> None:
        with small(name) as warm_up:
            store(warm_up, "everything is imported")
            warm_up.unlink()
        holes, made = spare_descriptors(spare), False
        try:
            small(name).close()
            made = True
        except (OSError, ShmCacheError) as e:
            said_so(e)
        os.close(holes.pop())  # one to look with
        assert bool(files_of(name)) == made and (made or spare < 4)
        if made:
            limit(resource.RLIMIT_NOFILE, 256)
            shmcache.unlink(name)

    in_child(test)


@pytest.mark.parametrize("spare", range(5))
def test_with_few_descriptors_left_attaching_and_growing_work_or_do_without(name, in_child, spare):
    """B91: RLIMIT_NOFILE"""

    def test() -> None:
        with small(name, 4 * MIB, region_bytes=MIB) as cache:
            join(name).close()
            before = len(open_files())
            holes = spare_descriptors(spare)
            for i in range(8):
                assert store(cache, i, nbytes=512 * KIB)  # grows, or evicts
            assert cache.reap().slots == 0
            attached = 0
            for _ in range(20):
                try:
                    join(name).close()
                    attached += 1
                except (OSError, ShmCacheError) as e:
                    said_so(e)
            assert attached == (20 if spare > 3 else attached)
            limit(resource.RLIMIT_NOFILE, 256)
            for fd in holes:
                os.close(fd)
            assert len(open_files()) <= before
            assert_only_published(cache)
            cache.unlink()

    in_child(test)


def test_attaching_two_thousand_times_leaks_neither_descriptors_nor_mappings(name, in_child):
    """B91"""

    def test() -> None:
        def counts() -> tuple[int, int]:
            return len(open_files()), len(Path("/proc/self/maps").read_text().splitlines())

        shmcache.create(name, MIB, prefault="lazy", hugepages=False).close()
        other = f"{name}b"
        Path(f"/dev/shm/shmcache.{other}").write_bytes(bytes([1]) * 8192)
        join(name).close()
        limit(resource.RLIMIT_NOFILE, 64 + len(open_files()))
        before = counts()
        for _ in range(500):
            join(name).close()
        for wrong in (f"{name}a", other):
            for _ in range(500):
                with pytest.raises(ShmCacheError):
                    join(wrong)
        after = counts()
        assert after[0] == before[0] and after[1] <= before[1] + 8, (before, after)  # malloc may map some
        shmcache.unlink(name)
        shmcache.unlink(other, force=True)

    in_child(test)


# ---- memory and threads ----------------------------------------------------------------------------------------


def test_attaching_with_too_little_address_space_harms_nobody(name):
    """B68: RLIMIT_AS. The name stays, and the owner and others go on."""
    with small(name, 1 << 30, region_bytes=64 * MIB) as cache:
        store(cache, "k")
        code = f"""
import os, resource, shmcache
size = int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)
before = len(os.listdir("/proc/self/fd"))
for call in (shmcache.attach, shmcache.open):
    try:
        call({name!r})
    except (OSError, MemoryError, shmcache.ShmCacheError) as e:
        assert "memory" in str(e) or "address space" in str(e), e
    else:
        raise SystemExit("attached")
assert len(os.listdir("/proc/self/fd")) == before
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert files_of(name)
        with join(name) as other:
            assert other.contains("k")
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
        cache.unlink()


def test_without_another_thread_all_works_only_later(name, in_child):
    """RLIMIT_NPROC: growing, and opening with what would be done in the background."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become a user who has no more processes")

    def test() -> None:
        with small(f"{name}a", 4 * MIB, region_bytes=MIB) as before:
            before.unlink()
            store(before, "warm up: everything is imported")
            os.setgid(NOBODY)
            limit(resource.RLIMIT_NPROC, 1)
            os.setuid(NOBODY)
            for i in range(8):
                assert store(before, i, nbytes=512 * KIB)
            assert before.stats().bytes.ready == 4 * MIB
            assert_only_published(before)
        with shmcache.open(name, capacity=4 * MIB, region_bytes=MIB, prefault="background", hugepages=False) as cache:
            assert "thread" in str(cache.stats().prefault)
            for i in range(8):
                assert store(cache, i, nbytes=512 * KIB)
            assert_only_published(cache)
            cache.unlink()

    in_child(test)


def test_no_memory_need_be_lockable(name, in_child):
    """RLIMIT_MEMLOCK 0: nothing but pinning locks memory. (What pinning says of it: tests/procs.)"""

    def test() -> None:
        limit(resource.RLIMIT_MEMLOCK, 0)
        with shmcache.open(name, capacity=2 * MIB, prefault="wait") as cache:
            assert store(cache, "k") and cache.stats().bytes.ready == 2 * MIB
            cache.unlink()

    in_child(test)


# ---- who commits memory and stops --------------------------------------------------------------------------------


def test_a_stopped_committer_is_waited_for_once_and_not_by_every_allocation(name, fork):
    """Others evict meanwhile, and grow again when it goes on."""
    from shmcache._core import ffi, lib

    with small(name, 2 * MIB, region_bytes=MIB) as cache:
        assert store(cache, 0, nbytes=MIB)

        def committer(child):
            with join(name) as mine:
                out = ffi.new("uint32_t *")
                assert lib.shmc_region_claim(mine._attachment.handle, out) == lib.SHMC_OK
                child.tell()
                child.await_parent()  # as if stopped here
                os.posix_fallocate(mine._attachment.mapping.arena.open_region(out[0]), 0, MIB)
                assert lib.shmc_region_done(mine._attachment.handle, out[0], 1, 0, 0) == lib.SHMC_OK
                child.tell()

        child = fork(committer)
        assert child.listen()
        watch = Stopwatch()
        for i in range(1, 21):
            assert store(cache, i, nbytes=MIB)  # each evicts the one before
        assert watch.seconds < 1 + PROMPT, "it was 20 s"
        assert cache.stats().bytes.ready == MIB
        child.go()
        assert child.listen()
        assert store(cache, 99, nbytes=MIB)
        assert cache.contains(99) and cache.contains(20)
        assert child.wait() == 0
        assert_only_published(cache)
        cache.unlink()
