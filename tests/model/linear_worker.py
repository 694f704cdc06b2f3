"""A process that makes random calls, and notes them where a SIGKILL leaves them.

Each put carries bytes that no other put has, so that a read says which put it saw.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from linear_model import (
    ABORT,
    ALLOCATE,
    BUMP,
    CLEAR,
    GET,
    HAS,
    HAS_ALL,
    LOOKUP,
    PARTS,
    PENDING,
    PUT,
    REAPED,
    REMOVE,
    RESERVE,
    WRITE,
)  # fmt: skip
from linearize import Op

from shmcache._core import lib

# ---- notes ----------------------------------------------------------------------------------------------


class Notes:
    """What one worker called, in memory shared with the test. A note is begun before its call."""

    CALL = struct.Struct("<5q")  # kind, key, part, tag, call
    RETURN = struct.Struct("<2q")  # result, ret
    SIZE = CALL.size + RETURN.size
    VOID = -9  # says nothing

    def __init__(self, room: int) -> None:
        self._map = mmap.mmap(-1, room * self.SIZE)
        self._room = room
        self._n = 0

    @property
    def full(self) -> bool:
        return self._n + 16 > self._room

    def has(self, n: int) -> bool:
        """Whether there are so many, as the test sees it."""
        return bool(self.CALL.unpack_from(self._map, (n - 1) * self.SIZE)[-1])

    def begin(self, kind: int, key: int, part: int, tag: int = 0) -> int:
        at = self._n * self.SIZE
        self._n += 1
        self.CALL.pack_into(self._map, at, kind, key, part, tag, time.monotonic_ns())
        return at

    def end(self, at: int, result: int, ret: int = 0) -> None:
        self.RETURN.pack_into(self._map, at + self.CALL.size, result, ret or time.monotonic_ns())

    def read(self, who: int, killed: tuple[int, int] | None, reaped: int) -> list[tuple[int, Op]]:
        """(key, operation). killed: just before, and when its process was gone; reaped: when all was reaped."""
        found: list[tuple[int, Op]] = []
        reserved: tuple[int, int, int] | None = None  # by this worker, and not yet given up
        for at in range(0, self._room * self.SIZE, self.SIZE):
            kind, key, part, tag, call = self.CALL.unpack_from(self._map, at)
            if not call:
                break
            result, ret = self.RETURN.unpack_from(self._map, at + self.CALL.size)
            if ret and result == self.VOID:
                continue
            what = (kind, part, tag)
            if ret:
                found.append((key, Op(call, ret, what, result, who, optional=kind == CLEAR)))
            else:
                assert killed, f"worker {who} left a call unfinished"
                if kind == ALLOCATE:
                    continue  # whatever it got, nobody will put it
                found.append((key, Op(call, killed[1], what, None, who, optional=True)))
            if kind == RESERVE and (not ret or result == WRITE):
                reserved = (key, part, tag)
            elif kind == ABORT and ret:
                reserved = None
        if killed and reserved:
            key, part, tag = reserved
            found.append((key, Op(killed[0], reaped, (REAPED, part, tag), None, who, silent=True)))
        return found

    def close(self) -> None:
        self._map.close()


# ---- bytes ------------------------------------------------------------------------------------------------

STAMP = struct.Struct("<4Q")


def size_of(tag: int) -> int:
    return 2 * STAMP.size + tag % 7 * 520


def write(obj: Any, key: int, part: int, tag: int) -> None:
    view = obj.byte_array
    mark = STAMP.pack(tag, key, part, len(view))
    view[: len(mark)] = mark
    view[len(mark) : -len(mark)] = bytes([tag % 251]) * (len(view) - 2 * len(mark))
    view[-len(mark) :] = mark


def read(obj: Any, key: int, part: int) -> int:
    """The tag, after a look at all bytes."""
    raw = bytes(obj.byte_array)
    tag = STAMP.unpack_from(raw)[0]
    mark = STAMP.pack(tag, key, part, size_of(tag))
    body = raw[len(mark) : -len(mark)]
    assert raw.startswith(mark) and raw.endswith(mark), f"key {key}.{part}: {raw[:32].hex()} ... {raw[-32:].hex()}"
    assert body == bytes([tag % 251]) * len(body), f"key {key}.{part}: the body is not that of {tag}"
    return int(tag)


# ---- a worker ---------------------------------------------------------------------------------------------


class Worker:
    """One process's calls. Their choice follows from the seed alone, not from what they answer."""

    def __init__(self, cache: Any, notes: Notes, who: int, seed: int, keys: int, lies: bool = False) -> None:
        self.cache, self.kv, self.notes = cache, cache.namespace("linear"), notes
        self.dice = random.Random(f"{seed} {who}")
        self.keys, self.lies = keys, lies
        self.tags = itertools.count((who << 32) + 1)
        self.held: list[tuple[Any, int, int, int]] = []  # object, key, part, tag
        self.pins: Counter[int] = Counter()
        self.remembered: dict[tuple[int, int], int] = {}

    def run(self, enough: Callable[[], bool]) -> None:
        moves = [self.put] * 5 + [self.get] * 5 + [self.reserve] * 4 + [self.lookup] * 3 + [self.remove] * 3
        moves += [self.contains] * 2 + [self.put_many, self.get_many, self.pin, self.reap, self.clear, self.linger]
        moves += [self.bump]
        while not enough() and not self.notes.full:
            move, key, part = self.dice.choice(moves), self.dice.randrange(self.keys), self.dice.randrange(PARTS)
            move(key, part, self.dice.random())
        self.leave()

    def leave(self) -> None:
        for obj, key, part, tag in self.held:
            assert read(obj, key, part) == tag
            obj.release()
        for key, n in self.pins.items():
            for _ in range(n):
                assert self.kv.unpin(key)

    def fresh(self, key: int, part: int) -> tuple[Any, int]:
        """An object with bytes of its own, or None where a small arena is full of what is held."""
        tag = next(self.tags)
        at = self.notes.begin(ALLOCATE, key, part, tag)
        obj = self.kv.allocate(size_of(tag))
        self.notes.end(at, Notes.VOID if obj is None else 0)
        if obj is not None:
            write(obj, key, part, tag)
        return obj, tag

    def keep(self, obj: Any, key: int, part: int, tag: int) -> None:
        """Held bytes stay what they are, whatever happens to the key."""
        self.held.append((obj, key, part, tag))
        if len(self.held) > 4:
            old, key, part, tag = self.held.pop(0)
            assert read(old, key, part) == tag, "bytes stay while they are held"
            old.release()

    def put(self, key: int, part: int, chance: float) -> None:
        obj, tag = self.fresh(key, part)
        if obj is None:
            return
        at = self.notes.begin(PUT, key, part, tag)
        stored = self.kv.put(key, obj, part=part)
        self.notes.end(at, int(stored))
        obj.release()

    def put_many(self, key: int, part: int, chance: float) -> None:
        run = [(key + i) % self.keys for i in range(2)]
        made = [self.fresh(k, part) for k in run]
        if any(obj is None for obj, _ in made):
            for obj, _ in made:
                if obj is not None:
                    obj.release()
            return
        at = [self.notes.begin(PUT, k, part, tag) for k, (_, tag) in zip(run, made, strict=True)]
        stored = self.kv.put_many(run, [obj for obj, _ in made], part=part)
        for a, yes in zip(at, stored, strict=True):
            self.notes.end(a, int(yes))
        for obj, _ in made:
            obj.release()

    def get(self, key: int, part: int, chance: float) -> None:
        at = self.notes.begin(GET, key, part)
        obj = self.kv.get(key, part=part)
        ret = time.monotonic_ns()
        tag = 0 if obj is None else read(obj, key, part)
        if self.lies and chance < 0.1:  # as a client would that caches answers on its own
            self.notes.end(at, self.remembered.get((key, part), 0), ret)
        else:
            self.notes.end(at, tag, ret)
        self.remembered[key, part] = tag
        if obj is not None:
            self.keep(obj, key, part, tag)

    def get_many(self, key: int, part: int, chance: float) -> None:
        run = [(key + i) % self.keys for i in range(2)]
        at = [self.notes.begin(GET, k, part) for k in run]
        found = self.kv.get_many(run, part=part)
        ret = time.monotonic_ns()
        for a, k, obj in zip(at, run, found, strict=True):
            tag = 0 if obj is None else read(obj, k, part)
            self.notes.end(a, tag, ret)
            if obj is not None:
                obj.release()

    def contains(self, key: int, part: int, chance: float) -> None:
        kind, of = (HAS, part) if chance < 0.5 else (HAS_ALL, None)
        at = self.notes.begin(kind, key, part)
        self.notes.end(at, int(self.kv.contains(key, part=of)))

    def remove(self, key: int, part: int, chance: float) -> None:
        at = self.notes.begin(REMOVE, key, part)
        self.notes.end(at, int(self.kv.remove(key)))

    def lookup(self, key: int, part: int, chance: float) -> None:
        """What is read through the pin, however late, is what was there when it was found."""
        run = [(key + i) % self.keys for i in range(2)]
        at = [self.notes.begin(LOOKUP, k, part) for k in run]
        with self.kv.lookup(run, pin=True) as hit:
            ret = time.monotonic_ns()
            if chance < 0.1:
                os.sched_yield()
            for i, a in enumerate(at):
                if i < hit.n:
                    with hit.get(i, part=part) as obj:
                        self.notes.end(a, read(obj, run[i], part), ret)
                else:
                    self.notes.end(a, 0 if i == hit.n else Notes.VOID, ret)

    def pin(self, key: int, part: int, chance: float) -> None:
        if chance < 0.5:
            at = self.notes.begin(HAS_ALL, key, part)
            yes = self.kv.pin(key)
            self.notes.end(at, int(yes))
            self.pins[key] += yes
        else:
            assert self.kv.unpin(key) is (self.pins[key] > 0), "a pin is spent by its owner, once"
            self.pins[key] = max(0, self.pins[key] - 1)

    def reserve(self, key: int, part: int, chance: float) -> None:
        tag = next(self.tags)
        at = self.notes.begin(RESERVE, key, part, tag)
        r = self.kv.reserve(key, size_of(tag), part=part)
        if r.state == "WRITE":
            self.notes.end(at, WRITE)
            write(r.obj, key, part, tag)
            if chance < 0.7:
                at = self.notes.begin(PUT, key, part, tag)
                self.notes.end(at, int(r.put()))
            at = self.notes.begin(ABORT, key, part, tag)
            r.release()
            self.notes.end(at, 0)
        elif r.state == "PUBLISHED":
            self.notes.end(at, read(r.obj, key, part))
            r.release()
        elif r.state == "FULL":
            self.notes.end(at, Notes.VOID)
        else:
            self.notes.end(at, PENDING)
            at = self.notes.begin(GET, key, part)
            obj = r.wait(0.002)
            self.notes.end(at, Notes.VOID if obj is None else read(obj, key, part))
            if obj is not None:
                obj.release()

    def clear(self, key: int, part: int, chance: float) -> None:
        if chance < 0.04:
            at = [self.notes.begin(CLEAR, k, part) for k in range(self.keys)]
            self.kv.clear()
            for a in at:
                self.notes.end(a, 0)

    def bump(self, key: int, part: int, chance: float) -> None:
        if chance < 0.3:
            at = [self.notes.begin(BUMP, k, part) for k in range(self.keys)]
            self.kv.bump()
            for a in at:
                self.notes.end(a, 0)

    def reap(self, key: int, part: int, chance: float) -> None:
        if chance < 0.2:
            self.cache.reap()

    def linger(self, key: int, part: int, chance: float) -> None:
        """In the lock, amid a transaction: so that calls overlap there, and deaths fall there."""
        if chance < 0.3:
            assert lib.shmc_debug_hold_lock(self.cache._attachment.handle, 400_000, 1) == 0
