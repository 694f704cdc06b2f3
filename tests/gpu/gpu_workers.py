"""What the processes of these tests do. Each talks to its test through a connection."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

import shmcache

DEVICE = "cuda"
MIB = 1 << 20
PIN_SECONDS = 60.0
OLD, NEW = 0xAA, 0x55  # what a victim's copies write, and what its survivor does


class Talk:
    """The worker's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, value: Any) -> None:
        self._connection.send(("said", value))

    def hear(self, timeout: float = 90.0) -> Any:
        if not self._connection.poll(timeout):
            raise TimeoutError(f"the test said nothing for {timeout} s")
        return self._connection.recv()


def guarded(fn: Callable[..., None], connection: Connection, *args: Any) -> None:
    """Entry of every worker: runs `fn`, and sends its failure."""
    try:
        fn(Talk(connection), *args)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise


def count_devices(talk: Talk) -> None:
    talk.say(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def attach_pinned(name: str, rank: int) -> shmcache.SharedCache:
    cache = shmcache.attach(name, pin=True, prefault="wait", rank=rank)
    assert cache.wait_pinned(PIN_SECONDS), cache.stats().pinning
    return cache


# ---- bandwidth --------------------------------------------------------------------------------------


def best_seconds(to: torch.Tensor, source: torch.Tensor, rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(talk: Talk, name: str, nbytes: int) -> None:
    """Says ((to host, to device) pageable, the same pinned), in GiB/s, of one block in this process."""
    device = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)

    def both(host: torch.Tensor) -> tuple[float, float]:
        gib = nbytes / (1 << 30)
        return gib / best_seconds(host, device), gib / best_seconds(device, host)

    with shmcache.attach(name, pin=False, prefault="wait") as cache, cache.allocate(nbytes) as obj:
        host = obj.raw_tensor
        assert not host.is_pinned()
        pageable = both(host)
        with shmcache.attach(name, pin=True) as second:  # registers the mapping that both handles share
            assert second.wait_pinned(PIN_SECONDS), second.stats().pinning
            assert host.is_pinned(), "torch sees that it is registered"
            talk.say((pageable, both(host)))


# ---- every rank's mapping ---------------------------------------------------------------------------


def pattern(rank: int, n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32, device=DEVICE) * 7 + rank


def exchange(talk: Talk, name: str, rank: int, ranks: int, n: int) -> None:
    """Stores this rank's part from the device, loads every rank's to the device, and compares there."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with attach_pinned(name, rank) as cache:
        kv = cache.namespace("kv", parts=ranks)
        with kv.allocate((n,), torch.int32) as obj:
            obj.tensor.copy_(pattern(rank, n), non_blocking=True)
            torch.cuda.synchronize()
            assert kv.put("chunk", obj, part=rank)
        talk.say("stored")
        talk.hear()
        for other in range(ranks):
            obj = kv.get("chunk", part=other)
            loaded = torch.empty(n, dtype=torch.int32, device=DEVICE)
            loaded.copy_(obj.tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            obj.release(after=done)
            assert torch.equal(loaded, pattern(other, n)), f"rank {rank} read other bytes of rank {other}"
        talk.say("right")
    talk.say(cache.closed)


def contexts(talk: Talk, name: str, device: int) -> None:
    """Pins with `device` selected, and says on which devices this process has a context."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=DEVICE)
    with attach_pinned(name, device):
        has = torch._C._cuda_hasPrimaryContext
        talk.say([d for d in range(torch.cuda.device_count()) if has(d)])


def capture(talk: Talk, name: str) -> None:
    """Captures graphs for as long as the registration takes; says how many, and how it ended."""
    x = torch.zeros(1024, device=DEVICE)
    torch.cuda.synchronize()
    captured = 0
    with shmcache.attach(name, pin=True) as cache:
        until = time.monotonic() + PIN_SECONDS
        while cache.stats().pinning.startswith("running") and time.monotonic() < until:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # the mode "global", which forbids others most calls
                for _ in range(64):
                    x += 1
            graph.replay()
            captured += 1
        torch.cuda.synchronize()
        assert float(x[0]) == 64 * captured
        talk.say((captured, cache.stats().pinning))


# ---- death in the middle of a copy --------------------------------------------------------------------


def copy_until_killed(talk: Talk, name: str, nbytes: int) -> None:
    """Fills a block that it has not published from the device, over and over."""
    cache = attach_pinned(name, 0)
    source = torch.full((nbytes,), OLD, dtype=torch.uint8, device=DEVICE)
    obj = cache.allocate(nbytes)
    host = obj.raw_tensor
    host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    talk.say(obj.shm_offset)
    while True:
        for _ in range(8):
            host.copy_(source, non_blocking=True)
        torch.cuda.synchronize()


def survive(talk: Talk, name: str, nbytes: int, watch_seconds: float) -> None:
    """Each time it is told of a death: takes the dead one's block, stamps it, and watches the stamp."""
    with attach_pinned(name, 1) as cache:
        talk.say("attached")
        while talk.hear() == "it is dead":
            obj, until = None, time.monotonic() + 30.0
            while obj is None and time.monotonic() < until:
                cache.reap()
                obj = cache.allocate(nbytes, timeout=0.1)
            assert obj is not None, "the dead one's block did not come back"
            with obj:
                host = obj.raw_tensor
                found = bool((host == OLD).any())
                host.fill_(NEW)
                looks, spoiled, until = 0, False, time.monotonic() + watch_seconds
                while not spoiled and time.monotonic() < until:
                    spoiled = not bool((host == NEW).all())
                    looks += 1
                talk.say((obj.shm_offset, found, looks, spoiled))
        assert cache.verify() == []
        talk.say("sound")
