"""Committing one region: reserve its pages, ask for huge ones, and touch what is left.

    posix_fallocate    says ENOSPC where a first touch of a sparse file would be a SIGBUS
    MADV_COLLAPSE      huge pages also where tmpfs is not mounted for them; at once, since it is three
                       times dearer after populating, and READY regions are never collapsed
    MADV_POPULATE_WRITE  clears pages, in parallel

Everything goes in pieces, so that a stop is heard. It runs in threads of its own with all signals
blocked: a signal makes tmpfs throw away the whole of an unfinished fallocate, and the preference for
a NUMA node belongs to the thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable

from ._core import ffi, lib
from ._numa import NO_NODE
from ._regions import FLAG_HUGE, FLAG_PARTLY_HUGE, HUGE_PAGE, Arena
from ._space import cgroup_allows
from ._threads import Flag, start

FULL = (errno.ENOSPC, errno.ENOMEM)
_RESERVE_PIECE = 256 << 20
_PIECE = 64 << 20  # 6 to 30 ms: how long a stop may take
_MAX_THREADS = 4
_BLOCK = 512  # unit of st_blocks


def in_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Starts a daemon thread with all signals blocked. RuntimeError: no more threads are to be had."""

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        work()

    thread = threading.Thread(target=run, name=f"shmcache-{name}", daemon=True)
    start(thread)
    return thread


def aside(work: Callable[[], None], name: str, started: Callable[[threading.Thread], object] | None = None) -> None:
    """Does it in such a thread and waits; where none is to be had, here, with all signals blocked meanwhile."""
    try:
        thread = in_thread(work, name)
    except RuntimeError:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            work()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    if started is not None:
        started(thread)
    thread.join()


def reserve_aside(arena: Arena, i: int) -> None:
    """Reserves region i's memory in a thread of its own, and waits for it. OSError when there is no room."""
    failures: list[OSError] = []

    def work() -> None:
        try:
            _prefer(arena.region_node(i))
            _reserve(arena, i)
        except OSError as e:
            failures.append(e)

    aside(work, "reserve")
    if failures:
        raise failures[0]


def commit_region(arena: Arena, i: int, stop: Flag, until: float | None = None) -> int:
    """Makes region i's memory exist; returns its flags. OSError when there is no room.

    To be called in a thread of in_thread(). After a failure the region is sparse again. A stop ends
    the work early, but not before the memory is reserved. `until` (time.monotonic()) is for a caller
    who waits: huge pages as far as time allows, and page tables left to the first use.
    """
    node = arena.region_node(i)
    _prefer(node)
    reserved = _reserve(arena, i)
    flags = _collapse(arena, i, stop, until)
    if not reserved and until is not None:  # what is not reserved must be touched before anybody relies on it
        populate_region(arena, i, Flag(), threads=_threads(), node=node)
    if until is None:
        arena.mapped(i, populate_region(arena, i, stop, threads=_threads(), node=node))
    return flags


def populate_region(arena: Arena, i: int, stop: Flag, *, threads: int = 1, node: int = NO_NODE) -> bool:
    """Maps region i's pages into this process; False when stopped. OSError where the kernel refuses."""
    start, length = arena.region_address(i), arena.region_length(i)
    pieces = [(start + at, min(_PIECE, length - at)) for at in range(0, length, _PIECE)]
    pieces.reverse()
    failures: list[int] = []

    def work() -> None:
        _prefer(node)
        while not stop.is_set() and not failures:
            try:
                address, size = pieces.pop()
            except IndexError:
                return
            error = lib.shmc_populate(ffi.cast("void *", address), size)
            if error in (-errno.EINVAL, -errno.ENOSYS):  # a kernel before 5.14: the first use will fault pages in
                return
            if error:
                failures.append(-error)

    helpers = []
    try:
        for _ in range(min(threads, len(pieces)) - 1):
            helpers.append(in_thread(work, "populate"))
    except RuntimeError:
        pass  # no more threads to be had: fewer will do
    work()
    for helper in helpers:
        helper.join()
    if failures:
        # EFAULT: touching the page would have been a SIGBUS, which is how tmpfs says that it is full
        number = errno.ENOSPC if failures[0] == errno.EFAULT else failures[0]
        raise OSError(number, os.strerror(number))
    return not stop.is_set()


def _prefer(node: int) -> None:
    """For the rest of this thread: its next region sets it again, and nothing else allocates in it."""
    if node != NO_NODE:
        lib.shmc_numa_prefer(node)


def _reserve(arena: Arena, i: int) -> bool:
    """False: the segment was unlinked, but is still in use. Then populating reserves, page by page."""
    fd = arena.open_region(i)
    if fd is None:
        return False
    length = arena.region_length(i)
    try:
        missing = length - os.fstat(fd).st_blocks * _BLOCK  # region 0 is reserved at creation
        if missing > 0 and not cgroup_allows(missing):
            raise OSError(errno.ENOMEM, "the memory cgroup allows no more")
        for at in range(0, length, _RESERVE_PIECE):
            os.posix_fallocate(fd, at, min(_RESERVE_PIECE, length - at))
    except OSError:
        with mmap.mmap(fd, length) as sparse_again:
            sparse_again.madvise(mmap.MADV_REMOVE)
        raise
    finally:
        os.close(fd)
    return True


def _collapse(arena: Arena, i: int, stop: Flag, until: float | None) -> int:
    start, length = arena.region_address(i), arena.region_length(i)
    whole = length // HUGE_PAGE * HUGE_PAGE
    if not arena.want_hugepages or arena.hugepages_refused or not whole or start % HUGE_PAGE:
        return 0
    done = 0
    while done < whole and not stop.is_set() and (until is None or time.monotonic() < until):
        size = min(_PIECE, whole - done)
        error = lib.shmc_collapse(ffi.cast("void *", start + done), size)
        if error:
            arena.hugepages_refused = os.strerror(-error)
            break
        done += size
    if done == length:
        return FLAG_HUGE
    return FLAG_PARTLY_HUGE if done else 0


def _threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
