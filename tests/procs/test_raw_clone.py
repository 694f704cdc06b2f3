"""A child made by clone() itself, behind libc's back: it cannot own a robust lock, and is told so.

Its thread has no robust list, and libc believes that its thread id is the parent's: a lock it took
would look like the parent's, and its death in it would hang everyone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from hostile import assert_only_published, join, small, store, uniform

import shmcache
from shmcache import RawCloneError, ShmCacheError, StaleHandleError
from shmcache._core import lib

_SYS_CLONE = {"x86_64": 56, "aarch64": 220}

pytestmark = pytest.mark.skipif(
    platform.machine() not in _SYS_CLONE, reason=f"the number of clone() is not known for {platform.machine()}"
)


def raw_clone() -> int:
    # PyDLL keeps the interpreter lock, which the child could not get back from a thread it does not have
    return int(ctypes.PyDLL(None).syscall(_SYS_CLONE[platform.machine()], int(signal.SIGCHLD), 0, 0, 0, 0))


def in_raw_clone(work: Callable[[], object], timeout: float = 30.0) -> int:
    """Exit code of a raw clone that ran `work`: 0 when it returned."""
    pid = raw_clone()
    assert pid >= 0
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError("the clone did not end")


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(RawCloneError) as caught:
        call()
    assert "fork" in str(caught.value) and "exec" in str(caught.value), f"what to use instead: {caught.value}"
    assert isinstance(caught.value, ShmCacheError)


def test_attaching_in_a_raw_clone_is_refused(name):
    with small(name) as cache:
        store(cache, "k", 7)

        def work() -> None:
            assert lib.shmc_can_lock() == lib.SHMC_E_RAW_CLONE
            refused(lambda: join(name))
            refused(lambda: small(name))

        for _ in range(3):
            assert in_raw_clone(work) == 0
            assert lib.shmc_can_lock() == 0
            assert cache.stats().counts.attachments == 1
            assert store(cache, "after", 8) in (True, False)
        with join(name) as other, other.get("k") as obj:
            uniform(obj, 7)
        assert_only_published(cache)
    shmcache.unlink(name)


def test_creating_in_a_raw_clone_is_refused_and_leaves_nothing(name):
    def work() -> None:
        refused(lambda: small(name))
        assert not [s for s in shmcache.segments() if s.name == name]

    assert in_raw_clone(work) == 0
    with small(name) as cache:
        assert store(cache, "k")
        assert_only_published(cache)
    shmcache.unlink(name)


def test_using_what_a_raw_clone_inherited_is_refused_and_the_parent_is_unharmed(name):
    with small(name) as cache:
        store(cache, "k", 7)
        obj = cache.get("k")
        fresh = cache.allocate(4096)
        hit = cache.lookup(["k"], pin=True)
        cache.pin("k")
        before = cache.stats().counts

        def work() -> None:
            uniform(obj, 7)
            for call in (
                lambda: cache.get("k"),
                lambda: cache.allocate(4096),
                lambda: cache.contains("k"),
                lambda: cache.lookup(["k"], pin=True),
                lambda: cache.pin("k"),
                cache.reap,
                cache.check_fork,
            ):
                refused(call)
            for call in (obj.release, fresh.release, hit.release, lambda: cache.put("new", fresh)):
                with pytest.raises((StaleHandleError, RawCloneError)):
                    call()
            with contextlib.suppress(ShmCacheError):
                cache.close()

        for _ in range(3):
            assert in_raw_clone(work) == 0
            assert cache.stats().counts == before
        with pytest.raises(shmcache.SegmentBusyError, match=str(os.getpid())):
            unlink_elsewhere(name)
        fresh.byte_array[:] = b"\x05" * 4096
        assert cache.put("new", fresh)
        for held in (obj, fresh, hit):
            held.release()
        assert cache.unpin("k")
        assert cache.stats().counts.holds == 0
        assert_only_published(cache)
    shmcache.unlink(name)


def unlink_elsewhere(name: str) -> None:
    """unlink() by another process; its error, if any, is raised here."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            try:
                shmcache.unlink(name)
            except ShmCacheError as e:
                os.write(writer, f"{type(e).__name__} {e}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as f:
        said = f.read()
    os.waitpid(pid, 0)
    if said:
        kind, _, message = said.partition(" ")
        raise getattr(shmcache, kind)(message, hint="")


def test_the_parents_death_is_noticed_although_a_raw_clone_has_its_descriptors(name, fork):
    """It never ran the fork handlers, so the presence of the dead parent is kept open by the clone."""
    with small(name) as cache:
        store(cache, "k", 7)

        def parent(child: Any) -> None:
            mine = join(name)
            kept = [mine.get("k"), mine.allocate(4096)]
            pid = raw_clone()
            if pid == 0:
                time.sleep(20)
                os._exit(0)
            child.tell(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
            del kept

        child = fork(parent)
        clone = os.pidfd_open(int(child.listen()))  # nobody's child soon: its number alone could be another's
        child.wait()
        try:
            report = cache.reap()
            assert (report.slots, report.holds, report.blocks) == (1, 1, 1)
            assert cache.stats().counts.holds == 0
            assert_only_published(cache)
            cache.close()
            shmcache.unlink(name)  # no slot is left, whatever the presence byte says
        finally:
            signal.pidfd_send_signal(clone, signal.SIGKILL)
            os.close(clone)


def test_a_fork_of_a_raw_clone_may_attach(name):
    """os.fork() sets up the robust list again."""
    with small(name) as cache:
        store(cache, "k", 7)

        def work() -> None:
            pid = os.fork()
            if pid == 0:
                code = 1
                with contextlib.suppress(BaseException):
                    try:
                        with cache.get("k") as obj:
                            uniform(obj, 7)
                    except RawCloneError:
                        pass  # libc may still have the wrong thread id: then it has to refuse
                    code = 0
                os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

        assert in_raw_clone(work) == 0
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_threads_and_forks_are_not_taken_for_raw_clones(name, fork):
    with small(name) as cache:
        verdicts = []
        threads = [threading.Thread(target=lambda: verdicts.append(lib.shmc_can_lock())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert verdicts == [0] * 4

        def child_main(child: Any) -> None:
            assert lib.shmc_can_lock() == 0
            inside = []
            thread = threading.Thread(target=lambda: inside.append(store(cache, "from a thread of a child")))
            thread.start()
            thread.join()
            assert inside == [True]

        assert fork(child_main).wait() == 0
        assert cache.contains("from a thread of a child")
    shmcache.unlink(name)
