"""Control segments as real processes leave them, as the images that the fuzzer changes; and first inputs."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shmcache
from shmcache import SharedCache
from shmcache._core import ffi, lib

SHM = Path("/dev/shm")
LIVE, TAKEOVER = 1, 2
_LONGEST = 60
_HOLD_NS = _LONGEST * 10**9


def small(name: str, **more: Any) -> SharedCache:
    options = {"capacity": "1MiB", "max_chunks": 32, "max_attachments": 8, "prefault": "lazy", "hugepages": False}
    return shmcache.open(name, **{**options, **more})


def _furnish(cache: SharedCache) -> list[Any]:
    """Something of everything: published, written, held, pinned, leased, removed, reserved, outdated."""
    two, bumped = cache.namespace("two", parts=2), cache.namespace("bumped")
    for i in range(8):
        cache.put_tensor(f"k{i}", _bytes(1 + i))
    for i in range(3):
        for part in range(2 if i else 1):
            two.put_tensor(f"k{i}", _bytes(9), part=part)
        bumped.put_tensor(f"k{i}", _bytes(2))
    held = [cache.get("k1"), cache.get("k2"), cache.lookup(["k3", "k4"], pin=True), cache.allocate(10_000)]
    held += [cache.reserve("k9", (100,), _uint8()), cache.lookup(["k5"], pin=True, lease=1000.0), bumped.get("k0")]
    cache.pin("k6")
    cache.remove("k2")
    bumped.bump()
    return held


def _uint8() -> Any:
    import torch

    return torch.uint8


def _bytes(fill: int) -> Any:
    import torch

    return torch.full((4096 * (1 + fill % 3),), fill, dtype=torch.uint8)


def _empty(cache: SharedCache) -> None:
    return None


def _busy(cache: SharedCache) -> list[Any]:
    return _furnish(cache)


def _full(cache: SharedCache) -> list[Any]:
    held = _furnish(cache)
    for i in range(60):  # evicts, parks, fills the tables
        cache.put_tensor(f"k{chr(48 + i)}", _bytes(i))
    return held


def _dies_inside(cache: SharedCache) -> list[Any]:
    """Killed in the middle of a transaction, with holds: the lock tells of it, the journal is not empty."""
    held = _furnish(cache)
    lib.shmc_debug_hold_lock(cache._attachment.handle, _HOLD_NS, 1)
    return held


DIES = "3-died-inside"
SCENES: dict[str, tuple[Callable[[SharedCache], object], dict[str, Any]]] = {
    "0-empty": (_empty, {}),
    "1-busy": (_busy, {}),
    "2-full-lfu": (_full, {"policy": "lfu", "region_bytes": "256KiB"}),
    DIES: (_dies_inside, {"policy": "fifo"}),
    "4-full-lru": (_full, {"region_bytes": "512KiB"}),
}


def make_images(folder: Path, name: str) -> None:
    """One file for each scene. Each is made by a child that is killed, as it was when it was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for scene, (furnish, options) in SCENES.items():
        ready_r, ready_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(_LONGEST)
            try:
                with small(name, **options) as cache:
                    kept = None if scene == DIES else furnish(cache)
                    os.write(ready_w, b"x")
                    kept = furnish(cache) if scene == DIES else kept
                    signal.pause()
            finally:
                os._exit(1)
        os.close(ready_w)
        try:
            if os.read(ready_r, 1) != b"x":
                raise RuntimeError(f"scene {scene} could not be made")
            if scene == DIES:
                _await_inside(name)
        finally:
            os.close(ready_r)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        control = SHM / f"shmcache.{name}"
        (folder / scene).write_bytes(control.read_bytes())
        shmcache.unlink(name, force=True)


def _await_inside(name: str) -> None:
    end = time.monotonic() + 20
    out = ffi.new("shmc_lock_info *")
    while time.monotonic() < end:
        with open(SHM / f"shmcache.{name}", "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as copy:
            base = ffi.from_buffer(copy)
            inside = lib.shmc_peek_lock(base, len(base), out) == 0 and out.journal and out.in_transaction
            ffi.release(base)
        if inside:
            return
        time.sleep(0.02)
    raise TimeoutError("nobody came to be inside the lock")


def change(table: int, place: int, value: int, *, width: int = 4, add: bool = False) -> bytes:
    kind = {1: 0, 2: 1, 4: 2, 8: 3}[width] | (8 if add else 0)
    return bytes([table, kind]) + place.to_bytes(2, "little") + (value & 0xFFFFFFFF).to_bytes(4, "little")


def an_input(image: int, changes: list[bytes], calls: bytes = b"", what: int = LIVE | TAKEOVER) -> bytes:
    return bytes([image, what, len(changes)]) + b"".join(changes) + calls


def first_inputs() -> list[bytes]:
    """One for each image and kind of table, with every call; and files cut short."""
    calls = bytes(b for call in range(20) for b in (call, 0x30 + call % 10, call * 13 % 256))
    found = [an_input(i, [], calls, what) for i in range(len(SCENES)) for what in (0, LIVE, LIVE | TAKEOVER)]
    for table in range(13):
        for place in (0, 8, 36, 100):
            found.append(an_input(1 + table % 4, [change(table, place, 1, add=True)], calls[: 3 * (table + 4)]))
            found.append(an_input(1 + table % 4, [change(table, place, 0xFFFFFFFF)], calls[-3 * (table + 4) :]))
    found += [b"\xff" + b"MHCHEA1"[:n] + bytes(200) for n in (0, 3, 7)]
    return found
