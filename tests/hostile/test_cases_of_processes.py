"""Public fault reports that no other test meets: who ends how, settings, what a host has or lacks, tensors."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hostile import KIB, MIB, assert_only_published, files_of, instance, join, small, store, uniform

import shmcache
from shmcache import _commit
from shmcache._core import lib
from shmcache.inspect.change import _abandoned

GRAN = 4096


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=60
    )


# ---- who ends, and what is left ------------------------------------------------------------------------------


def test_a_creator_that_is_killed_takes_nothing_from_those_who_joined(name, fork):
    """B65, B61: newcomers join the same generation, gc leaves it alone until the last has ended."""

    def creator(child):
        mine = small(name, MIB)
        store(mine, "created")
        child.tell(str(instance(mine)))
        child.await_parent()

    child = fork(creator)
    generation = int(child.listen())
    with join(name) as b:
        child.kill()
        child.wait()
        with shmcache.open(name, capacity=MIB) as c:
            assert instance(c) == instance(b) == generation
            assert c.contains("created") and c.stats().counts.attachments == 2
            store(b, "later")
            assert c.contains("later")
            for _ in range(200):
                store(c, "k"), c.remove("k")
            assert [s.alive for s in shmcache.segments() if s.name == name] == [2]
            assert _abandoned(name, True, True) is None and files_of(name)  # what gc does, to this one only
            assert "SegmentBusyError" in run_python(f"import shmcache; shmcache.unlink({name!r})").stderr
            assert_only_published(c)
    shmcache.unlink(name)


def test_an_interpreter_that_only_attached_leaves_quietly_and_takes_nothing(name):
    """B66: no tracker, no warning, and the name stays."""
    with small(name, MIB) as cache:
        store(cache, "k")
        code = f"import shmcache\nc = shmcache.attach({name!r})\nassert c.get('k') is not None\n{{}}"
        for ending in ("c.close()", "", "c.get('k'); c.lookup(['k'], pin=True)"):
            run = run_python(code.format(ending))
            wanted = "" if "close" in ending else run.stderr  # an unclosed cache may say so, and is no failure
            assert (run.returncode, run.stderr) == (0, wanted), run.stderr
            assert "tracker" not in run.stderr and "leaked" not in run.stderr
        assert files_of(name)
        with join(name) as third:
            assert third.contains("k")
        cache.unlink()


START = """
import multiprocessing, sys, shmcache

def work(cache, closes):
    with cache.get("k") as obj:
        assert obj.byte_array[0] == 1
    if closes:
        cache.close()

if __name__ == "__main__":
    name, method, child_first, child_closes = sys.argv[1], sys.argv[2], sys.argv[3] == "1", sys.argv[4] == "1"
    cache = shmcache.create(name, "1MiB", prefault="lazy", hugepages=False)
    with cache.allocate(4096) as obj:
        obj.byte_array[:] = bytes([1]) * 4096
        cache.put("k", obj)
    process = multiprocessing.get_context(method).Process(target=work, args=(cache, child_closes))
    process.start()
    if child_first:
        process.join()
        assert process.exitcode == 0
    else:
        process.join(0.3)
    other = shmcache.attach(name)
    assert other.contains("k")
    process.join()
    assert process.exitcode == 0
    other.close()
    shmcache.unlink(name)
    cache.close()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_no_start_method_leaves_a_word_or_a_file(name, tmp_path, method):
    """B67: whoever closes first; only the owner's unlink removes the name."""
    script = tmp_path / "start.py"
    script.write_text(START)
    runs = []
    for child_first, child_closes in (("1", "1"), ("0", "0")) if method == "fork" else (("1", "1"),):
        command = [sys.executable, str(script), name, method, child_first, child_closes]
        runs.append(subprocess.run(command, capture_output=True, text=True, timeout=60))
        assert files_of(name) == []
    assert [(run.returncode, run.stderr) for run in runs] == [(0, "")] * len(runs)


