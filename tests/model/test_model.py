"""Random operations against a small pure-Python model: the same answer at every step.

All extents are one granule, so that the model needs no allocator; order, holds, pins, versions,
eviction and what is freed when are all modelled. The order of chunks is the order of their stamps.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

import shmcache

CAPACITY = 16  # granules
GRAN = 4096


@dataclass(eq=False)
class Chunk:
    key: int
    parts: dict[int, int] = field(default_factory=dict)  # part -> tag
    stamp: int = 0
    level: int = 0
    holds: dict[int, int] = field(default_factory=dict)  # part -> how many objects
    pins: int = 0  # by key and by lookups
    key_pins: int = 0
    linked: bool = True

    @property
    def held(self) -> bool:
        return self.pins > 0 or any(self.holds.values())


class Model:
    def __init__(self, policy: str, parts: int) -> None:
        self.policy, self.parts = policy, parts
        self.clock = 0
        self.loose = 0  # extents allocated and not published
        self.chunks: list[Chunk] = []  # also unlinked ones that are still held, oldest first

    def find(self, key: int) -> Chunk | None:
        return next((c for c in self.chunks if c.linked and c.key == key), None)

    def complete(self, key: int) -> Chunk | None:
        c = self.find(key)
        return c if c and len(c.parts) == self.parts else None

    def used(self) -> int:
        return self.loose + sum(len(c.parts) for c in self.chunks)

    def order(self) -> list[Chunk]:
        return sorted((c for c in self.chunks if c.linked), key=lambda c: (c.level, c.stamp))

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def touch(self, c: Chunk) -> None:
        if self.policy == "fifo":
            return
        if self.policy == "lfu":
            c.level += 1
        c.stamp = self.tick()

    def settle(self, c: Chunk) -> None:
        """Its bytes go when it is unlinked and nobody holds it."""
        if not c.linked and not c.held:
            self.chunks.remove(c)

    def unlink(self, c: Chunk) -> None:
        c.linked = False
        self.settle(c)

    def allocate(self) -> bool:
        if self.used() >= CAPACITY:
            free = [c for c in self.order() if not c.held]
            if not free:
                return False
            self.unlink(free[-1] if self.policy == "mru" else free[0])
        self.loose += 1
        return True

    def put(self, key: int, part: int, tag: int) -> bool:
        c = self.find(key)
        if c and part in c.parts:
            return False
        if c is None:
            c = Chunk(key, stamp=self.tick(), level=1 if self.policy == "lfu" else 0)
            self.chunks.append(c)
        c.parts[part] = tag
        c.holds[part] = c.holds.get(part, 0) + 1
        self.loose -= 1
        return True

    def lookup(self, keys: list[int]) -> list[Chunk]:
        found: list[Chunk] = []
        for k in keys:
            c = self.complete(k)
            if c is None:
                break
            found.append(c)
        return found


def run(name: str, policy: str, parts: int, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    model = Model(policy, parts)
    with shmcache.create(name, CAPACITY * GRAN, policy=policy, align=GRAN, prefault="wait") as cache:
        ns = cache.namespace("model", parts=parts)
        loose: list[tuple[shmcache.MemoryObj, int]] = []  # unpublished objects and the tag they carry
        held: list[tuple[shmcache.MemoryObj, Chunk, int]] = []  # holds on a chunk's part
        lookups: list[tuple[shmcache.Lookup, list[Chunk]]] = []
        tag = 0

        def bytes_of(obj: shmcache.MemoryObj) -> int:
            return int.from_bytes(bytes(obj.byte_array[:8]), "little")

        def allocate() -> None:
            nonlocal tag
            obj = ns.allocate(GRAN)
            assert (obj is not None) == model.allocate()
            if obj is not None:
                tag += 1
                obj.byte_array[:8] = tag.to_bytes(8, "little")
                loose.append((obj, tag))

        def put() -> None:
            if not loose:
                return
            obj, mark = loose.pop(rng.randrange(len(loose)))
            key, part = rng.randrange(24), rng.randrange(parts)
            stored = model.put(key, part, mark)
            assert ns.put(key, obj, part=part) is stored
            if stored:
                chunk = model.find(key)
                assert chunk
                held.append((obj, chunk, part))
            else:
                loose.append((obj, mark))

        def get() -> None:
            key, part = rng.randrange(24), rng.randrange(parts)
            obj, chunk = ns.get(key, part=part), model.find(key)
            assert (obj is not None) == (chunk is not None and part in chunk.parts)
            if obj is not None and chunk is not None:
                assert bytes_of(obj) == chunk.parts[part]
                chunk.holds[part] = chunk.holds.get(part, 0) + 1
                held.append((obj, chunk, part))

        def release() -> None:
            if held and rng.random() < 0.8:
                obj, chunk, part = held.pop(rng.randrange(len(held)))
                assert bytes_of(obj) == chunk.parts[part], "bytes stay while held"
                chunk.holds[part] -= 1
                obj.release()
                model.settle(chunk)
            elif loose:
                loose.pop(rng.randrange(len(loose)))[0].release()
                model.loose -= 1

        def lookup() -> None:
            keys = rng.sample(range(24), rng.randrange(1, 5))
            touch = rng.random() < 0.5
            found = model.lookup(keys)
            hit = ns.lookup(keys, pin=True, touch=touch)
            assert hit.n == len(found)
            for c in found:
                c.pins += 1
            if touch:
                for c in reversed(found):
                    model.touch(c)
            lookups.append((hit, found))

        def lookup_end() -> None:
            if not lookups:
                return
            hit, found = lookups.pop(rng.randrange(len(lookups)))
            for i, c in enumerate(found):
                part = rng.randrange(parts)
                with hit.get(i, part=part) as obj:
                    assert bytes_of(obj) == c.parts[part], "through the pin, also after remove"
            hit.release()
            for c in reversed(found):
                c.pins -= 1
                model.settle(c)

        def pin() -> None:
            key = rng.randrange(24)
            c = model.complete(key)
            assert ns.pin(key) is (c is not None)
            if c:
                c.pins += 1
                c.key_pins += 1

        def unpin() -> None:
            key = rng.randrange(24)
            c = next((c for c in model.chunks if c.key == key and c.key_pins), None)  # the oldest version first
            assert ns.unpin(key) is (c is not None)
            if c:
                c.pins -= 1
                c.key_pins -= 1
                model.settle(c)

        def touch() -> None:
            keys = rng.sample(range(24), 3)
            ns.touch(keys)
            for k in reversed(keys):
                c = model.find(k)
                if c:
                    model.touch(c)

        def contains() -> None:
            key = rng.randrange(24)
            assert ns.contains(key) is (model.complete(key) is not None)
            part = rng.randrange(parts)
            c = model.find(key)
            assert ns.contains(key, part=part) is (c is not None and part in c.parts)

        def remove() -> None:
            key = rng.randrange(24)
            c = model.find(key)
            assert ns.remove(key) is (c is not None)
            if c:
                model.unlink(c)

        def clear() -> None:
            gone = [c for c in model.chunks if c.linked and not c.held]
            assert ns.clear() == len(gone)
            for c in gone:
                model.unlink(c)

        def bump() -> None:
            ns.bump()
            for c in [c for c in model.chunks if c.linked]:
                model.unlink(c)
            for _ in range(64):  # outdated chunks drain, some per call
                ns.contains("nothing")
            for obj, _ in loose:  # allocated before the bump: stores nothing
                assert ns.put("late", obj) is False

            for obj, _ in loose:
                obj.release()
            model.loose -= len(loose)
            loose.clear()

        def reserve() -> None:
            key, part = rng.randrange(24), rng.randrange(parts)
            c = model.find(key)
            there = c is not None and part in c.parts
            if there:
                r = ns.reserve(key, (GRAN,), "uint8", part=part)
                assert r.state == "PUBLISHED"
                r.release()
                return
            if c is not None and not c.held and model.used() >= CAPACITY:
                return  # making room may evict the very chunk: two outcomes are right
            ok = model.allocate()
            r = ns.reserve(key, (GRAN,), "uint8", part=part)
            assert r.state == ("WRITE" if ok else "FULL")
            if ok:
                again = ns.reserve(key, (GRAN,), "uint8", part=part)
                assert again.state == "PENDING"
                assert ns.get(key, part=part) is None
                model.loose -= 1
            r.release()

        moves = [allocate] * 6 + [put] * 6 + [get] * 4 + [release] * 7 + [lookup] * 3 + [lookup_end] * 3
        moves += [pin, unpin, unpin, touch, contains, remove, reserve] + ([clear, bump] if rng.random() < 0.5 else [])
        for step in range(steps):
            rng.choice(moves)()
            stats = cache.stats()
            assert stats.bytes.used == model.used() * GRAN, step
            assert stats.counts.chunks == sum(c.linked for c in model.chunks), step
            if step % 25 == 0:
                assert cache.verify() == []
                assert ns.keys() == [c.key for c in model.order() if len(c.parts) == parts]
        for obj, _ in loose:
            obj.release()
        for obj, _, _ in held:
            obj.release()
        for hit, _ in lookups:
            hit.release()
        assert cache.verify() == []
        cache.unlink()


@pytest.mark.parametrize("policy", ["lru", "fifo", "mru", "lfu"])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_answer_is_the_models(name: str, policy: str, parts: int) -> None:
    for seed in range(4):
        run(name, policy, parts, seed, steps=500)


@pytest.mark.slow
def test_every_answer_is_the_models_for_long(name: str) -> None:
    first = int(os.environ.get("SHMCACHE_MODEL_SEED", random.randrange(1 << 30)))
    for seed in range(first, first + 200):
        print("seed", seed)
        run(name, ["lru", "fifo", "mru", "lfu"][seed % 4], 1 + seed % 3, seed, steps=2000)
