"""Pinning where processes meet, fork, exit and die, against a stand-in for the CUDA runtime."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import pytest
from hostile import PROMPT, Stopwatch, assert_only_published, assert_sound, files_of, join, small, store, uniform
from standin import is_mapped, order

import shmcache
from shmcache.pinning import first_region

MIB = 1 << 20
LONG = 30.0  # seconds

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def python(script: str, *args: str) -> tuple[int, str, str]:
    """Exit code and output of another program."""
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


# ---- order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_ranks_begin_far_from_each_other(n):
    assert sorted(first_region(who, n) for who in range(n)) == list(range(n)), "each at another region"
    assert all(0 <= first_region(who, n) < n for who in (0, 7, 4095, 2**31 - 1))
    if n >= 8:
        assert [first_region(who, n) for who in range(4)] == [0, n // 2, n // 4, 3 * n // 4]


def test_two_ranks_register_in_different_order(name, cuda, fork):
    with small(name, "16MiB", region_bytes="2MiB", prefault="wait", pin=False) as cache:

        def rank(r: int) -> Any:
            def run(child: Any) -> None:
                with join(name, pin=True, rank=r) as mine:
                    assert mine.wait_pinned(LONG)
                    child.tell(" ".join(map(str, order(mine, cuda.registered(os.getpid())))))

            return run

        children = [fork(rank(r)) for r in range(2)]
        orders = [list(map(int, child.listen(LONG).split())) for child in children]
        assert orders == [[0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]]
        assert [child.wait() for child in children] == [0, 0]
        assert not cuda.calls(pid=os.getpid())
        assert_sound(cache)
    shmcache.unlink(name)


def test_processes_without_a_rank_begin_by_their_slot(name, cuda, fork):
    with small(name, "4MiB", region_bytes="2MiB", prefault="wait", pin=False):

        def run(child: Any) -> None:  # the second slot
            with join(name, pin=True) as mine:
                assert mine.wait_pinned(LONG)
                child.tell(str(order(mine, cuda.registered(os.getpid()))))

        child = fork(run)
        assert child.listen(LONG) == "[1, 0]"
        assert child.wait() == 0
    shmcache.unlink(name)


# ---- death ------------------------------------------------------------------------------------------


def test_who_is_killed_while_registering_leaves_nothing_to_clean(name, cuda, fork):
    with small(name, "8MiB", region_bytes="2MiB", prefault="wait", pin=False) as cache:
        store(cache, "before", 7)
        before = files_of(name)

        def victim(child: Any) -> None:
            cuda.close_gate(at=3)
            mine = join(name, pin=True)
            mine.get("before")
            mine.wait_pinned(LONG)

        child = fork(victim)
        cuda.await_call("enter", 3, child.pid)
        child.kill()
        child.wait()
        assert len(cuda.registered(child.pid)) == 2
        cache.reap()
        assert cache.stats().counts.attachments == 1
        assert files_of(name) == before
        assert_only_published(cache)

        with join(name, pin=True) as other:
            assert other.wait_pinned(LONG)
            with other.get("before") as obj:
                uniform(obj, 7)
            assert store(other, "after", 8, 2 * MIB)
        assert not cuda.calls("unregister", child.pid)
        assert_only_published(cache)
    cuda.assert_all_unregistered()
    shmcache.unlink(name)


# ---- fork -------------------------------------------------------------------------------------------


def test_a_forked_child_has_no_registration_and_touches_none(name, cuda, fork):
    cuda.keep_from_children()
    with small(name, "2MiB", pin=True) as cache:
        assert cache.wait_pinned(LONG)
        store(cache, "k", 5)
        address = cache._attachment.arena().address

        def use(child: Any) -> None:
            with cache.get("k") as obj:
                uniform(obj, 5)
            assert cache.stats().pinning == "off (forked child)"
            assert not cache.wait_pinned(LONG)
            del obj
            cache.close()
            gc.collect()
            assert not is_mapped(address), "its mapping ended, finalizers and all"
            with join(name, pin=True) as another:  # a new mapping does not bring CUDA back
                assert another.stats().pinning == "off (forked child)"
                assert store(another, "child's", 6)
            child.tell("done")

        child = fork(use)
        assert child.listen() == "done"
        assert child.wait() == 0
        assert cache.stats().pinning == "done: 2MiB"
        assert [(c.what, c.pid) for c in cuda.calls()] == [("enter", os.getpid()), ("register", os.getpid())]
    cuda.assert_all_unregistered()
    shmcache.unlink(name)


def test_a_fork_in_the_middle_of_a_registration(name, cuda, fork):
    cuda.close_gate(at=2)
    with small(name, "4MiB", region_bytes="2MiB", prefault="wait", pin=True) as cache:
        store(cache, "k", 5)
        cuda.await_call("enter", 2)

        def use(child: Any) -> None:
            assert cache.stats().pinning == "off (forked child)"
            assert not cache.wait_pinned(0.1)
            with cache.get("k") as obj:
                uniform(obj, 5)
            cache.close()
            child.tell("done")

        child = fork(use)
        assert child.listen() == "done"
        assert child.wait() == 0
        assert not cuda.calls(pid=child.pid)
        cuda.open_gate()
        assert cache.wait_pinned(LONG)
    cuda.assert_all_unregistered()
    shmcache.unlink(name)


def test_a_child_forked_before_cuda_was_used_pins_for_itself(name, cuda, fork, monkeypatch):
    library = os.environ["SHMCACHE_CUDART"]
    monkeypatch.delenv("SHMCACHE_CUDART")
    with small(name, "2MiB") as cache:

        def use(child: Any) -> None:
            os.environ["SHMCACHE_CUDART"] = library
            assert cache.wait_pinned(LONG)
            assert cache.stats().pinning == "done: 2MiB"
            cache.close()
            gc.collect()
            child.tell("done")

        child = fork(use)
        assert child.listen() == "done"
        assert child.wait() == 0
        assert [c.what for c in cuda.calls()] == ["enter", "register", "unregister"]
        assert cache.stats().pinning == "off (CUDA is not in use in this process)"
    shmcache.unlink(name)


# ---- exit -------------------------------------------------------------------------------------------

_OPEN = "import shmcache, sys; cache = shmcache.open(sys.argv[1], capacity='4MiB', region_bytes='2MiB', rank=0); "


def test_exit_without_close_is_quiet_even_when_cuda_is_gone(name, cuda):
    cuda.fail_unregistering(4)
    script = _OPEN + "obj = cache.allocate(4096); view = obj.byte_array; print(cache.wait_pinned(30))"
    assert python(script, name) == (0, "True\n", "")
    shmcache.unlink(name)


def test_exit_does_not_wait_for_a_call_that_hangs(name, cuda):
    cuda.close_gate(at=2)
    watch = Stopwatch()
    script = _OPEN + "import time; print(cache.wait_pinned(0.5), cache.stats().pinning)"
    code, out, err = python(script, name)
    assert (code, err) == (0, "")
    assert out in ("False running: 2MiB of 4MiB\n", "False running: 0 bytes of 4MiB\n")
    assert watch.seconds < 4 * PROMPT
    shmcache.unlink(name)


def test_by_default_neither_torch_nor_cuda_is_started(name, monkeypatch):
    monkeypatch.delenv("SHMCACHE_CUDART", raising=False)
    script = _OPEN + "cache.wait_pinned(1); print('torch' in sys.modules, cache.stats().pinning); cache.close()"
    assert python(script, name) == (0, "False off (CUDA is not in use in this process)\n", "")
    shmcache.unlink(name)
