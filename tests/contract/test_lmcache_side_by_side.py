"""The same random calls on our backend and on LMCache's, policy by policy: the same answers to all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lmcache.v1.storage_backend.local_cpu_backend", reason="LMCache is not installed")

from contract_kits import BYTES, SHAPE, BorrowedKit, Kit, LMCacheKit

import shmcache
from shmcache import allocators

ROOM = 12  # objects that fit
CHUNKS = 20


class Side:
    """One backend, and what its caller holds."""

    def __init__(self, kit: Kit, policy: str, allocator: Any) -> None:
        self.kit = kit
        meta = kit.metadata(world_size=1, local_world_size=1)
        self.backend = kit.backend({"cache_policy": policy}, metadata=meta, allocator=allocator)
        self.held: dict[int, list[Any]] = {}
        self.pins: dict[int, int] = {}

    def key(self, chunk: int) -> Any:
        return self.kit.key(chunk, world_size=1)

    def put(self, chunk: int) -> Any:
        obj = self.backend.allocate(SHAPE, self.kit.metadata().kv_dtype, busy_loop=False)
        if obj is None:
            return None
        obj.tensor.fill_(chunk)
        self.backend.submit_put_task(self.key(chunk), obj)
        obj.ref_count_down()
        return True

    def get(self, chunk: int) -> Any:
        obj = self.backend.get_blocking(self.key(chunk))
        if obj is None:
            return None
        self.held.setdefault(chunk, []).append(obj)
        return float(obj.tensor.max()), obj.get_ref_count(), obj.is_pinned, obj.can_evict

    def give_back(self, chunk: int) -> Any:
        if not self.held.get(chunk):
            return None
        obj = self.held[chunk].pop()
        value = float(obj.tensor.min())
        obj.ref_count_down()
        return value

    def look_up(self, chunk: int) -> Any:
        """As a request does: pin the leading chunks, touch them, unpin them."""
        keys = [self.key(c) for c in range(chunk, min(chunk + 4, CHUNKS))]
        n = self.backend.batched_contains(keys, pin=True)
        self.backend.touch_cache()
        for key in keys[:n]:
            assert self.backend.unpin(key) is True
        return n

    def pin(self, chunk: int) -> Any:
        done = self.backend.pin(self.key(chunk))
        self.pins[chunk] = self.pins.get(chunk, 0) + done
        return done

    def unpin(self, chunk: int) -> Any:
        if not self.pins.get(chunk):
            return None
        self.pins[chunk] -= 1
        return self.backend.unpin(self.key(chunk))

    def contains(self, chunk: int) -> Any:
        return self.backend.contains(self.key(chunk))

    def remove(self, chunk: int) -> Any:
        """Not of a pinned chunk: whose pins those are differs."""
        return None if self.pins.get(chunk) else self.backend.remove(self.key(chunk))

    def clear(self, _chunk: int) -> Any:
        return self.backend.clear()

    def keys(self) -> list[int]:
        return [key.chunk_hash for key in self.backend.get_keys()]


@pytest.fixture
def sides(tame: None, name: str, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    policy = request.param
    ours, theirs = BorrowedKit("borrowed", name), LMCacheKit("lmcache", name)
    cache = shmcache.create(name, ROOM * BYTES, policy=policy.lower())
    allocator = allocators.MixedMemoryAllocator(ROOM * BYTES, cache=cache)
    both = Side(ours, policy, allocator), Side(theirs, policy, theirs.allocator(ROOM * BYTES))
    yield both
    assert cache.verify() == []
    for side in both:
        side.held.clear()
        side.kit.close()
    shmcache.unlink(name)


WEIGHTS = {
    "put": 30, "get": 12, "give_back": 14, "look_up": 20, "pin": 4, "unpin": 6, "contains": 8, "remove": 5, "clear": 1,
}  # fmt: skip


@pytest.mark.parametrize("sides", ["LRU", "FIFO", "MRU", "LFU"], indirect=True)
def test_random_calls_have_the_same_answers(sides: tuple[Side, Side], request: pytest.FixtureRequest) -> None:
    by_order = request.node.callspec.params["sides"] in ("LRU", "MRU")
    for seed in range(4):
        rng = random.Random(seed)
        told: list[Any] = []
        for _ in range(250):
            verb = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            chunk = rng.randrange(CHUNKS)
            ours, theirs = (getattr(side, verb)(chunk) for side in sides)
            told.append((verb, chunk, ours, theirs))
            assert ours == theirs, (seed, told[-12:])
            mine, other = (side.keys() for side in sides)
            if by_order:
                assert mine == other, (seed, told[-12:])
            else:
                assert sorted(mine) == sorted(other), (seed, told[-12:])
    assert sides[0].backend.cache.stats().evictions > 50, "not much was tried"