@pytest.mark.parametrize("how", ["return", "exception", "SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_an_ephemeral_segment_ends_with_its_owner_however_he_ends(name, how):
    """B69: at once when Python ends, at the next open when a signal ends it."""
    ends = {"return": "", "exception": "raise RuntimeError('over')"}
    code = f"""
import os, signal, time, shmcache
cache = shmcache.create({name!r}, "1MiB", lifetime="ephemeral", prefault="lazy")
{ends.get(how, f"os.kill(os.getpid(), signal.{how}); time.sleep(30)")}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    quiet = how in ("return", "exception", "SIGINT")
    assert ("RuntimeError: over" in run.stderr) == (how == "exception")
    assert (files_of(name) == []) == quiet, run.stderr
    with pytest.raises(shmcache.SegmentNotFoundError):
        shmcache.attach(name)
    with small(name, 2 * MIB) as cache:  # of other parameters: it is a new one
        cache.unlink()


def test_signal_handlers_of_the_host_program_stay_his(name):
    """B70"""
    mine = {}

    def handler(number, frame):
        mine[number] = True

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {n: signal.signal(n, handler) for n in numbers}
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with shmcache.open(name, capacity=MIB, prefault="wait") as cache:
            assert all(signal.getsignal(n) is handler for n in numbers)
            assert signal.getsignal(signal.SIGINT) is interrupt
            os.kill(os.getpid(), signal.SIGUSR1)
            store(cache, "k")
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            end = time.monotonic() + 20
            with pytest.raises(KeyboardInterrupt):
                while time.monotonic() < end:
                    cache.get("k")
            cache.unlink()
        assert all(signal.getsignal(n) is handler for n in numbers) and mine == {signal.SIGUSR1: True}
    finally:
        for n, was in before.items():
            signal.signal(n, was)


def test_no_call_opens_anything_by_name_after_attaching(name):
    """B72, B77: with its files gone, and beside a cache of another name."""
    with small(name, MIB) as cache, small(f"{name}b", MIB) as other:
        store(cache, "mine")
        store(other, "other's")
        assert cache.keys() == ["mine"] and other.keys() == ["other's"]
        shmcache.unlink(name, force=True)
        for i in range(1000):
            assert store(cache, i)
            assert cache.contains(i) and cache.lookup([i]).n == 1
            if i % 50 == 0:
                cache.reap(), cache.stats(), cache.events(), cache.clear()
        assert_only_published(cache)
        assert other.contains("other's")
        other.unlink()


# ---- what a host has --------------------------------------------------------------------------------------------


class Fake:
    """The compiled module, but for one call."""

    def __init__(self, **calls):
        self.__dict__.update(calls)

    def __getattr__(self, what):
        return getattr(lib, what)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS, errno.ENOMEM, errno.EFAULT])
def test_a_kernel_that_cannot_populate_is_no_reason_to_fail(name, monkeypatch, error):
    """B89: old kernels do not know the advice; a full host is told as such, and nothing is lost."""
    monkeypatch.setattr(_commit, "lib", Fake(shmc_populate=lambda at, size: -error))
    with shmcache.open(name, capacity=2 * MIB, hugepages=False, prefault="wait") as cache:
        assert cache.stats().bytes.ready in (0, 2 * MIB)
        unknown = error in (errno.EINVAL, errno.ENOSYS)
        assert str(cache.stats().prefault).startswith("done" if unknown else "failed")
        if unknown:
            assert store(cache, "k", 7)
            with cache.get("k") as obj:
                uniform(obj, 7)
        cache.unlink()
    assert files_of(name) == []


@pytest.mark.parametrize("capacity", [4 * MIB, 5 * MIB + 12 * KIB])
def test_huge_pages_that_are_not_to_be_had_are_said_to_be_none(name, monkeypatch, capacity):
    """B94, B115: what was obtained, not what was asked."""
    monkeypatch.setattr(_commit, "lib", Fake(shmc_collapse=lambda at, size: -errno.EINVAL))
    with shmcache.open(name, capacity=capacity, hugepages=True, prefault="wait") as cache:
        assert str(cache.stats().hugepages).startswith("none")
        assert cache.stats().pinning != "done" and store(cache, "k", nbytes=MIB)
        cache.unlink()


def test_nodes_that_do_not_exist_are_refused_and_those_that_do_are_used(name):
    """B102"""
    for wrong in (31, [0, 31], "everywhere", -1, [], 1.5):
        with pytest.raises((ValueError, TypeError)):
            shmcache.create(name, MIB, numa=wrong)
        assert files_of(name) == []
    for right in ("none", "interleave", 0, [0]):
        with shmcache.create(name, 2 * MIB, numa=right, prefault="wait") as cache:
            assert store(cache, "k") and cache.stats().numa
            cache.unlink()


def test_one_arena_for_all_ranks_is_charged_once(name, fork):
    """B95, B41: with four processes that each ask for it, /dev/shm holds it and its tables, once."""

    def rank(child):
        with shmcache.open(name, capacity=8 * MIB, prefault="wait", hugepages=False) as mine:
            child.tell()
            child.await_parent()
            assert mine.stats().bytes.ready == 8 * MIB

    children = [fork(rank) for _ in range(4)]
    assert all(child.listen() is not None for child in children)
    used = sum(os.stat(f"/dev/shm/{f}").st_blocks * 512 for f in files_of(name))
    assert 8 * MIB <= used < 12 * MIB, used
    for child in children:
        child.go()
    assert [child.wait() for child in children] == [0] * 4
    shmcache.unlink(name)


# ---- tensors and settings -------------------------------------------------------------------------------------------


def test_tensors_of_every_layout_are_stored_by_value(name):
    """B109: strided, expanded, without dimensions, that require a gradient; the source stays as it is."""
    import numpy as np
    import torch

    x = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    sources = {
        "transposed": x.transpose(0, 1),
        "strided": x[:, ::2],
        "expanded": x[:1].expand(3, 6),
        "scalar": torch.tensor(5.0),
        "gradient": x.clone().requires_grad_(),
        "bfloat16": x.to(torch.bfloat16)[1:, 1:],
    }
    with small(name, MIB) as cache:
        for key, source in sources.items():
            before = source.detach().clone()
            assert cache.put_tensor(key, source)
            assert torch.equal(source, before)
            assert torch.equal(cache.get_tensor(key), before) and cache.get_tensor(key).is_contiguous()
        with pytest.raises((TypeError, ValueError, AttributeError)):
            cache.put_tensor("numpy", np.arange(6)[::-1])
        assert cache.stats().counts.holds == 0
        cache.unlink()


SWITCHES = {"0": False, "false": False, "False": False, "no": False, "off": False}
SWITCHES |= {"1": True, "true": True, "TRUE": True, "yes": True, "on": True}


@pytest.mark.parametrize("text", [*SWITCHES, "maybe", "2", ""])
def test_a_switch_means_what_its_text_says(monkeypatch, text):
    """B117"""
    from shmcache.config import EngineConfig

    monkeypatch.setenv("LMCACHE_USE_LAYERWISE", text)
    if text in SWITCHES:
        assert EngineConfig.from_env().use_layerwise is SWITCHES[text]
    else:
        with pytest.raises(ValueError, match="use_layerwise"):
            EngineConfig.from_env()


@pytest.mark.parametrize("text", ["5", "5.5", "512MiB", "-1", "nan", "1e3", "much"])
def test_a_size_means_what_its_text_says_or_is_refused(monkeypatch, text):
    """B117"""
    from shmcache.config import EngineConfig

    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", text)
    good = {"5": 5.0, "5.5": 5.5, "512MiB": 0.5}
    if text in good:
        assert EngineConfig.from_env().max_local_cpu_size == good[text]
    else:
        with pytest.raises(ValueError, match="max_local_cpu_size"):
            EngineConfig.from_env()


def test_what_is_imported_starts_neither_torch_nor_threads():
    """B85: an import, an open without pinning and its stats leave CUDA to the forked child."""
    code = "import sys, threading, shmcache; assert 'torch' not in sys.modules and threading.active_count() == 1"
    run = run_python(code)
    assert run.returncode == 0, run.stderr
