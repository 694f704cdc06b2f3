"""A control file with any damage, found by the native API: a typed error, or calls that end; verify never raises."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest
from hostile import MIB, join, small, store

import shmcache
from shmcache import ShmCacheError
from shmcache._core import lib

MUTEX = range(lib.shmc_handshake_pid_offset(), lib.shmc_handshake_pid_offset() + 128)  # it follows the pid: libc's own
MINUTE = 60


def furnish(cache) -> None:
    two = cache.namespace("two", parts=2, descriptor={"model": "m"})
    for i in range(12):
        store(cache, f"k{i}", i)
        two.put_many([f"c{i}"], [two.allocate(1000)], part=i % 2)
    for i in range(3):
        two.put_many([f"c{i}"], [two.allocate(1000)], part=1 - i % 2)
    cache.remove("k0")
    cache.pin("k1")


def everyday(cache) -> None:
    for key in ("k1", "k2", "new"):
        obj = cache.get(key)
        if obj is not None:
            bytes(obj.byte_array)
    with cache.lookup([f"k{i}" for i in range(1, 6)], pin=True) as hit:
        for i in range(hit.n):
            hit.get(i)
    for i in range(40):
        obj = cache.allocate(64 * 1024)
        if obj is None:
            break
        with obj:
            obj.byte_array[:] = bytes(64 * 1024)
            cache.put(f"n{i}", obj)
    cache.keys(), cache.stats(), cache.events(), cache.namespaces(), cache.contains("k3")
    cache.namespace("two").bump()
    cache.remove("k4"), cache.clear(), cache.reap()


def look_and_use(name: str) -> None:
    """Typed errors only."""
    assert any(s.name == name for s in shmcache.segments())
    try:
        cache = join(name, timeout=0.5)
    except ShmCacheError:
        return
    problems = cache.verify()
    assert isinstance(problems, list)
    with contextlib.suppress(ShmCacheError):
        everyday(cache)
    cache.verify()
    with contextlib.suppress(ShmCacheError):
        cache.close()


def damage(image: bytes, used: list[int], r: random.Random) -> bytes:
    raw = bytearray(image)
    for _ in range(r.choice((1, 2, 8, 100))):
        at = r.choice(used) if r.random() < 0.9 else r.randrange(len(raw))
        width = r.choice((1, 4, 8))
        raw[at : at + width] = r.choice((bytes(width), b"\xff" * width, r.randbytes(width), b"\1" + bytes(width - 1)))
    del raw[len(image) :]
    raw[MUTEX.start : MUTEX.stop] = image[MUTEX.start : MUTEX.stop]
    if r.random() < 0.8:
        raw[:512] = image[:512]  # so that it is still taken for a segment
    return bytes(raw)


def rounds(name: str, first: int, n: int, seconds: float = 1e9) -> None:
    """So many, or as many as there is time for: a round takes 20 to 500 ms, by how busy the machine is."""
    end = time.monotonic() + seconds
    with small(name, 2 * MIB, region_bytes=MIB, max_chunks=64) as cache:
        furnish(cache)
    path = Path(f"/dev/shm/shmcache.{name}")
    image = path.read_bytes()
    used = [i for i, byte in enumerate(image) if byte and i not in MUTEX]
    with open(path, "r+b", buffering=0) as f:
        for seed in range(first, first + n):
            if time.monotonic() > end:
                break
            f.seek(0)
            f.write(damage(image, used, random.Random(seed)))
            pid = os.fork()
            if pid == 0:
                signal.alarm(MINUTE)
                try:
                    look_and_use(name)
                    os._exit(0)
                finally:
                    traceback.print_exc()
                    os._exit(1)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == 0, f"seed {seed}: {status}"
    shmcache.unlink(name, force=True)


def test_any_damage_of_a_control_file_is_a_typed_error_or_none(scrap):
    rounds(scrap, 0, 40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_more_damage_of_a_control_file(scrap):
    rounds(scrap, 1000, 5000, seconds=300)
