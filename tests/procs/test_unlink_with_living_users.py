"""Removing a segment while processes use it: refused, or by force, and then nobody is mixed up."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
from hostile import (
    CLONE_NEWNS,
    KIB,
    MIB,
    SHM,
    assert_only_published,
    await_stopped,
    files_of,
    instance,
    join,
    need_namespaces,
    own_shm,
    small,
    store,
    uniform,
)

import shmcache
from shmcache import SegmentBusyError, SegmentNotFoundError


def attached_child(fork: Any, name: str) -> Any:
    def main(child: Any) -> None:
        with join(name):
            child.tell("attached")
            child.await_parent()

    child = fork(main)
    assert child.listen() == "attached"
    return child


def test_unlink_is_refused_while_others_live_and_names_them(name, fork):
    with small(name) as cache:
        store(cache, "k", 7)
        children = [attached_child(fork, name) for _ in range(2)]
        for remove in (lambda: shmcache.unlink(name), cache.unlink):
            with pytest.raises(SegmentBusyError) as caught:
                remove()
            for child in children:
                assert str(child.pid) in str(caught.value)
            assert str(os.getpid()) not in str(caught.value).replace(name, ""), "own handles do not count"
        assert cache.contains("k")
        children[0].kill(signal.SIGSTOP)
        await_stopped(children[0].pid)
        children[1].kill()
        children[1].wait()
        with pytest.raises(SegmentBusyError, match=str(children[0].pid)) as caught:
            shmcache.unlink(name)
        assert str(children[1].pid) not in str(caught.value), "the dead do not count, the stopped do"
        children[0].kill()
        children[0].wait()
        shmcache.unlink(name)
        assert files_of(name) == []
        with pytest.raises(SegmentNotFoundError):
            shmcache.unlink(name)
        with cache.get("k") as obj:
            uniform(obj, 7)


def test_a_segment_unlinked_by_force_goes_on_for_those_who_have_it(name, fork):
    """The old generation keeps its memory, also that which it commits later; the new one never sees it."""
    more = {"capacity": 4 * MIB, "region_bytes": 512 * KIB}

    def old_user(child: Any) -> None:
        old = join(name)
        child.tell("attached")
        child.await_parent()  # the name is gone
        for i in range(8):
            assert store(old, ("o", i).__repr__(), 0xAA, 512 * KIB), "regions are committed without names"
        child.tell("filled")
        child.await_parent()  # a new generation has the name
        old.clear()
        for i in range(8):
            obj = old.allocate(512 * KIB)
            obj.byte_array[:] = b"\xbb" * (512 * KIB)
            assert old.put(f"again {i}", obj)
            obj.release()
        for i in range(8):
            with old.get(f"again {i}") as obj:
                uniform(obj, 0xBB)
        assert not old.contains("new's")
        assert old.verify() == []
        child.tell(f"{instance(old):x}")
        child.await_parent()
        with old.get("again 7") as obj:
            uniform(obj, 0xBB)
        old.close()
        child.tell("closed")
        child.await_parent()

    with small(name, **more) as mine:
        first = instance(mine)
        child = fork(old_user)
        assert child.listen() == "attached"
        with pytest.raises(SegmentBusyError):
            shmcache.unlink(name)
        shmcache.unlink(name, force=True)
        assert files_of(name) == []
        with pytest.raises(SegmentNotFoundError):
            join(name)
        child.go()
        assert child.listen() == "filled"
        with mine.get("('o', 3)") as obj:
            uniform(obj, 0xAA)  # both handles of the old generation still share it

        with small(name, **more) as new:
            assert instance(new) != first
            assert new.keys() == []
            assert new.stats().counts.attachments == 1
            for i in range(8):
                assert store(new, "new's" if i == 7 else i, 0xCC, 512 * KIB)
            child.go()
            assert int(child.listen(), 16) == first
            for key in new.keys():
                with new.get(key) as obj:
                    uniform(obj, 0xCC)
            assert not new.contains("again 0")
            assert len(files_of(name)) == 1 + 8
            child.go()
            assert child.listen() == "closed"
            assert len(files_of(name)) == 1 + 8, "the old user's close left the new segment alone"
            for key in new.keys():
                with new.get(key) as obj:
                    uniform(obj, 0xCC)
            assert_only_published(new)
            assert mine.contains("again 0") and not mine.contains("new's")
            assert_only_published(mine)
            child.go()
            assert child.wait() == 0
    shmcache.unlink(name)
    assert files_of(name) == []


def test_an_ephemeral_old_generation_does_not_take_the_new_one_with_it(name, fork):
    with small(name, lifetime="ephemeral") as old:
        shmcache.unlink(name, force=True)
        with small(name, lifetime="ephemeral") as new:
            store(new, "k", 7)
            child = attached_child(fork, name)
            old.close()
            assert len(files_of(name)) == 2
        assert len(files_of(name)) == 2, "the child is still there"
        child.go()
        assert child.wait() == 0
    assert files_of(name) == []


def test_the_memory_of_a_forced_away_generation_ends_with_its_last_user(name, fork):
    need_namespaces(CLONE_NEWNS)

    def free() -> int:
        fs = os.statvfs(SHM)
        return fs.f_bavail * fs.f_frsize

    def with_shm_of_its_own(child: Any) -> None:
        own_shm("128m")
        before = free()
        cache = small(name, capacity=64 * MIB, prefault="wait")
        store(cache, "k", 7)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writer, b"x" if cache.contains("k") else b"")
            os.close(writer)
            signal.pause()
        os.close(writer)
        assert os.read(reader, 1) == b"x"
        cache.close()
        del cache
        gc.collect()
        shmcache.unlink(name, force=True)
        assert files_of(name) == []
        assert before - free() > 64 * MIB, "somebody has it"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert free() == before

    assert fork(with_shm_of_its_own).wait() == 0


def test_files_removed_by_hand(name, fork):
    """As by force: those who have it go on, the name starts anew, and their leaving removes nothing new."""
    with small(name) as old:
        store(old, "k", 7)
        child = attached_child(fork, name)
        for file in files_of(name):
            (SHM / file).unlink()
        with pytest.raises(SegmentNotFoundError):
            join(name)
        assert store(old, "after", 8)
        with small(name) as new:
            assert instance(new) != instance(old)
            assert not new.contains("k")
            child.go()
            assert child.wait() == 0
            assert len(files_of(name)) == 2
            old.close()
            assert len(files_of(name)) == 2
            assert_only_published(new)
    shmcache.unlink(name)


def test_a_region_removed_by_hand_is_a_typed_error_for_newcomers_only(name, fork):
    def newcomer(child: Any) -> None:
        child.tell("ready")
        child.await_parent()
        with pytest.raises(shmcache.SegmentCorruptError, match="0000"):
            join(name)
        with pytest.raises(shmcache.SegmentCorruptError, match="0000"):
            small(name)

    child = fork(newcomer)  # before there is a mapping that it would inherit
    child.listen()
    with small(name) as old:
        store(old, "k", 7)
        (SHM / files_of(name)[1]).unlink()
        child.go()
        assert child.wait() == 0
        with old.get("k") as obj:
            uniform(obj, 7)
        assert_only_published(old)
    shmcache.unlink(name, force=True)
    with small(name) as new:
        assert_only_published(new)
    shmcache.unlink(name)
    assert files_of(name) == []


def test_unlink_refuses_while_a_forked_child_uses_it(name, fork):
    cache = small(name)
    store(cache, "k", 7)

    def user(child: Any) -> None:
        assert cache.contains("k")
        child.tell("attached")
        child.await_parent()

    child = fork(user)
    child.listen()
    cache.close()
    with pytest.raises(SegmentBusyError, match=str(child.pid)):
        shmcache.unlink(name)
    child.go()
    child.wait()
    shmcache.unlink(name)
