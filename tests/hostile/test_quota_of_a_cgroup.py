"""A memory cgroup that is smaller than /dev/shm: an error or a miss before the kernel kills anybody for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile import KIB, MIB, assert_only_published, files_of, join, small, store

import shmcache
from shmcache import OutOfSharedMemoryError

# The limit of both versions: where groups are made, the file that limits, and what counts in it.
ROOTS = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]


@pytest.fixture
def group() -> Iterator[Callable[[int], Path]]:
    """group(bytes) -> a memory cgroup of that size, into which a child moves itself with enter()."""
    made: list[Path] = []

    def make(limit: int) -> Path:
        for root, file in ROOTS:
            folder = Path(root, f"t{os.getpid()}-{len(made)}")
            try:
                folder.mkdir()
            except OSError:
                continue
            made.append(folder)
            if (folder / file).exists():
                (folder / file).write_text(str(limit))
                return folder
        pytest.skip("no memory cgroup can be made here")

    yield make
    for folder in made:
        for _ in range(500):  # its processes have just gone
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.01)


def enter(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def test_creating_more_than_the_group_may_have_names_it_and_leaves_nothing(name, in_child, group):
    """As for a full /dev/shm, by both numbers."""
    folder = group(64 * MIB)

    def test() -> None:
        enter(folder)
        with pytest.raises(OutOfSharedMemoryError) as caught:
            shmcache.open(name, capacity=256 * MIB)
        assert "cgroup" in str(caught.value) and str(256 * MIB)[:5] in str(caught.value)
        assert files_of(name) == []
        with small(name, 16 * MIB) as cache:
            assert store(cache, "k")
            cache.unlink()

    in_child(test)


def test_what_was_reserved_is_not_asked_for_again(name, in_child, group):
    """The first region is reserved at creation, and committed after: both fit, once."""
    folder = group(64 * MIB)

    def test() -> None:
        enter(folder)
        with small(name, 40 * MIB) as cache:
            assert cache.stats().bytes.ready == 40 * MIB
            for i in range(40):
                assert store(cache, i, nbytes=MIB)
            assert cache.stats().counts.chunks == 40
            cache.unlink()

    in_child(test)


def test_a_worker_in_a_small_group_uses_a_large_arena(name, fork, group):
    """B92: pages belong to the group of who made them: the creator, who populates."""
    folder = group(32 * MIB)
    with small(name, 128 * MIB, prefault="wait") as cache:
        for i in range(16):
            assert store(cache, i, i, 8 * MIB)

        def worker(child):
            enter(folder)
            with join(name) as mine:
                for i in range(16):
                    with mine.get(i) as obj:
                        view = obj.byte_array
                        assert {view[at] for at in range(0, len(view), 4096)} == {i}
                    mine.remove(i)
                    assert store(mine, i, i + 1, 8 * MIB)

        assert fork(worker).wait(60) == 0
        assert str(cache.stats().prefault).startswith("done")
        assert_only_published(cache)
        cache.unlink()


def test_growing_stops_at_the_limit_of_the_group_and_kills_nobody(name, fork, group):
    """What passed when it was created may be too much by now: memory is looked for before it is reserved."""
    folder = group(32 * MIB)
    with small(name, 128 * MIB, region_bytes=8 * MIB) as cache:

        def worker(child):
            enter(folder)
            with join(name) as mine:
                for i in range(200):
                    assert store(mine, i, i % 250, 1024 * KIB)
                assert 8 * MIB <= mine.stats().bytes.ready < 40 * MIB

        assert fork(worker).wait(60) == 0, "killed for its memory"
        assert store(cache, "k", nbytes=8 * MIB)  # outside of the group there is more
        assert_only_published(cache)
        cache.unlink()
