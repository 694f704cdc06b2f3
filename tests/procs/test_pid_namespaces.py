"""Containers: a robust lock knows its owner by the pid of one namespace, so two of them never share it.

A segment of a namespace that has gone is taken over warm; that is every restart of a container.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hostile import (
    CLONE_NEWNS,
    CLONE_NEWPID,
    KIB,
    assert_only_published,
    assert_sound,
    await_holder,
    eventually,
    hold_lock,
    instance,
    join,
    libc,
    mount,
    need_namespaces,
    own_mounts,
    small,
    store,
    uniform,
    unshare,
)

import shmcache
from shmcache import SegmentBusyError, SegmentMismatchError


@pytest.fixture
def fork_container(fork: Any) -> Callable[[Callable[[Any], object]], Any]:
    """fork(fn) whose fn runs as pid 1 of a pid namespace of its own, with its own /proc and the shared /dev/shm.

    The handle is the container's: its pipes lead to fn, killing it kills fn.
    """
    need_namespaces(CLONE_NEWNS | CLONE_NEWPID)

    def start(fn: Callable[[Any], object], *, mount_proc: bool = True) -> Any:
        def outside(child: Any) -> None:
            unshare(CLONE_NEWPID)
            pid = os.fork()
            if pid:
                # when this one is killed, so is the whole namespace
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os._exit(code if code >= 0 else 128 - code)
            die_with_the_parent()
            if mount_proc:
                own_mounts()
                mount("proc", "/proc", "proc")
                assert os.readlink("/proc/self") == str(os.getpid()) == "1"
            fn(child)

        return fork(outside)

    return start


def die_with_the_parent() -> None:
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGKILL)


def gone(child: Any, name: str) -> None:
    """Kill a container and wait until the last of it has let go of its files."""
    child.kill()
    child.wait()
    eventually(lambda: all(s.alive == 0 for s in shmcache.segments() if s.name == name), "its descriptors are closed")


def test_attaching_while_another_namespace_is_attached_is_refused_with_the_remedy(name, fork_container):
    def inside(child: Any) -> None:
        for how in (lambda: join(name), lambda: small(name), lambda: small(name, on_incompatible="replace")):
            with pytest.raises((SegmentMismatchError, SegmentBusyError)) as caught:
                how()
            assert "pid namespace" in str(caught.value)
            assert "--pid" in str(caught.value) and "hostPID" in str(caught.value), "the remedy"
        with pytest.raises(SegmentBusyError):
            shmcache.unlink(name)
        (info,) = [s for s in shmcache.segments() if s.name == name]
        assert info.alive >= 1, "pids of another namespace say nothing; that somebody is there is known"
        child.tell("refused")
        child.await_parent()

    with small(name) as cache:
        store(cache, "k", 7)
        obj = cache.get("k")
        before = cache.stats()
        child = fork_container(inside)
        assert child.listen() == "refused"
        assert cache.stats().counts == before.counts
        uniform(obj, 7)
        obj.release()
        assert store(cache, "after", 8)
        assert_sound(cache)
        child.go()
        assert child.wait() == 0
    shmcache.unlink(name)


def test_when_all_of_the_old_namespace_have_gone_the_segment_is_found_warm(name, fork_container):
    def container(child: Any) -> None:
        with small(name) as cache:
            s = cache.stats()
            assert s.counts.attachments == 1, "the slots of the namespace that has gone were reaped"
            assert s.counts.holds == 0
            keys = sorted(cache.keys())
            for key in keys:
                with cache.get(key) as obj:
                    uniform(obj, len(key))
            assert cache.verify() == []
            assert store(cache, "x" * (len(keys) + 1), len(keys) + 1)
            kept = [cache.get("x"), cache.lookup(["x"], pin=True), cache.allocate(64 * KIB)]
            cache.pin("x")
            child.tell(f"{len(keys)} {instance(cache):x}")
            child.await_parent()
            del kept

    with small(name) as cache:
        store(cache, "x", 1)
        found = f"{instance(cache):x}"
    for i in range(1, 4):
        child = fork_container(container)
        assert child.listen() == f"{i} {found}", "the same generation, with all that was stored"
        with pytest.raises(SegmentMismatchError):
            join(name)
        gone(child, name)
    # back in the first namespace: the last container was killed with everything in its hands
    with join(name) as cache:
        assert f"{instance(cache):x}" == found
        assert cache.stats().counts.attachments == 1
        assert cache.stats().counts.holds == 0
        assert sorted(map(len, cache.keys())) == [1, 2, 3, 4]
        assert_only_published(cache)
    shmcache.unlink(name)


def test_killed_inside_the_lock_in_another_namespace(name, fork_container):
    """The owner's pid in the lock word is nobody's, or somebody else's, in the namespace that takes over."""

    def container(child: Any) -> None:
        cache = small(name)
        store(cache, "k", 7)
        cache.pin("k")
        threading.Thread(target=hold_lock, args=(cache,), kwargs={"in_transaction": True}, daemon=True).start()
        await_holder(cache, os.getpid(), in_transaction=True)
        child.tell("inside")
        child.await_parent()

    child = fork_container(container)
    assert child.listen() == "inside"
    gone(child, name)
    with join(name) as cache:
        with cache.get("k") as obj:
            uniform(obj, 7)
        assert cache.stats().counts.holds == 0
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_the_same_pid_in_two_namespaces_is_not_the_same_process(name, fork_container):
    """Both are pid 1: the second must not take the first for its own leftover."""

    def first(child: Any) -> None:
        assert os.getpid() == 1
        with small(name) as cache:
            store(cache, "k", 7)
            obj = cache.get("k")
            child.tell("holding")
            child.await_parent()
            uniform(obj, 7)
            assert cache.stats().counts.holds == 1
            assert cache.verify() == []
            obj.release()

    def second(child: Any) -> None:
        assert os.getpid() == 1
        with pytest.raises(SegmentMismatchError):
            join(name)
        child.tell("refused")

    one = fork_container(first)
    assert one.listen() == "holding"
    two = fork_container(second)
    assert two.listen() == "refused"
    assert two.wait() == 0
    one.go()
    assert one.wait() == 0
    with join(name) as cache:
        assert cache.stats().counts.attachments == 1
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_forked_child_that_lands_in_another_namespace_may_not_use_what_it_inherited(name, fork_container):
    """unshare, then fork: the child's handle would lock under a pid that the others do not know."""
    with small(name) as cache:
        store(cache, "k", 7)
        obj = cache.get("k")

        def inside(child: Any) -> None:
            uniform(obj, 7)  # what the parent holds is readable
            for call in (lambda: cache.get("k"), cache.check_fork, cache.reap, lambda: cache.allocate(4096)):
                with pytest.raises(SegmentMismatchError, match="pid namespace"):
                    call()
            child.tell("refused")

        child = fork_container(inside)
        assert child.listen() == "refused"
        assert child.wait() == 0
        assert cache.stats().counts.attachments == 1
        obj.release()
        assert_only_published(cache)
    shmcache.unlink(name)


def test_a_namespace_with_the_proc_of_another_is_no_ground_to_reap_the_living(name, fork_container):
    """pid 1 looks into a /proc where 1 is somebody else. It may refuse, but must not be taken for dead."""

    def container(child: Any) -> None:
        try:
            cache = small(name)
        except shmcache.ShmCacheError as e:
            child.tell(f"refused: {e}")
            return
        obj = cache.get("k")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                other = join(name)
                other.reap()
                assert other.stats().counts.holds == 1, "of the first, which lives"
                assert other.stats().counts.attachments == 2
                code = 0
            except shmcache.ShmCacheError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        uniform(obj, 7)
        obj.release()
        cache.close()
        child.tell("used")

    with small(name) as cache:
        store(cache, "k", 7)
    child = fork_container(container, mount_proc=False)
    said = child.listen()
    print(said)
    assert said == "used" or said.startswith("refused: ")
    assert child.wait() == 0
    with join(name) as cache:
        assert_only_published(cache)
    shmcache.unlink(name)
