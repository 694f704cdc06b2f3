"""Persistent segments stay until they are removed, ephemeral ones until the last who may live has left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from hostile import (
    assert_only_published,
    await_stopped,
    eventually,
    files_of,
    instance,
    join,
    small,
    store,
    uniform,
)

import shmcache
from shmcache import SegmentNotFoundError


def user_of(fork: Any, name: str) -> Any:
    def main(child: Any) -> None:
        cache = join(name)
        child.tell("attached")
        child.await_parent()
        cache.close()
        child.tell("closed")
        child.await_parent()

    child = fork(main)
    assert child.listen() == "attached"
    return child


def test_an_ephemeral_segment_goes_with_the_last_to_leave(name, fork):
    with small(name, lifetime="ephemeral") as cache:
        store(cache, "k", 7)
        first, second = user_of(fork, name), user_of(fork, name)
        first.go()
        assert first.listen() == "closed"
        assert len(files_of(name)) == 2
    assert len(files_of(name)) == 2, "the second is still there"
    with join(name) as cache, cache.get("k") as obj:
        uniform(obj, 7)
    second.go()
    assert second.listen() == "closed"
    assert files_of(name) == [], "gone before its close returned"


def test_the_creator_may_leave_first(name, fork):
    cache = small(name, lifetime="ephemeral")
    store(cache, "k", 7)
    child = user_of(fork, name)
    cache.close()
    with join(name) as cache:
        assert cache.contains("k")
        child.go()
        assert child.listen() == "closed"
        assert len(files_of(name)) == 2
    assert files_of(name) == []


def test_a_stopped_user_keeps_an_ephemeral_segment(name, fork):
    cache = small(name, lifetime="ephemeral")
    store(cache, "k", 7)
    child = user_of(fork, name)
    child.kill(signal.SIGSTOP)
    await_stopped(child.pid)
    cache.close()
    assert len(files_of(name)) == 2
    with join(name) as cache:
        assert cache.contains("k")
    child.kill(signal.SIGCONT)
    child.go()
    assert child.listen() == "closed"
    assert files_of(name) == []


def test_an_ephemeral_segment_whose_processes_all_died_is_replaced_at_the_next_open(scrap, fork):
    name = scrap

    def main(child: Any) -> None:
        cache = small(name, lifetime="ephemeral")
        store(cache, "k", 7)
        child.tell(f"{instance(cache):x}")
        child.await_parent()

    child = fork(main)
    first = int(child.listen(), 16)
    child.kill()
    child.wait()
    eventually(lambda: all(s.alive == 0 for s in shmcache.segments() if s.name == name), "its descriptors are closed")
    assert len(files_of(name)) == 2, "nobody was left to remove it"
    assert [(s.lifetime, s.alive, s.dead) for s in shmcache.segments() if s.name == name] == [("ephemeral", 0, 1)]
    with small(name, lifetime="ephemeral") as cache:
        assert instance(cache) != first
        assert not cache.contains("k")
        assert len(files_of(name)) == 2
        assert_only_published(cache)
    assert files_of(name) == []


def test_attaching_to_an_ephemeral_segment_whose_processes_all_died_finds_none(scrap, fork):
    name = scrap

    def main(child: Any) -> None:
        cache = small(name, lifetime="ephemeral")
        assert not cache.closed
        os.kill(os.getpid(), signal.SIGKILL)

    fork(main).wait()
    eventually(lambda: all(s.alive == 0 for s in shmcache.segments() if s.name == name), "its descriptors are closed")
    with pytest.raises(SegmentNotFoundError):
        join(name)
    assert files_of(name) == []


def test_the_dead_do_not_keep_an_ephemeral_segment_from_going(name, fork):
    cache = small(name, lifetime="ephemeral")
    child = user_of(fork, name)
    child.kill()
    child.wait()
    eventually(lambda: [s.dead for s in shmcache.segments() if s.name == name] == [1], "it has died")
    cache.close()
    assert files_of(name) == []


def test_a_dead_user_among_living_ones_changes_nothing(name, fork):
    cache = small(name, lifetime="ephemeral")
    store(cache, "k", 7)
    dying, living = user_of(fork, name), user_of(fork, name)
    dying.kill()
    dying.wait()
    cache.close()
    with small(name, lifetime="ephemeral") as cache:
        assert cache.contains("k"), "the same segment: somebody lived"
    living.go()
    assert living.listen() == "closed"
    assert files_of(name) == []


def test_two_handles_of_one_process_count_each(name):
    first = small(name, lifetime="ephemeral")
    second = join(name)
    first.close()
    assert len(files_of(name)) == 2
    store(second, "k")
    second.close()
    assert files_of(name) == []


def test_an_interpreter_that_ends_without_close_takes_its_ephemeral_segment_along(name):
    code = f"""
import shmcache
cache = shmcache.open({name!r}, capacity="4MiB", lifetime="ephemeral")
obj = cache.allocate(4096)
view = obj.byte_array
"""
    folder = os.path.dirname(os.path.dirname(shmcache.__file__))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=dict(os.environ, PYTHONPATH=folder), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert files_of(name) == []


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
def test_a_persistent_segment_outlives_everybody(name, fork, end):
    def main(child: Any) -> None:
        cache = small(name)
        assert store(cache, "k", 7)
        child.tell(f"{instance(cache):x}")
        child.await_parent()
        if end == "close":
            cache.close()
        elif end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)

    child = fork(main)
    first = int(child.listen(), 16)
    child.go()
    child.wait()
    assert len(files_of(name)) == 2
    for how in (join, small):
        with how(name) as cache:
            assert instance(cache) == first
            with cache.get("k") as obj:
                uniform(obj, 7)
    shmcache.unlink(name)
    assert files_of(name) == []
